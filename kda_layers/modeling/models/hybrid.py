"""Parts shared by all models with KDA layers: the layer in a decoder's attention slot, and the forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel

from kda_layers.kernels.over_ranks.shards import Shards
from kda_layers.kernels.registry import keep_backend
from kda_layers.modeling.inputs.arguments import takes_cache
from kda_layers.modeling.inputs.keywords import (
    is_checkpointed,
    is_engine_cache,
    loss_options,
    refuse_misspelt,
    without_plans,
)
from kda_layers.modeling.inputs.masks import masks_by_type, masks_of_engine
from kda_layers.modeling.inputs.sequences import Layout, read_layout
from kda_layers.modeling.layer.cache import with_kda_layers
from kda_layers.modeling.layer.fused_sums import add_and_normalise
from kda_layers.modeling.layer.layer import KimiDeltaAttention
from kda_layers.modeling.layer.states import StateDtypeOfModel
from kda_layers.modeling.models.generation import HybridGeneration
from kda_layers.modeling.models.hub import write_card
from kda_layers.modeling.models.loss import check_skip_logits, logits_and_loss
from kda_layers.modeling.parallel import tensor_parallel as tensor_parallel  # registers the styles of the plans
from kda_layers.modeling.parallel.context_parallel import read_shards
from kda_layers.modeling.seams import (
    CACHE,
    OVERRIDDEN,
    BaseModelOutputWithPast,
    Cache,
    CausalLMOutputWithPast,
    can_return_tuple,
    capture_outputs,
    check,
)

check(OVERRIDDEN)


class KDAAttention(StateDtypeOfModel, KimiDeltaAttention):
    """`KimiDeltaAttention` built from a configuration with `KDAFields`, called as transformers calls attention."""

    gradient_checkpointing = False  # that of its decoder layer

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        self.model_config = config
        super().__init__(**config.layer_arguments(), layer_idx=layer_idx)
        self.layers_in_model = config.layer_types.count("linear_attention")

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        cu_seqlens: Tensor | None = None,
        shards: Shards | None = None,
        by_kernel: bool = True,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return (output, None), as transformers' decoder layers expect; positions and the like are not read.

        A caller that has asked for the kernel of a decode step in vain says by_kernel=False.
        """
        return self.compute(hidden_states, attention_mask, cache, cu_seqlens, shards, by_kernel), None


