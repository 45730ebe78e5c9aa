"""Layers under the names that transformers' Kimi-Linear model looks up in a Hub kernel.

`kernels.kernelize` puts the `forward` of these classes in place of that of a module or a wrapped function of the model;
its `self` is then that module. So these classes have no state, no methods but `forward`, and the parameters of the
forward that they replace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..kernels.fla_api import chunk_kda, fused_recurrent_kda
from ..kernels.kda.contract import state_dtype
from ..modeling.inputs.arguments import given_offsets, takes_cache
from ..modeling.layer.decode_plan import DecodePlan
from ..modeling.layer.remembered import Remembered
from ..modeling.layer.weights import MergedWeights, loads_weights_of
from ..modeling.swap.stock_layer import StockParameters, check_stock_layer, kda_options

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


class chunk_kimi_delta_attention(nn.Module):
    """Kimi Delta Attention over full sequences."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, T, H, V] in value's dtype, and the final state or None.

        Args:
            query, key: [B, T, H, K]. value: [B, T, H, V]. All of one dtype: fp32, bf16, fp16 or fp64.
            g: [B, T, H, K] log-decay, any float dtype. beta: [B, T, H] in (0, 1), in query's dtype or fp32.
            chunk_size: changes no result and is not read.
            initial_state: [N, H, K, V], any float dtype; zeros if None.
            output_final_state: return the final state too: [N, H, K, V] in fp32, fp64 for fp64 inputs.
            use_qk_l2norm_in_kernel: normalise query and key.
            **kwargs: the model's other keywords; cu_seqlens [N + 1] or seq_idx [1, T] separate packed sequences, and
                the others are not read.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came; cu_seq_lens_q of several
                sequences without cu_seqlens and seq_idx.
        """
        options = _options(query, initial_state, output_final_state, use_qk_l2norm_in_kernel, kwargs)
        o, state, *_ = chunk_kda(query, key, value, g.to(state_dtype(query.dtype)), beta, **options)
        return o, state


class recurrent_kimi_delta_attention(nn.Module):
    """Kimi Delta Attention over a few tokens that follow a state."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, T, H, V] in value's dtype, and the final state or None.

        Arguments and errors are those of `chunk_kimi_delta_attention`. The initial state is not overwritten.
        """
        options = _options(query, initial_state, output_final_state, use_qk_l2norm_in_kernel, kwargs)
        return fused_recurrent_kda(query, key, value, g.to(state_dtype(query.dtype)), beta, **options)


class KimiLinearDeltaAttention(nn.Module):
    """The full layer of Kimi-Linear between hidden states: projections, convolution, operator, norm and cache."""

    has_backward = True
    can_torch_compile = True

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention output [B, T, D] in the dtype of hidden_states.

        Args:
            hidden_states: [B, T, D].
            cache: a transformers cache (before 5.24 `cache_params`) with a linear-attention layer at this layer's
                index, read and updated. Its recurrent state is [N, H, V, K]: a cache filled by the stock layer, or by
                the two functions above, holds [N, H, K, V] and cannot be continued.
            attention_mask: [B, S] with S >= T, nonzero for real tokens. Padding may be anywhere. None with packed
                sequences.
            **kwargs: the model's other keywords; cu_seqlens or cu_seq_lens_q [N + 1], or seq_idx [1, T], separate the
                sequences packed in a single row, and the others are not read. The model does not pass position_ids on.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came; an activation other than SiLU,
                a convolution with a bias, a cache of another number of sequences or one that records its past.
        """
        return _run(self, hidden_states, cache, attention_mask, kwargs)


def _options(
    query: Tensor, initial_state: Tensor | None, final_state: bool, qk_l2norm: bool, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the keywords that both functions pass on."""
    cu_seqlens, seq_idx, of_softmax = (kwargs.get(name) for name in ("cu_seqlens", "seq_idx", "cu_seq_lens_q"))
    if cu_seqlens is None and seq_idx is None and of_softmax is not None and of_softmax.shape[0] > 2:
        raise ValueError(
            f"cu_seq_lens_q must hold one sequence here, got {of_softmax.shape[0] - 1}: the model's convolution before "
            "this function does not read it and has mixed them. Use this kernel's KimiLinearDeltaAttention, which "
            "contains the convolution"
        )
    return dict(
        initial_state=None if initial_state is None else initial_state.to(state_dtype(query.dtype)),
        output_final_state=final_state,
        use_qk_l2norm_in_kernel=qk_l2norm,
        cu_seqlens=given_offsets(query, cu_seqlens, None, seq_idx),
    )


@loads_weights_of("forget_gate")  # its parameters are read here, not in its own forward
def _run(
    layer: Any,
    hidden_states: Tensor,
    cache: Cache | None,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    check_stock_layer(layer, None)
    offsets = given_offsets(hidden_states, *(kwargs.get(name) for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx")))
    return _Stateless(layer).compute(hidden_states, attention_mask, cache, offsets)


class _Apart(MergedWeights):
    """Weights that are never merged: a layer without state has nowhere to keep their buffer."""

    def weight(self, layers: Sequence[nn.Module]) -> None:
        return None

    def watch(self, x: Tensor) -> None:
        return None


APART = _Apart()
READ = (
    "hidden_size", "head_dim", "layer_idx", "training", "q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "conv1d",
    "o_norm", "forget_gate",
)  # fmt: skip


class _Stateless(StockParameters):
    """A stock layer during one call."""

    # A layer does not know its model. Kimi-Linear-48B-A3B has 20 KDA layers; with more than this many, "auto" keeps
    # more memory for the backward than in a model that `swap_attention` changed.
    layers_in_model = 32
    gradient_checkpointing = False
    merged_weights = factors = APART
    plan: Remembered[DecodePlan] = Remembered()  # stays empty, as only plans of merged weights last

    def __init__(self, layer: Any) -> None:
        self._modules = layer._modules  # which of them a layer has tells the ranks of its gates
        gates = ("g_a_proj", "g_b_proj") if self.gate_rank else ("g_proj",)
        for name in (*READ, *gates):
            setattr(self, name, getattr(layer, name))
        self.kda_options = kda_options(None)
