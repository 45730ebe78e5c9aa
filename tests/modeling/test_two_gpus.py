"""Sequences and heads that are cut over two GPUs, with NCCL and the kernels that serve there, in bf16.

The truth is one process in fp64. Two GPUs may be twice as far from it as one GPU, up to a rounding. In a chain, slices
of whole chunks have the bits of one GPU.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as torch_attention
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from kda_layers import KDAConfig, KDAForCausalLM, kda
from kda_layers.parallel import Shards, enable_context_parallel, kda_over_ranks
from kda_layers.testing.budgets import BF16, budget, error
from tests.ranks import Cases, Ranks, outcomes

GPUS = 2
TOKENS = ("q", "k", "v", "g", "beta")
Tensors = dict[str, Tensor]


def near(ranks: Ranks, got: Tensors, of_one: Tensors, truth: Tensors, how: str = "") -> None:
    """Fail with every tensor that is further from the truth than one GPU's allows."""
    ranks.check(got.keys() == truth.keys() == of_one.keys(), f"{how}: {got.keys()}")
    for name, t in truth.items():
        found, limit = error(got[name], t), budget(error(of_one[name], t), BF16)
        ranks.check(found <= limit, f"{how} {name}: error {found:.2g}, limit {limit:.2g}")


def summed(ranks: Ranks, t: Tensor) -> Tensor:
    total = ranks.summed(t)
    assert total is not None
    return total


# ---------------------------------------------------------------- the operator


