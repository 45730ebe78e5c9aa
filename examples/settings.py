"""The settings of a training run, and the record of how far it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from text_data import InputError


def option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": f"{help} ({default})", **more})


@dataclass(frozen=True)
class TrainingSettings:
    """What each trainer here is told."""

    least: ClassVar[Mapping[str, float]] = {"seed": 0, "seq_len": 8, "lr": 0.0}  # bounds of numbers, else 1

    seed: int = option(0, "of initialisation, data order and sampling")
    dtype: str = option("float32", "bfloat16: autocast, with float32 parameters", choices=("float32", "bfloat16"))
    seq_len: int = option(256, "tokens per training excerpt")
    batch_size: int = option(8, "excerpts per step")
    lr: float = option(2e-3, "peak learning rate")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str):
                check_range(name, value, self.least.get(name, 1))


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """What fixes the loss curve of a run, besides its text and machine: kept when the run is resumed."""

    steps: int = option(600, "optimizer steps of the whole run")
    hidden_size: int = option(128, "width of the model")
    layers: int = option(4, "layers of the model")
    heads: int = option(2, "KDA heads of each layer, 32 wide")
    threads: int = option(1, "CPU threads; with more, any other busy program slows so small a model down a lot")


@dataclass
class Run:
    """A run and how far it came; what a checkpoint holds besides the model and the optimizer."""

    settings: Settings
    data: str | None  # path; None is the default text
    data_sha256: str
    step: int = 0
    losses: list[float] = field(default_factory=list)  # of each step, in bits per byte
    heldout: list[tuple[int, float]] = field(default_factory=list)  # (step, bits per byte)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_range(name: str, value: float, least: float) -> None:
    """Raise an InputError that names the option unless its value is in range, which NaN and infinity are not."""
    if not least <= value < 2**32:
        raise InputError(f"{flag(name)} {value}: expected at least {least} and less than 2^32")
