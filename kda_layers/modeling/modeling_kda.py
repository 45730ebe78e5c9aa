"""KDA language models: decoder layers of KDA or softmax attention and gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from kda_layers.modeling.cache import with_kda_layers
from kda_layers.modeling.configuration_kda import KDAConfig
from kda_layers.modeling.layer import KimiDeltaAttention
from kda_layers.modeling.packing import packed_offsets


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
        self, hidden_states: Tensor, attention_mask: Any, past_key_values: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(output [B, T, D], attention weights or None); kwargs go to transformers' attention function."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        o, weights = attention(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(o.reshape(*hidden_states.shape[:2], -1)), weights


def eager_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, dropout: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """transformers' 'eager' interface: q [B, H, T, D], k and v [B, Hkv, S, D] -> (o [B, T, H, D], weights)."""
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

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class KDADecoderLayer(GradientCheckpointingLayer):
    """Pre-norm residual layer: attention of its type, then the MLP."""

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = KDAMLP(config)
        self.is_linear = config.layer_types[layer_idx] == "linear_attention"
        if not self.is_linear:
            self.self_attn: nn.Module = KDASoftmaxAttention(config, layer_idx)
            return
        self.self_attn = KimiDeltaAttention(
            config.hidden_size,
            config.linear_num_heads,
            config.linear_head_dim,
            num_v_heads=config.linear_num_value_heads,
            head_v_dim=config.linear_value_head_dim,
            conv_size=config.linear_conv_kernel_dim,
            gate_activation=config.linear_gate_activation,
            lower_bound=config.linear_lower_bound,
            allow_neg_eigval=config.linear_allow_neg_eigval,
            norm_eps=config.rms_norm_eps,
            gate_rank=config.linear_gate_rank,
            output_gate_bias=config.linear_output_gate_bias,
            layer_idx=layer_idx,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x = self.input_layernorm(hidden_states)
        if self.is_linear:
            x = self.self_attn(x, attention_mask, past_key_values, cu_seqlens)
        else:
            x, _ = self.self_attn(x, attention_mask, past_key_values, **kwargs)
        hidden_states = hidden_states + x
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class KDAPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of KDA models: initialisation, checkpointing, caches, dtypes."""

    config: KDAConfig
    config_class = KDAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KDADecoderLayer"]  # noqa: RUF012  (class attributes that transformers reads)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": KDADecoderLayer, "attentions": KDASoftmaxAttention}  # noqa: RUF012
    _is_stateful = False  # states can be taken back: see cache.KDACacheLayer

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, KimiDeltaAttention):
            module.reset_gate()


class KDAModel(KDAPreTrainedModel):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(KDADecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states after the final norm.

        Args:
            input_ids: [B, T] token ids, or inputs_embeds [B, T, D].
            attention_mask: [B, S], nonzero for real tokens, S the tokens in the cache and these; or a dict of
                prepared masks by layer type.
            position_ids: positions have no encoding; where they restart at 0 in a single row, a sequence starts.
            past_key_values: cache to continue; updated.
            use_cache: return a cache; by default config.use_cache, but not while training or for packed
                sequences.
            cu_seqlens: [N + 1] offsets of sequences packed along T (then B = 1), int32 or int64; also read from
                cu_seq_lens_q, seq_idx or position_ids, as transformers' DataCollatorWithFlattening gives them.

        Returns:
            BaseModelOutputWithPast: last_hidden_state [B, T, D], past_key_values, and what was asked to be recorded.

        Raises:
            ValueError: not exactly one of input_ids and inputs_embeds; a cache while training with gradient
                checkpointing, or for packed sequences in a model with softmax layers; what the layers raise.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if cu_seqlens is None:
            cu_seqlens = packed_offsets(position_ids, attention_mask, past_key_values, **kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        past_key_values = self._cache(past_key_values, use_cache, packed=cu_seqlens is not None)
        tokens = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        if cu_seqlens is not None:  # restarting positions keep packed sequences apart in softmax layers
            starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
            position_ids = (tokens - starts)[None]
        elif position_ids is None:
            position_ids = (tokens + (0 if past_key_values is None else past_key_values.get_seq_length()))[None]
        masks = attention_mask
        if not isinstance(masks, dict):
            arguments = dict(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            masks = {"linear_attention": create_recurrent_attention_mask(**arguments)}
            if "full_attention" in self.config.layer_types:
                masks["full_attention"] = create_causal_mask(**arguments)
        hidden_states = inputs_embeds
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[kind],
                past_key_values=past_key_values,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _cache(self, cache: Cache | None, use_cache: bool, packed: bool) -> Cache | None:
        """The cache that this call fills, if any."""
        wanted = use_cache or cache is not None
        if wanted and self.gradient_checkpointing and self.training:
            raise ValueError(
                "use_cache must be False and past_key_values None while training with gradient checkpointing, "
                f"got use_cache={use_cache}: recomputation would advance the cache twice"
            )
        if wanted and packed and "full_attention" in self.config.layer_types:
            raise ValueError(
                "cu_seqlens must be None with a cache in a model with full_attention layers, "
                f"got use_cache={use_cache}: their keys and values are cached per batch row"
            )
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        return None if cache is None else with_kda_layers(cache)


class KDAForCausalLM(KDAPreTrainedModel, GenerationMixin):
    """`KDAModel` with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        self.model = KDAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the loss where labels are given.

        Args: as `KDAModel.forward`, and
            labels: [B, T] token ids, -100 to ignore; shifted here.
            logits_to_keep: logits of the last so many positions only (0: all), or of these indices.

        Returns:
            CausalLMOutputWithPast: loss (scalar) or None, logits [B, T, vocab_size], past_key_values.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        kept = slice(None) if isinstance(kept, int) else kept
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            with_kda_layers(cache)
            if generation_config.is_assistant:
                cache.activate_past_recording()


AutoModel.register(KDAConfig, KDAModel, exist_ok=True)
AutoModelForCausalLM.register(KDAConfig, KDAForCausalLM, exist_ok=True)
