"""Safetensors files and checkpoint folders as a mapping that reads each tensor on access."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

Source = Mapping[str, Tensor] | str | PathLike


class SafetensorsFiles(Mapping[str, Tensor]):
    """The tensors of a .safetensors file or of a checkpoint folder, each read on access."""

    def __init__(self, path: str | PathLike):
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"source must be an existing .safetensors file or checkpoint folder, got {path}")
        if path.is_dir():
            path, index = path / "model.safetensors", path / "model.safetensors.index.json"
            if not path.exists() and index.exists():
                self._files = {name: path.parent / file for name, file in _weight_map(index).items()}
                return
            if not path.exists():
                raise FileNotFoundError(f"source must hold {path.name} or {index.name}, got neither in {path.parent}")
        with _open(path) as file:
            self._files = dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with _open(self._files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} must be a complete safetensors file, got: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} must be a JSON object with a weight_map, got: {error!r}") from error
    for name, file in files.items():
        if not (isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")):
            raise ValueError(f"{index} must name .safetensors files beside it, no paths, got {file!r} for {name}")
    return files


def read_config(source: Source) -> dict[str, Any] | None:
    """Return the text model's configuration in a checkpoint folder, its linear_attn_config merged into it.

    None for a file, a state dict or a folder without config.json.
    """
    path = Path(source) / "config.json" if isinstance(source, str | PathLike) else None
    if path is None or not path.exists():
        return None
    try:
        config = json.loads(path.read_text())
        text = config.get("text_config", config)
        return text | (text.get("linear_attn_config") or {})
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} must be the configuration of a model, got: {error!r}") from error


def open_weights(source: Source) -> Mapping[str, Tensor]:
    """Return `source` as a mapping of tensors: itself, or the contents of the file or folder."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str | PathLike):
        return SafetensorsFiles(source)
    raise TypeError(f"source must be a state dict or a path, got {type(source).__name__}")
