"""Doge: softmax attention with a bias for each key, in which a query sees only the keys with the largest biases."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kda_layers.kernels import biased_attention
from kda_layers.kernels.attention_bias.contract import ATTENTION
from kda_layers.kernels.checks import accumulator_dtype, sequence_offsets
from kda_layers.modeling.inputs.arguments import rename_cache, takes_cache
from kda_layers.modeling.inputs.masks import create_key_mask
from kda_layers.modeling.inputs.sequences import read_layout
from kda_layers.modeling.layer.weights import KeepsFP32
from kda_layers.modeling.models.key_bias import key_bias, refuse_weights, with_past
from kda_layers.modeling.seams import CACHE, Cache
from kda_layers.modeling.swap.in_place import StockFamily, call_arguments, packed_call

ROWS = 128  # queries per chunk of key selection


class StockDogeLayer(KeepsFP32):
    """Doge's attention on `biased_attention`: no tensor of the size of all scores, forward or backward."""

    kept_in_fp32 = ("A",)  # the bias is exponential in it

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return (output [B, T, D], None); called as the stock layer, attention_mask as in `key_bias.with_past`."""
        # Here, as this file is imported without transformers' models too.
        from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

        refuse_weights(self.config, kwargs)
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *position_embeddings, unsqueeze_dim=2)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast the norms return fp32, the dtype of their weights
        bias = key_bias(self.dt_proj(v.flatten(2)), self.A)
        k, v, bias, causal = with_past(k, v, bias, attention_mask, cache, self.layer_idx)
        o = attend_to_largest(
            q, k, v, bias, causal, self.keep_window_size, kwargs.get("cu_seq_lens_q"),
            scale=self.scaling, backend=self.backend,
        )  # fmt: skip
        return self.o_proj(o.flatten(2)), None


def attend_to_largest(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, keep: int, cu_seqlens: Tensor | None, **options: Any
) -> Tensor:
    """Run `biased_attention` with each query restricted to the `keep` keys of the largest bias that it can see.

    Args:
        q, k, v, bias, causal, cu_seqlens: as in `biased_attention`.
        keep: number of keys.
        **options: its scale and backend.
    """
    S = k.shape[1]
    if keep >= S:
        return biased_attention(q, k, v, bias, causal=causal, cu_seqlens=cu_seqlens, **options)
    if cu_seqlens is None:
        return _choose_and_attend(q, k, v, bias, causal, keep, **options)
    documents = (
        attend_to_largest(q[:, a:b], k[:, a:b], v[:, a:b], bias[..., a:b], causal, keep, None, **options)
        for a, b in itertools.pairwise(sequence_offsets(cu_seqlens, S))
    )
    return torch.cat(list(documents), 1)


def _choose_and_attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, keep: int, **options: Any
) -> Tensor:
    """Run `attend_to_largest` with more keys than `keep`.

    Queries that see at most `keep` keys are one call. The others differ in their keys, so their bias is not broadcast:
    they are processed in chunks, and the backward selects the keys again, so that memory grows with T + S. Among equal
    biases, which the first layer has for repeated tokens, torch.topk over all S decides, as in the stock layer.
    """
    T, S, dtype = q.shape[1], k.shape[1], q.dtype
    k, v, bias = (t.to(accumulator_dtype(t.dtype)) for t in (k, v, bias))  # their gradients are summed over the chunks

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, start: int) -> Tensor:
        end = S
        if causal:
            end = S - T + start + q.shape[1]
            slots = torch.arange(S, device=q.device)
            bias = bias.masked_fill(slots > slots[end - q.shape[1] : end, None], -torch.inf)
        seen = torch.zeros_like(bias, dtype=torch.bool).scatter_(-1, bias.topk(keep, -1).indices, True)
        bias = bias.masked_fill(~seen, -torch.inf)[..., :end]
        return biased_attention(q, k[:, :end].to(dtype), v[:, :end].to(dtype), bias, causal=False, **options)

    parts, first = [], 0
    if causal and keep > S - T:
        first = keep - (S - T)
        before = q[:, :first], k[:, :keep].to(dtype), v[:, :keep].to(dtype), bias[..., :keep]
        parts.append(biased_attention(*before, causal=True, **options))
    for a in range(first, T, ROWS):
        inputs = q[:, a : a + ROWS], k, v, bias if causal else bias[:, :, a : a + ROWS], a
        parts.append(checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, 1)


def prepare_masks(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Give the base model masks of keys, instead of the stock forward's masks of all scores; a forward pre-hook.

    A mask of four dimensions passes unchanged. Packed sequences, however described, become cu_seq_lens_q and positions
    that restart.

    Raises:
        ValueError: packed sequences with a mask, a cache or stock layers; a mask of a wrong size.
    """
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return args, kwargs  # both kinds of layers apply a mask of scores as it is
    kwargs, tokens = call_arguments(model, args, kwargs)
    layout = read_layout(tokens, **rename_cache(kwargs))
    nothing_hidden = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    if layout.cu_seqlens is not None:
        packed = packed_call(model, kwargs, layout, "attention layer", _is_stock)
        return (), packed | dict(attention_mask=nothing_hidden)
    if any(_is_stock(layer.self_attn) for layer in model.layers):
        return (), kwargs  # they need the mask of all scores, which ours can read
    mask = create_key_mask(model.config, tokens, layout.attention_mask, kwargs.get(CACHE))
    return (), kwargs | dict(attention_mask=nothing_hidden if mask is None else mask)


def _is_stock(module: Any) -> bool:
    return isinstance(module, FAMILY.stock_layer) and not isinstance(module, StockDogeLayer)


@dataclass(frozen=True, kw_only=True)
class DogeFamily(StockFamily):
    """Doge, in which all layers have biased softmax attention."""

    operator = ATTENTION
    noun = "attention layer"

    def check(self, layer: Any) -> None:
        window, dropout = layer.config.sliding_window, layer.attention_dropout
        if window is not None:
            raise ValueError(f"sliding_window must be None, as `biased_attention` has no window, got {window}")
        if dropout:
            raise ValueError(f"attention_dropout must be 0, as `biased_attention` has no dropout, got {dropout}")

    def attributes(
        self, model: nn.Module, path: str, layer: Any, backend: str | None, **recompute: Any
    ) -> dict[str, Any]:
        return dict(backend=backend)


FAMILY = DogeFamily(
    model_type="doge",
    base_name="DogeModel",
    stock_name="DogeAttention",
    mixin=StockDogeLayer,
    prepare_call=prepare_masks,
)
__getattr__ = FAMILY.layer_by_name
