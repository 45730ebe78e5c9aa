"""Models over sequences that torch's `context_parallel` cuts over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kda_layers.kernels.checks import check_index, check_offsets
from kda_layers.kernels.over_ranks.shards import Shards
from kda_layers.kernels.torch_private import process_group
from kda_layers.modeling.checks import is_stock

# Attention functions of transformers that know nothing of other ranks, whatever context they are called in.
OWN_TOKENS_ONLY = ("eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def enable_context_parallel(model: nn.Module, mesh: Any) -> None:
    """Let the KDA layers of a model exchange states over the ranks of a mesh, so that a sequence may be cut over them.

    For use with torch's `context_parallel`, which cuts the sequence and runs softmax attention over all ranks:

    ```python
    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("cp",))
    kda_layers.parallel.enable_context_parallel(model, mesh["cp"])
    buffers = [input_ids, position_ids, labels]  # [B, T] each, labels already shifted
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        loss = model(input_ids=input_ids, position_ids=position_ids, labels=labels, shift_labels=labels).loss
        loss.backward()
    ```

    Each rank's loss is that of its own labels, and gradients of parameters are its own part, to be summed over the mesh
    if the loss is divided by the labels of all ranks (`num_items_in_batch`). Every call needs position_ids, from which
    the model reads which tokens it has: each rank one slice or two of equal length, in any order, that make up the
    full sequence together. Models of KDA layers alone need no context: slices that you cut yourself do as well.

    Packed sequences, for models of KDA layers alone, are described by cu_seqlens over the tokens of all ranks, the same
    on all; rank r then holds the r-th slice, and position_ids count in the full row or in each sequence.

    Args:
        model: a KDAForCausalLM, KDAModel, a variant, a stock model whose KDA layers are all swapped, or a module with
            one; changed in place.
        mesh: `DeviceMesh` of one dimension, or None to switch it off.

    Raises:
        TypeError: model or mesh of another type.
        ValueError: a mesh of several dimensions; a model without such layers, with stock KDA layers, with sliding
            windows, indexed attention or attention_bias='key'.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    group, parts = None if mesh is None else _group_of(mesh), _parts(model)
    if not parts:
        raise ValueError(
            "model must be a KDAForCausalLM, a KDAModel, a variant of these, or a Kimi-Linear or Ling with swapped "
            f"layers, got {type(model).__name__}"
        )
    for part in parts:
        reason = _unsupported(part)
        if group is not None and reason:
            raise ValueError(f"model must have no {reason}, which context parallelism does not support")
    for part in parts:
        part.context_group = group
    for module in model.modules():
        if any(child in parts for child in module.children()):  # it has the head, and takes labels
            _set_check(module, group is not None)


def _set_check(module: nn.Module, wanted: bool) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _check_labels:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    if wanted:
        module.register_forward_pre_hook(_check_labels, with_kwargs=True)


def _check_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a ValueError for labels that a model would shift itself, within this rank's tokens; a forward pre-hook."""
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            "shift_labels must be given with labels and context parallelism, as a rank's last tokens have their "
            "labels on another rank: shift labels by one before the sequence is cut, and pass them as both"
        )


def _parts(model: nn.Module) -> list[Any]:
    """Return the modules of a model that read its calls for their KDA layers: our own models, and swapped ones."""

    def reads_shards(module: nn.Module) -> bool:
        return any(getattr(hook, "reads_shards", False) for hook in module._forward_pre_hooks.values())

    return [m for m in model.modules() if hasattr(type(m), "context_group") or reads_shards(m)]


def _group_of(mesh: Any) -> str:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, such as init_device_mesh('cuda', (8,)), got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}: pass one of them, such as mesh['cp']")
    return mesh.get_group().group_name


def _unsupported(part: Any) -> str:
    """Return what of a model rules out context parallelism, or an empty string."""
    if getattr(part.config, "attention_bias", None) == "key":
        return "attention_bias='key'"
    stock = [path for path, m in part.named_modules() if is_stock(m)]
    if stock:
        return f"stock KDA layers, got those at {', '.join(stock)}: swap them (kda_layers.swap_attention)"
    others = set(part.config.layer_types) - {"linear_attention", "full_attention"}
    return f"layers of {', '.join(sorted(others))}" if others else ""


