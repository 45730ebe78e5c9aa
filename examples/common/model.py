"""The model and the backend of a run of train_lm.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from common.cli import InputError, first_line
from common.settings import LMSettings
from common.text import BYTES
from kda_layers import KDAConfig, use_backend
from kda_layers.kernels.kda.contract import KDA, default_problem


def load_config(s: LMSettings) -> Any:
    """Load the configuration in s.config, with the vocabulary of the settings."""
    try:
        found = json.loads(Path(s.config).read_text())
        if not isinstance(found, dict) or found.get("model_type") != KDAConfig.model_type:
            raise ValueError(f"no model_type {KDAConfig.model_type!r}")
        size = BYTES if s.vocab == "byte" else s.vocab_size or found.get("vocab_size", KDAConfig.vocab_size)
        tokens = {"vocab_size": size, "bos_token_id": None, "eos_token_id": None}  # the vocabularies have neither
        return KDAConfig.from_dict(found | tokens)
    except OSError as error:
        raise InputError(f"--config {s.config}: expected a readable file, got: {error.strerror}") from error
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"--config {s.config}: expected a configuration of a KDA model, got: {reason}") from error


def serving_backend(config: Any, s: LMSettings, device: torch.device) -> str:
    """Name of the backend that trains the KDA layers; an InputError with all reasons if there is none."""
    dtype = getattr(torch, s.dtype)
    problem = replace(
        default_problem(str(device)),
        dtype=dtype,
        beta_dtype=dtype,
        K=config.linear_head_dim,
        V=config.linear_value_head_dim,
        group=config.linear_num_value_heads // config.linear_num_heads,
        gate_activation=config.linear_gate_activation,
        beta_activation="2sigmoid" if config.linear_allow_neg_eigval else "sigmoid",
        head_gates=config.linear_decay == "head",
    )
    try:
        return KDA.select(problem).name
    except ValueError as error:
        raise InputError(f"--backend: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def chosen_backend(name: str | None) -> Iterator[None]:
    """Use the backend of that name; choose automatically if `name` is None."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            try:
                stack.enter_context(use_backend(name))
            except ValueError as error:
                raise InputError(f"--backend {name}: {first_line(error)}") from error
        yield
