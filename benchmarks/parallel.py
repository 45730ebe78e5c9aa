"""Sequences that are cut over GPUs: `torchrun --nproc-per-node 8 -m benchmarks.parallel`.

For each length, one GPU and the first 2, 4, ... GPUs of the group take turns at a forward and backward of the operator
(32 heads of 128, nothing recomputed), also flash-linear-attention's where that is installed, and at a training step of
the 0.70 B model of benchmarks/lm.py with gradient checkpointing, its gradients summed over the ranks. A time is that of
the slowest rank. `exchange %` is what is saved where ranks keep what they would send and wait for nothing, so that
results are wrong. `error` is that of a short call's outputs against fp64. On a CPU, a small model, to rehearse.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from benchmarks import lm, report, timing
from kda_layers import KDAConfig, KDAForCausalLM, Shards, enable_context_parallel, kda, kda_over_ranks
from kda_layers.testing.budgets import budget, error

TITLE = "Sequences cut over GPUs: operator and training step"
COLUMNS = ["what", "contender", "T", "ranks", "ms", "speedup", "exchange %", "MiB", "tokens/s", "error"]
OURS, FLA = "ours", "flash-linear-attention"
SHAPES = {"cuda": (32, 128, torch.bfloat16), "cpu": (2, 16, torch.float32)}  # heads, width and dtype of the operator
SMALL = dict(vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, linear_num_heads=2)


def operator(T: int, group: Any, device: str, exact: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward of this rank's slice of T tokens; returns outputs and the gradient of q.

    exact: in fp64, from the same inputs.
    """
    tensors, d_o = _operands(T, group, device, exact)
    options: dict[str, Any] = dict(lower_bound=-5.0, recompute=False, backend="eager" if exact else None)

    def run() -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = tensors
        if group is None:
            o = kda(q, k, v, g, beta, **options).o
        else:
            o = kda_over_ranks(q, k, v, g, beta, Shards.contiguous(group), **options).o
        return o.detach(), torch.autograd.grad(o, tensors, d_o.to(o.dtype))[0]

    return run


