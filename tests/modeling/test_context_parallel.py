"""Layers and models over sequences that torch's `context_parallel` cuts over two processes.

Losses and gradients, summed over the processes, are those of one process with the whole sequence. torch's ring
attention has no kernel on a CPU: softmax layers of these models call a function that gathers keys instead.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import _attention as torch_attention
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from kda_layers import KDAForCausalLM, KimiDeltaAttention
from kda_layers.parallel import Shards, enable_context_parallel
from kda_layers.testing.budgets import BF16, FP64
from tests.modeling.models import build, ids, stock
from tests.ranks import Cases, Ranks, exchanges, outcomes

IGNORED = -100
ANY_LENGTH = Version(torch.__version__).release >= (
    2,
    13,
)  # torch's balanced order takes it, not multiples of four alone


class Gathered(torch.autograd.Function):
    """The tensors of all ranks, [ranks, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        everyones = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, x.contiguous())
        return torch.stack(everyones)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        d = d.contiguous()
        dist.all_reduce(d)
        return d[dist.get_rank()]


def gathering_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention [B, H, T, D] to the keys of all ranks, by the positions of the call."""
    assert mask is None
    k, v = (torch.cat(tuple(Gathered.apply(t)), 2).repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
    own = POSITIONS[0].view(-1, q.shape[2])[0]
    keys = torch.cat(tuple(Gathered.apply(own)))
    hidden = own[:, None] < keys
    scores = (q @ k.mT * scaling).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


POSITIONS: list[Tensor] = []  # of the call in progress: transformers does not pass them to attention functions
AttentionInterface.register("gathering", gathering_attention)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]


@contextmanager
def cut_by_torch(buffers: list[Tensor], balanced: bool = True) -> Iterator[None]:
    """torch's context, which cuts the last dimension of the buffers in place."""
    dims = [t.ndim - 1 for t in buffers]
    with (
        mock.patch.object(torch_attention._cp_options, "enable_load_balance", balanced),
        context_parallel(mesh(), buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)),
    ):
        yield


def slow(m: nn.Module) -> Any:
    """The module with gates so slow and writes so weak that the first tokens matter to the last ones."""
    for part in m.modules():
        if isinstance(part, KimiDeltaAttention):
            with torch.no_grad():
                if part.A_log is not None:  # whose gates start slow
                    part.A_log.fill_(-3.0)
                part.b_proj.weight.mul_(0.3)
                part.conv1d.weight.normal_(std=0.5)
    return m


def tiny(name: str = "kda", **fields: Any) -> Any:
    torch.manual_seed(1)
    return slow(build(name, **fields).double().train())  # a swapped model keeps some parameters in fp32


def grads(m: nn.Module) -> dict[str, Tensor]:
    """Gradients of the parameters, which then have none."""
    found = {
        n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for n, p in m.named_parameters()
        if p.grad is not None
    }
    m.zero_grad()
    return found


def compare_grads(
    ranks: Ranks, got: dict[str, Tensor], want: dict[str, Tensor], how: str = "", sum: bool = True
) -> None:
    ranks.check(got.keys() == want.keys(), f"{how}: gradients of other parameters")
    for n, t in want.items():
        ranks.same(f"{how} gradient of {n}", ranks.summed(got[n]) if sum else got[n], t, 1e-11)


# ---------------------------------------------------------------- the layer


def layer(**options: Any) -> KimiDeltaAttention:
    torch.manual_seed(3)
    return slow(KimiDeltaAttention(16, 2, 8, num_value_heads=4, value_head_dim=4, **options).double())


def piece(t: Tensor, shards: Shards) -> Tensor:
    pieces = t.chunk(len(shards.places) * shards.pieces, 1)
    return torch.cat([pieces[i] for i in shards.places[shards.rank]], 1)


