"""Inputs inside the documented domain on which fast kernels are known to go wrong, over thousands of tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.kda.activations import BOUNDED_GATES
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.testing.budgets import FP64

Kind = Callable[[int, int, int], dict[str, Any]]  # of T, D, H
NEVER, ALWAYS = -30.0, 30.0  # gate logits: no decay, and decay at the lower bound


def _base(T: int, D: int, H: int) -> dict[str, Any]:
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


def slow_gates(T: int, D: int, H: int) -> dict[str, Any]:
    """The state lives for hundreds of tokens."""
    return _base(T, D, H)


def lower_bound_everywhere(T: int, D: int, H: int) -> dict[str, Any]:
    """Every channel decays by e^-4.998 at every token; nearer to the bound the gate's gradient is lost in fp32."""
    x = _base(T, D, H)
    return x | {"g": torch.full_like(x["g"], 8.0), "dt_bias": None}


def repeated_token(T: int, D: int, H: int) -> dict[str, Any]:
    """Identical keys, beta about 0.98, no decay: the worst inverse that a chunk can ask for."""
    x = _base(T, D, H)
    k = x["k"][:, :1].expand_as(x["k"])
    return x | {
        "k": k, "g": torch.full_like(x["g"], NEVER), "dt_bias": None, "beta": 4 + 0.3 * x["normal"](1, T, H)
    }  # fmt: skip


def negative_eigenvalues(T: int, D: int, H: int) -> dict[str, Any]:
    """beta close to 2: every write almost reflects the state."""
    x = _base(T, D, H)
    return x | {"beta": 4 + 0.3 * x["normal"](1, T, H), "beta_activation": "2sigmoid"}


def resets(T: int, D: int, H: int) -> dict[str, Any]:
    """Log-decays of -200 and -1e4 between ordinary ones, in single channels and in all at once."""
    x = _base(T, D, H)
    g = -5.0 * torch.sigmoid(x["g"] + x["dt_bias"])
    pick = x["normal"](1, T, H, D)
    g = g.masked_fill(pick > 2.0, -200.0).masked_fill(pick < -2.3, -1e4)
    g[:, 37::101] = -200.0
    g[:, 90::149] = -1e4
    return x | {"g": g, "A_log": None, "dt_bias": None, "gate_activation": "log_decay"}


def correlated_keys(T: int, D: int, H: int) -> dict[str, Any]:
    """Keys with a cosine of about 0.7 between them, beta about 0.9."""
    x = _base(T, D, H)
    return x | {"k": 1.5 * x["normal"](1, 1, H, D) + x["k"], "beta": torch.full_like(x["beta"], 2.2)}


def turning_keys(T: int, D: int, H: int) -> dict[str, Any]:
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


def reflections(T: int, D: int, H: int) -> dict[str, Any]:
    """Keys with a cosine of about 0.7, beta 2 x sigmoid of 1 + N(0, 1): most writes reflect the state."""
    x = correlated_keys(T, D, H)
    return x | {"beta": 2 * torch.sigmoid(1 + x["normal"](1, T, H)), "beta_activation": "given"}


def resets_at_the_bound(T: int, D: int, H: int) -> dict[str, Any]:
    """Hardly any decay, but for one token in twenty, at which every channel decays by more than e^-4.95."""
    x = _base(T, D, H)
    g = torch.where(x["normal"](1, T, H, 1) < -1.645, 8.0, -9.0).expand_as(x["g"])
    return x | {"g": g, "dt_bias": None}


def one_gate_a_head(kind: Kind) -> Kind:
    """The inputs of `kind` with the gates of its first channels for all channels, g [1, T, H] and dt_bias [H]."""

    @functools.wraps(kind)
    def of_heads(T: int, D: int, H: int) -> dict[str, Any]:
        x = kind(T, D, H)
        return x | {n: None if x[n] is None else x[n][..., 0] for n in ("g", "dt_bias")}

    of_heads.__name__ += "_of_heads"
    return of_heads


HARD = [
    slow_gates, lower_bound_everywhere, repeated_token, negative_eigenvalues, resets, correlated_keys, turning_keys
]  # fmt: skip


HARD_OF_HEADS = [*map(one_gate_a_head, (kind for kind in HARD if kind is not turning_keys))]  # which turn by channels


def hard_inputs(kind: Kind, T: int, D: int, H: int, dtype: torch.dtype) -> Inputs:
    """Inputs of a kind, q, k, v [1, T, H, D], g [1, T, H, D] or [1, T, H] and beta [1, T, H] in `dtype`; up to T = 512
    also boundary states."""
    x: dict[str, Any] = {"gate_activation": "lower_bound", "beta_activation": "sigmoid"} | kind(T, D, H)
    q, k, v, g, beta = (x[n].to(dtype) for n in ("q", "k", "v", "g", "beta"))
    wide = {n: x[n].float() for n in ("A_log", "dt_bias", "initial_state") if x[n] is not None}
    return Inputs(
        q, k, v, g, beta, wide.get("A_log"), wide.get("dt_bias"), wide.get("initial_state"), None,
        x["gate_activation"], -5.0 if x["gate_activation"] in BOUNDED_GATES else 0.0, x["beta_activation"], True,
        D**-0.5, True, 64 if T <= 512 else 0,
    )  # fmt: skip