def read_shards(group: str, config: Any, tokens: Tensor, call: Mapping[str, Any]) -> tuple[Shards, Tensor | None]:
    """Return where a call's tokens lie in the sequence, and the offsets of packed sequences over all ranks.

    One exchange of a few integers, which the host waits for. Ranks that refuse their arguments take part in it, so that
    all ranks raise and none waits for another.

    Args:
        group: name of the process group.
        config: configuration of the model.
        tokens: [B, T, ...] token ids or embeddings of this rank.
        call: arguments of the model's call by name.

    Raises:
        ValueError: what context parallelism does not support, or slices that do not make up one sequence.
    """
    name = "cu_seqlens" if call.get("cu_seqlens") is not None else "cu_seq_lens_q"
    offsets, position_ids = call.get(name), call.get("position_ids")
    softmax = config.layer_types.count("full_attention")
    between = config.layer_types.count("linear_attention") // (softmax + 1)  # KDA layers between two softmax layers
    shards = Shards.contiguous(process_group(group), between)._replace(memory={})
    refusal, facts = None, torch.zeros(len(_Facts._fields), dtype=torch.long, device=tokens.device)
    try:
        if not tokens.shape[1]:
            raise ValueError("input_ids must have at least one token on each rank, got none")
        _check_supported(config, tokens.device, call, offsets is not None)
        if offsets is None:
            facts = _facts_of_positions(tokens, position_ids)
        else:
            check_offsets(offsets, tokens, name, "input_ids")
            facts = _facts_of_offsets(tokens, offsets, position_ids, shards.rank * tokens.shape[1])
    except (TypeError, ValueError) as e:
        refusal = e
    everyones = [_Facts(*of_rank) for of_rank in shards.everyones(facts[None])[:, 0].tolist()]
    if refusal is not None:
        raise refusal
    for what, condition in (
        ("arguments that no rank refuses", [r for r, f in enumerate(everyones) if not f.accepted]),
        ("cu_seqlens on all ranks or on none", [r for r, f in enumerate(everyones) if f.packed != everyones[0].packed]),
    ):
        if condition:
            raise ValueError(f"the model must be called with {what}, got others on ranks {condition} of the group")
    lengths = [f.tokens for f in everyones]
    if len(set(lengths)) > 1:
        raise ValueError(f"input_ids must have as many tokens on each rank, got {lengths}")
    if offsets is None:
        places = _read_positions(everyones)
        return shards._replace(places=places, chain=shards.chain and len(places[0]) == 1), None
    _check_packed(everyones, sum(lengths))
    return shards, offsets


class _Facts(NamedTuple):
    """Facts about their arguments that ranks exchange."""

    accepted: int  # 0 on a rank that refuses its arguments
    packed: int
    tokens: int
    first: int  # position of the first token; for packed sequences the last offset
    second: int  # position of the first token of the second half; for packed sequences a sum that distinguishes offsets
    consecutive: int  # positions go on by 1; for packed sequences they are those of the slice
    halves: int  # positions go on by 1 in each half


def _check_supported(config: Any, device: torch.device, call: Mapping[str, Any], packed: bool) -> None:
    if call.get("cache") is not None or call.get("use_cache"):
        given = "use_cache=True" if call.get("cache") is None else "cache"
        raise ValueError(f"{given} must not be given with context parallelism, which has no cache over ranks")
    attention_mask = call.get("attention_mask")
    if isinstance(attention_mask, dict):
        attention_mask = [m for m in attention_mask.values() if m is not None] or None
    plain = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and bool((attention_mask == 1).all())
    if attention_mask is not None and not plain:
        raise ValueError(
            "attention_mask must be None, or [B, T] of ones, with context parallelism: drop padding, or pack sequences"
        )
    if call.get("seq_idx") is not None:
        raise ValueError("seq_idx must be None with context parallelism: pass cu_seqlens over the tokens of all ranks")
    if "full_attention" in config.layer_types:
        _check_softmax(config, device)
        if packed:
            raise ValueError("cu_seqlens must be None with context parallelism in a model with softmax layers")


def _check_softmax(config: Any, device: torch.device) -> None:
    """Raise a ValueError if softmax attention would see the tokens of one rank alone, or torch has no ring of it."""
    name = config._attn_implementation
    if name in OWN_TOKENS_ONLY or "/" in name or name.startswith("paged|"):  # kernels of the Hub: owner/name
        raise ValueError(
            f"attn_implementation must be 'sdpa' with context parallelism, got {name!r}, which sees the tokens of one "
            "rank alone: call model.set_attn_implementation('sdpa')"
        )
    if name == "sdpa" and nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention:
        raise ValueError(
            "the model must be called within torch.distributed.tensor.experimental.context_parallel, as its softmax "
            "layers otherwise see the tokens of one rank alone; "
            "kda_layers.parallel.enable_context_parallel(model, None) ends context parallelism"
        )
    if name == "sdpa" and device.type == "cpu":
        raise ValueError(
            "softmax layers must run on a GPU with context parallelism, got tokens on the CPU, for which torch has no "
            "ring attention: models of KDA layers alone run there"
        )


