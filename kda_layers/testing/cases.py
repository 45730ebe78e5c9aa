"""Calls of `kda`, and their inputs: the same on every device and in every run."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.checks import accumulator_dtype
from kda_layers.kernels.kda.activations import BOUNDED_GATES
from kda_layers.kernels.kda.contract import DecodeInputs, Inputs
from kda_layers.testing.budgets import BF16, FP32, FP64


@dataclass(frozen=True)
class Call:
    """One call of an operator; its text, which is the test's name, says what differs from the defaults."""

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        text = {torch.dtype: lambda v: str(v).removeprefix("torch."), tuple: lambda v: "+".join(map(str, v))}
        return ",".join(f"{n}={text.get(type(v), str)(v)}" for n, v in changed) or "default"


@dataclass(frozen=True)
class Case(Call):
    """One call of `kda`."""

    T: int = 130
    B: int = 1
    H: int = 2
    group: int = 1
    K: int = 128
    V: int = 128
    dtype: torch.dtype = BF16
    gate: str = "lower_bound"
    lower_bound: float = -5.0
    A_log: bool = True
    dt_bias: bool = True
    head_gates: bool = False  # one gate a head: g [B, T, HV], dt_bias [HV]
    g_wide: bool = False  # gate logits in fp32 (fp64 for fp64), not in q's dtype
    slow: bool = False  # gates of a fresh or long-memory model, not ones that forget everything in 16 tokens
    beta: str = "sigmoid"
    beta_wide: bool = False
    l2norm: bool = True
    scale: float | None = None
    state: bool = False
    final: bool = True
    checkpoints: bool = True
    lengths: tuple[int, ...] | None = None  # of packed sequences; T is then their sum
    offsets_dtype: torch.dtype = torch.int32
    layout: str = "contiguous"  # or "fused" (slices of one tensor), "heads_first" ([B, H, T, .] transposed)
    poison: bool = False  # fresh memory holds NaN

    @property
    def draws(self) -> int:
        """Number of draws of the inputs. A tensor of a few elements has an error of known size only over several
        draws: A_log's gradient has one element for each head, a sum over all tokens that may happen to be small."""
        return {FP64: 1, FP32: 8}.get(self.dtype, 16)

    @property
    def tokens(self) -> int:
        return self.T if self.lengths is None else sum(self.lengths)


def make_inputs(case: Case, device: str = "cpu", draw: int = 0) -> Inputs:
    """The inputs of a case, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case}/{draw}".encode()))
    B, T, H, K, V = case.B, case.tokens, case.H, case.K, case.V
    HV, wide = H * case.group, accumulator_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=FP64)

    small = 1.0 if case.l2norm else 0.7 * K**-0.5  # without a norm |k| must stay below 1
    q, k, v = normal(B, T, H, K) * small, normal(B, T, H, K) * small, normal(B, T, HV, V)
    A_log: Tensor | None
    dt_bias: Tensor | None
    g, A_log, dt_bias = normal(B, T, HV, K), uniform(HV), uniform(HV, K)
    if case.slow:
        dt = torch.exp(math.log(1e-3) + uniform(HV, K) * math.log(100))
        g, A_log, dt_bias = 0.3 * g, 0.1 * A_log, dt.expm1().log()
    if case.gate == "log_decay":
        g, A_log, dt_bias = -5.0 * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias)), None, None
    if case.head_gates:
        g, dt_bias = g[..., 0], None if dt_bias is None else dt_bias[:, 0]
    beta = normal(B, T, HV)
    if case.beta == "given":
        beta = 2 * torch.sigmoid(beta)
    q, k, v, g, beta = (
        t.to(device, wide if is_wide else case.dtype)  # before the layout, which moving a slice would lose
        for t, is_wide in zip((q, k, v, g, beta), (False, False, False, case.g_wide, case.beta_wide), strict=True)
    )
    if case.layout == "fused":
        q, k, v, g = _slices_of_one(q, k, v, g[..., None] if case.head_gates else g)
        g = g[..., 0] if case.head_gates else g
        beta = torch.stack((beta, beta), -1)[..., 0]
    elif case.layout == "heads_first":
        q, k, v, g, beta = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, g, beta))
    N = B if case.lengths is None else len(case.lengths)
    offsets = None if case.lengths is None else torch.tensor((0, *case.lengths)).cumsum(0).to(case.offsets_dtype)
    x = Inputs(
        q, k, v, g, beta,
        A_log.to(wide) if case.A_log and A_log is not None else None,
        dt_bias.to(wide) if case.dt_bias and dt_bias is not None else None,
        normal(N, HV, V, K).mul(0.5).to(wide) if case.state else None,
        offsets, case.gate, case.lower_bound if case.gate in BOUNDED_GATES else 0.0, case.beta, case.l2norm,
        K**-0.5 if case.scale is None else case.scale, case.final, 64 if case.checkpoints else 0,
        fine_gradients=case.final,
    )  # fmt: skip
    return to_device(x, device)


def _slices_of_one(*tensors: Tensor) -> list[Tensor]:
    """The same values as slices of one [B, T, sum of widths] tensor, as a fused projection makes them."""
    assert len({t.dtype for t in tensors}) == 1, "slices of one tensor have one dtype"
    fused = torch.cat([t.flatten(2) for t in tensors], -1)
    parts = fused.split([t.shape[2] * t.shape[3] for t in tensors], -1)
    return [part.unflatten(2, t.shape[2:]) for part, t in zip(parts, tensors, strict=True)]


def map_tensors(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    changed: dict[str, Any] = {n: change(t) for n, t in x._asdict().items() if isinstance(t, Tensor)}
    return x._replace(**changed)


def to_device(x: Inputs, device: str) -> Inputs:
    return map_tensors(x, lambda t: t.to(device))


def to_fp64(x: Inputs) -> Inputs:
    """The same values on the CPU in fp64."""
    return map_tensors(x, lambda t: t.cpu().double() if t.is_floating_point() else t.cpu())


def sequences(x: Inputs) -> list[Inputs]:
    """Each packed sequence as inputs of its own (empty ones too)."""
    if x.cu_seqlens is None:
        raise ValueError("x must have cu_seqlens: its sequences are packed")
    offsets = x.cu_seqlens.tolist()
    return [
        x._replace(
            **{n: getattr(x, n)[:, a:b] for n in ("q", "k", "v", "g", "beta")},
            initial_state=None if x.initial_state is None else x.initial_state[n : n + 1],
            cu_seqlens=None,
        )
        for n, (a, b) in enumerate(itertools.pairwise(offsets))
    ]


def step_inputs(x: Inputs, **more: Tensor) -> DecodeInputs:
    """The inputs of `kda_step` for all tokens of `x`: its initial state is the state."""
    fields: dict[str, Any] = {n: getattr(x, n) if n in Inputs._fields else None for n in DecodeInputs._fields}
    return DecodeInputs(**fields | {"state": x.initial_state, "initial_state": None} | more)
