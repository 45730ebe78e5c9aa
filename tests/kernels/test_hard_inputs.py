"""Inputs inside the documented domain on which fast kernels are known to go wrong, over thousands of tokens.

In fp32 a backend may lose one digit on the recurrence itself. In 16 bits it has the usual budget; the yardstick of a
backend on tensor cores is the recurrence or, where that is further from the truth, chunks with 16-bit operands (see
rounded.py). No limit lets a result pass that is half wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.kda.activations import BOUNDED_GATES
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.dispatch import problem_of
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    budget,
    call,
    check,
    error,
    on_every_backend,
    on_every_device,
    oracle,
    output_gradients,
    poisoned_memory,
    run,
    serve,
    to_device,
    to_fp64,
    trains_only_without_checkpoints,
)
from tests.kernels.rounded import rounded_chunks

HALF_WRONG = 0.5
LOST_IN_FP32 = 10.0  # a backend's error over the recurrence's own, in fp32
NEVER, ALWAYS = -30.0, 30.0  # gate logits: no decay, and decay at the lower bound


def _base(T: int, D: int, H: int) -> dict:
    """Random keys [1, T, H, D], gate logits of a fresh model, beta logits N(0, 1)."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    dt = torch.exp(math.log(1e-3) + torch.rand(H, D, generator=generator, dtype=FP64) * math.log(100))
    return {
        "q": normal(1, T, H, D), "k": normal(1, T, H, D), "v": normal(1, T, H, D),
        "g": 0.3 * normal(1, T, H, D), "beta": normal(1, T, H),
        "A_log": torch.zeros(H, dtype=FP64), "dt_bias": dt.expm1().log(), "initial_state": 0.1 * normal(1, H, D, D),
        "normal": normal,
    }  # fmt: skip


def slow_gates(T: int, D: int, H: int) -> dict:
    """The state lives for hundreds of tokens."""
    return _base(T, D, H)


def lower_bound_everywhere(T: int, D: int, H: int) -> dict:
    """Every channel decays by e^-4.998 at every token; nearer to the bound the gate's gradient is lost in fp32."""
    x = _base(T, D, H)
    return x | {"g": torch.full_like(x["g"], 8.0), "dt_bias": None}


def repeated_token(T: int, D: int, H: int) -> dict:
    """Identical keys, beta about 0.98, no decay: the worst inverse that a chunk can ask for."""
    x = _base(T, D, H)
    k = x["k"][:, :1].expand_as(x["k"])
    return x | {
        "k": k, "g": torch.full_like(x["g"], NEVER), "dt_bias": None, "beta": 4 + 0.3 * x["normal"](1, T, H)
    }  # fmt: skip


def negative_eigenvalues(T: int, D: int, H: int) -> dict:
    """beta close to 2: every write almost reflects the state."""
    x = _base(T, D, H)
    return x | {"beta": 4 + 0.3 * x["normal"](1, T, H), "beta_activation": "2sigmoid"}


def resets(T: int, D: int, H: int) -> dict:
    """Log-decays of -200 and -1e4 between ordinary ones, in single channels and in all at once."""
    x = _base(T, D, H)
    g = -5.0 * torch.sigmoid(x["g"] + x["dt_bias"])
    pick = x["normal"](1, T, H, D)
    g = g.masked_fill(pick > 2.0, -200.0).masked_fill(pick < -2.3, -1e4)
    g[:, 37::101] = -200.0
    g[:, 90::149] = -1e4
    return x | {"g": g, "A_log": None, "dt_bias": None, "gate_activation": "log_decay"}


def correlated_keys(T: int, D: int, H: int) -> dict:
    """Keys with a cosine of about 0.7 between them, beta about 0.9."""
    x = _base(T, D, H)
    return x | {"k": 1.5 * x["normal"](1, 1, H, D) + x["k"], "beta": torch.full_like(x["beta"], 2.2)}


def turning_keys(T: int, D: int, H: int) -> dict:
    """Keys that turn a quarter in 4 tokens and back, while the channel that they have just left decays."""
    x = _base(T, D, H)
    i = torch.arange(T) % 16
    phase, j = i // 4, i % 4 + 1
    quarter = torch.stack((j / 4, torch.ones(T), 1 - j / 4, torch.zeros(T)))[phase, torch.arange(T)].double()
    k = torch.zeros_like(x["k"])
    k[..., 0], k[..., 1] = (f(math.pi / 2 * quarter)[:, None] for f in (lambda t: -t.sin(), torch.cos))
    g = torch.full_like(x["g"], ALWAYS)
    turning = (phase == 0) | (phase == 2)
    g[:, turning | (phase == 3), :, 0] = NEVER
    g[:, turning | (phase == 1), :, 1] = NEVER
    return x | {"k": k, "g": g, "dt_bias": None, "beta": torch.full_like(x["beta"], 15.0)}


