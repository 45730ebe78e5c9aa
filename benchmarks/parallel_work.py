"""The work that benchmarks/parallel.py times: the operator and models over one rank and over several.

Each function takes the number of tokens, a process group or None for one rank, and the device; it returns what is
timed, whose `parameters` say how many the full model has.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks import lm
from benchmarks.gpu.layer import to_bf16
from kda_layers import KDAConfig, KDAForCausalLM, kda
from kda_layers.parallel import Shards, enable_context_parallel, kda_over_ranks

SHAPES = {"cuda": (32, 128, torch.bfloat16), "cpu": (2, 16, torch.float32)}  # heads, width and dtype of the operator
SMALL = dict(
    vocab_size=62, hidden_size=64, intermediate_size=96, num_hidden_layers=4, linear_num_heads=2, linear_head_dim=32,
    num_attention_heads=2, num_key_value_heads=2,
)  # fmt: skip
ROWS = 8  # sequences of a batch that is not cut along its tokens
SEQUENCES = 64  # of a decode step
PROMPT = 64  # tokens before it


def operator(T: int, group: Any, device: str, exact: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward of this rank's slice of T tokens; returns outputs and the gradient of q.

    exact: in fp64, from the same inputs.
    """
    tensors, d_o = _operands(T, group, device, exact)
    options: dict[str, Any] = dict(lower_bound=-5.0, recompute="never", backend="eager" if exact else None)

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


def _config(device: str, **fields: Any) -> KDAConfig:
    if device == "cpu":
        return KDAConfig(**SMALL, **fields)
    size = dict(lm.SIZES["0.7b"])
    heads = size.pop("heads")
    both = dict(linear_num_heads=heads, num_attention_heads=heads, linear_head_dim=128, tie_word_embeddings=True)
    return KDAConfig(**size, **both, **fields)


def _model(device: str, bf16: bool = True, **fields: Any) -> Any:
    """The 0.70 B model of benchmarks/lm.py, in bf16 but for the gates' parameters; on a CPU a small one in fp32."""
    torch.manual_seed(0)
    with torch.device(device):
        model = KDAForCausalLM(_config(device, **fields))
    return (to_bf16(model) if bf16 and device == "cuda" else model).train()


def _tokens(device: str, *shape: int) -> Tensor:
    return torch.randint(1, 60, shape, generator=torch.Generator().manual_seed(1)).to(device)


def _timed(run: Callable[[], Any], model: Any) -> Callable[[], Any]:
    run.parameters = sum(p.numel() for p in model.parameters())  # type: ignore[attr-defined]  # of DTensors, all elements
    return run


def sequence_step(T: int, group: Any, device: str, **fields: Any) -> Callable[[], Any]:
    """A training step, without optimizer, of a sequence of T tokens that is cut over the ranks, with gradient
    checkpointing; gradients are summed over the ranks. Models with softmax layers are cut by torch's context."""
    model = _model(device, **fields)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    mesh: Any = None if group is None else DeviceMesh.from_group(group, device)
    enable_context_parallel(model, mesh)
    tokens = _tokens(device, 1, T + 1)
    whole = [tokens[:, :-1], tokens[:, 1:], torch.arange(T, device=device)[None]]
    own = [t[:, T // ranks * rank : T // ranks * (rank + 1)].contiguous() for t in whole]
    ring = group is not None and "full_attention" in model.config.layer_types

    def compute(ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        call = dict(input_ids=ids, labels=labels, shift_labels=labels, position_ids=positions)
        loss = model(**call, num_items_in_batch=T, use_cache=False).loss
        loss.backward()
        return loss.detach().clone()

    def run() -> Tensor:
        model.zero_grad()
        if ring:
            parts = [t.clone() for t in whole]
            with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts)):
                total = compute(*parts)
        else:
            total = compute(*own)
        if group is not None:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
            dist.all_reduce(total, group=group)
        return total

    return _timed(run, model)


def sharded_step(T: int, group: Any, device: str) -> Callable[[], Any]:
    """A training step, without optimizer, of ROWS sequences with T tokens in all, by FSDP2 over the ranks.

    Weights are in fp32 and computed with under autocast: FSDP2 takes one dtype for all of a layer, and the gates'
    parameters are in fp32.
    """
    model = _model(device, bf16=False)
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    rows = _tokens(device, ROWS, T // ROWS).chunk(ranks)[rank]
    timed = _timed(_step(model, rows), model)
    if group is not None:
        mesh = DeviceMesh.from_group(group, device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return timed


def heads_step(T: int, group: Any, device: str) -> Callable[[], Any]:
    """The same by tensor parallelism: every rank has all sequences."""
    model = _shared(group, device)
    return _timed(_step(model, _tokens(device, ROWS, T // ROWS)), model)


def heads_decode(T: int, group: Any, device: str) -> Callable[[], Any]:
    """A decode step of T sequences by tensor parallelism."""
    model = _shared(group, device).eval()
    prompt = _tokens(device, T, PROMPT)
    with torch.no_grad():
        cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def run() -> Tensor:
        return model(input_ids=prompt[:, -1:], past_key_values=cache, use_cache=True).logits

    return run


def _step(model: Any, rows: Tensor) -> Callable[[], Tensor]:
    """A training step under autocast, whatever the dtype of the weights."""

    def run() -> Tensor:
        model.zero_grad()
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return run


def _shared(group: Any, device: str) -> Any:
    """The model with its heads shared by all ranks, which have to be those of the group."""
    if group is None:
        return _model(device)
    if dist.get_world_size(group) < dist.get_world_size():
        raise ValueError("transformers shares heads over all processes")
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        _model(device).save_pretrained(Path(folder[0]))
    dist.broadcast_object_list(folder)
    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder[0], dtype=dtype, distributed_config=plan).train()


OURS, FLA = "ours", "flash-linear-attention"
# By what is timed and by contender.
WORK: dict[str, dict[str, Callable[..., Callable[[], Any]]]] = {
    "operator": {OURS: operator},
    "model": {OURS: sequence_step},
    "hybrid": {OURS: functools.partial(sequence_step, full_attention_interval=4)},
    "FSDP2": {OURS: sharded_step},
    "heads": {OURS: heads_step},
    "decode": {OURS: heads_decode},
}
