"""`python -m benchmarks.biased_attention`: softmax attention with a learned bias for each key, and its peers, on a GPU.

(B, T, H, D) = (1, 8192, 32, 128), bf16, bias [1, 32, 1, 8192], causal and not; forward, and forward + backward, with
the gradient of the bias and without. Ours; FlexAttention (a score_mod that adds the bias, compiled); torch's scaled dot
product attention with the bias as an expanded mask, and without a bias. Results are compared with dense attention in
fp64 on the first and the last head, and what is wrong is not timed. Contenders take turns, replayed from CUDA graphs
where they can be captured, with a cold L2; peak memory is beyond the inputs.

`--tune` instead tries launches of our kernels and prints the fastest.

Exit code 0; 1 where nothing was timed, or ours was wrong or broke; 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks import report
from benchmarks.gpu.contenders import Contender, Prepared, Refusal, graphed
from benchmarks.gpu.harness import Row, compete, failures
from benchmarks.gpu.machine import CudaMachine, Machine
from benchmarks.gpu.truth import Results
from kda_layers.kernels import biased_attention
from kda_layers.kernels.attention_bias.backends.triton import Launch, TritonBackend, launches
from kda_layers.kernels.attention_bias.contract import ATTENTION, Inputs

Attention = Callable[["Tensors"], Tensor]
NAMES = ("d_q", "d_k", "d_v", "d_bias")
TITLE = "Softmax attention with a learned bias beside FlexAttention and SDPA"
COLUMNS = ["what", "causal", "contender", "bias", "status", "ms", "p10", "p90", "mode", "MiB", "errors", "reason"]


class Shape(NamedTuple):
    B: int = 1
    T: int = 8192
    H: int = 32
    D: int = 128


class Tensors(NamedTuple):
    """q, k, v, d_o [B, T, H, D] and the bias [1, H, 1, T], or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    d_o: Tensor
    causal: bool


def make(shape: Shape, device: str, causal: bool) -> Tensors:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, d_o = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4))
    bias = torch.randn(1, shape.H, 1, shape.T, generator=generator, device=device).bfloat16()
    return Tensors(q, k, v, bias, d_o, causal)


# ---------------------------------------------------------------- who is timed


def ours(backend: str) -> Attention:
    return lambda x: biased_attention(x.q, x.k, x.v, x.bias, causal=x.causal, backend=backend)