@dataclass(frozen=True)
class Call:
    """A call of the operator over both ranks."""

    shards: str = "chain"
    gates: str = "slow"
    T: int = 4096
    H: int = 2
    HV: int = 4
    lengths: tuple[int, ...] | None = None
    like_fla: bool = False  # the inputs of flash-linear-attention's tests

    def inputs(self) -> Tensors:
        T, H, HV = self.T, self.H, self.HV
        generator = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(1, T, *shape, generator=generator, device="cuda")

        x = dict(q=randn(H, 128), k=randn(H, 128), v=randn(HV, 128), g=randn(HV, 128), beta=randn(HV))
        if self.like_fla:
            x |= dict(q=x["q"] + 1, k=10 * x["k"] - 50, beta=x["beta"].sigmoid())
            dt = torch.exp(torch.rand(HV, 128, generator=generator, device="cuda") * math.log(100) + math.log(0.001))
            parameters = dict(A_log=torch.linspace(1, 8, HV, device="cuda").log(), dt_bias=dt + (-(-dt).expm1()).log())
        else:
            x["g"] += -6 if self.gates == "slow" else 3
            parameters = dict(A_log=0.1 * randn(HV)[0, 0], dt_bias=0.1 * randn(HV, 128)[0, 0])
            if self.lengths is None:
                parameters["initial_state"] = randn(HV, 128, 128)[:, 0].contiguous()
        return {n: t.to(BF16) for n, t in x.items()} | parameters

    def cut(self, t: Tensor, shards: Shards) -> Tensor:
        pieces = t.chunk(GPUS * shards.pieces, 1)
        return torch.cat([pieces[i] for i in shards.places[shards.rank]], 1)

    def run(self, x: Tensors, shards: Shards | None = None) -> Tensors:
        """Outputs and gradients, those of this rank's tokens and partial sums with shards."""
        offsets = None
        if self.lengths is not None:
            offsets = torch.tensor((0, *itertools.accumulate(self.lengths)), device="cuda")
        d_o = torch.randn(1, self.T, self.HV, 128, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        d_o = d_o.to(BF16)
        if shards is not None:
            x = {n: self.cut(t, shards) if n in TOKENS else t for n, t in x.items()}
            d_o = self.cut(d_o, shards)
        x = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
        options = dict(
            lower_bound=-5.0, cu_seqlens=offsets, return_final_state=offsets is None,
            beta_activation="given" if self.like_fla else "sigmoid",
        )  # fmt: skip
        out = kda(**x, **options) if shards is None else kda_over_ranks(**x, shards=shards, **options)
        loss = (out.o * d_o.to(out.o.dtype)).sum()
        if out.final_state is not None:
            loss = loss + out.final_state.sum() / (1 if shards is None else GPUS)
        loss.backward()
        found = {"o": out.o} | ({} if out.final_state is None else {"final_state": out.final_state})
        return {n: t.detach() for n, t in found.items()} | {f"d_{n}": t.grad for n, t in x.items()}


def operator(call: Call, ranks: Ranks) -> None:
    shards = Shards.balanced() if call.shards == "balanced" else Shards.contiguous()
    shards = shards._replace(chain=call.shards == "chain")
    x = call.inputs()
    of_one, truth = call.run(x), call.run({n: t.double() for n, t in x.items()})
    got = call.run(x, shards)
    whole = ("final_state", "d_A_log", "d_dt_bias", "d_initial_state")
    got = {n: summed(ranks, t) if n in whole[1:] else t for n, t in got.items()}
    of_one, truth = ({n: t if n in whole else call.cut(t, shards) for n, t in r.items()} for r in (of_one, truth))
    near(ranks, got, of_one, truth)
    if call.shards == "chain" and call.lengths is None:
        for n in ("o", "final_state", *(f"d_{n}" for n in TOKENS), "d_initial_state"):
            ranks.check(torch.equal(got[n], of_one[n]), f"{n}: other bits than on one GPU")


# ---------------------------------------------------------------- models

CONFIG: dict[str, Any] = dict(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, linear_num_heads=2,
    linear_head_dim=128, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def models(**fields: Any) -> tuple[Any, Any]:
    """A model in bf16, and its copy in fp64, both on the GPU."""
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(**CONFIG, **fields)).to("cuda", BF16).train()
    return model, copy.deepcopy(model).double()


def trained(model: Any, tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensors:
    count = tokens.numel() * (1 if positions is None else GPUS)
    out = model(
        input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count,
        use_cache=False,
    )  # fmt: skip
    out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": out.loss.detach()} | grads


def context(ranks: Ranks, balanced: bool, **fields: Any) -> None:
    """A training step of a sequence that torch's context cuts, and runs ring attention over."""
    T = 1024
    model, wide = models(**fields)
    tokens = torch.randint(256, (1, T), generator=torch.Generator().manual_seed(1)).cuda()
    labels = pad(tokens[:, 1:], (0, 1), value=0)
    of_one, truth = trained(model, tokens, labels), trained(wide, tokens, labels)
    mesh = init_device_mesh("cuda", (GPUS,), mesh_dim_names=("cp",))["cp"]
    enable_context_parallel(model, mesh)
    buffers = [tokens.clone(), labels.clone(), torch.arange(T, device="cuda")[None].contiguous()]
    before = torch_attention._cp_options.enable_load_balance
    torch_attention._cp_options.enable_load_balance = balanced
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
            got = trained(model, *buffers)
    finally:
        torch_attention._cp_options.enable_load_balance = before
    near(ranks, {n: summed(ranks, t) for n, t in got.items()}, of_one, truth)


def heads(ranks: Ranks, **fields: Any) -> None:
    """Tensor parallelism: a training step, and decoding from a cache."""
    model, wide = models(**fields)
    folder = [tempfile.mkdtemp()] if ranks.rank == 0 else [None]
    dist.broadcast_object_list(folder)
    assert folder[0] is not None
    if ranks.rank == 0:
        model.save_pretrained(Path(folder[0]))
    dist.barrier()
    plan = DistributedConfig(tp_size=GPUS, tp_plan="auto")
    shared = AutoModelForCausalLM.from_pretrained(folder[0], dtype=BF16, distributed_config=plan).train()
    ranks.check(shared.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 128, "not sharded")
    tokens = torch.randint(256, (2, 80), generator=torch.Generator().manual_seed(1)).cuda()
    labels = pad(tokens[:, 1:], (0, 1), value=0)
    results = []
    for m in (shared, model, wide):
        found = trained(m, tokens, labels)
        found = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
        with torch.no_grad():
            m.eval()
            out = m(input_ids=tokens[:, :70], use_cache=True)
            logits = [out.logits[:, -1]]
            for i in range(70, 74):
                out = m(input_ids=tokens[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
                logits.append(out.logits[:, -1])
        results.append(found | {"logits of decoding": torch.stack(logits)})
    near(ranks, *results)


# ---------------------------------------------------------------- all cases


def case(f: Callable[..., None], *args: Any, **options: Any) -> Any:
    return partial(_case, f, args, options)


def _case(f: Callable[..., None], args: Any, options: Any, ranks: Ranks) -> None:
    f(*args, ranks, **options)


# Inputs and lengths of flash-linear-attention's tests/context_parallel/test_cp_kda.py, those of two GPUs. Keys are
# almost parallel; its limit, 8e-3 from fp32, is less than the error of one GPU:
# docs/internals/studies/2026-11-23-two-gpus.md.
LIKE_FLA = dict(T=10240, H=12, HV=12, like_fla=True)
OF_TWO: Cases = {
    **{
        f"operator, {shards}, {gates} gates": case(operator, Call(shards, gates))
        for shards in ("chain", "gathered", "balanced")
        for gates in ("slow", "fast")
    },
    **{
        f"operator, {shards}, packed": case(operator, Call(shards, lengths=(1000, 0, 1500, 1596)))
        for shards in ("chain", "gathered")
    },
    **{
        f"as flash-linear-attention's: {name}, {shards}": case(operator, Call(shards, lengths=lengths, **LIKE_FLA))
        for name, lengths in (
            ("cut", (3000, 4000, 3240)),
            ("aligned", (5120, 5120)),
            ("many", (1000, 1500, 2000, 2500, 1240, 1000, 1000)),
            ("one", (10240,)),
        )
        for shards in ("chain", "gathered")
    },
    "KDA layers, contiguous": case(context, balanced=False),
    "KDA layers, balanced": case(context, balanced=True),
    "hybrid, contiguous": case(context, balanced=False, full_attention_interval=2),
    "hybrid, balanced": case(context, balanced=True, full_attention_interval=2),
    "tensor parallel": case(heads),
    "tensor parallel, hybrid": case(heads, full_attention_interval=2),
}


@pytest.mark.skipif(torch.cuda.device_count() < GPUS, reason="needs two GPUs")
@pytest.mark.parametrize("name", OF_TWO)
def test_two_gpus_as_one(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    failures = outcomes(tmp_path_factory, "two_gpus", GPUS, OF_TWO, "cuda")[name]
    assert not failures, "\n".join(failures)
