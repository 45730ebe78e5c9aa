"""Two processes train as one does on the whole batch: DDP, FSDP2 (`fully_shard`) and FSDP2 in bf16 over fp32 shards.

With gloo on a CPU, and with NCCL on two GPUs where there are two. The truth is the same training in fp64 and one
process; two processes may be twice as far from it as one in their precision, up to a rounding.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import take_first_configurations
from kda_layers.kernels.kda.contract import default_problem
from tests.kernels.cases import BF16, FP32, FP64, budget, error, on_every_device, on_installed_backends, serve
from tests.modeling.test_training import WIDTH, batch, build_model

pytestmark = pytest.mark.slow

KINDS = ("ddp", "fsdp", "fsdp in bf16")
RANKS, ROWS, STEPS = 2, 4, 3
SECONDS = 120  # for processes that compile kernels on a busy machine; on a CPU they take a tenth of it


def precision(kind: str, device: str) -> torch.dtype:
    """Dtype of matrix products: fast backends need 16 bits."""
    return BF16 if device == "cuda" or kind == "fsdp in bf16" else FP32


def train(model: Any, rank: int | None, kind: str, device: str) -> Tensor:
    """Losses [STEPS, rows] of some steps on the rows of this rank, or on all of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # unlike Adam's, steps show a wrong scale
    losses = []
    for step in range(STEPS):
        tokens = batch(step, ROWS, device=device)
        if rank is not None:
            tokens = tokens.chunk(RANKS)[rank]
        autocast = torch.autocast(device, BF16) if precision(kind, device) == BF16 and kind != "fsdp in bf16" else None
        with autocast or contextlib.nullcontext():
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        logits = logits.double() if kind == "truth" else logits.float()
        of_rows = cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(1)
        of_rows.mean().backward()
        grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
        assert all(g.isfinite().all() for g in grads), f"gradients of step {step}"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_rows.detach())
    return torch.stack(losses)


# ---------------------------------------------------------------- two processes


def work(rank: int, backend: str, device: str, folder: Path) -> None:
    """Run every kind of training, in each process; the first one leaves the results in `folder`."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        if importlib.util.find_spec("triton"):
            take_first_configurations()
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=SECONDS),
    )  # fmt: skip
    try:
        for kind in KINDS:
            model = wrapped(build_model(backend, FP32, device), kind, device, rank)
            losses = train(model, rank, kind, device)
            of_ranks = [torch.empty_like(losses) for _ in range(RANKS)]
            dist.all_gather(of_ranks, losses)
            parameters = {
                n.removeprefix("module."): p.full_tensor() if hasattr(p, "full_tensor") else p
                for n, p in model.named_parameters()
            }
            if rank == 0:
                result = {n: p.detach().cpu() for n, p in parameters.items()}
                torch.save((torch.cat(of_ranks, 1).cpu(), result), folder / f"{kind}.pt")
        gradients = gradients_of_bf16_weights(build_model(backend, BF16, device), device, rank)
        torch.save(gradients, folder / f"gradients of rank {rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # all is saved; the interpreter's end, with gloo's threads, was seen to hang now and then


def wrapped(model: Any, kind: str, device: str, rank: int) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[rank] if device == "cuda" else None)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32) if "bf16" in kind else MixedPrecisionPolicy()
    mesh = init_device_mesh(device, (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def sharded_by_dtype(model: Any, mesh: Any) -> None:
    """As docs/guides/parallel.md says."""
    gates = {p for p in model.parameters() if p.dtype == torch.float32}  # A_log and dt_bias
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, ignored_params=gates)

    def average(p: torch.nn.Parameter) -> None:
        dist.all_reduce(p.grad, group=mesh.get_group())
        p.grad /= mesh.size()

    for p in gates:
        p.register_post_accumulate_grad_hook(average)


def gradients_of_bf16_weights(model: Any, device: str, rank: int | None) -> dict[str, Tensor]:
    """Gradients of two batches, of this rank's rows or of all of them, whole and in fp64."""
    if rank is not None:
        sharded_by_dtype(model, init_device_mesh(device, (RANKS,)))
    for seed in range(2):
        tokens = batch(seed, ROWS, device=device)
        if rank is not None:
            tokens = tokens.chunk(RANKS)[rank]
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        cross_entropy(logits.to(torch.promote_types(logits.dtype, FP32)).mT, tokens[:, 1:]).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).cpu().double() for n, g in grads.items()}