def of_layer(ranks: Ranks) -> None:
    """Plain, checkpointed and compiled, in every order and packed."""
    torch.manual_seed(5)
    T = 12 * ranks.size
    packed = torch.tensor([0, 7, 7, 22, T], dtype=torch.int32)
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    ways: dict[str, Any] = {
        "eager": lambda m: m,
        "compiled": compiled,
        "checkpointed": lambda m: partial(checkpoint, m, use_reentrant=False),
        "checkpointed, reentrant": lambda m: partial(checkpoint, m, use_reentrant=True),
    }
    for how, shards, offsets, options in (
        ("balanced", Shards.balanced(), None, {}),
        (
            "contiguous",
            Shards.contiguous(),
            None,
            dict(gate_activation="softplus", lower_bound=None, conv_kernel_dim=1),
        ),
        ("packed", Shards.contiguous(), packed, dict(allow_neg_eigval=True, gate_rank=0)),
        ("mixed ranks", Shards.contiguous(), None, dict(gate_rank=0, decay_rank=3, learned_rate=False)),
        ("one decay a head", Shards.balanced(), None, dict(decay="head")),
    ):
        m = layer(**options)
        B = 1 if offsets is not None else 2
        x, d_y = torch.randn(B, T, 16, dtype=FP64), torch.randn(B, T, 16, dtype=FP64)
        whole = x.clone().requires_grad_()
        y = m(whole, cu_seqlens=offsets)
        (y * d_y).sum().backward()
        want = grads(m)
        for way, wrap in ways.items():
            if way == "compiled" and how != "balanced":  # the operators are compiled packed in their own tests
                continue
            mine = piece(x, shards).requires_grad_()
            got = wrap(m)(mine, None, None, offsets, shards)
            (got * piece(d_y, shards)).sum().backward()
            ranks.same(f"{how}, {way}: output", got, piece(y, shards))
            ranks.same(f"{how}, {way}: gradient", mine.grad, piece(whole.grad, shards), 1e-11)
            compare_grads(ranks, grads(m), want, f"{how}, {way}:")
        if ranks.rank:
            ranks.far(how, m(piece(x, shards)), piece(y, shards), 0.02)


def of_layer_in_bf16(ranks: Ranks) -> None:
    """Autocast: as far from fp64 as one process in autocast."""
    torch.manual_seed(5)
    x, shards = torch.randn(2, 12 * ranks.size, 16), Shards.balanced()
    with torch.no_grad():
        truth = layer()(x.double())
        m = layer().float()
        with torch.autocast("cpu", BF16):
            one = m(x)
            own = m(piece(x, shards), shards=shards)
    ranks.check(own.dtype == one.dtype, "dtype")
    ranks.same("output", own, piece(truth, shards), 3 * float((one - truth).norm() / truth.norm()))
    half = layer().to(BF16)
    got = half(piece(x, shards).to(BF16), shards=shards)
    got.sum().backward()
    ranks.same("bf16", got, piece(truth, shards), 0.05)


def layer_refuses(ranks: Ranks) -> None:
    m, shards = layer(), Shards.balanced()
    x = torch.randn(2, 8, 16, dtype=FP64)
    for match, call in (
        ("attention_mask must be None with shards", dict(attention_mask=torch.ones(2, 8))),
        ("cache must be None with shards", dict(past_key_values=object())),
        ("cu_seqlens needs packed sequences with B = 1, got B = 2", dict(cu_seqlens=torch.tensor([0, 16]))),
        ("hidden_states must have as many tokens in each of 2 pieces.*got T = 7", dict(hidden_states=x[:, :7])),
        ("hidden_states must have at least W - 1 = 3 tokens in each of the 2 pieces", dict(hidden_states=x[:, :4])),
        ("cu_seqlens must end at T = 16, got 8", dict(hidden_states=x[:1], cu_seqlens=torch.tensor([0, 8]))),
        ("shards must be contiguous", dict(hidden_states=x[:1], cu_seqlens=torch.tensor([0, 16]))),
    ):
        with ranks.raises(ValueError, match):
            m(**(dict(hidden_states=x, shards=shards) | call))


# ---------------------------------------------------------------- models


def positions_of(form: str, T: int, B: int) -> Tensor:
    row = torch.arange(T) + (1 if "from 1" in form else 0)
    if "[T]" in form:
        return row
    return row[None].expand(B if "[B, T]" in form else 1, T).contiguous()


