"""Several GPUs: `torchrun --nproc-per-node 8 -m benchmarks.parallel`.

One GPU and the first 2, 4, ... GPUs of the group take turns. Each case is what, and how many tokens: those of a full
sequence or batch (strong scaling), or with a trailing * of each rank (weak scaling). A sequence that one GPU has no
memory for is timed on more of them.

* operator: forward and backward of one sequence that is cut over the ranks, 32 heads of 128, nothing recomputed; also
  flash-linear-attention's where that is installed.
* model, hybrid: a training step of one sequence that is cut over the ranks: the 0.70 B model of benchmarks/lm.py, and
  the same with softmax attention in every fourth layer. Gradient checkpointing; gradients are summed over the ranks.
* FSDP2, heads: a training step of 8 sequences by FSDP2 and by tensor parallelism.
* decode: a step of so many sequences by tensor parallelism.

A time is that of the slowest rank, `MiB` its peak memory above what was held before the step, `held MiB` weights and
other tensors between steps. `exchange %` is what is saved where ranks keep what they would send and wait for nothing,
so that results are wrong. `predicted ms` is the cost model of docs/internals/parallel_costs.md from the time of one
GPU. `error` is that of a short call's outputs against fp64. On a CPU, a small model, to rehearse.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from benchmarks import report, timing
from benchmarks.gpu.model import PEAK
from benchmarks.parallel_work import FLA, OURS, SHAPES, WORK, operator, operator_of_fla
from kda_layers.parallel import Shards
from kda_layers.testing.budgets import budget, error

TITLE = "Several GPUs: sequences, weights and heads cut over them"
COLUMNS = [
    "what", "contender", "scaling", "T", "ranks", "ms", "speedup", "of one rank's", "exchange %", "predicted ms", "MiB",
    "held MiB", "tokens/s", "MFU %", "error", "reason",
]  # fmt: skip
CASES = (
    "operator:131072,model:131072,model:131072*,FSDP2:65536,heads:65536,decode:64,hybrid:131072,operator:32768,"
    "operator:131072*,hybrid:131072*,model:786432,model:1048576"
)
ON_CPU = "operator:256,model:256,model:128*,FSDP2:512,heads:512,decode:4"
WAIT = 54e-6  # ms a token of a scan forward and back over 16 heads of one layer, from the times of the kernels
BYTES_PER_MS = 178e6  # of an all-reduce of gradients, one call for each parameter, between two H200s
PASS_S = 12  # seconds of a pass, about: longer calls get fewer rounds, at least one
FAILED = "failed"


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


def predicted_ms(one_ms: float, one_T: int, T: int, ranks: int, parameters: int) -> float:
    """The cost model of a model whose layers hand states on: see docs/internals/parallel_costs.md."""
    others = (ranks - 1) / ranks
    return one_ms * T / ranks / one_T + WAIT * T * others + 2 * others * 2 * parameters / BYTES_PER_MS


def measure(what: str, lengths: dict[int, int], groups: dict[int, Any], device: str) -> list[dict[str, Any]]:
    """A row for each contender and number of ranks, in turns; every rank calls it.

    Args:
        lengths: number of tokens for each number of ranks.
    """
    gc.collect()  # of models of earlier cases
    runs: dict[tuple[str, int, bool], Callable[[], Any]] = {}
    memory, reasons, seconds, parameters = {}, {}, 0.0, 0
    for contender, work in WORK[what].items():
        for ranks, group in groups.items():
            takes_part = dist.get_rank() < ranks
            started = _start(work, lengths[ranks], group, device) if takes_part else Started()
            # If one rank alone fails, the others wait in a collective until the group's timeout ends them.
            if _largest(float(bool(started.reason)), device):
                reasons[contender, ranks] = started.reason or "not served on other ranks"
                gc.collect()  # the model of a run that ran out of memory
                continue
            run = runs[contender, ranks, True] = started.run
            parameters = getattr(run, "parameters", parameters)
            seconds += _largest(started.seconds, device)
            memory[contender, ranks] = _largest(started.extra, device), _largest(started.held, device)
            if ranks > 1 and contender == OURS and what in ("operator", "model", "hybrid"):
                alone = runs[contender, ranks, False] = functools.partial(_alone, run)
                seconds += _largest(_warm_up(alone, device)[0], device)
    turns = {key: functools.partial(_turn, run, device) for key, run in runs.items()}
    rounds = max(1, min(timing.rounds_of(len(turns)), int(PASS_S / max(seconds, 1e-3))))
    found = {}
    for key, times in timing.in_turns(turns, rounds).items():
        if isinstance(times, Exception):
            raise times
        found[key] = times.summary()
    rows = []
    for contender, ranks in ((c, n) for c in WORK[what] for n in groups):
        row: dict[str, Any] = {"what": what, "contender": contender, "T": lengths[ranks], "ranks": ranks}
        row["scaling"] = "strong" if len(set(lengths.values())) == 1 else "weak"
        rows.append(row)
        if (contender, ranks) in reasons:
            row["reason"] = reasons[contender, ranks]
            continue
        row["wall"] = found[contender, ranks, True]
        ms = row["ms"] = row["wall"]["median"]
        row["tokens/s"] = lengths[ranks] / ms * 1e3
        if (contender, 1, True) in found:
            one_ms = found[contender, 1, True]["median"]
            row["speedup"] = lengths[ranks] / ms / (lengths[1] / one_ms)
            row["of one rank's"] = row["speedup"] / ranks
            if what == "model" and ranks > 1 and device == "cuda":
                row["predicted ms"] = predicted_ms(one_ms, lengths[1], lengths[ranks], ranks, parameters)
        if device == "cuda":
            row["MiB"], row["held MiB"] = (n / 2**20 for n in memory[contender, ranks])
            if parameters:
                row["MFU %"] = 600 * parameters * row["tokens/s"] / ranks / PEAK
        if (contender, ranks, False) in found:
            row["exchange %"] = 100 * (1 - found[contender, ranks, False]["median"] / ms)
    return rows


def _nothing() -> None:
    """The work of a rank that takes no part."""


def _alone(run: Callable[[], Any]) -> None:
    with without_exchange():
        run()


class Started(NamedTuple):
    """Work on this rank after its warm-up."""

    run: Callable[[], Any] = _nothing
    reason: str = ""  # why it does not run
    seconds: float = 0.0  # of a call
    extra: float = 0.0  # peak bytes of a call above `held`
    held: float = 0.0  # bytes between calls


def _start(work: Callable[..., Callable[[], Any]], T: int, group: Any, device: str) -> Started:
    """Prepare work and warm it up."""
    before = _allocated(device)
    try:
        run = work(T, group, device)
        held = _allocated(device) - before
        return Started(run, "", *_warm_up(run, device), held)
    except ValueError as problem:
        return Started(reason=f"refused: {problem}")
    except torch.OutOfMemoryError:
        return Started(reason="out of memory")
    except Exception as problem:
        traceback.print_exc()
        return Started(reason=f"{FAILED}: {type(problem).__name__}: {problem}")


def _warm_up(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """Call it twice; return the second call's seconds and its peak bytes above what was held."""
    spent = extra = 0.0
    for _ in range(2):
        before = _allocated(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spent = timing.wall_ms(run, synchronize=_synchronize(device))[0] / 1e3
        if device == "cuda":
            extra = torch.cuda.max_memory_allocated() - before
    return spent, extra


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _synchronize(device: str) -> Callable[[], Any]:
    return torch.cuda.synchronize if device == "cuda" else _nothing


def _turn(run: Callable[[], Any], device: str) -> list[float]:
    dist.barrier()
    return [_largest(ms, device) for ms in timing.wall_ms(run, synchronize=_synchronize(device))]


def _largest(x: float, device: str) -> float:
    t = torch.tensor([x], dtype=torch.float64, device=device)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 where something failed that was not refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", help=f"what:tokens, with commas between them ({CASES}; on a CPU {ON_CPU})")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    report.add_name_option(parser, "gpu-parallel, on a CPU cpu-parallel")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--budget-s", type=float, help="start no case after so many seconds; those left out are listed")
    report.add_commit_option(parser)
    timing.add_tuning_option(parser)
    args = parser.parse_args(argv)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    patience = datetime.timedelta(minutes=10)  # Triton's autotuners may keep a rank for minutes
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=patience)
    name = args.name or ("gpu-parallel" if args.device == "cuda" else "cpu-parallel")
    counts = [2**i for i in range(dist.get_world_size().bit_length()) if 2**i <= dist.get_world_size()]
    groups = {n: None if n == 1 else dist.new_group(range(n)) for n in counts}
    os.environ.setdefault("FLA_FLASH_KDA", "0")  # flash-linear-attention's own kernels, not FlashKDA's
    if args.device == "cuda" and importlib.util.find_spec("fla"):
        WORK["operator"][FLA] = operator_of_fla
    errors = {key: _largest(e, args.device) for key, e in check(groups, args.device).items()}
    rows: list[dict[str, Any]] = []
    cases = (args.cases or (CASES if args.device == "cuda" else ON_CPU)).split(",")
    began, left_out = time.monotonic(), []
    for case in tqdm(cases, unit="case", disable=dist.get_rank() > 0):
        if args.budget_s is not None and _largest(time.monotonic() - began, args.device) > args.budget_s:
            left_out.append(case)
            continue
        what, tokens = case.split(":")
        per_rank = tokens.endswith("*")
        lengths = {n: int(tokens.rstrip("*")) * (n if per_rank else 1) for n in groups}
        new = measure(what, lengths, groups, args.device)
        if what == "operator":
            new = [row | {"error": errors[row["contender"], row["ranks"]]} for row in new]
        rows += new
        if dist.get_rank() == 0:
            results = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit))
            report.save(args.output, results)
    if dist.get_rank() == 0:
        print(report.text(results))
        if left_out:
            print(f"not run, as --budget-s {args.budget_s:g} was spent: {', '.join(left_out)}")
    dist.destroy_process_group()
    return int(any(str(row.get("reason", "")).startswith(FAILED) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
