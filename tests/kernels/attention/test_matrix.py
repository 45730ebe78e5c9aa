"""Every backend against dense attention in fp64: the output and every gradient, over what the contract allows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kda_layers.kernels.attention_bias.contract import problem_of
from tests.kernels.attention.cases import (
    BiasedCase,
    call,
    expected,
    make_inputs,
    on_every_backend,
    output_gradient,
    run,
    serve,
)
from tests.kernels.cases import BF16, FP16, FP32, FP64, ROUNDOFF, check, error, ids, poisoned_memory

TAILS = (1, 15, 63, 64, 65, 130)
BIASES = [f"{b}{h}{t}S" for b in "1B" for h in "1KH" for t in "1T"]

CASES = [
    # lengths around the edges of tiles
    *(BiasedCase(T=T, dtype=FP32) for T in TAILS[1:]),
    *(BiasedCase(T=T, S=130, causal=causal, dtype=FP16) for T in TAILS[:-1] for causal in (True, False)),
    *(BiasedCase(T=T, S=130) for T in (64, 65)),
    *(BiasedCase(T=130, S=S, causal=False, dtype=FP32) for S in TAILS[1:-1]),
    # every form of bias, with groups and batches
    *(BiasedCase(T=33, S=50, B=2, H_kv=2, group=2, bias=bias, dtype=FP32) for bias in ("", *BIASES)),
    *(BiasedCase(T=20, B=2, H_kv=2, group=2, bias=bias, causal=False, dtype=FP16) for bias in ("1H1S", "1K1S", "11TS")),
    BiasedCase(T=40, group=4),
    BiasedCase(T=40, group=4, bias="1K1S", dtype=FP16),
    # dtypes and widths
    *(BiasedCase(D=D, dtype=dtype) for D in (1, 24, 128) for dtype in (BF16, FP32)),
    BiasedCase(D=256, T=20, dtype=FP16),
    *(BiasedCase(T=70, dtype=dtype, bias_wide=True) for dtype in (BF16, FP16)),
    *(BiasedCase(T=40, H_kv=2, group=2, B=2, bias=bias, dtype=FP64) for bias in ("111S", "BKTS", "")),
    # several tiles of those that a GPU has in 16 bits
    *(BiasedCase(T=300, S=330, H_kv=2, group=2, D=128, bias=bias) for bias in ("1H1S", "1K1S", "1HTS")),
    BiasedCase(T=300, H_kv=2, D=64, bias="111S", causal=False),
    BiasedCase(lengths=(200, 0, 1, 150), group=2, D=128),
    # one query, for which keys are split among programs
    *(BiasedCase(T=1, S=S, H_kv=2, group=2, bias=bias, dtype=FP32) for S in (2, 31, 32, 70) for bias in ("", "1H1S")),
    BiasedCase(T=1, S=300, B=2, H_kv=2, group=3, D=24, bias="B11S", hidden=0.9, bias_wide=True, dtype=FP16),
    BiasedCase(T=1, S=300, B=2, H_kv=2, D=128, bias="BK1S", layout="heads_first", dtype=FP16),
    BiasedCase(T=1, S=9000, B=2, H_kv=2, group=4, D=64, bias="B11S", hidden=0.5),
    BiasedCase(T=1, S=200, group=20, D=128, causal=False),
    BiasedCase(T=1, S=70, hidden=1.0),
    # scales, of which one turns the order of the scores around
    BiasedCase(scale=1.0),
    BiasedCase(scale=-0.3, dtype=FP32),
    # hidden keys; with so many, whole rows see nothing
    BiasedCase(T=70, hidden=0.3, B=2, bias="B11S", dtype=FP32),
    BiasedCase(T=70, hidden=0.95, bias="1HTS", group=2, dtype=FP32),
    BiasedCase(T=70, hidden=1.0, causal=False),
    # packed sequences
    BiasedCase(lengths=(0, 1, 64, 0, 65, 1, 0), group=2),
    BiasedCase(lengths=(30, 0, 1, 35), causal=False, bias="111S", H_kv=2, dtype=FP32, offsets_dtype=torch.int64),
    BiasedCase(lengths=(30, 1, 35), bias="1HTS", group=2, dtype=FP32),
    BiasedCase(lengths=(30, 1, 35), bias="11TS", group=2, causal=False),
    BiasedCase(lengths=(130,), bias="", dtype=FP32),
    BiasedCase(lengths=(3, 2), bias="1K1S", H_kv=2, dtype=FP64),
    # layouts
    *(
        BiasedCase(layout=layout, B=2, group=2, bias=bias, T=40)
        for layout in ("fused", "heads_first")
        for bias in ("BH1S", "1HTS")
    ),
]  # fmt: skip


@on_every_backend
@pytest.mark.parametrize("case", **ids(CASES))
def test_against_fp64(case: BiasedCase, backend: str, device: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(case, device)
    problem = dataclasses.replace(problem_of(x, needs_grad=True), bias_grad=bool(case.bias))
    serve(backend, problem, required_backends)
    truth, limits = expected(x)
    with poisoned_memory():
        got = run(lambda x: call(x, backend), x)
        with torch.no_grad():
            assert torch.equal(call(x, backend), got["o"])
    check({n: t.cpu() for n, t in got.items()}, truth, limits)
    assert [(n, t.dtype) for n, t in got.items() if t.dtype != getattr(x, n.removeprefix("d_"), x.v).dtype] == []


@on_every_backend
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_one_token(dtype: torch.dtype, backend: str, device: str, required_backends: frozenset[str]) -> None:
    """It sees itself alone: o is v, d_v is d_o, and the rest is nothing but what rounding leaves of <d_o, v - o>."""
    x = make_inputs(BiasedCase(T=1, group=2, dtype=dtype), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    got, d_o = run(lambda x: call(x, backend), x), output_gradient(x).to(device)
    assert torch.equal(got["o"], x.v.expand_as(x.q))
    assert error(got["d_v"], d_o.double().sum(2, keepdim=True)) <= ROUNDOFF[dtype]
    scale = float((d_o.double().abs() * x.v.double().abs()).sum())
    for name in ("d_q", "d_k", "d_bias"):
        assert float(got[name].abs().max()) <= 4 * ROUNDOFF[dtype] * scale * max(1.0, float(x.q.abs().max()))


@on_every_backend
@pytest.mark.parametrize("bias", ["111S", "1H1S", "B11S", "11TS", "1HTS"])
def test_expanded_bias(bias: str, backend: str, device: str, required_backends: frozenset[str]) -> None:
    """Broadcast by stride 0, it gets the same gradient as where its size is 1."""
    x = make_inputs(BiasedCase(T=33, S=40, B=2, H_kv=2, group=2, bias=bias, dtype=FP32), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    truth, limits = expected(x)
    check(run(lambda x: call(x._replace(bias=x.bias.expand(2, 4, 33, 40)), backend), x), truth, limits)
