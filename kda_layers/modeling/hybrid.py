"""What every model with KDA layers shares: the layer in a decoder's attention slot, the forward pass, generation."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from kda_layers.kernels.registry import keep_backend
from kda_layers.modeling.cache import with_kda_layers
from kda_layers.modeling.calls import loss_options, refuse_unknown, without_plans
from kda_layers.modeling.hub import CardMixin
from kda_layers.modeling.key_bias import create_key_mask
from kda_layers.modeling.layer import KimiDeltaAttention
from kda_layers.modeling.packing import Layout, read_layout

MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


def masks_by_type(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    layout: Layout,
    past_key_values: Cache | None,
) -> dict[str, Any]:
    """The mask of each type of layer: padding [B, T] or None for KDA layers, transformers' masks for softmax layers.

    Each type names the layer whose cache knows the lengths: left to search for it, transformers 5.17 takes a KDA layer
    for one of full attention where other layers have sliding windows.
    """
    kinds = config.layer_types
    # In a variant's configuration the field says whether projections have biases.
    biased = getattr(config, "attention_bias", None) == "key"
    functions = MASKS | ({"full_attention": create_key_mask} if biased else {})
    return {"linear_attention": layout.padding} | {
        kind: functions[kind](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=layout.attention_mask,
            past_key_values=past_key_values,
            position_ids=layout.positions,  # None unless packed: transformers would read their values
            layer_idx=kinds.index(kind),
        )
        for kind in dict.fromkeys(kinds)
        if kind != "linear_attention"
    }


def masks_for_generate(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Cache | None,
    **_: Any,
) -> dict[str, Any]:
    """`masks_by_type` as generate calls it, ahead of a compiled forward that cannot read the values of a mask."""
    layout = read_layout(inputs_embeds, attention_mask, None, past_key_values)
    if layout.cu_seqlens is not None:
        raise ValueError("attention_mask must hold one document in each row to generate, got packed documents")
    return masks_by_type(config, inputs_embeds, layout, past_key_values)


def default_positions(x: Tensor, layout: Layout, cache: Cache | None) -> Tensor:
    """Positions [1, T] of tokens x [B, T, ...]: within each packed sequence, or from the end of the cache on."""
    if layout.positions is not None:
        return layout.positions
    return torch.arange(x.shape[1], device=x.device)[None] + (0 if cache is None else cache.get_seq_length())


class KDAAttention(KimiDeltaAttention):
    """`KimiDeltaAttention` built from a configuration with `KDAFields`, called as transformers calls attention."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(
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
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As `KimiDeltaAttention.forward`, and None for attention weights; positions and the like are not needed."""
        return super().forward(hidden_states, attention_mask, past_key_values, cu_seqlens), None


class HybridPreTrainedModel(CardMixin, PreTrainedModel):
    """What transformers needs to know of a model's KDA layers."""

    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # noqa: RUF012  (class attributes that transformers reads)
    _is_stateful = False  # states can be taken back: see cache.KDACacheLayer

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, KimiDeltaAttention):
            module.reset_gate()

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **options: Any
    ) -> None:
        """As transformers', but layers are recomputed with the backend of their forward (see `use_backend`)."""
        super()._set_gradient_checkpointing(enable, partial(_checkpoint, gradient_checkpointing_func), **options)


def _checkpoint(function: Any, f: Any, *args: Any) -> Any:
    return function(keep_backend(f), *args)


