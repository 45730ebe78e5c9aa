"""Checkpoint directories of the examples: written completely or not at all, and checked when read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from command import first_line
from text_data import BYTES, InputError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

import kda_layers  # noqa: F401  (registers the model with AutoModelForCausalLM)

logging.disable_progress_bar()  # of loading and saving: they would break into that of training

STATE = "trainer.pt"
MODEL_FILES = ("config.json", "model.safetensors")


def save_checkpoint(
    directory: Path, model: PreTrainedModel, state: dict[str, Any], tokenizer: PreTrainedTokenizerFast | None = None
) -> None:
    """Makes `directory` a checkpoint of `model`, `state` and `tokenizer`, or leaves it as it is and raises.

    Everything is written and flushed to disk next to it first. A directory cannot be renamed over another one, so the
    previous checkpoint steps aside in between; should the power fail at that moment, `recover` puts it back.
    """
    recover(directory)
    new, aside = _sibling(directory, "new"), _sibling(directory, "aside")
    for leftover in (new, aside):
        shutil.rmtree(leftover, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(new)
        torch.save(state, new / STATE)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        for path in (*new.iterdir(), new):
            _flush(path)
        if directory.exists():
            directory.rename(aside)
        new.rename(directory)
        _flush(directory.parent)
    except BaseException:
        recover(directory)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def held_signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM instead of stopping at once, so that not even a second one breaks into a save."""
    received: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda number, _: received.append(number)) for kind in kinds]
    try:
        yield received
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def recover(directory: Path) -> None:
    """Puts back the checkpoint that an interrupted save moved aside, if one did."""
    aside = _sibling(directory, "aside")
    if aside.exists() and not directory.exists():
        aside.rename(directory)


def load_model(directory: Path, device: torch.device) -> PreTrainedModel:
    """The byte-level language model in `directory`."""
    recover(directory)
    _expect_files(directory, MODEL_FILES)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # damaged files fail in as many ways as there are parsers
        raise _not_a_checkpoint(directory, error) from error
    if model.config.vocab_size != BYTES:
        raise InputError(f"{directory}: expected a byte-level model, vocab_size {BYTES}, got {model.config.vocab_size}")
    return model.to(device)


def load_state(directory: Path) -> dict[str, Any]:
    """The trainer's state in `directory`."""
    recover(directory)
    _expect_files(directory, (*MODEL_FILES, STATE))
    try:
        return torch.load(directory / STATE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _not_a_checkpoint(directory, error) from error


def as_device(name: str) -> torch.device:
    """The device of that name, if it works here: a number can be written to it and read back."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except Exception as error:  # torch raises many kinds
        raise InputError(f"--device {name}: expected a device that works here, got: {first_line(error)}") from error
    return device


def check_replaceable(directory: Path) -> None:
    """Raise an InputError unless `save_checkpoint` can take `directory`'s place: it is missing, empty or ours."""
    check_writable(directory.parent)
    try:
        recover(directory)
        if directory.exists() and not (directory / STATE).is_file():
            directory.rmdir()  # fails unless it is an empty directory, and not a mount point, which cannot be renamed
    except OSError as error:
        raise InputError(
            f"--output {directory}: expected a new directory, an empty one or a checkpoint of this script, "
            f"got: {error.strerror}"
        ) from error


def check_writable(directory: Path, option: str = "--output") -> None:
    """Make `directory` if it is missing; raise an InputError unless files can be written to it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:  # permissions alone do not tell: file systems refuse too
            file.write(b"\0")
    except OSError as error:
        raise InputError(f"{option} {directory}: expected a directory to write to, got: {error.strerror}") from error


def _sibling(directory: Path, suffix: str) -> Path:
    directory = directory.resolve()  # "." has no name to add to
    return directory.parent / f".{directory.name}.{suffix}"


def _flush(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _expect_files(directory: Path, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        reason = f"no {', '.join(missing)}" if directory.is_dir() else "no such directory"
        raise InputError(f"{directory}: expected a checkpoint of train_tiny_lm.py, got: {reason}")


def _not_a_checkpoint(directory: Path, error: Exception) -> InputError:
    return InputError(f"{directory}: expected a checkpoint of train_tiny_lm.py, got: {first_line(error)}")
