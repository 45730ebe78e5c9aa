"""The short convolution's Triton kernels, on a GPU or in Triton's interpreter, and compiled without a GPU.

The interpreter takes a time for each operation of a program, whatever its size: cases on a CPU are small.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers.kernels import triton_package
from kda_layers.kernels.fused.short_conv import SHORT_CONV, short_conv, short_convs
from tests.kernels.cases import BEST_DEVICE, BF16, FP16, FP32, FP64, budget, error, poisoned_memory

pytestmark = pytest.mark.compiles

TRITON = SHORT_CONV.backend("triton")
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
ON_GPU = torch.cuda.is_available()
WIDTHS = (3, 40, 6)
LENGTHS = (0, 9, 1, 0, 18, 2, 0)  # strips of 16 tokens: sequences end within one, at its end and in the next
T = sum(LENGTHS)


@pytest.fixture(autouse=True)
def _any_length(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels serve a few tokens as well, so that the cases can be small."""
    monkeypatch.setattr(TRITON, "features", frozenset(("few_tokens",)))
    SHORT_CONV.clear_caches()
    yield
    SHORT_CONV.clear_caches()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def offsets(lengths: tuple[int, ...] | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
    return None if lengths is None else torch.tensor((0, *itertools.accumulate(lengths)), dtype=dtype)


def run(
    backend: str,
    xs: list[Tensor],
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    d_ys: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    """The results, the new state and the gradients."""
    xs, weight = [x.detach().requires_grad_() for x in xs], weight.detach().requires_grad_()
    with poisoned_memory():
        ys, new = short_convs(xs, weight, state, cu_seqlens, backend=backend)
        d_ys = [normal(*y.shape, seed=40 + i) for i, y in enumerate(ys)] if d_ys is None else d_ys
        grads = torch.autograd.grad(ys, [*xs, weight], [d.to(y) for d, y in zip(d_ys, ys, strict=True)])
    assert new is not None
    named = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"state": new.detach()}
    return named | {f"d_x{i}": d for i, d in enumerate(grads[:-1])} | {"d_weight": grads[-1]}


def converted(x: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(x, list):
        return [converted(t, device, dtype) for t in x]
    return x.to(device, dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x


def check_against_fp64(*inputs: Any, dtype: torch.dtype) -> None:
    """Everything within twice the plain form's error in the same dtype plus a rounding."""
    inputs = tuple(converted(x, BEST_DEVICE, dtype) for x in inputs)
    truth = run("eager", *(converted(x, "cpu", FP64) for x in inputs))
    plain, got = run("eager", *inputs), run("triton", *inputs)
    assert got.keys() == truth.keys()
    for n, t in truth.items():
        assert got[n].dtype == dtype
        assert error(got[n], t) <= budget(error(plain[n], t), dtype), n


CASES = [  # W, dtype, packed, state: all of them on a GPU
    case
    for case in itertools.product((2, 3, 4), (BF16, FP16, FP32), (False, True), (False, True))
    if ON_GPU
    or case in ((4, FP32, False, True), (4, FP32, True, True), (4, FP16, True, False), (3, FP32, True, True))
    or case in ((2, FP32, True, False), (2, BF16, False, False))
]


@needs_triton
@pytest.mark.parametrize(("W", "dtype", "packed", "with_state"), CASES, ids=lambda value: str(value))
def test_against_fp64(W: int, dtype: torch.dtype, packed: bool, with_state: bool) -> None:
    B, N = (1, len(LENGTHS)) if packed else (2, 2)
    xs = [normal(B, T, width, seed=i) for i, width in enumerate(WIDTHS)]
    state = normal(N, sum(WIDTHS), W, seed=9) if with_state else None
    cu_seqlens = offsets(LENGTHS, torch.int64 if with_state else torch.int32) if packed else None
    assert SHORT_CONV.choose("triton", torch.device(BEST_DEVICE), dtype, True, False, W) == "triton"
    check_against_fp64(xs, normal(sum(WIDTHS), W, seed=8), state, cu_seqlens, dtype=dtype)


@needs_triton
def test_one_packed_token_with_a_state() -> None:
    """An engine's step of one sequence: Triton takes arguments of 1 for constants, which 3.6 did not compile."""
    xs = [normal(1, 1, width, seed=i) for i, width in enumerate(WIDTHS)]
    state = normal(1, sum(WIDTHS), 4, seed=9)
    check_against_fp64(xs, normal(sum(WIDTHS), 4, seed=8), state, offsets((1,)), dtype=FP32)


@needs_triton
@pytest.mark.parametrize("columns", [4, 3])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_states_in_a_pool(backend: str, columns: int) -> None:
    """Strided slots in any order get what would be returned; the other ones, and those of empty sequences, nothing."""
    xs = [normal(1, T, width, seed=i).to(BEST_DEVICE, FP32) for i, width in enumerate(WIDTHS)]
    weight, state = normal(49, 4, seed=8).to(BEST_DEVICE, FP32), normal(7, 49, 4, seed=9).to(BEST_DEVICE, FP32)
    cu_seqlens = converted(offsets(LENGTHS), BEST_DEVICE, FP32)
    ys, new = short_convs(xs, weight, state, cu_seqlens, backend=backend)
    assert new is not None
    pool = torch.full((9, columns, 53), 7.0, device=BEST_DEVICE)[..., 1:50].mT
    slots = torch.tensor([0, 8, 3, 0, 1, 5, 0], device=BEST_DEVICE)
    kept = state[..., -columns:]
    again, nothing = short_convs(xs, weight, kept, cu_seqlens, backend=backend, into=(pool, slots.int()))
    assert nothing is None
    assert all(torch.equal(a, b) for a, b in zip(again, ys, strict=True))
    for n, length in enumerate(LENGTHS):
        if length:
            assert torch.equal(pool[slots[n]], new[n, :, -columns:])
    assert (pool[[2, 4, 6, 7]] == 7).all()


@pytest.mark.skipif(not ON_GPU, reason="the interpreter would take minutes")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("lengths", [None, (0, 700, 64, 1, 3000, 331)], ids=["whole", "packed"])
def test_many_programs(lengths: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    widths, length = (512, 512, 1024), 4096
    xs = [normal(1 if lengths else 2, length, width, seed=i) for i, width in enumerate(widths)]
    check_against_fp64(xs, normal(sum(widths), 4, seed=8), None, offsets(lengths), dtype=dtype)


@needs_triton
def test_strided_rows() -> None:
    """Parts of one product, as a projection of all three writes them; a broadcast and a transposed gradient."""
    whole = normal(2, 18, sum(WIDTHS)).to(BEST_DEVICE, FP32)
    parts = list(whole.split(WIDTHS, -1))
    weight, state = (normal(sum(WIDTHS), 4, seed=s).to(BEST_DEVICE, FP32) for s in (1, 2))
    d_ys = [whole.flip(1)[..., :3], parts[1][:, :1].expand(2, 18, 40), whole[..., :6].mT.contiguous().mT]
    states = state.expand(2, -1, -1)
    got = run("triton", parts, weight, states, d_ys=d_ys)
    want = run("triton", [p.contiguous() for p in parts], weight, states.contiguous(), d_ys=[d.clone() for d in d_ys])
    assert all(torch.equal(got[n], want[n]) for n in want)


@needs_triton
def test_same_bits_alone_and_packed() -> None:
    lengths = (9, 1, 18, 2)
    xs = [normal(1, 30, width, seed=i).to(BEST_DEVICE, FP32) for i, width in enumerate(WIDTHS)]
    weight, state = normal(49, 4, seed=8).to(BEST_DEVICE, FP32), normal(4, 49, 4, seed=9).to(BEST_DEVICE, FP32)
    d_ys = [normal(1, 30, width, seed=20 + i).to(BEST_DEVICE, FP32) for i, width in enumerate(WIDTHS)]
    packed = run("triton", xs, weight, state, offsets(lengths).to(BEST_DEVICE), d_ys)
    begin = 9 + 1
    rows = slice(begin, begin + 18)
    alone = run("triton", [x[:, rows] for x in xs], weight, state[2:3], None, [d[:, rows] for d in d_ys])
    for i in range(3):
        for name in (f"y{i}", f"d_x{i}"):
            assert torch.equal(packed[name][:, rows], alone[name]), name


@needs_triton
def test_what_one_sequence_holds_does_not_reach_another() -> None:
    xs = [normal(1, 20, width, seed=i).to(BEST_DEVICE, FP32) for i, width in enumerate(WIDTHS)]
    weight, cu_seqlens = normal(49, 4, seed=8).to(BEST_DEVICE, FP32), offsets((6, 5, 9)).to(BEST_DEVICE)
    clean = run("triton", xs, weight, None, cu_seqlens)
    for x in xs:
        x[:, 6:11] = torch.nan
    spoilt = run("triton", xs, weight, None, cu_seqlens)
    for i in range(3):
        for name in (f"y{i}", f"d_x{i}"):
            assert torch.equal(spoilt[name][:, :6], clean[name][:, :6])
            assert torch.equal(spoilt[name][:, 11:], clean[name][:, 11:])
            assert spoilt[name][:, 6:11].isnan().all()


@needs_triton
def test_one_tensor_and_gradients_of_some() -> None:
    """The same tensor three times, a gradient for one of three tensors, and a frozen weight."""
    x = normal(2, 7, 5).to(BEST_DEVICE, FP32).requires_grad_()
    weight = normal(5, 4, seed=1).to(BEST_DEVICE, FP32)
    others = [normal(2, 7, width, seed=width).to(BEST_DEVICE, FP32) for width in (2, 3)]
    y, new = short_conv(x, weight, backend="triton")
    whole = torch.cat((weight, *(normal(w, 4, seed=w).to(weight) for w in (2, 3))))
    ys, states = short_convs([x, *others], whole, backend="triton")
    assert torch.equal(ys[0], y)
    assert torch.equal(states[:, :5], new)
    (alone,), (among) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(ys[0].sum(), x)
    assert torch.equal(alone, among[0])


@needs_triton
def test_empty() -> None:
    xs = [torch.ones(1, 0, width, device=BEST_DEVICE, requires_grad=True) for width in WIDTHS]
    weight = torch.ones(49, 4, device=BEST_DEVICE, requires_grad=True)
    ys, state = short_convs(xs, weight, backend="triton")
    grads = torch.autograd.grad(sum(y.sum() for y in ys), [*xs, weight])
    assert [list(y.shape) for y in ys] == [[1, 0, width] for width in WIDTHS]
    assert torch.equal(state, torch.zeros_like(state))
    assert torch.equal(grads[-1], torch.zeros_like(weight))


@needs_triton
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_op(packed: bool) -> None:
    xs = [normal(1, 5, width, seed=width).to(BEST_DEVICE, FP32).requires_grad_() for width in (1, 2, 3)]
    weight = normal(6, 2, seed=1).to(BEST_DEVICE, FP32).requires_grad_()
    cu_seqlens = offsets((2, 3)).to(BEST_DEVICE) if packed else None
    state = normal(2 if packed else 1, 6, 2, seed=2).to(BEST_DEVICE, FP32)
    for save in (False, True):
        args = (*(x.detach() for x in xs), weight.detach(), state, cu_seqlens, save, "triton")
        torch.library.opcheck(torch.ops.kda_layers.short_conv.default, args)
    compiled = torch.compile(short_convs, backend="aot_eager", fullgraph=True)
    results = []
    for f in (short_convs, compiled):
        ys, new = f(xs, weight, state, cu_seqlens, backend="triton")
        loss = sum(y.square().sum() for y in ys)
        results.append((*ys, new, *torch.autograd.grad(loss, [*xs, weight])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = dataclasses.replace(SHORT_CONV.problem.default("cpu"), device="cuda", arch=90)

    def reasons(**changes: object) -> str:
        return "; ".join(TRITON.unsupported(dataclasses.replace(gpu, **changes)))

    monkeypatch.setattr(triton_package, "is_installed", lambda: True)
    monkeypatch.setattr(triton_package, "interprets", lambda: False)
    assert reasons() == reasons(W=2, dtype=FP32) == ""
    assert reasons(W=5, dtype=FP64) == "dtype is float64, needs bfloat16, float16 or float32; W is 5, needs 2, 3 or 4"
    assert reasons(arch=75) == "arch is sm_75, needs sm_80 or newer"
    assert reasons(masked=True) == "tokens are masked, needs mask=None"
    assert reasons(device="mps", arch=0) == "device is mps, needs cuda"
    assert reasons(device="cpu", arch=0) == "device is cpu, needs cuda"
    monkeypatch.setattr(triton_package, "interprets", lambda: True)
    assert reasons(device="cpu", arch=0) == ""
    monkeypatch.setattr(triton_package, "is_installed", lambda: False)
    assert reasons() == "triton is not installed"


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("sm", [80, 90])
def test_compiles_without_a_gpu(sm: int) -> None:
    """Nothing is spilled or exchanged between threads, and rows are read in vectors of 8 bytes or more.

    Also with sizes and strides of 1, which Triton takes for constants; but then the forward spills where its registers
    are limited.
    """
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_short_conv", str(sm)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 3
    for line in lines:
        usage = json.loads(line)
        spills = usage["ones"] and usage["kernel"] == "conv_forward_kernel" and sm >= 90
        assert usage["stack"] == 0 or spills, line
        assert usage["ones"] or (usage["shared"] == 0 and usage["row loads"] >= 7), line