def run_two(backend: str, device: str, folder: Path) -> None:
    """Both processes, which raise here what they raise, and are killed when their time is over."""
    context = mp.spawn(work, (backend, device, folder), nprocs=RANKS, join=False)
    end = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < end, f"two processes took more than {SECONDS} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


# ---------------------------------------------------------------- one process


class Rounded(torch.nn.Module):
    """The model with its parameters rounded to bf16 for each forward, as FSDP2 does with `param_dtype`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return functional_call(self.model, {n: p.to(BF16) for n, p in self.model.named_parameters()}, (), inputs)


def alone(kind: str, backend: str, dtype: torch.dtype, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and parameters of one process with the whole batch; in fp64 with no other precision inside."""
    model = build_model(backend, dtype, device)
    rounds = kind == "fsdp in bf16" and dtype != FP64
    losses = train(Rounded(model) if rounds else model, None, "truth" if dtype == FP64 else kind, device)
    return losses.cpu(), {n: p.detach().cpu() for n, p in model.named_parameters()}


@on_every_device
@on_installed_backends
def test_two_processes_train_as_one(
    backend: str, device: str, required_backends: frozenset[str], tmp_path: Path
) -> None:
    serve(backend, replace(default_problem(device), K=WIDTH, V=WIDTH), required_backends)
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, there is {torch.cuda.device_count()}")
    run_two(backend, device, tmp_path)
    first = {n: p.detach().double() for n, p in build_model(backend, FP32, "cpu").named_parameters()}
    true_losses, true = alone("truth", "eager", FP64, "cpu")
    sizes = {n: (p - first[n]).norm() for n, p in true.items()}
    assert all(sizes.values()), "a parameter was not trained"

    def update(parameters: dict[str, Tensor]) -> Tensor:
        """Return what training changed, every parameter at the same weight."""
        assert parameters.keys() == first.keys()
        return torch.cat([((p.double() - first[n]) / sizes[n]).flatten() for n, p in parameters.items()])

    for kind in KINDS:
        losses, parameters = torch.load(tmp_path / f"{kind}.pt")
        losses_alone, parameters_alone = alone(kind, backend, FP32, device)
        for name, got, one, truth in (
            ("losses", losses, losses_alone, true_losses),
            ("update", update(parameters), update(parameters_alone), update(true)),
        ):
            limit = budget(error(one, truth), precision(kind, device))
            print(f"{kind}, {name}: error {error(got, truth):.2g}, limit {limit:.2g}")
            assert error(got, truth) <= limit, f"{kind}: {name}"
    check_gradients_of_bf16_weights(backend, device, tmp_path)


def check_gradients_of_bf16_weights(backend: str, device: str, folder: Path) -> None:
    """FSDP2 of a model loaded in bf16, whose gates are in fp32 and whole on every rank."""
    first, second = (torch.load(folder / f"gradients of rank {rank}.pt") for rank in range(RANKS))
    one = gradients_of_bf16_weights(build_model(backend, BF16, device), device, None)
    truth = gradients_of_bf16_weights(build_model("eager", BF16, "cpu").double(), "cpu", None)
    for name, want in truth.items():
        assert torch.equal(first[name], second[name]), name
        limit = budget(error(one[name], want), BF16)
        assert error(first[name], want) <= limit < 0.2, f"{name}: {error(first[name], want):.2g} > {limit:.2g}"
