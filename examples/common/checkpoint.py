"""Checkpoint directories: written completely or not at all, and checked when read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

import kda_layers  # noqa: F401  (registers the model with AutoModelForCausalLM)
from common.cli import InputError, check_writable, first_line

logging.disable_progress_bar()  # of loading and saving: they would interrupt that of training

STATE = "trainer.pt"
MODEL_FILES = ("config.json", "model.safetensors")


def save_checkpoint(
    directory: Path, model: PreTrainedModel, state: dict[str, Any], tokenizer: PreTrainedTokenizerFast | None = None
) -> None:
    """Make `directory` a checkpoint of `model`, `state` and `tokenizer`, or leave it as it is and raise.

    Everything is first written and flushed to disk in a sibling directory. A directory cannot be renamed over another
    one, so the previous checkpoint is moved aside in between; if the power fails then, `recover` puts it back.
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
    """Collect Ctrl-C and SIGTERM instead of stopping at once, so that not even a second one interrupts a save."""
    received: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda number, _: received.append(number)) for kind in kinds]
    try:
        yield received
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def recover(directory: Path) -> None:
    """Put back the checkpoint that an interrupted save moved aside, if one did."""
    aside = _sibling(directory, "aside")
    if aside.exists() and not directory.exists():
        aside.rename(directory)


def checkpoint_of(directory: Path) -> Path:
    """Return the checkpoint of a run of train_lm.py, or `directory` itself if it is not a run."""
    checkpoint = directory / "checkpoint"
    recover(checkpoint)
    return checkpoint if checkpoint.is_dir() else directory


def load_model(directory: Path, device: torch.device) -> PreTrainedModel:
    """Load the language model in `directory`."""
    recover(directory)
    _expect_files(directory, MODEL_FILES)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # damaged files fail in as many ways as there are parsers
        raise _not_a_checkpoint(directory, error) from error
    return model.to(device)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer of the checkpoint in `directory`; None if it has none, as that of a byte-level model."""
    if not (directory / "tokenizer.json").is_file():
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise _not_a_checkpoint(directory, error) from error


def load_state(directory: Path) -> dict[str, Any]:
    """Load the state of the training run in `directory`."""
    recover(directory)
    _expect_files(directory, (*MODEL_FILES, STATE))
    try:
        return torch.load(directory / STATE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _not_a_checkpoint(directory, error) from error


def check_replaceable(directory: Path) -> None:
    """Raise an InputError unless `save_checkpoint` can replace `directory`: it is missing, empty or a checkpoint."""
    check_writable(directory.parent)
    try:
        recover(directory)
        if directory.exists() and not (directory / STATE).is_file():
            directory.rmdir()  # fails unless it is an empty directory, and not a mount point, which cannot be renamed
    except OSError as error:
        raise InputError(
            f"--output {directory}: expected a new directory, an empty one or a checkpoint of train_lm.py, "
            f"got: {error.strerror}"
        ) from error


def _sibling(directory: Path, suffix: str) -> Path:
    directory = directory.resolve()  # "." has no name to add to
    return directory.parent / f".{directory.name}.{suffix}"


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _expect_files(directory: Path, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        reason = f"no {', '.join(missing)}" if directory.is_dir() else "no such directory"
        raise InputError(f"{directory}: expected a checkpoint of train_lm.py, got: {reason}")


def _not_a_checkpoint(directory: Path, error: Exception) -> InputError:
    return InputError(f"{directory}: expected a checkpoint of train_lm.py, got: {first_line(error)}")
