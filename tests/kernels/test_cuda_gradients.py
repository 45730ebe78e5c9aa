"""gradients.cu on the CPU against fp64 autograd through the recurrence.

What the forward and the reverse scan save for it comes from the recurrence in fp64, rounded to the dtype in which it is
saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import CHUNK, Inputs
from kda_layers.kernels.kda.cuda.backward import gradients as launcher
from kda_layers.kernels.kda.cuda.backward.reverse_scan import Scanned
from kda_layers.kernels.kda.cuda.forward.forward import Saved
from kda_layers.kernels.kda.reference import activate
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    FP16,
    Case,
    check,
    ids,
    limits_of,
    make_inputs,
    oracle,
    output_gradients,
    run,
    to_fp64,
)
from tests.kernels.emulated import end_of_memory
from tests.kernels.test_cuda_chunk import softplus_resets
from tests.kernels.test_hard_inputs import hard_inputs, repeated_token, resets

WHY_NOT = cuda_emulator.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

NAMES = ("q", "k", "g", "beta", "A_log", "dt_bias")


class Left(NamedTuple):
    """What forward and reverse scan leave to gradients.cu."""

    saved: Saved
    scanned: Scanned
    d_o: Tensor


def saved_by(x: Inputs, d_out: dict[str, Tensor]) -> Left:
    """What is saved for gradients.cu, exactly but for its dtype."""
    dtype, rows = x.q.dtype, launcher.chunk_rows(x)
    y = activate(to_fp64(x))
    B, T, HV, V = y.v.shape
    heads = torch.arange(HV) // (HV // y.q.shape[2])
    q, k = y.q[:, :, heads], y.k[:, :, heads]
    v = y.v.clone().requires_grad_()
    offsets = [0, T] if y.cu_seqlens is None else y.cu_seqlens.tolist()
    spans = [(slice(b, b + 1), 0, T) for b in range(B)] if y.cu_seqlens is None else [
        (slice(0, 1), a, b) for a, b in itertools.pairwise(offsets)
    ]  # fmt: skip
    starts, ends, finals, outputs, all_errors = [], [], [], [], []
    checkpoints: list[Tensor] = []
    for n, (batch, first, last) in enumerate(spans):
        S = q.new_zeros(1, HV, V, q.shape[3]) if y.initial_state is None else y.initial_state[n : n + 1]
        S = S.clone().requires_grad_()
        for t in range(first, last):
            if (t - first) % CHUNK == 0:
                starts.append(S)
            kt, qt = k[batch, t, :, None], q[batch, t, :, None]
            decayed = S * y.g[batch, t, :, None].exp()
            errors = y.beta[batch, t, :, None] * (v[batch, t] - (decayed * kt).sum(-1))
            S = decayed + errors[..., None] * kt
            all_errors.append(errors)
            outputs.append(y.scale * (S * qt).sum(-1))
            if (t - first + 1) % CHUNK == 0 or t == last - 1:
                S = S.clone()  # its gradient is what comes from behind the chunk
                ends.append(S)
            if (t - first + 1) % CHUNK == 0:
                checkpoints.append(S)
        finals.append(S)
    d_o = d_out["o"].to(dtype)
    total = (torch.stack(outputs).view(B, T, HV, V) * d_o.double()).sum()
    total = total + (torch.cat(finals) * d_out["final_state"].double()).sum()
    d_checkpoints = d_out["checkpoints"].double().flatten(0, 1)
    total = total + sum((S[0] * d).sum() for S, d in zip(checkpoints, d_checkpoints, strict=False))
    d_v, *d_ends = torch.autograd.grad(total, [v, *ends])

    def by_chunk(states: list[Tensor]) -> Tensor:
        out = torch.full((rows, HV, V, q.shape[3]), torch.nan, dtype=dtype)
        out[: len(states)] = torch.cat(states).to(dtype)
        return out

    errors = torch.stack(all_errors).view(B, T, HV, V)
    with torch.no_grad():
        saved = Saved(torch.empty(0), by_chunk(starts), errors.to(dtype))
        return Left(saved, Scanned(d_v.to(dtype), by_chunk(d_ends), None), d_o)


def gradients(x: Inputs, left: Left, processors: int = 3, **launch: Any) -> dict[str, Tensor]:
    """What gradients.cu makes of them, by name."""
    saved, scanned = (type(part)(*map(end_of_memory, part)) for part in left[:2])
    got = emulated.gradients(x, saved, scanned, end_of_memory(left.d_o), processors=processors, **launch)
    return {f"d_{n}": getattr(got, n) for n in NAMES if getattr(got, n) is not None}


def check_in_budget(draws: list[Inputs], **launch: Any) -> None:
    got, truth, yardstick = [], [], []
    for x in draws:
        d_out = output_gradients(x)
        names = [f"d_{n}" for n in NAMES if getattr(x, n) is not None]
        for results, cast in ((truth, to_fp64), (yardstick, lambda x: x)):
            every = run(oracle, cast(x), d_out)
            results.append({n: every[n] for n in names})
        got.append(gradients(x, saved_by(x, d_out), **launch))
    stacked = [{n: torch.stack([r[n] for r in results]) for n in results[0]} for results in (got, truth, yardstick)]
    check(stacked[0], stacked[1], limits_of(stacked[2], stacked[1], draws[0].q.dtype))


# ---------------------------------------------------------------- shapes and options

ARCHS = (90, 80)  # products of a warpgroup, of single warps
WIDE = Case(H=1, state=True)
SOFTPLUS = Case(K=64, V=64, dtype=FP16, gate="softplus", state=True)
LOG_DECAY = Case(H=1, gate="log_decay", state=True)
PACKED = (65, 0, 1, 130, 64, 0)

CASES = [
    *(replace(WIDE, T=T) for T in (1, 63, 64, 65, 130)),
    replace(WIDE, T=200, slow=True),
    replace(WIDE, B=3, T=65, state=False),
    *(replace(SOFTPLUS, group=group, H=2, B=2, T=70) for group in (2, 4)),
    replace(WIDE, group=2, lengths=PACKED, slow=True),
    replace(SOFTPLUS, group=4, H=1, lengths=PACKED, offsets_dtype=torch.int64),
    replace(LOG_DECAY, lengths=(0, 0, 5), state=False),
    replace(LOG_DECAY, lengths=(1,) * 40),
    replace(WIDE, A_log=False),
    replace(WIDE, dt_bias=False, slow=True),
    replace(SOFTPLUS, slow=True),
    replace(SOFTPLUS, A_log=False, dt_bias=False),
    *(replace(WIDE, beta=beta, beta_wide=wide) for beta, wide in (("2sigmoid", True), ("given", False))),
    replace(SOFTPLUS, beta="given", beta_wide=True),
    *(replace(case, l2norm=False, slow=True) for case in (WIDE, SOFTPLUS)),
    replace(SOFTPLUS, scale=-0.3, l2norm=False),
]


def drawn(case: Case) -> list[Inputs]:
    return [make_inputs(case, draw=n) for n in range(4)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", **ids(CASES))
def test_against_fp64(case: Case, arch: int) -> None:
    check_in_budget(drawn(case), arch=arch)


def test_wide_gates() -> None:
    """Gate logits, and their gradients, in fp32."""
    check_in_budget(drawn(Case(K=64, V=64, H=1, g_wide=True)))


# ---------------------------------------------------------------- hard inputs


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "case", **ids([replace(WIDE, beta="given"), replace(SOFTPLUS, beta="given", beta_wide=True, l2norm=False)])
)
def test_given_zeros(case: Case, arch: int) -> None:
    """Betas of zero, and below what fp16 holds: what nothing was written with has a gradient nevertheless."""
    draws = drawn(case)
    for x in draws:
        x.beta[:, ::3], x.beta[:, 1::7] = 0.0, 1e-7
    check_in_budget(draws, arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", [repeated_token, softplus_resets, resets], ids=lambda kind: kind.__name__)
def test_hard_inputs(kind: Callable[[int, int, int], dict], arch: int) -> None:
    D, dtype = (64, FP16) if kind is softplus_resets else (128, BF16)
    check_in_budget([hard_inputs(kind, 200, D, 1, dtype)], arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_same_bits(arch: int) -> None:
    """Whatever the order of what is concurrent, the number of blocks and the company."""
    x = make_inputs(replace(WIDE, group=2, lengths=(65, 0, 1, 70)))
    saved = saved_by(x, output_gradients(x))
    want = gradients(x, saved, arch=arch)
    for seed, processors in ((1, 1), (2, 3), (3, 100)):
        got = gradients(x, saved, arch=arch, seed=seed, processors=processors)
        assert [n for n, t in want.items() if not torch.equal(got[n], t)] == []
