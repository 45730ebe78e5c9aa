"""Cases that the processes of one gloo group run together.

Starting processes takes far longer than a case, so that one group runs all cases of a file, each in every process, and
leaves what fails in a folder. Processes that hang are killed; a case that they did not finish fails.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kda_layers.kernels.over_ranks.shards import Shards
from kda_layers.testing.budgets import FP64_LIMIT, error
from tests.processes import once

SECONDS = 240  # for all cases of a file on a busy machine; they take an eighth of it
PATIENCE = 15  # for the other processes to finish a case that raised in this one


class Ranks:
    """One process among those that run a case. Comparisons collect failures, so that no process leaves others behind
    in an exchange."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.failures = rank, size, list[str]()

    def same(self, name: str, got: Tensor | None, want: Tensor | None, limit: float = FP64_LIMIT) -> None:
        """Fail unless `got` is as close to `want` as rounding explains, or both are None."""
        if got is None or want is None:
            self.check(got is want, f"{name}: {'None' if got is None else 'a tensor'}")
            return
        e = error(got.detach(), want.detach()) if got.shape == want.shape else float("nan")
        self.check(e <= limit, f"{name}: error {e:.2g}, limit {limit:.2g}, shapes {list(got.shape)} {list(want.shape)}")

    def far(self, name: str, got: Tensor, want: Tensor, least: float) -> None:
        """Fail unless the two differ, so that a test of their difference means something."""
        e = error(got.detach(), want.detach())
        self.check(e >= least, f"{name}: error {e:.2g}, must be at least {least:.2g}")

    def check(self, condition: bool, message: str) -> None:
        if not condition:
            self.failures.append(message)

    @contextlib.contextmanager
    def raises(self, expected: type[Exception], match: str) -> Iterator[None]:
        """Fail unless the block raises an `expected` exception whose message matches."""
        try:
            yield
        except expected as e:
            self.check(re.search(match, str(e)) is not None, f"{match!r} not in {e}")
        else:
            self.failures.append(f"no {expected.__name__} with {match!r}")

    def summed(self, t: Tensor | None) -> Tensor | None:
        """The sum over all processes, as data-parallel training forms it of gradients."""
        if t is None:
            return None
        t = t.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(t)
        return t


@contextlib.contextmanager
def exchanges() -> Iterator[list[str]]:
    """Names of the exchanges between ranks in the block."""
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in ("everyones", "send", "receive"):
            method = getattr(Shards, name)

            def counted(*args: Any, name: str = name, method: Any = method) -> Any:
                found.append(name)
                return method(*args)

            stack.enter_context(mock.patch.object(Shards, name, counted))
        yield found


Cases = Mapping[str, Callable[[Ranks], None]]


def outcomes(
    factory: pytest.TempPathFactory, module: str, size: int, cases: Cases, device: str = "cpu"
) -> dict[str, list[str]]:
    """Run all cases in `size` processes, once for every worker of pytest-xdist; return the failures of each case.

    Args:
        module: name of the test file, for the folder.
        cases: functions that a new process can import.
        device: "cpu", with gloo, or "cuda", with NCCL and a GPU for each process.
    """
    folder = once(factory, f"{module}-{size}", lambda folder: _run(folder, size, dict(cases), device))
    failures: dict[str, list[str]] = {name: [] for name in cases}
    for number, name in enumerate(cases):
        for rank in range(size):
            result = folder / f"{number}.{rank}.json"
            found = json.loads(result.read_text()) if result.exists() else ["not finished, nor perhaps an earlier case"]
            failures[name] += [f"rank {rank}: {text}" for text in found]
    return failures


def _run(folder: Path, size: int, cases: dict[str, Callable[[Ranks], None]], device: str) -> None:
    context = mp.spawn(_work, (size, folder, cases, device), nprocs=size, join=False)
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end and not context.join(timeout=1):
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
        print(e)  # the case that failed has no result, or an error as its result
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _work(rank: int, size: int, folder: Path, cases: dict[str, Callable[[Ranks], None]], device: str) -> None:
    torch.set_num_threads(1)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # transformers reads them
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )  # fmt: skip
    for number, (name, case) in enumerate(cases.items()):
        ranks, start, raised = Ranks(rank, size), time.monotonic(), False
        try:
            case(ranks)
        except Exception:
            ranks.failures.append(traceback.format_exc())
            raised = True
        results = [folder / f"{number}.{other}.json" for other in range(size)]
        results[rank].write_text(json.dumps(ranks.failures))
        while raised and not all(map(Path.exists, results)):
            time.sleep(0.05)
            if time.monotonic() > start + PATIENCE:
                os._exit(1)  # others wait in an exchange, which the end of this process ends
        if rank == 0:
            print(f"{name}: {time.monotonic() - start:.2f} s", flush=True)
    dist.barrier()
    os._exit(0)  # the interpreter's end, with gloo's threads, was seen to hang now and then
