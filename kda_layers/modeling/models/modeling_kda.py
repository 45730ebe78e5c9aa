"""KDA language models: decoder layers of KDA or softmax attention and gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from kda_layers.kernels import biased_attention
from kda_layers.kernels.fused.linear_step import linear_step
from kda_layers.kernels.fused.swiglu import swiglu, swiglu_linear
from kda_layers.kernels.torch_private import has_global_hooks
from kda_layers.kernels.tracing import autocasts, may_run_again
from kda_layers.modeling.inputs.keywords import is_engine_cache
from kda_layers.modeling.layer.merged_weights import DEVICES, MergedWeights, is_plain, is_unhooked, only_multiplies
from kda_layers.modeling.layer.precision import KeepsFP32
from kda_layers.modeling.layer.residual import add_and_normalise
from kda_layers.modeling.layer.shared_input import projections, serves
from kda_layers.modeling.models.configuration_kda import KDAConfig
from kda_layers.modeling.models.hybrid import HybridForCausalLM, HybridModel, HybridPreTrainedModel, KDAAttention
from kda_layers.modeling.models.key_bias import key_bias, refuse_weights, with_past
from kda_layers.modeling.models.registration import register
from kda_layers.modeling.seams import ALL_ATTENTION_FUNCTIONS, RENAMED, Cache, GradientCheckpointingLayer


class KDASoftmaxAttention(nn.Module):
    """Causal softmax attention with grouped heads and no position encoding: the KDA layers carry the positions."""

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = config.head_dim**-0.5, True
        q_dim, kv_dim = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, cache: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output [B, T, D], attention weights or None); kwargs go to transformers' attention function."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None and not RENAMED and is_engine_cache(cache):
            kwargs["cache"] = cache  # the attention function updates it
        elif cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        o, weights = attention(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(o.reshape(*hidden_states.shape[:2], -1)), weights


class KDABiasedAttention(KeepsFP32, KDASoftmaxAttention):
    """`KDASoftmaxAttention` with a learned bias for each key and head, computed from the key's values.

    The bias of query head h is exp(A_h softplus(dt_proj(v)_h)), with v all value heads of the key's token. The layer
    runs on `biased_attention` for any `attn_implementation`, and has neither dropout nor attention weights to return.
    """

    kept_in_fp32 = ("A",)

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = config.num_attention_heads
        self.dt_proj = nn.Linear(config.num_key_value_heads * self.head_dim, heads, bias=False)
        # 0 makes all biases equal: the layer starts as one without them.
        self.A = nn.Parameter(torch.zeros(heads, dtype=torch.float32))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return (output [B, T, D], None); attention_mask as `key_bias.create_key_mask` makes it."""
        refuse_weights(self.config, kwargs)
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        bias = key_bias(self.dt_proj(v.flatten(2)), self.A)
        k, v, bias, causal = with_past(k, v, bias, attention_mask, cache, self.layer_idx)
        o = biased_attention(q, k, v, bias, scale=self.scaling, causal=causal, cu_seqlens=cu_seqlens)
        return self.o_proj(o.flatten(2)), None


def eager_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, dropout: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Implement transformers' 'eager': q [B, H, T, D], k and v [B, Hkv, S, D] -> (o [B, T, H, D], weights)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scaling
    if mask is not None:
        scores = scores + mask
    weights = nn.functional.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ v).transpose(1, 2).contiguous(), weights


class KDAMLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: KDAConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.merged_weights = MergedWeights()

    def forward(self, x: Tensor) -> Tensor:
        layers = self.gate_proj, self.up_proj
        self.merged_weights.watch(x)
        # Autocast keeps its casts of parameters, not of a buffer.
        separate = torch.is_grad_enabled() or may_run_again() or autocasts(x.device.type)
        whole = None if separate else self.merged_weights.weight(layers)
        if whole is None:
            gate, up = projections(x, layers) or (layer(x) for layer in layers)
        else:
            gate, up = nn.functional.linear(x, whole).chunk(2, -1)
        if serves(gate, (self.down_proj,)):
            return swiglu_linear(gate, up, self.down_proj.weight)
        return self.down_proj(swiglu(gate, up))

    def merged(self) -> Tensor | None:
        """Return the weights of gate and up side by side if `decode` is what calling the layers does."""
        if not (only_multiplies(self.down_proj) and is_unhooked(self)):
            return None
        return self.merged_weights.weight((self.gate_proj, self.up_proj))

    def decode(self, residual: Tensor, norm: nn.RMSNorm, merged: Tensor | None) -> Tensor:
        """Return residual + forward(norm(residual)) of one token of each sequence [B, 1, D].

        By two launches with `merged` weights. The kernel launched before must not have written these.
        """
        if merged is None:
            return residual + self(norm(residual))
        y = linear_step(residual, merged, norm_weight=norm.weight, norm_eps=norm.eps, swiglu=True, overlap=True)
        return linear_step(y, self.down_proj.weight, residual=residual, overlap=True)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.merged_weights.refresh(self)
        return self


class KDADecoderLayer(GradientCheckpointingLayer):
    """Pre-norm residual layer: attention of its type, then the MLP."""

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = KDAMLP(config)
        softmax = KDABiasedAttention if config.attention_bias == "key" else KDASoftmaxAttention
        kind = KDAAttention if config.layer_types[layer_idx] == "linear_attention" else softmax
        self.self_attn = kind(config, layer_idx)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Map [B, T, D] to [B, T, D]; kwargs are those of `HybridModel`'s layers."""
        if (decoded := self._decode(hidden_states, **kwargs)) is not None:
            return decoded
        residual, x = add_and_normalise(hidden_states, None, self.input_layernorm)
        x, _ = self.self_attn(x, **kwargs)
        residual, x = add_and_normalise(residual, x, self.post_attention_layernorm)
        return residual + self.mlp(x)

    def _decode(
        self,
        x: Tensor,
        attention_mask: Any = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> Tensor | None:
        """Return the output for one token of each sequence; None where the layers must be called themselves.

        Of one sequence, five launches do it; of several, the larger products and what surrounds them are apart.
        """
        norms = self.input_layernorm, self.post_attention_layernorm
        if (
            x.shape[1] != 1
            or x.device.type not in DEVICES
            or cache is None
            or attention_mask is not None
            or cu_seqlens is not None
            or torch.is_grad_enabled()
            or autocasts(x.device.type)
            or has_global_hooks()
            or type(self.self_attn) is not KDAAttention
            or type(self.mlp) is not KDAMLP
            or not all(is_plain(n, nn.RMSNorm) and n.eps is not None and n.weight.dtype == x.dtype for n in norms)
        ):
            return None
        merged = self.mlp.merged()  # before the first launch, as it may copy the weights
        y = self.self_attn.decode(x, norms[0], cache)
        return None if y is None else self.mlp.decode(y, norms[1], merged)


class KDAPreTrainedModel(HybridPreTrainedModel):
    """Flags of KDA models for transformers: checkpointing, attention implementations, recorded outputs."""

    config: KDAConfig
    config_class = KDAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KDADecoderLayer"]  # noqa: RUF012  (class attributes that transformers reads)
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": KDADecoderLayer, "attentions": KDASoftmaxAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, KDABiasedAttention):
            init.zeros_(module.A)


class KDAModel(HybridModel, KDAPreTrainedModel):
    """Embedding, decoder layers of KDA or of softmax attention without position encoding, final norm."""

    norm_class = nn.RMSNorm

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        if config.attention_bias == "key":
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, "self_attn.A"]
        self.post_init()

    def make_layer(self, layer_idx: int) -> nn.Module:
        return KDADecoderLayer(self.config, layer_idx)


class KDAForCausalLM(HybridForCausalLM, KDAPreTrainedModel):
    """`KDAModel` with a language-model head."""

    model_class = KDAModel

    def _get_static_cache_init_shape(self) -> Any:
        # transformers would initialise a static cache early with this shape: None defers that until the values come,
        # which are wider than the configuration says if biases are cached with them.
        return None if self.config.attention_bias == "key" else super()._get_static_cache_init_shape()


register(KDAForCausalLM)