def operator_of_fla(T: int, group: Any, device: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """The same by flash-linear-attention, over ranks with its context of context parallelism."""
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda

    tensors, d_o = _operands(T, group, device)
    options: dict[str, Any] = dict(
        A_log=torch.zeros(tensors[0].shape[2], device=device), use_gate_in_kernel=True, safe_gate=True,
        lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, disable_recompute=True,
    )  # fmt: skip
    if group is not None:
        options["cp_context"] = build_cp_context(torch.tensor([0, T], device=device), group=group)

    def run() -> tuple[Tensor, Tensor]:
        o = chunk_kda(*tensors, **options)[0]
        return o.detach(), torch.autograd.grad(o, tensors, d_o.to(o.dtype))[0]

    return run


def _operands(T: int, group: Any, device: str, exact: bool = False) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g and beta of this rank's slice, and the gradient of its outputs."""
    H, K, dtype = SHAPES[device]
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    start, length = T // ranks * rank, T // ranks
    shapes = [(H, K)] * 4 + [(H,)]
    tensors = [_slice(i, start, length, shape, dtype, device) for i, shape in enumerate(shapes)]
    tensors = [(t.double() if exact else t).requires_grad_() for t in tensors]
    return tensors, _slice(5, start, length, (H, K), dtype, device)


def _slice(which: int, start: int, length: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A slice of a random tensor [1, T, *shape], made in blocks so that every rank knows any of them alone.

    The fourth are gate logits of a memory of hundreds of tokens, so that slices matter to each other.
    """
    block, parts = 4096, []
    for first in range(start // block * block, start + length, block):
        generator = torch.Generator(device).manual_seed(which * 10**7 + first // block)
        part = torch.randn(1, block, *shape, generator=generator, device=device)
        parts.append(part[:, max(start - first, 0) : start + length - first])
    x = torch.cat(parts, 1)
    return (x - 6 if which == 3 else x).to(dtype)


def model_step(T: int, group: Any, device: str) -> Callable[[], Tensor]:
    """A training step of this rank's slice of T tokens, without optimizer; returns the loss of the whole sequence."""
    torch.manual_seed(0)
    if device == "cuda":
        model = lm.build("ours", "0.7b").train()
    else:
        model = KDAForCausalLM(KDAConfig(**SMALL, linear_head_dim=32)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    enable_context_parallel(model, None if group is None else DeviceMesh.from_group(group, device))
    tokens = torch.randint(model.config.vocab_size, (1, T + 1), generator=torch.Generator().manual_seed(1)).to(device)
    own = slice(T // ranks * rank, T // ranks * (rank + 1))
    labels, positions = tokens[:, 1:][:, own], torch.arange(T, device=device)[None, own]
    call = dict(input_ids=tokens[:, :-1][:, own], position_ids=positions, labels=labels, shift_labels=labels)
    if group is None:
        call.pop("position_ids")

    def run() -> Tensor:
        model.zero_grad()
        loss = model(**call, num_items_in_batch=T, use_cache=False).loss
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
            dist.all_reduce(total, group=group)
        return total

    return run


WORK: dict[str, dict[str, Callable[..., Callable[[], Any]]]] = {
    "operator": {OURS: operator},
    "model": {OURS: model_step},
}


@contextlib.contextmanager
def without_exchange() -> Iterator[None]:
    """Every rank takes its own tensors for those of all ranks, and zeros for another's; positions are exchanged, as a
    model checks them."""
    exchange = Shards.everyones

    def alone(shards: Shards, t: Tensor) -> Tensor:
        return t.expand(len(shards.places), *t.shape) if t.is_floating_point() else exchange(shards, t)

    def nothing(shards: Shards, like: Tensor, step: int) -> Tensor:
        return torch.zeros_like(like)

    with mock.patch.multiple(Shards, everyones=alone, send=lambda *_: None, receive=nothing):
        yield


def check(groups: dict[int, Any], device: str) -> dict[tuple[str, int], float]:
    """Return the error of this rank's outputs for each contender and number of ranks, 0 where it takes no part.

    Raises:
        RuntimeError: our operator over ranks is further from fp64 than on one rank: `testing.budgets`.
    """
    T, dtype = 1024 if device == "cuda" else 256, SHAPES[device][2]
    truth, whole = operator(T, None, device, exact=True)(), operator(T, None, device)()
    errors = {(contender, ranks): 0.0 for contender in WORK["operator"] for ranks in groups}
    for contender, work in WORK["operator"].items():
        for ranks, group in groups.items():
            if dist.get_rank() >= ranks:
                continue
            own = slice(T // ranks * dist.get_rank(), T // ranks * (dist.get_rank() + 1))
            results = zip(("o", "the gradient of q"), work(T, group, device)(), whole, truth, strict=True)
            for name, got, of_one, exact in results:
                found, limit = error(got, exact[:, own]), budget(error(of_one[:, own], exact[:, own]), dtype)
                if contender == OURS and not found <= limit:
                    raise RuntimeError(f"{name} over {ranks} ranks is off by {found:.2g}, more than {limit:.2g}")
                if name == "o":
                    errors[contender, ranks] = found
    return errors


def measure(what: str, T: int, groups: dict[int, Any], device: str) -> list[dict[str, Any]]:
    """A row for each contender and number of ranks, in turns; every rank calls it."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    runs: dict[tuple[str, int, bool], Callable[[], Any]] = {}
    memory = {}
    for contender, work in WORK[what].items():
        for ranks, group in groups.items():
            run = work(T, group, device) if dist.get_rank() < ranks else lambda: None
            runs[contender, ranks, True] = run
            if ranks > 1 and contender == OURS:
                runs[contender, ranks, False] = functools.partial(_alone, run)
            for _ in range(2):  # the second one's memory counts
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() if device == "cuda" else 0
                run()
                synchronize()
                extra = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0.0
                memory[contender, ranks] = _largest(extra, device)
    turns = {key: functools.partial(_turn, run, synchronize, device) for key, run in runs.items()}
    for turn in turns.values():
        turn()
    found = {}
    for key, times in timing.in_turns(turns).items():
        if isinstance(times, Exception):
            raise times
        found[key] = times.summary()
    rows = []
    for contender, ranks in memory:
        time = found[contender, ranks, True]
        row: dict[str, Any] = {"what": what, "contender": contender, "T": T, "ranks": ranks, "wall": time}
        row |= {"ms": time["median"], "speedup": found[contender, 1, True]["median"] / time["median"]}
        row |= {"tokens/s": T / time["median"] * 1e3}
        if device == "cuda":
            row["MiB"] = memory[contender, ranks] / 2**20
        if (contender, ranks, False) in found:
            row["exchange %"] = 100 * (1 - found[contender, ranks, False]["median"] / time["median"])
        rows.append(row)
    return rows


def _alone(run: Callable[[], Any]) -> None:
    with without_exchange():
        run()


def _turn(run: Callable[[], Any], synchronize: Callable[[], Any], device: str) -> list[float]:
    dist.barrier()
    return [_largest(ms, device) for ms in timing.wall_ms(run, synchronize=synchronize)]


def _largest(x: float, device: str) -> float:
    t = torch.tensor([x], dtype=torch.float64, device=device)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--what", default=",".join(WORK))
    parser.add_argument("--tokens", default="32768,131072", help="of a sequence, over all ranks (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    report.add_name_option(parser, "gpu-parallel, on a CPU cpu-parallel")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_commit_option(parser)
    timing.add_tuning_option(parser)
    args = parser.parse_args(argv)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    minutes = datetime.timedelta(minutes=5)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=minutes)
    name = args.name or ("gpu-parallel" if args.device == "cuda" else "cpu-parallel")
    counts = [2**i for i in range(dist.get_world_size().bit_length()) if 2**i <= dist.get_world_size()]
    groups = {n: None if n == 1 else dist.new_group(range(n)) for n in counts}
    if args.device == "cuda" and importlib.util.find_spec("fla"):
        WORK["operator"][FLA] = operator_of_fla
    errors = {key: _largest(e, args.device) for key, e in check(groups, args.device).items()}
    jobs = [(what, int(T)) for what in args.what.split(",") for T in args.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    for what, T in tqdm(jobs, unit="case", disable=dist.get_rank() > 0):
        rows += measure(what, T, groups, args.device)
        for row in rows:
            if row["what"] == "operator":
                row["error"] = errors[row["contender"], row["ranks"]]
        if dist.get_rank() == 0:
            results = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit))
            report.save(args.output, results)
    if dist.get_rank() == 0:
        print(report.text(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