class HybridPreTrainedModel(PreTrainedModel):
    """Flags and hooks of a model's KDA layers for transformers."""

    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # noqa: RUF012  (class attributes that transformers reads)
    _is_stateful = False  # states can be taken back: see cache.KDACacheLayer

    @property
    def supports_context_parallel(self) -> bool:
        """True once `enable_context_parallel` lets the KDA layers exchange states: transformers' trainers ask this."""
        parts = [m for m in self.modules() if isinstance(m, HybridModel)]
        return bool(parts) and all(part.context_group is not None for part in parts)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with a model card (README.md, see `hub.write_card`).

        `push_to_hub` replaces the card by one of transformers or of the repository: to publish ours, upload the folder.
        """
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            write_card(self, save_directory)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, KimiDeltaAttention):
            module.reset_gate()

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **options: Any
    ) -> None:
        """Checkpoint as transformers does, but recompute layers with the backend of their forward."""
        super()._set_gradient_checkpointing(enable, partial(_checkpoint, gradient_checkpointing_func), **options)
        for layer in self.modules():  # every_n_layers leaves out decoder layers, but not the attention in them
            attention = getattr(layer, "self_attn", None)
            if isinstance(attention, KDAAttention):
                attention.gradient_checkpointing = layer.gradient_checkpointing


def _checkpoint(function: Any, f: Any, *args: Any) -> Any:
    return function(keep_backend(f), *args)


class HybridModel(HybridPreTrainedModel):
    """Embedding, decoder layers, final norm.

    A subclass defines `make_layer`. Layers are called with hidden_states [B, T, D] and the keywords attention_mask (of
    their type), cache (by transformers' name for it), position_ids, cu_seqlens and those of `position_inputs`.
    """

    norm_class: ClassVar[type[nn.Module]]
    context_group: str | None = None  # name of the process group that a sequence is cut over; see context_parallel

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(config.num_hidden_layers))
        self.norm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False

    def make_layer(self, layer_idx: int) -> nn.Module:
        """Return the decoder layer of the type that the configuration gives."""
        raise NotImplementedError

    def position_inputs(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """Return further keywords for layers to encode position_ids [B or 1, T]."""
        return {}

    @takes_cache
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states after the final norm.

        Args:
            input_ids: [B, T] token ids, or inputs_embeds [B, T, D].
            attention_mask: [B, S], 1 for real tokens and 0 for padding, S counting the tokens in the cache and these;
                [1 or B, heads, T, S], bool or additive, causal within each document; or a dict of prepared masks by
                layer type.
            position_ids: [T] or [B or 1, T], for softmax layers that encode positions. Without a cache they start at 0
                or 1 and increase by 1; a step back or a repeat, in a single row, begins the next packed sequence.
            cache: cache to continue; updated. `past_key_values`, its name before transformers 5.24, is read too.
            use_cache: return a cache; None for config.use_cache, except in training and for packed sequences.
            cu_seqlens: [N + 1] offsets of sequences packed along T (then B = 1), int32 or int64; also read from
                cu_seq_lens_q, seq_idx, position_ids, as transformers' DataCollatorWithFlattening gives them, or a mask
                of scores. Softmax layers encode position_ids if they are given as well.
            **kwargs: keywords of transformers for attention functions, outputs and continuous batching. Others are
                ignored, as transformers' models ignore them, but for misspelt ones, see `keywords.refuse_misspelt`.

        Returns:
            BaseModelOutputWithPast: last_hidden_state [B, T, D], the recorded outputs requested, and the cache, which
                transformers before 5.24 calls `past_key_values`.

        Raises:
            TypeError: a keyword that is close to one that changes results, as cu_seqlen or past_key_value.
            ValueError: not exactly one of input_ids and inputs_embeds; a cache while training with gradient
                checkpointing, or for packed sequences in a model with softmax layers; masks or positions that the KDA
                layers cannot follow, see `sequences.read_layout`; the errors of the layers.
        """
        from_engine, slots, over_ranks = is_engine_cache(cache), None, {}
        if not from_engine:
            refuse_misspelt(kwargs, type(self))
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if from_engine:
            if (allocator := cache.cache_allocators.get("linear_attention")) is not None:
                slots = allocator.step(position_ids, **kwargs)
            layout = Layout(None if slots is None else slots.cu_seqlens, position_ids, None, attention_mask)
            masks = masks_of_engine(self.config, attention_mask)
        else:
            if self.context_group is not None:
                call = kwargs | dict(
                    attention_mask=attention_mask, position_ids=position_ids, cache=cache, use_cache=use_cache,
                    cu_seqlens=cu_seqlens,
                )  # fmt: skip
                shards, offsets = read_shards(self.context_group, self.config, inputs_embeds, call)
                over_ranks, layout = {"shards": shards}, Layout(offsets, None, None, None)
            else:
                if cache is not None:
                    with_kda_layers(cache)
                layout = read_layout(
                    inputs_embeds, attention_mask, position_ids, cache, cu_seqlens=cu_seqlens, **kwargs
                )
                cache = self._cache(cache, use_cache, layout.cu_seqlens is not None)
            masks = masks_by_type(self.config, inputs_embeds, layout, cache)
        positions, encodings = self._positions(inputs_embeds, position_ids, layout, cache)
        hidden_states = inputs_embeds
        # That of an engine goes to the attention function, which updates it, by its new name in every version.
        cache_name = "cache" if from_engine else CACHE
        # The first layers only where `generate` exits early, or where the rest was cut off.
        layers = self.layers[: self.config.num_hidden_layers]
        with without_plans(inputs_embeds, None if from_engine else cache):
            for layer, kind in zip(layers, self.config.layer_types, strict=False):
                hidden_states = layer(
                    hidden_states,
                    attention_mask=masks[kind],
                    cu_seqlens=layout.cu_seqlens,
                    position_ids=positions,
                    **{cache_name: cache if slots is None or kind != "linear_attention" else slots},
                    **over_ranks,
                    **encodings,
                    **kwargs,
                )
        _, normed = add_and_normalise(hidden_states, None, self.norm)
        return BaseModelOutputWithPast(last_hidden_state=normed, **{CACHE: None if from_engine else cache})

    def _positions(
        self, x: Tensor, position_ids: Tensor | None, layout: Layout, cache: Cache | None
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the positions [B or 1, T] that layers get, and `position_inputs`; none for KDA layers alone."""
        T = x.shape[1]
        if position_ids is not None and position_ids.shape[-1] != T:
            raise ValueError(f"position_ids must have shape [{T}] or [B or 1, {T}], got {list(position_ids.shape)}")
        if set(self.config.layer_types) == {"linear_attention"}:
            return None, {}
        positions = position_ids if layout.positions is None else layout.positions
        if positions is None:
            past = 0 if cache is None else cache.get_seq_length()
            positions = torch.arange(T, device=x.device)[None] + past
        return positions, self.position_inputs(x, (positions if position_ids is None else position_ids).view(-1, T))

    def _cache(self, cache: Cache | None, use_cache: bool | None, packed: bool) -> Cache | None:
        """Return the cache that this call fills, or None."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        wanted = use_cache or cache is not None
        if wanted and is_checkpointed(self):
            raise ValueError(
                "use_cache must be False and cache None while training with gradient checkpointing, "
                f"got use_cache={use_cache}: recomputation would advance the cache twice"
            )
        if wanted and packed and set(self.config.layer_types) != {"linear_attention"}:
            raise ValueError(
                "cu_seqlens must be None with a cache in a model with softmax layers, "
                f"got use_cache={use_cache}: their keys and values are cached per batch row"
            )
        return with_kda_layers(DynamicCache(config=self.config)) if wanted and cache is None else cache


class HybridForCausalLM(HybridGeneration, HybridPreTrainedModel, GenerationMixin):
    """A `HybridModel` with a language-model head.

    Attributes:
        skip_logits: default of the keyword of `forward`. Set it to False for code that trains with labels and reads
            `.logits` in every step, but passes no keyword: the head then computes them once.
    """

    skip_logits: bool | None = None

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    model_class: ClassVar[type[HybridModel]]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return next-token logits, and the loss if labels are given.

        In training with labels, the loss is computed by chunks of tokens, which saves most of the memory of a step with
        a large vocabulary. The logits are then computed when the output's are read (`loss.LazyLogitsOutput`),
        with their gradients; `skip_logits=False` computes them at once and the loss from them.

        Args: as `HybridModel.forward`, and
            labels: [B, T] token ids, -100 to ignore; shifted here.
            logits_to_keep: number of last positions to compute logits for (0: all), or their indices.
            skip_logits: True for the loss without logits, where the head is a plain linear layer and the loss
                transformers' ForCausalLMLoss; False for both. None for the model's attribute `skip_logits`, and where
                that is None, too, True in training (`model.train()` and gradients enabled) with labels.

        Returns:
            CausalLMOutputWithPast: loss (scalar) or None, logits [B, T, vocab_size], the cache.

        Raises: as `HybridModel.forward`; keywords of the loss function are accepted too.
            ValueError: skip_logits=True without labels or with logits_to_keep.
        """
        check_skip_logits(skip_logits, labels, logits_to_keep)
        for_loss = {} if is_engine_cache(cache) else loss_options(kwargs, type(self), self.loss_function)
        kwargs = {name: value for name, value in kwargs.items() if name not in for_loss}
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
            inputs_embeds=inputs_embeds, use_cache=use_cache, cu_seqlens=cu_seqlens, **kwargs,
        )  # fmt: skip
        return logits_and_loss(
            self, outputs.last_hidden_state, labels, logits_to_keep, skip_logits, kwargs, for_loss,
            hidden_states=outputs.hidden_states, attentions=outputs.attentions, **{CACHE: getattr(outputs, CACHE)},
        )  # fmt: skip
