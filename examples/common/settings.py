"""Settings of the training runs, as dataclasses whose fields are command line options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.cli import InputError, check_ranges, flag, option
from common.text import BYTES

CONFIGS = Path(__file__).resolve().parents[2] / "kda_layers" / "configs"
FIRST_STEPS = 5  # of a run: compilation and autotuning, not timed


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of every training loop of the examples."""

    least: ClassVar[Mapping[str, float]] = {"seed": 0, "seq_len": 8, "lr": 0.0}  # bounds of numbers, 1 for others

    seed: int = option(0, "of initialisation, data order and sampling")
    dtype: str = option("float32", "bfloat16: autocast, with float32 parameters", choices=("float32", "bfloat16"))
    seq_len: int = option(256, "tokens per training excerpt")
    batch_size: int = option(8, "excerpts per step")
    lr: float = option(2e-3, "peak learning rate")

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if not isinstance(value, str)}
        check_ranges(numbers, self.least)


@dataclass(frozen=True)
class ModelSettings(TrainingSettings):
    """Settings of the examples that build a small byte-level model of their own."""

    steps: int = option(600, "optimizer steps of the run")
    hidden_size: int = option(128, "width of the model")
    layers: int = option(4, "layers of the model")
    heads: int = option(2, "KDA heads of each layer, 32 wide")
    threads: int = option(1, "CPU threads; with more, any other busy program slows so small a model down a lot")


@dataclass(frozen=True)
class LMSettings(TrainingSettings):
    """Settings that determine the loss curve of a run of train_lm.py, besides its text and its backend.

    With `minutes`, the curve also depends on the speed of the machine. The defaults are those of `--preset 120m`.
    """

    least: ClassVar = dict(seed=0, seq_len=8, lr=0.0, steps=0, minutes=0.001, vocab_size=0, max_mb=0.001, threads=0)

    config: str = option(str(CONFIGS / "120m.json"), "configuration of the model", metavar="FILE")
    minutes: float = option(5.0, "of training, after the first steps")
    steps: int = option(0, "optimizer steps of the run; 0: by --minutes")
    dtype: str = option("bfloat16", "bfloat16: autocast, with float32 parameters", choices=("float32", "bfloat16"))
    seq_len: int = option(8192, "tokens per training excerpt")
    lr: float = option(1e-3, "peak learning rate")
    schedule: str = option(
        "cosine", "after a warm-up: cosine to a tenth, or constant, then linear to zero", choices=("cosine", "wsd")
    )
    vocab: str = option("bpe", "tokens: of a byte-level BPE trained on the text, or bytes", choices=("bpe", "byte"))
    vocab_size: int = option(0, "tokens of the BPE; 0: as the configuration says")
    text: str = option(
        "installed", "without --data: what is installed with Python, or its reference alone",
        choices=("installed", "reference"),
    )  # fmt: skip
    max_mb: float = option(200.0, "megabytes of text at most")
    heldout_kb: int = option(2000, "kilobytes of it at most that are held out, and a tenth at most")
    log_every: int = option(10, "steps between two readings of loss and time, which wait for the device")
    evaluations: int = option(5, "on the held-out text, evenly over the run, each followed by a checkpoint")
    threads: int = option(0, "CPU threads; 0: torch's choice")

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.steps <= FIRST_STEPS:
            raise InputError(f"--steps {self.steps}: expected more than the {FIRST_STEPS} that are not timed")
        if 0 < self.vocab_size <= BYTES:
            raise InputError(f"--vocab-size {self.vocab_size}: expected more than the {BYTES} bytes, or 0")


PRESETS: dict[str, dict[str, Any]] = {
    "demo": dict(
        config=str(Path(__file__).with_name("demo.json")), steps=650, dtype="float32", seq_len=128, batch_size=8,
        lr=4e-3, vocab="byte", text="reference", evaluations=4, threads=1,
    ),
    "120m": {},
}  # fmt: skip


def lm_settings(
    options: dict[str, Any], preset: str | None, recorded: dict[str, Any] | None, resumed: Path | None
) -> LMSettings:
    """Return the settings of a run.

    Args:
        options: settings of the command line.
        preset: name of the preset; None for "demo".
        recorded: settings of the run to resume, which the command line cannot change; None for a new run.
        resumed: directory of that run.
    """
    if recorded is None:
        by_clock = {"steps": 0} if "minutes" in options else {}
        if by_clock and options.get("steps"):
            raise InputError(f"--minutes {options['minutes']}: expected --minutes or --steps, got both")
        return LMSettings(**PRESETS[preset or "demo"] | options | by_clock)
    for name, value in (({"preset": preset} if preset else {}) | options).items():
        if value != recorded.get(name):
            raise InputError(
                f"{flag(name)} {value}: expected {recorded.get(name, 'the settings')} as in {resumed}, or nothing: "
                "a resumed run continues the same loss curve"
            )
    return LMSettings(**recorded)
