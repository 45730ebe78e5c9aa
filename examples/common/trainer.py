"""Resuming the Trainer of transformers: a record of the run, and the newest complete checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from common.cli import InputError, first_line, flag
from common.text import Text


class RunRecord(TrainerCallback, ExportableState):
    """Options that must not change when a run is resumed; the Trainer stores them in the state of each checkpoint."""

    def __init__(self, options: dict[str, Any]):
        self.options = options

    def state(self) -> dict[str, Any]:
        return {"args": {"options": self.options}, "attributes": {}}


def last_checkpoint(output: str) -> tuple[str, dict[str, Any]]:
    """Return the newest complete checkpoint in `output` and the options of its run.

    Newer ones that an interrupted save left are reported and renamed: the Trainer keeps the checkpoint with the highest
    number where a file system has no exact times.
    """
    found = {int(m[1]): path for path in Path(output).glob("*") if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))}
    for _, path in sorted(found.items(), reverse=True):
        try:
            state = whole_state(path)
        except Exception as error:  # damaged files fail in as many ways as there are parsers
            if os.environ.get("RANK", "0") == "0":
                print(f"{path} is skipped and renamed: it is not a complete checkpoint, {first_line(error)}")
                aside = path.with_name(f"incomplete-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            continue
        try:
            return str(path), state["stateful_callbacks"][RunRecord.__name__]["args"]["options"]
        except KeyError as error:
            raise InputError(f"--resume: expected a checkpoint of this version of the script, got {path}") from error
    raise InputError(f"--resume: expected a run with --save-every in --output {output}, got no complete checkpoint")


def whole_state(checkpoint: Path) -> dict[str, Any]:
    """Return the Trainer's state in a checkpoint; raise unless each of its files is there and complete."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())  # the file that the Trainer writes last
    for pattern in ("*model[-._]*", "optimizer*", "scheduler*"):
        if not any(checkpoint.glob(pattern)):
            raise FileNotFoundError(f"it has no {pattern}")
    index = checkpoint / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    for path in {*checkpoint.glob("*.safetensors"), *(checkpoint / shard for shard in shards)}:
        with safe_open(path, "pt"):  # fails unless the file has the length that its header promises
            pass
    for path in (*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")):
        if not zipfile.is_zipfile(path):  # whose directory is at the end
            raise ValueError(f"{path.name} is cut short")
    return state


def defining_options(args: argparse.Namespace, text: Text) -> dict[str, Any]:
    """Return the options that a resumed run cannot change: the checkpoint holds them, or the loss curve would break."""
    names = ("swap", "seq_len", "batch_size", "lr", "seed", "bf16")
    model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    return {"model": model, "data": text.sha256} | {name: getattr(args, name) for name in names}


def check_same(options: dict[str, Any], recorded: dict[str, Any], checkpoint: str, data: str | None) -> None:
    """Raise an InputError that names the first option that differs from the run to resume."""
    if options["data"] != recorded.get("data"):
        raise InputError(f"--data {data or '(default)'}: expected the text that {checkpoint} was trained on")
    for name, value in options.items():
        if value != recorded.get(name):
            raise InputError(f"{flag(name)} {value}: expected {recorded.get(name)} as in {checkpoint}")