HARD = [
    slow_gates, lower_bound_everywhere, repeated_token, negative_eigenvalues, resets, correlated_keys, turning_keys
]  # fmt: skip


def hard_inputs(kind: Callable[[int, int, int], dict], T: int, D: int, H: int, dtype: torch.dtype) -> Inputs:
    x = {"gate_activation": "lower_bound", "beta_activation": "sigmoid"} | kind(T, D, H)
    wide = {n: x[n].float() for n in ("A_log", "dt_bias", "initial_state") if x[n] is not None}
    return Inputs(
        *(x[n].to(dtype) for n in ("q", "k", "v", "g", "beta")),
        wide.get("A_log"), wide.get("dt_bias"), wide.get("initial_state"), None,
        x["gate_activation"], -5.0 if x["gate_activation"] in BOUNDED_GATES else 0.0, x["beta_activation"], True,
        D**-0.5, True, 64 if T <= 512 else 0,
    )  # fmt: skip


# Known to be out of budget: A_log's gradient, a sum of small differences of products where every channel decays at the
# bound. flash-linear-attention's backward takes three bf16 MMAs for one in fp32:
# docs/internals/studies/2026-11-21-fla-backend.md.
FLA_LOSES = ("fla", lower_bound_everywhere, 32)


@functools.lru_cache(maxsize=1)
def expected(
    kind: Callable[[int, int, int], dict],
    T: int,
    D: int,
    H: int,
    dtype: torch.dtype,
    grad: bool,
    checkpoints: bool,
    tensor_cores: bool,
    device: str,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The truth, and the error of the yardstick in the working dtype."""
    x = hard_inputs(kind, T, D, H, dtype)._replace(checkpoint_every=64 if checkpoints else 0)
    assert all(t.isfinite().all() for t in x if isinstance(t, Tensor))
    with torch.set_grad_enabled(grad):
        d_out = output_gradients(x)
        truth, recurrence = run(oracle, to_fp64(x), d_out), run(oracle, to_device(x, device), d_out)
        yardsticks = [recurrence]
        if tensor_cores and dtype in (BF16, FP16):
            yardsticks.append(run(lambda x: rounded_chunks(x, dtype), to_fp64(x), d_out))
    assert all(t.isfinite().all() for t in truth.values())
    return truth, {n: max(error(y[n], t) for y in yardsticks) for n, t in truth.items()}


@on_every_backend
@on_every_device
@pytest.mark.parametrize(
    ("T", "D", "H", "dtype", "grad"),
    [  # many heads where there are gradients: A_log's has one element for each, whose error is a matter of luck
        pytest.param(T, D, H, dtype, grad, id=f"T={T},K=V={D},{str(dtype).removeprefix('torch.')}" + ",grad" * grad)
        for T, D, H, grad in ((4096, 32, 2, False), (512, 32, 16, True), (2048, 128, 2, False), (200, 128, 8, True))
        for dtype in (FP32, BF16)
    ],
)
@pytest.mark.parametrize("kind", HARD, ids=lambda kind: kind.__name__)
def test_hard_inputs(
    kind: Callable[[int, int, int], dict],
    T: int,
    D: int,
    H: int,
    dtype: torch.dtype,
    grad: bool,
    device: str,
    backend: str,
    required_backends: frozenset[str],
    record_property: Callable[..., None],
) -> None:
    x = to_device(hard_inputs(kind, T, D, H, dtype), device)
    if grad and trains_only_without_checkpoints(x, backend):
        x = x._replace(checkpoint_every=0)
    serve(backend, problem_of(x, needs_grad=grad), required_backends)
    truth, yardstick = expected(kind, T, D, H, dtype, grad, x.checkpoint_every > 0, backend != "eager", device)
    with poisoned_memory(), torch.set_grad_enabled(grad):
        got = run(lambda x: call(x, backend), x, output_gradients(x))
    if dtype == FP32:
        limits = {n: LOST_IN_FP32 * e for n, e in yardstick.items()}
    else:
        limits = {n: budget(e, dtype) for n, e in yardstick.items()}
    limits = {n: min(limit, HALF_WRONG) for n, limit in limits.items()}
    for n, t in got.items():
        record_property(f"{n}: error / the yardstick's", round(error(t, truth[n]) / yardstick[n], 2))
    known = {"d_A_log"} if grad and (backend, kind, D) == FLA_LOSES else set()
    check(*({n: t for n, t in ts.items() if n not in known} for ts in (got, truth)), limits)
    for n in known:
        e = error(got[n], truth[n])
        assert e <= 2 * limits[n]
        if e > limits[n]:
            pytest.xfail(f"{n}: error {e:.3g}, limit {limits[n]:.3g}")