def train(m: Any, tokens: Tensor, labels: Tensor, positions: Tensor | None = None, **options: Any) -> Tensor:
    """The loss of a call, divided by the number of all labels; gradients are taken."""
    POSITIONS[:] = [] if positions is None else [positions]
    count = options.pop("count")
    out = m(
        input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count,
        use_cache=False, **options,
    )  # fmt: skip
    out.loss.backward()
    return out.loss.detach()


def shifted(tokens: Tensor) -> Tensor:
    return nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)


def trains(
    name: str, ranks: Ranks, T: int = 36, B: int = 2, balanced: bool = True, form: str = "[B, T]",
    lengths: tuple[int, ...] | None = None, checkpointing: bool | None = None, **fields: Any,
) -> None:  # fmt: skip
    m = tiny(name, **fields)
    tokens = ids(B, T)
    labels, positions = shifted(tokens), positions_of(form, T, B)
    options: dict[str, Any] = {}
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)
        if "in sequences" in form:
            positions = torch.cat([torch.arange(n) for n in lengths])[None] + ("from 1" in form)
    count = (labels != IGNORED).sum()
    loss = train(m, tokens, labels, count=count, **options)
    want = grads(m)
    if "full_attention" in m.config.layer_types:
        m.set_attn_implementation("gathering")
    ranks.check(not m.supports_context_parallel, "supports_context_parallel before")
    enable_context_parallel(m, mesh())
    ranks.check(m.supports_context_parallel and m.model.supports_context_parallel, "supports_context_parallel after")
    if checkpointing is not None:
        m.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    buffers = [tokens.clone(), labels.clone(), positions.clone()]
    with cut_by_torch(buffers, balanced):
        ranks.check(buffers[0].shape[1] == T // ranks.size, "not cut")
        own = train(m, buffers[0], buffers[1], buffers[2], count=count, **options)
        got = grads(m)
        m.eval()
        with torch.no_grad():
            logits = m(input_ids=buffers[0], position_ids=buffers[2], **options).logits
    ranks.same("loss", ranks.summed(own), loss)
    compare_grads(ranks, got, want)
    enable_context_parallel(m, None)
    ranks.check(not m.supports_context_parallel, "supports_context_parallel when switched off")
    if "full_attention" in m.config.layer_types:
        m.set_attn_implementation("sdpa")
    with torch.no_grad():
        whole = m(input_ids=tokens, **options).logits
    places = buffers[2].view(-1, T // ranks.size)[0] - positions.min()
    if lengths is not None:
        places = torch.arange(T).chunk(ranks.size)[ranks.rank]
    ranks.same("logits in evaluation", logits, whole[:, places], 1e-11)


def of_any_order(ranks: Ranks) -> None:
    """Pieces that only the positions tell the order of."""
    T, m = 24, tiny("kda")
    tokens = ids(2, T)
    labels = shifted(tokens)
    train(m, tokens, labels, count=1)
    want = grads(m)
    enable_context_parallel(m, mesh())
    for places in (((3, 0), (1, 2)), ((1, 2), (3, 0)), ((2, 3), (0, 1)), ((0, 2), (1, 3))):
        shards = Shards(Shards.contiguous().group, places)
        train(m, *(piece(t, shards) for t in (tokens, labels, torch.arange(T)[None])), count=1)
        compare_grads(ranks, grads(m), want, str(places))


def of_recomputations(ranks: Ranks) -> None:
    """Gradient checkpointing recomputes layers without a new exchange between ranks."""
    for balanced in (True, False):
        counts = []
        for checkpointing in (False, True):
            m = tiny("kda")
            enable_context_parallel(m, mesh())
            if checkpointing:
                m.gradient_checkpointing_enable({"use_reentrant": False})
            buffers = [ids(2, 24), shifted(ids(2, 24)), torch.arange(24)[None].expand(2, 24).contiguous()]
            with cut_by_torch(buffers, balanced), exchanges() as found:
                train(m, *buffers, count=1)
            counts.append(len(found))
        ranks.check(counts[0] == counts[1] > 2, f"balanced={balanced}: {counts} exchanges")


def of_two_models_in_turns(ranks: Ranks) -> None:
    """Two models, and a plain one between, with their backward passes after all forward passes."""
    first, second, plain = tiny("kda"), tiny("softplus_tied"), tiny("kda", num_hidden_layers=1)
    tokens = ids(2, 24)
    labels = shifted(tokens)
    positions = positions_of("[1, T]", 24, 2)
    wants = []
    for m in (first, second):
        train(m, tokens, labels, count=1)
        wants.append(grads(m))
        enable_context_parallel(m, mesh())
    buffers = [tokens.clone(), labels, positions]
    with cut_by_torch(buffers):
        own, labels, positions = buffers
        call = dict(input_ids=own, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=1)
        losses = [first(**call).loss, plain(tokens, labels=tokens).loss, second(**call).loss]
        sum(losses).backward()
    compare_grads(ranks, grads(first), wants[0], "first")
    compare_grads(ranks, grads(second), wants[1], "second")


def of_frozen_layers(ranks: Ranks) -> None:
    """Only a few parameters train: the gate's, and those of the last layer."""
    for trained in (
        "layers.0.self_attn.A_log",
        "layers.1.self_attn.conv1d",
        "layers.1.mlp",
        "layers.0.self_attn.k_proj",
    ):
        m = tiny("kda")
        for n, p in m.named_parameters():
            p.requires_grad_(trained in n)
        tokens = ids(2, 24)
        labels = shifted(tokens)
        train(m, tokens, labels, count=1)
        want = grads(m)
        enable_context_parallel(m, mesh())
        buffers = [tokens, labels, positions_of("[1, T]", 24, 2)]
        with cut_by_torch(buffers):
            train(m, *buffers, count=1)
        ranks.check(bool(want), "nothing trains")
        compare_grads(ranks, grads(m), want, trained)


def under_fsdp(ranks: Ranks) -> None:
    """FSDP2 over the same mesh, with checkpointing: the mean of the ranks' gradients."""
    m = tiny("hybrid", num_attention_heads=2, num_key_value_heads=2)
    tokens = ids(2, 36)
    labels, positions = shifted(tokens), positions_of("[1, T]", 36, 2)
    train(m, tokens, labels, count=1)
    want = {n: t / ranks.size for n, t in grads(m).items()}
    m.set_attn_implementation("gathering")
    enable_context_parallel(m, mesh())
    m.gradient_checkpointing_enable({"use_reentrant": False})
    for part in m.model.layers:
        fully_shard(part, mesh=mesh())
    fully_shard(m, mesh=mesh())
    buffers = [tokens, labels, positions]
    with cut_by_torch(buffers):
        train(m, *buffers, count=1)
    compare_grads(ranks, grads(m), want, "FSDP2", sum=False)


# ---------------------------------------------------------------- what is refused


def enabling_refuses(ranks: Ranks) -> None:
    m = tiny("kda")
    flat = mesh()
    for expected, match, args in (
        (TypeError, "model must be a torch.nn.Module, got str", ("model", flat)),
        (TypeError, "mesh must be a DeviceMesh, .*got ProcessGroup", (m, dist.group.WORLD)),
        (TypeError, "mesh must be a DeviceMesh, .*got int", (m, 2)),
        (ValueError, "mesh must have one dimension, got 2", (m, init_device_mesh("cpu", (1, ranks.size)))),
        (ValueError, "model must be a KDAForCausalLM, .*got LlamaForCausalLM", (stock("llama"), flat)),
        (ValueError, "model must have no attention_bias='key'", (tiny("key_bias"), flat)),
        (ValueError, "model must have no layers of sliding_attention", (build("windows"), flat)),
    ):  # fmt: skip
        with ranks.raises(expected, match):
            enable_context_parallel(*args)
    ranks.check(not m.supports_context_parallel, "enabled by an error")
    enable_context_parallel(nn.ModuleList([m]), flat)
    ranks.check(m.supports_context_parallel, "a model inside of another module")
    copied = copy.deepcopy(m)
    enable_context_parallel(m, None)
    ranks.check(copied.supports_context_parallel and not m.supports_context_parallel, "a copy")
    enable_context_parallel(tiny("key_bias"), None)


def calls_refuse(ranks: Ranks) -> None:
    """Arguments that all ranks refuse; then the same of one rank, where the others must not wait."""
    T = 8
    m, start = tiny("kda"), ranks.rank * T
    hybrid = tiny("hybrid")
    enable_context_parallel(m, mesh())
    enable_context_parallel(hybrid, mesh())
    good = dict(input_ids=ids(1, T), position_ids=torch.arange(start, start + T)[None], use_cache=False)
    ends = torch.tensor([0, 5, T * ranks.size])
    holes = torch.ones(1, T)
    holes[0, 2] = 0
    positions: Any = good["position_ids"]
    without = {n: t for n, t in good.items() if n != "position_ids"}
    filled = KDAForCausalLM(m.config)(ids(1, 4), use_cache=True).past_key_values
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "no tokens": ("input_ids must have at least one token on each rank", good | dict(input_ids=ids(1, 0))),
        "use_cache": ("use_cache=True must not be given", good | dict(use_cache=True)),
        "cache": ("cache must not be given", good | dict(past_key_values=filled)),
        "holes": ("attention_mask must be None, or .* of ones", good | dict(attention_mask=holes)),
        "scores": ("attention_mask must be None, or", good | dict(attention_mask=torch.ones(1, 1, T, T).bool())),
        "masks": ("attention_mask must be None", good | dict(attention_mask={"linear_attention": holes})),
        "seq_idx": ("seq_idx must be None", good | dict(seq_idx=torch.zeros(1, T).int())),
        "missing": ("position_ids must be given", without),
        "missing, packed": ("position_ids must be given", without | dict(cu_seqlens=torch.tensor([0, T * ranks.size]))),
        "shape": (r"position_ids must have shape \[8\], \[1, 8\] or \[1, 8\], got \[2, 8\]",
                  good | dict(position_ids=positions.expand(2, T))),
        "length": (r"position_ids must have shape .*got \[1, 7\]", good | dict(position_ids=positions[:, 1:])),
        "axes": (r"position_ids must have shape .*\[3, 1, 8\]", good | dict(position_ids=positions.expand(3, 1, T))),
        "list": ("position_ids must be a torch.Tensor, got list", good | dict(position_ids=positions.tolist())),
        "local offsets": ("cu_seqlens must count the tokens of all 2 ranks, 16, got offsets up to 8, 8",
                          good | dict(cu_seqlens=ends // 2)),
        "shape of offsets": (r"cu_seqlens must have shape \[N \+ 1\]", good | dict(cu_seqlens=ends[None])),
        "rows": ("cu_seqlens needs packed sequences with B = 1, got B = 2",
                 good | dict(input_ids=ids(2, T), cu_seqlens=ends)),
        "order of packed slices": ("position_ids of packed sequences must be .* on ranks",
                                   good | dict(cu_seqlens=ends, position_ids=positions.flip(0) + 4)),
    }  # fmt: skip
    for name, (match, call) in cases.items():
        expected = TypeError if name == "list" else ValueError
        with ranks.raises(expected, match):
            m(**call)
            ranks.failures.append(name)
        bad = ranks.rank == 1
        with ranks.raises(expected if bad else ValueError, f"{match}|on ranks .* of the group" if bad else "on ranks"):
            m(**(call if bad else good))
            ranks.failures.append(f"{name}, refused by one rank")
    wanted = m(**good).logits
    for mask in (torch.ones(1, T), {"full_attention": None}):
        ranks.same("nothing masked", m(**good, attention_mask=mask).logits, wanted)


def positions_refused(ranks: Ranks) -> None:
    T = 8
    m, start = tiny("kda"), ranks.rank * T
    enable_context_parallel(m, mesh())
    row = torch.arange(start, start + T)
    made_up = "position_ids of all ranks must make up one sequence from 0 or 1, .*, got ranges of"
    swapped = torch.cat((row[:4], row[4:].flip(0)))
    for name, positions in (
        ("the same slice on all ranks", torch.arange(T)),
        ("from 2", row + 2),
        ("a gap between slices", row + 3 * ranks.rank),
        ("an overlap", row - ranks.rank),
        ("a gap inside", row + (torch.arange(T) > 5)),
        ("uneven pieces", torch.cat((row[:3], row[3:] + 20))),
        ("backwards", swapped),
        ("out of order in the first half", row[torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])]),
        ("restarting", torch.arange(T) % 4),
        ("a gap on one rank", row + (torch.arange(T) > 3) * ranks.rank),
    ):
        with ranks.raises(ValueError, made_up):
            m(input_ids=ids(1, T), position_ids=positions[None])
            ranks.failures.append(name)
    rows = torch.stack((row, row + 1))
    with ranks.raises(ValueError, made_up):
        m(input_ids=ids(2, T), position_ids=rows)
    with ranks.raises(ValueError, r"input_ids must have as many tokens on each rank, got \[8, 9\]"):
        n = T + ranks.rank
        m(input_ids=ids(1, n), position_ids=torch.arange(start, start + n)[None])
    with ranks.raises(ValueError, r"input_ids must have as many tokens on each rank, got \[8, 9\]"):
        n = T + ranks.rank
        places = torch.arange(start, start + n)[None]
        m(input_ids=ids(1, n), position_ids=places, cu_seqlens=torch.tensor([0, 2 * T + 1]))
    with ranks.raises(ValueError, "cu_seqlens on all ranks or on none"):
        offsets = torch.tensor([0, 2 * T]) if ranks.rank else None
        m(input_ids=ids(1, T), position_ids=row[None], cu_seqlens=offsets)
    with ranks.raises(ValueError, "cu_seqlens must be the same on all ranks"):
        m(input_ids=ids(1, T), position_ids=row[None], cu_seqlens=torch.tensor([0, 5 + ranks.rank, 2 * T]))
    with ranks.raises(ValueError, "hidden_states must have at least W - 1 = 3 tokens in each of the 1 pieces"):
        m(input_ids=ids(1, 2), position_ids=torch.arange(2)[None] + 2 * ranks.rank)
    tokens = ids(1, T)
    with ranks.raises(ValueError, "shift_labels must be given with labels and context parallelism"):
        m(input_ids=tokens, position_ids=row[None], labels=tokens)
    for dtype in (torch.int32, torch.int64):
        ranks.check(m(input_ids=tokens, position_ids=row.to(dtype)).logits is not None, str(dtype))


def softmax_refuses(ranks: Ranks) -> None:
    """Softmax layers that would see the tokens of one rank alone."""
    T = 8
    m, row = tiny("hybrid"), torch.arange(T)[None] + ranks.rank * T
    enable_context_parallel(m, mesh())
    call = dict(input_ids=ids(1, T), position_ids=row)
    m.set_attn_implementation("sdpa")
    with ranks.raises(ValueError, "must be called within torch.distributed.tensor.experimental.context_parallel"):
        m(**call)
    with (
        cut_by_torch([torch.arange(T * ranks.size)[None]], False),
        ranks.raises(ValueError, "must run on a GPU with context parallelism, got tokens on the CPU"),
    ):
        m(**call)
    for name in ("eager", "flash_attention_2", "flex_attention", "paged|sdpa", "kernels-community/flash-attn2"):
        with (
            mock.patch.object(m.config, "_attn_implementation_internal", name),
            ranks.raises(ValueError, f"attn_implementation must be 'sdpa' .*got '{name}'".replace("|", r"\|")),
        ):
            m(**call)
    m.set_attn_implementation("gathering")
    with ranks.raises(ValueError, "cu_seqlens must be None with context parallelism in a model with softmax layers"):
        m(**call, cu_seqlens=torch.tensor([0, T * ranks.size]))
    with ranks.raises(ValueError, "cache|use_cache=True"):
        m.generate(ids(1, 4), max_new_tokens=2)


def without_enabling(ranks: Ranks) -> None:
    """A model that is not enabled raises on every rank whose slice does not begin the sequence."""
    for balanced in (True, False):
        for name in ("kda", "llama"):
            m, positions = tiny(name), torch.arange(24)[None]
            with cut_by_torch([positions], balanced):
                if ranks.rank or balanced:
                    what = f"a row that starts at {int(positions[0, 0])}" if ranks.rank else "a jump forward"
                    with ranks.raises(ValueError, f"position_ids must start at 0 or 1 .*{what}.*enable_context"):
                        m(input_ids=ids(1, 12), position_ids=positions)


def ring(*args: Any, **options: Any) -> Any:
    return partial(_trains, args, options)


def _trains(args: Any, options: Any, ranks: Ranks) -> None:
    trains(*args, ranks, **options)


OF_TWO: Cases = {
    "layer": of_layer,
    "layer in bf16": of_layer_in_bf16,
    "layer, refused": layer_refuses,
    "kda, balanced": ring("kda"),
    "kda, contiguous": ring("kda", balanced=False, form="[1, T] from 1"),
    "kda, [T]": ring("kda", form="[T] from 1"),
    "kda, no multiple of four": ring("kda", T=38, form="[1, T]", balanced=ANY_LENGTH),
    "kda, odd slices": ring("kda", T=26, B=3, balanced=ANY_LENGTH),
    "kda, checkpointed": ring("kda", checkpointing=False),
    "kda, checkpointed, reentrant": ring("softplus_tied", checkpointing=True),
    "kda, packed": ring("kda", B=1, balanced=False, lengths=(5, 0, 20, 11), form="[1, T]"),
    "kda, packed, positions of sequences": ring(
        "kda", B=1, balanced=False, lengths=(5, 0, 20, 11), form="in sequences"
    ),
    "kda, packed, positions from 1": ring("kda", B=1, balanced=False, lengths=(18, 18), form="in sequences from 1"),
    "hybrid, balanced": ring("hybrid"),
    "hybrid, contiguous": ring("grouped", balanced=False, form="[1, T]"),
    "hybrid, [T]": ring("hybrid", form="[T]"),
    "hybrid, from 1": ring("hybrid", form="[1, T]"),
    "hybrid, checkpointed": ring("hybrid", checkpointing=False),
    "llama, balanced": ring("llama"),
    "llama, contiguous": ring("llama", balanced=False, T=38),
    "llama of KDA layers": ring("llama, all", form="[1, T] from 1"),
    "kda, any order": of_any_order,
    "recomputations": of_recomputations,
    "two models in turns": of_two_models_in_turns,
    "frozen layers": of_frozen_layers,
    "FSDP2": under_fsdp,
    "enabling, refused": enabling_refuses,
    "calls, refused": calls_refuse,
    "positions, refused": positions_refused,
    "softmax, refused": softmax_refuses,
    "without enabling": without_enabling,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TWO)
def test_two_processes_as_one(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    failures = outcomes(tmp_path_factory, "context_parallel", 2, OF_TWO)[name]
    assert not failures, "\n".join(failures)


def test_accelerate_refuses_today() -> None:
    """accelerate 1.15 refuses KDA layers by the configuration; a later one is to ask `supports_context_parallel`."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    prepare = getattr(accelerate.big_modeling, "_attach_context_parallel_hooks", None)
    major, minor = map(int, accelerate.__version__.split(".")[:2])
    if prepare is None or (major, minor) != (1, 15):
        pytest.skip(f"accelerate {accelerate.__version__} may refuse other models, or none")
    refused = r"Context parallelism does not support attention layers of type \['linear_attention'\]"
    for name in ("kda", "hybrid", "llama"):
        m = build(name)
        for group in (None, "a group"):  # before and after enable_context_parallel
            m.model.context_group = group
            assert m.supports_context_parallel == (group is not None)
            with pytest.raises(ValueError, match=refused):
                prepare(m)
