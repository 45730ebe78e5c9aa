"""The activations of gate and beta, a table each. A new gate is an entry here and its code in gates.cuh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# 16 tokens at e^-5 span 2^115, which still fits fp32. An integer: torch.compile(dynamic=True) treats a float of a
# module as a variable, and then traces twice.
MIN_LOWER_BOUND = -5


@dataclass(frozen=True)
class Gate:
    """Map from logits z = g + dt_bias to a log-decay, given the rate exp(A_log) and the lower bound."""

    name: str
    code: int  # GATE in gates.cuh
    forward: Callable[[Tensor, Tensor | float, float], Tensor]  # (z, rate, bound)
    # (gradient of the log-decay, z, rate, bound) -> gradients of z and, before its sum over tokens and K, of A_log
    backward: Callable[[Tensor, Tensor, Tensor | float, float], tuple[Tensor, Tensor]]
    bounded: bool = False  # takes lower_bound
    needs_rate: bool = False  # requires A_log


@dataclass(frozen=True)
class Beta:
    """Map from logits to beta: scale * sigmoid."""

    name: str
    code: int  # in the kernels
    scale: float


def sigmoid_gradient(x: Tensor) -> Tensor:
    """sigmoid(x) (1 - sigmoid(x)), without cancellation where the sigmoid is near 1."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _lower_bound_backward(d_g: Tensor, z: Tensor, rate: Tensor | float, bound: float) -> tuple[Tensor, Tensor]:
    d_z = d_g * (bound * rate) * sigmoid_gradient(rate * z)
    return d_z, d_z * z


def _softplus_backward(d_g: Tensor, z: Tensor, rate: Tensor | float, bound: float) -> tuple[Tensor, Tensor]:
    return d_g * -rate * torch.sigmoid(z), d_g * -rate * torch.nn.functional.softplus(z)


LOWER_BOUND = Gate(
    "lower_bound", 0, lambda z, rate, bound: bound * torch.sigmoid(rate * z), _lower_bound_backward, bounded=True
)
SOFTPLUS = Gate(
    "softplus", 1, lambda z, rate, bound: -rate * torch.nn.functional.softplus(z), _softplus_backward, needs_rate=True
)
GATES = {gate.name: gate for gate in (LOWER_BOUND, SOFTPLUS)}
BOUNDED_GATES = tuple(name for name, gate in GATES.items() if gate.bounded)
BETAS = {beta.name: beta for beta in (Beta("sigmoid", 0, 1.0), Beta("2sigmoid", 1, 2.0))}

# Precomputed: g is the log-decay itself, beta is beta itself.
LOG_DECAY, GIVEN = "log_decay", "given"
GATE_CODES = {name: gate.code for name, gate in GATES.items()} | {LOG_DECAY: 2}
BETA_CODES = {name: beta.code for name, beta in BETAS.items()} | {GIVEN: 2}
GATE_ACTIVATIONS, BETA_ACTIVATIONS = tuple(GATE_CODES), tuple(BETA_CODES)


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, activation: str, lower_bound: float) -> Tensor:
    """Log-decay (natural log, <= 0) from gate logits.

    Args:
        g: [..., HV, G] logits, or the log-decay itself with activation 'log_decay'; G is K, or 1 for gates of heads.
        A_log: [HV], or None for a rate of 1.
        dt_bias: [HV, G] or None.
        activation: 'lower_bound' -> lower_bound * sigmoid(exp(A_log) * (g + dt_bias));
            'softplus' -> -exp(A_log) * softplus(g + dt_bias); 'log_decay' -> g.
        lower_bound: in [-5, 0), used by 'lower_bound' only.

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in GATE_CODES:
        raise ValueError(f"activation must be one of {GATE_ACTIVATIONS}, got {activation!r}")
    if activation == LOG_DECAY:
        return g
    return GATES[activation].forward(logits(g, dt_bias), rates(A_log), lower_bound)


def logits(g: Tensor, dt_bias: Tensor | None) -> Tensor:
    """g [..., HV, G] with dt_bias [HV, G] added."""
    return g if dt_bias is None else g + dt_bias


def rates(A_log: Tensor | None) -> Tensor | float:
    """exp(A_log) as [HV, 1], or 1."""
    return 1.0 if A_log is None else A_log.exp()[:, None]


def write_strength(beta: Tensor, activation: str) -> Tensor:
    """beta in [0, 2] from logits: 'sigmoid', '2sigmoid' (allows negative eigenvalues), or 'given', already beta.

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in BETA_CODES:
        raise ValueError(f"activation must be one of {BETA_ACTIVATIONS}, got {activation!r}")
    if activation == GIVEN:
        return beta
    beta, scale = torch.sigmoid(beta), BETAS[activation].scale
    return beta if scale == 1 else scale * beta
