"""KDA language models: decoder layers of KDA or softmax attention and gated MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from kda_layers.kernels import biased_attention
from kda_layers.kernels.attention_bias.contract import ATTENTION
from kda_layers.kernels.declarations import arch_of
from kda_layers.kernels.fused.linear_step import RepeatedLinearStep
from kda_layers.kernels.fused.swiglu import swiglu, swiglu_linear
from kda_layers.kernels.tracing import autocasts, may_run_again
from kda_layers.modeling.inputs.arguments import rename_cache
from kda_layers.modeling.inputs.keywords import is_engine_cache
from kda_layers.modeling.layer.decode_plan import DecodePlan, key_of_step
from kda_layers.modeling.layer.fast_paths import (
    Call,
    FastPath,
    Reason,
    SupposedCall,
    additions,
    fast_path,
    hooks,
)
from kda_layers.modeling.layer.fused_sums import FUSED_NORM, SHARED_INPUT, add_and_normalise, normal, projections
from kda_layers.modeling.layer.remembered import Remembered
from kda_layers.modeling.layer.states import LayerState
from kda_layers.modeling.layer.weights import DEVICES, MERGED_WEIGHTS, KeepsFP32, MergedWeights, as_local, forget_local
from kda_layers.modeling.models.configuration_kda import KDAConfig
from kda_layers.modeling.models.hybrid import HybridForCausalLM, HybridModel, HybridPreTrainedModel, KDAAttention
from kda_layers.modeling.models.key_bias import key_bias, refuse_weights, with_past
from kda_layers.modeling.models.registration import register
from kda_layers.modeling.seams import (
    ALL_ATTENTION_FUNCTIONS,
    RENAMED,
    Cache,
    GradientCheckpointingLayer,
    eager_attention_forward,
)


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
        if SPLIT_KEYS.serves(Call(hidden_states), self, _hides_keys(attention_mask)):
            bias = torch.where(attention_mask, 0.0, -torch.inf)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            o = biased_attention(q, k, v, bias, scale=self.scaling, causal=False)
            return self.o_proj(o.flatten(2)), None
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attention_dropout if self.training else 0.0
        o, weights = attention(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(o.reshape(*hidden_states.shape[:2], -1)), weights

    def fast_paths(self, call: SupposedCall) -> Iterator[tuple[FastPath, tuple[Any, ...]]]:
        """Yield the paths that a call would ask for, and their facts."""
        if call.tokens == 1 and not call.records:
            yield SPLIT_KEYS, (self, True)


def _hides_keys(mask: Any) -> bool:
    """Return True for a mask [1|B, 1, T, S] of bools."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1


@fast_path("attention of one token over a static cache, split by keys", instead="transformers' attention function")
def SPLIT_KEYS(call: Any, layer: KDASoftmaxAttention, hides_keys: bool) -> Iterator[Reason]:
    """One token of each sequence over a static cache, for whose mask SDPA has no kernel that splits the keys."""
    if call.compiling:  # before `requested` reads a context variable, which torch 2.11 cannot trace
        yield Reason("is compiled (torch.compile)")
    if call.tokens != 1:
        yield Reason("has several tokens")
    if call.device.type not in DEVICES:
        yield Reason(f"is on {call.device.type}")
    if not hides_keys:
        yield Reason("has no mask of bools")
    if (asked := ATTENTION.requested(None)) not in (None, "triton"):
        yield Reason(f"is asked to run on backend {asked!r}")
    fields = call.dtype, layer.head_dim, layer.num_key_value_groups, "per key", torch.float32, False
    for text in ATTENTION.backend("triton").unsupported(
        ATTENTION.problem(call.device.type, arch_of(call.device), *fields)
    ):
        yield Reason(text)
    if (chosen := layer.config._attn_implementation) != "sdpa":
        yield Reason(f"has attn_implementation={chosen!r}")
    if layer.training and layer.config.attention_dropout:
        yield Reason("has dropout", "call model.eval()")
    if call.grad:
        yield Reason("runs with gradients enabled")
    if call.autocast:
        yield Reason("runs under autocast", "load the model in bfloat16 instead")


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
        """Return (output [B, T, D], None); attention_mask as `masks.create_key_mask` makes it."""
        refuse_weights(self.config, kwargs)
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        bias = key_bias(self.dt_proj(v.flatten(2)), self.A)
        k, v, bias, causal = with_past(k, v, bias, attention_mask, cache, self.layer_idx)
        o = biased_attention(q, k, v, bias, scale=self.scaling, causal=causal, cu_seqlens=cu_seqlens)
        return self.o_proj(o.flatten(2)), None

    def fast_paths(self, call: SupposedCall) -> Iterator[tuple[FastPath, tuple[Any, ...]]]:
        """Yield nothing: every call runs `biased_attention`."""
        yield from ()


class KDAMLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: KDAConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.merged_weights = MergedWeights()

    def forward(self, x: Tensor) -> Tensor:
        layers = self._inputs()
        self.merged_weights.watch(x)
        # Autocast keeps its casts of parameters, not of a buffer.
        separate = torch.is_grad_enabled() or may_run_again() or autocasts(x.device.type)
        whole = None if separate else self.merged_weights.weight(layers)
        gate, up = projections(x, layers) if whole is None else nn.functional.linear(x, whole).chunk(2, -1)
        if SHARED_INPUT.serves(Call(gate), (self.down_proj,)):
            return swiglu_linear(gate, up, self.down_proj.weight)
        return self.down_proj(swiglu(gate, up))

    def fast_paths(self, call: SupposedCall) -> Iterator[tuple[FastPath, tuple[Any, ...]]]:
        """Yield the paths that a call would ask for, and their facts."""
        layers = self._inputs()
        if call.records:
            yield SHARED_INPUT, ((*layers, self.down_proj),)
        else:
            yield MERGED_WEIGHTS, (layers, self.merged_weights)

    def merged(self) -> Tensor | None:
        """Return the weights of gate and up in one buffer if `repeated` is what calling the layers does."""
        if next(hooks(self), None) or next(additions(self.down_proj, biased=False), None):
            return None
        return self.merged_weights.weight(self._inputs())

    def repeated(self, norm: nn.RMSNorm, merged: Tensor) -> tuple[RepeatedLinearStep, RepeatedLinearStep]:
        """Return the two launches of residual + forward(norm(residual)): norm to SwiGLU, then the down projection.

        The kernel launched before the first one must not write the weights.
        """
        up = RepeatedLinearStep(merged, norm, swiglu=True, overlap=True)
        return up, RepeatedLinearStep(self.down_proj.weight, overlap=True)

    def _inputs(self) -> tuple[nn.Module, nn.Module]:
        """Return the layers that read the input."""
        return as_local(self.gate_proj), as_local(self.up_proj)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        forget_local(self)
        super()._apply(fn, recurse)
        self.merged_weights.refresh(self)
        return self


# A decode step: the attention's plan and the two launches of the MLP, None where it is called.
DecoderStep = tuple[DecodePlan, tuple[RepeatedLinearStep, RepeatedLinearStep] | None]


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
        self.step: Remembered[DecoderStep] = Remembered()

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Map [B, T, D] to [B, T, D]; kwargs are those of `HybridModel`'s layers."""
        kwargs = rename_cache(kwargs)
        decoded = self._decode(hidden_states, kwargs)
        if decoded is not None:
            return decoded
        residual, x = add_and_normalise(hidden_states, None, self.input_layernorm)
        x, _ = self.self_attn(x, **kwargs)
        residual, x = add_and_normalise(residual, x, self.post_attention_layernorm)
        return residual + self.mlp(x)

    def fast_paths(self, call: SupposedCall) -> Iterator[tuple[FastPath, tuple[Any, ...]]]:
        """Yield the paths that a call would ask for, and their facts."""
        if call.tokens == 1 and not call.records:
            yield DECODER_STEP, (self, {"cache": True})  # only its presence matters
        yield FUSED_NORM, (self.input_layernorm,)
        yield FUSED_NORM, (self.post_attention_layernorm,)

    def _decode(self, x: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """Return the output for one token of each sequence; None if the modules must be called.

        Of one sequence, five launches do it; of several, the larger products and what surrounds them are apart.
        """
        cache, attention = arguments.get("cache"), cast(Any, self.self_attn)
        if x.shape[1] != 1 or cache is None:
            return None
        apart = (arguments.get(name) is None for name in ("attention_mask", "cu_seqlens"))
        key = key_of_step(x, type(cache), *apart)
        step = None if key is None else self.step.get(self, key)  # compiled code guards on what it reads
        if step is None and not DECODER_STEP.serves(Call(x), self, arguments):
            return None
        state = LayerState(cache, attention.layer_idx, x.shape[0])
        if step is None or not step[0].fits(attention, state):
            merged = self.mlp.merged()  # before the first launch, as it may copy the weights
            plan = attention.plan_step(x, state, self.input_layernorm)
            if plan is None:
                arguments["by_kernel"] = False  # it was asked for
                return None
            step = plan, None if merged is None else self.mlp.repeated(self.post_attention_layernorm, merged)
            if plan.lasts and merged is not None and key is not None:
                self.step.put(self, key, step)
        plan, mlp = step
        y = plan.output(attention, plan.run(attention, x, state), x)
        if mlp is None:
            return y + self.mlp(self.post_attention_layernorm(y))
        up, down = mlp
        return down(up(y), y)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.step.forget()
        return super()._apply(fn, recurse)


@fast_path("decode step of a decoder layer by few launches", instead="its modules one by one")
def DECODER_STEP(call: Any, layer: KDADecoderLayer, arguments: Mapping[str, Any]) -> Iterator[Reason]:
    """One token of each sequence on a GPU, through plain norms and a KDA layer that nothing observes."""
    cache = arguments.get("cache")
    if call.tokens != 1:
        yield Reason("has several tokens")
    if call.device.type not in DEVICES:
        yield Reason(f"is on {call.device.type}")
    if cache is None:
        yield Reason("has no cache")
    if arguments.get("attention_mask") is not None or arguments.get("cu_seqlens") is not None:
        yield Reason("has padding or packed sequences")
    if call.grad:
        yield Reason("runs with gradients enabled", "call it under torch.no_grad()" if cache is not None else "")
    if call.autocast:
        yield Reason("runs under autocast", "load the model in bfloat16 instead")
    if call.global_hooks:
        yield Reason("runs under global hooks of torch.nn", "remove them")
    if type(layer.mlp) is not KDAMLP:
        yield Reason(f"has a {type(layer.mlp).__name__} for its MLP")
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        yield from normal(norm, call.dtype)
    if type(layer.self_attn) is not KDAAttention:
        yield Reason(f"has a {type(layer.self_attn).__name__} for its attention")
    else:
        yield from layer.self_attn.bypassed()


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
