"""Process groups in tests, of two processes or of one, and results for every worker of pytest-xdist."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SECONDS = 120  # for processes on a busy machine; they take a tenth of it


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A gloo group of this process alone, which no DDP may outlive.

    The last owner of a group joins gloo's threads. DDP's reducer does so with the GIL held, and a thread that waits for
    the GIL never ends: a loop that frees DDPs after their groups hangs within 300 iterations (torch 2.13).
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
        gc.collect()
        alive = any(type(o) is DistributedDataParallel for o in gc.get_objects())
        assert not alive, "a DDP outlives its group: free it in the context"
    finally:
        dist.destroy_process_group()


def run_two(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """Run `python command` in two processes of one group, as torchrun does, and return what they print.

    The rendezvous is in this process: a launcher would only import torch once more.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = os.environ | {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment,
    }  # fmt: skip
    with tempfile.TemporaryFile("w+") as printed:
        running = [
            subprocess.Popen(
                [sys.executable, *command], cwd=cwd, env=shared | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=printed, stderr=subprocess.STDOUT,
            )
            for rank in ("0", "1")
        ]  # fmt: skip
        end = time.monotonic() + SECONDS
        while any(p.poll() is None for p in running) and not any(p.poll() for p in running):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        late = [p for p in running if p.poll() is None]
        for p in late:
            p.kill()
            p.wait()
        printed.seek(0)
        text = printed.read()
    assert [p.returncode for p in running] == [0, 0], text[-3000:]
    return text


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled in the first worker of pytest-xdist that asks; the others wait for it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = root / f"{name}.unfinished"
            unfinished.mkdir(exist_ok=True)
            make(unfinished)
            unfinished.rename(folder)
    return folder