def _facts_of_offsets(tokens: Tensor, offsets: Tensor, position_ids: Tensor | None, start: int) -> Tensor:
    """Return the `_Facts` of a rank whose tokens begin at `start` of all, [fields]."""
    T, row = tokens.shape[1], _rows_of(position_ids, tokens)[0]
    places = torch.arange(start, start + T, device=tokens.device)
    in_sequence = places - offsets[torch.searchsorted(offsets, places, right=True) - 1]
    steps = torch.stack((row - places, row - in_sequence))
    placed = ((steps == 0).all(1) | (steps == 1).all(1)).any()
    told_apart = (offsets.long() * torch.arange(1, offsets.shape[0] + 1, device=offsets.device)).sum()
    return _stacked(1, 1, T, offsets[-1], told_apart, placed, 0)


def _facts_of_positions(tokens: Tensor, position_ids: Tensor | None) -> Tensor:
    rows = _rows_of(position_ids, tokens)
    T, row = tokens.shape[1], rows[0]
    half, alike, steps = T // 2, (rows == row).all(), row.diff() == 1
    halves = alike & steps[: max(half - 1, 0)].all() & steps[half:].all() & (T % 2 == 0)
    return _stacked(1, 0, T, row[0], row[half], steps.all() & alike, halves)


def _rows_of(position_ids: Tensor | None, tokens: Tensor) -> Tensor:
    """Return positions as rows [1 or B, T]."""
    if position_ids is None:
        raise ValueError(
            "position_ids must be given with context parallelism, [1 or B, T]: the positions of this rank's tokens in "
            "the full sequence"
        )
    check_index("position_ids", position_ids, tokens)
    B, T = tokens.shape[:2]
    rows = position_ids[None] if position_ids.ndim == 1 else position_ids
    if rows.ndim != 2 or rows.shape[0] not in (1, B) or rows.shape[1] != T:
        raise ValueError(f"position_ids must have shape [{T}], [1, {T}] or [{B}, {T}], got {list(position_ids.shape)}")
    return rows


def _stacked(*facts: int | Tensor) -> Tensor:
    device = next(f.device for f in facts if isinstance(f, Tensor))
    return torch.stack([torch.as_tensor(f, dtype=torch.long, device=device) for f in facts])


def _check_packed(everyones: list[_Facts], tokens: int) -> None:
    """Raise a ValueError unless all ranks have the same offsets, of `tokens` tokens, and slices in their order."""
    if any(f.first != tokens for f in everyones):
        raise ValueError(
            f"cu_seqlens must count the tokens of all {len(everyones)} ranks, {tokens}, got offsets up to "
            f"{', '.join(str(f.first) for f in everyones)} on the ranks in turn"
        )
    if len({f.second for f in everyones}) > 1:
        raise ValueError("cu_seqlens must be the same on all ranks, got others")
    wrong = [rank for rank, f in enumerate(everyones) if not f.consecutive]
    if wrong:
        raise ValueError(
            "position_ids of packed sequences must be those of slices in the order of the ranks, from 0 or 1 in the "
            f"full row or in each sequence, got others on ranks {wrong} of the group: set "
            "torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
        )


def _read_positions(everyones: list[_Facts]) -> tuple[tuple[int, ...], ...]:
    """Return the places of `Shards` that the positions of all ranks describe."""
    T = everyones[0].tokens
    if all(f.consecutive for f in everyones):
        starts, length = [[f.first] for f in everyones], T
    else:
        starts, length = [[f.first, f.second] for f in everyones], T // 2
    in_order = sorted(start for of_rank in starts for start in of_rank)
    right = [in_order[0] + i * length for i in range(len(in_order))]
    if not all(f.halves or f.consecutive for f in everyones) or in_order[0] not in (0, 1) or in_order != right:
        found = "; ".join(", ".join(map(str, of_rank)) for of_rank in starts)
        raise ValueError(
            f"position_ids of all ranks must make up one sequence from 0 or 1, each rank with one range of positions "
            f"or with two of equal length, got ranges of {length} that start at {found} on the ranks in turn"
        )
    return tuple(tuple((s - in_order[0]) // length for s in of_rank) for of_rank in starts)
