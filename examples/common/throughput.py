"""Speed of a training run: operations per token, a clock, and the machine that it is measured on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import kda_layers

PEAK_TFLOPS = {"NVIDIA H200": 989.4, "NVIDIA H100 80GB HBM3": 989.4}  # dense bf16, NVIDIA's datasheets
PACKAGES = ("triton", "transformers", "tokenizers", "flash-linear-attention", "fla-core")
FORMULA = (
    "6 per weight of a linear layer, the head but not the embedding lookup; KDA: 18 K V per value head (the recurrence "
    "reads S k, adds a rank-1 update and reads S q: 2 K V each, three times that with the backward pass; the decay, "
    "convolutions, norms and the extra work of chunked kernels are not counted); softmax attention: 6 T d per head "
    "(the causal half of 4 T d, likewise three times)"
)


def flops_per_token(model: PreTrainedModel, length: int) -> dict[str, float]:
    """Floating-point operations of forward and backward per token of excerpts of `length`, by part and in total."""
    config = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    layers = config.layer_types.count("linear_attention")
    kda = 18 * config.linear_head_dim * config.linear_value_head_dim * config.linear_num_value_heads * layers
    softmax = 6 * length * config.head_dim * config.num_attention_heads * (len(config.layer_types) - layers)
    return {"linear": 6 * weights, "kda": kda, "softmax": softmax, "total": 6 * weights + kda + softmax}


def peak_tflops(device: torch.device, dtype: str, given: float | None) -> float | None:
    """Peak TFLOP/s for the utilization: the given one, else that of a known GPU in bfloat16, else None."""
    if given is None and device.type == "cuda" and dtype == "bfloat16":
        return PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    return given


class Clock:
    """Seconds since `start`, without those in `paused`, and their division into windows of steps.

    Work is queued on a GPU: wait for the device before a window ends. A resumed run passes the windows of its earlier
    processes, whose seconds count too.
    """

    def __init__(self, windows: Sequence[dict[str, float]] = ()) -> None:
        self.windows = list(windows)  # last step, steps, seconds
        self._earlier = self._window_start = self.seconds_in_windows()
        self._start: float | None = None
        self._paused = 0.0
        self._step = 0

    def start(self, step: int) -> None:
        self._start, self._step = time.perf_counter(), step

    @property
    def started(self) -> bool:
        return self._start is not None

    def seconds(self) -> float:
        """Seconds of earlier processes and since `start`."""
        return self._earlier + (0.0 if self._start is None else time.perf_counter() - self._start - self._paused)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.started:
                self._paused += time.perf_counter() - began

    def end_window(self, step: int) -> None:
        """End the window of the steps since the last window or `start`; ignored before `start`."""
        if self.started and step > self._step:
            now = self.seconds()
            self.windows.append({"step": step, "steps": step - self._step, "seconds": now - self._window_start})
            self._step, self._window_start = step, now

    def seconds_in_windows(self) -> float:
        return sum(w["seconds"] for w in self.windows)

    def rates(self, tokens_per_step: int) -> dict[str, float] | None:
        """Tokens per second: median, minimum and maximum over windows, and overall; None without windows."""
        rates = [tokens_per_step * w["steps"] / w["seconds"] for w in self.windows]
        if not rates:
            return None
        overall = tokens_per_step * sum(w["steps"] for w in self.windows) / self.seconds_in_windows()
        return {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "overall": overall}


def machine(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Processor, GPU, versions, commit and date, for the report."""
    found: dict[str, Any] = {"device": str(device), "cpu": _cpu(), "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda}
    found["torch"] = torch.__version__
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["kda_layers"] = kda_layers.__version__
    return found | {"commit": commit or _commit(), "date": time.strftime("%Y-%m-%d %H:%M")}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        here = Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