def flex(x: Tensors) -> Attention:
    """FlexAttention, compiled for the case; its block mask is made before."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, compiled = x.q.shape[1], torch.compile(flex_attention, dynamic=False)
    mask = None
    if x.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=x.q.device)

    def attention(y: Tensors) -> Tensor:
        assert y.bias is not None
        bias = y.bias[0, :, 0]
        q, k, v = heads_first(y)
        return compiled(q, k, v, lambda s, b, h, i, j: s + bias[h, j], mask).transpose(1, 2)

    return attention


def sdpa(x: Tensors) -> Tensor:
    if x.bias is not None and x.causal:
        raise Refusal("takes a mask or is_causal; both in one mask would be of size T x T for each head")
    B, T, H, _ = x.q.shape
    mask = None if x.bias is None else x.bias.expand(B, H, T, T)
    q, k, v = heads_first(x)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=x.causal).transpose(1, 2)


def heads_first(x: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    return x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2)


def dense(x: Tensors) -> Tensor:
    """The definition."""
    s = torch.einsum("bthd,bshd->bhts", x.q, x.k) * x.q.shape[3] ** -0.5
    s = s if x.bias is None else s + x.bias
    if x.causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return torch.einsum("bhts,bshd->bthd", s.softmax(-1), x.v)


def call(f: Attention, x: Tensors, backward: bool) -> Results:
    """The output and, with `backward`, the gradients of all that has one."""
    if not backward:
        with torch.no_grad():
            return {"o": f(x)}
    leaves = {n: getattr(x, n.removeprefix("d_")) for n in NAMES}
    leaves = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    o = f(x)
    return {"o": o} | dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), x.d_o.to(o)), strict=True))


def with_gradients(x: Tensors, bias_grad: bool) -> Tensors:
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    return x._replace(q=q, k=k, v=v, bias=None if x.bias is None else x.bias.detach().requires_grad_(bias_grad))


def some_heads(results: Results) -> Results:
    """The first and the last head of each result."""
    return {n: t[:, [0, -1]] if n == "d_bias" else t[:, :, [0, -1]] for n, t in results.items()}


def contender(name: str, make_attention: Callable[[Tensors], Attention], x: Tensors, backward: bool) -> Contender:
    bias = "none" if x.bias is None else "with its gradient" if x.bias.requires_grad else "given"

    def prepare() -> Prepared:
        attention = make_attention(x)
        return Prepared(lambda: call(attention, x, backward), lambda results: results)

    return Contender(name, prepare, name in ATTENTION.backends(), {"bias": bias})


def rows_of(shape: Shape, causal: bool, backward: bool, machine: Machine, backend: str) -> list[Row]:
    fields = {"what": "forward + backward" if backward else "forward", "causal": str(causal)}
    x = make(shape, machine.device, causal)
    given = with_gradients(x, False)
    biased = {backend: lambda x: ours(backend), "FlexAttention": flex, "SDPA, expanded bias": lambda x: sdpa}
    groups: list[tuple[Tensors, dict[str, Callable[[Tensors], Attention]]]] = [
        (given, biased),
        (given._replace(bias=None), {backend: lambda x: ours(backend), "SDPA": lambda x: sdpa}),
    ]
    if backward:
        groups.insert(1, (with_gradients(x, True), biased))
    rows = []
    for y, who in groups:
        contenders = [graphed(contender(name, f, y, backward), machine) for name, f in who.items()]
        rows += compete(fields, contenders, truth(y, backward), machine, pick=some_heads, memory=True)
        machine.collect()
    return rows


def truth(x: Tensors, backward: bool) -> Results:
    """Return the outputs and gradients of the first and the last head, in fp64."""
    q, k, v, d_o = (t[:, :, [0, -1]].detach().double() for t in (x.q, x.k, x.v, x.d_o))
    bias = None if x.bias is None else x.bias[:, [0, -1]].detach().double()
    few = with_gradients(Tensors(q, k, v, bias, d_o, x.causal), x.bias is not None and x.bias.requires_grad)
    return {n: t.detach() for n, t in call(dense, few, backward).items()}


def flat(row: Row) -> Row:
    """A row of the table."""
    time, errors = row.get("time", {}), row.get("errors", {})
    return row | {
        "ms": time.get("median", ""), "p10": time.get("p10", ""), "p90": time.get("p90", ""),
        "errors": ", ".join(f"{n} {e:.1e}" for n, e in errors.items()),
    }  # fmt: skip


# ---------------------------------------------------------------- tuning

SWEEP = {
    "forward": list(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))),
    "query": list(itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))),
    "key": list(itertools.product((32, 64, 128), (64, 128), (4, 8), (1, 2, 3, 4))),
}


def tune(shape: Shape, causal: bool, machine: Machine) -> list[Row]:
    """Milliseconds of the forward, or of the full backward, with each launch of one kernel, the others as they are."""
    x = make(shape, machine.device, causal)
    inputs = Inputs(x.q, x.k, x.v, x.bias, None, shape.D**-0.5, causal, True)
    rows: list[Row] = []
    for kernel, sweep in SWEEP.items():
        for launch in tqdm([Launch(*values) for values in sweep], desc=kernel):
            try:
                time = report.summary(machine.times_ms(tuned(inputs, x.d_o, kernel, launch)))
            except Exception as problem:  # most often too much shared memory
                print(f"{kernel} {tuple(launch)}: {type(problem).__name__}: {problem}".splitlines()[0][:150])
                continue
            rows.append({"kernel": kernel, **launch._asdict(), "ms": time["median"]})
    return sorted(rows, key=lambda row: (row["kernel"], row["ms"]))


def tuned(x: Inputs, d_o: Tensor, kernel: str, launch: Launch) -> Callable[[], object]:
    """The forward or the backward, whichever the kernel is part of."""
    backend = TritonBackend(lambda *problem: launches(*problem) | {kernel: launch})
    o, lse = backend.attend(x)
    if kernel == "forward":
        return lambda: backend.attend(x)
    return lambda: backend.attend_backward(x, o, lse, d_o)


def main(
    argv: Sequence[str] | None = None,
    machine: Machine | None = None,
    shape: Shape | None = None,
    backend: str = "triton",
) -> int:
    """The exit code. `machine`, `shape` and `backend` are for tests."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.biased_attention", description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="try launches of our kernels instead")
    parser.add_argument("--best", type=int, default=5, help="of --tune: how many launches to print")
    parser.add_argument("--causal", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_commit_option(parser)
    args = parser.parse_args(argv)
    if machine is None:
        if not torch.cuda.is_available():
            print("benchmarks.biased_attention needs a CUDA device, and torch finds none here", file=sys.stderr)
            return 2
        machine = CudaMachine()
    shape, masks = shape or Shape(), {"yes": [True], "no": [False], "both": [False, True]}[args.causal]
    if args.tune:
        for causal in masks:
            rows = tune(shape, causal, machine)
            for kernel in SWEEP:
                for row in [r for r in rows if r["kernel"] == kernel][: args.best]:
                    print("causal" if causal else "all", *row.values())
        return 0
    rows = []
    for backward, causal in tqdm(list(itertools.product((False, True), masks)), desc="cases"):
        rows += [{"section": "attention"} | row for row in rows_of(shape, causal, backward, machine, backend)]
    stamp = report.stamp(args.commit)
    results = report.document("gpu-biased-attention", TITLE, [flat(row) for row in rows], COLUMNS, stamp)
    report.save(args.output, results)
    print(report.text(results))
    found = failures(rows)
    for line in found:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