class HybridModel(HybridPreTrainedModel):
    """Embedding, decoder layers, final norm.

    A subclass says how a layer is made. It is called with hidden_states [B, T, D] and the keywords attention_mask (of
    its type), past_key_values, position_ids, cu_seqlens and those of `position_inputs`.
    """

    norm_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(config.num_hidden_layers))
        self.norm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False

    def make_layer(self, layer_idx: int) -> nn.Module:
        """Decoder layer of the type that the configuration says."""
        raise NotImplementedError

    def position_inputs(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """What layers get besides position_ids [B or 1, T] to encode positions."""
        return {}

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
            attention_mask: [B, S], 1 for real tokens and 0 for padding, S the tokens in the cache and these;
                [1 or B, heads, T, S], bool or additive, which must say that attention is causal within each document;
                or a dict of prepared masks by layer type.
            position_ids: [T] or [B or 1, T], for softmax layers that encode positions. Without a cache they start at 0
                or 1 and go on by 1; a step back or a repeat, in a single row, begins the next packed sequence.
            past_key_values: cache to continue; updated.
            use_cache: return a cache; by default config.use_cache, but not while training or for packed
                sequences.
            cu_seqlens: [N + 1] offsets of sequences packed along T (then B = 1), int32 or int64; also read from
                cu_seq_lens_q, seq_idx, position_ids, as transformers' DataCollatorWithFlattening gives them, or a mask
                of scores. position_ids that are given as well are the ones that softmax layers encode.
            **kwargs: keywords of transformers for attention functions and outputs.

        Returns:
            BaseModelOutputWithPast: last_hidden_state [B, T, D], past_key_values, and what was asked to be recorded.

        Raises:
            TypeError: a keyword that nothing would read.
            ValueError: not exactly one of input_ids and inputs_embeds; a cache while training with gradient
                checkpointing, or for packed sequences in a model with softmax layers; masks or positions that the KDA
                layers cannot follow, see `packing.read_layout`; what the layers raise.
        """
        refuse_unknown(kwargs, type(self))
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if past_key_values is not None:
            with_kda_layers(past_key_values)
        layout = read_layout(
            inputs_embeds, attention_mask, position_ids, past_key_values, cu_seqlens=cu_seqlens, **kwargs
        )
        packed = layout.cu_seqlens is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        past_key_values = self._cache(past_key_values, use_cache, packed)
        masks = attention_mask
        if not isinstance(attention_mask, dict):
            masks = masks_by_type(self.config, inputs_embeds, layout, past_key_values)
        if position_ids is None:
            position_ids = default_positions(inputs_embeds, layout, past_key_values)
        hidden_states = inputs_embeds
        encodings = self.position_inputs(hidden_states, position_ids.view(-1, inputs_embeds.shape[1]))
        with without_plans(inputs_embeds, past_key_values):
            for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
                hidden_states = layer(
                    hidden_states,
                    attention_mask=masks[kind],
                    past_key_values=past_key_values,
                    cu_seqlens=layout.cu_seqlens,
                    position_ids=position_ids if layout.positions is None else layout.positions,
                    **encodings,
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
        if wanted and packed and set(self.config.layer_types) != {"linear_attention"}:
            raise ValueError(
                "cu_seqlens must be None with a cache in a model with softmax layers, "
                f"got use_cache={use_cache}: their keys and values are cached per batch row"
            )
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        return None if cache is None else with_kda_layers(cache)


class HybridForCausalLM(HybridPreTrainedModel, GenerationMixin):
    """A `HybridModel` with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    model_class: ClassVar[type[HybridModel]]
    create_masks_for_generate = staticmethod(masks_for_generate)  # what generate prepares for compiled decoding

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model = self.model_class(config)
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

        Args: as `HybridModel.forward`, and
            labels: [B, T] token ids, -100 to ignore; shifted here.
            logits_to_keep: logits of the last so many positions only (0: all), or of these indices.

        Returns:
            CausalLMOutputWithPast: loss (scalar) or None, logits [B, T, vocab_size], past_key_values.

        Raises: as `HybridModel.forward`; a TypeError also for a keyword that the loss function does not name either.
        """
        for_loss = loss_options(kwargs, self.loss_function)
        refuse_unknown(kwargs := {name: kwargs[name] for name in kwargs if name not in for_loss}, type(self))
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
            vocab_size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs, **for_loss)
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
