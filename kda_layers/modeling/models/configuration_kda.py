"""Configuration of KDA layers, and of KDA language models: all KDA, or hybrid with softmax attention."""

import difflib
import importlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from kda_layers.kernels.deprecation import OLD_KEYWORDS, recompute_words
from kda_layers.modeling.checks import OF_FLA, check_epsilon, check_kda_arguments
from kda_layers.modeling.models import hub

PRESETS = Path(__file__).parents[2] / "configs"
logger = logging.getLogger("kda_layers")

# Attributes that transformers or this package reads from a configuration without a field for them.
UNDECLARED = (
    "attn_implementation", "auto_map", "compression_config", "converted_from", "custom_pipelines",
    "experts_implementation", "keys_to_ignore_at_inference", "per_layer_config", "quantization_config",
    "task_specific_params", "tie_encoder_decoder", "tokenizer_class", "transformers_weights",
)  # fmt: skip
ROPE = ("rope_theta", "partial_rotary_factor")  # become part of the field rope_parameters in a family that has it
_warned: set[str] = set()  # unknown names that were logged already


class KDAFields(PreTrainedConfig):
    """Fields of KDA layers; a base of every configuration with such layers.

    An argument of `KimiDeltaAttention` is the field of that name with linear_ before it; both have the names of
    transformers' own configurations of KDA and gated delta nets.

    Args:
        linear_num_heads: query / key heads of a KDA layer.
        linear_num_value_heads: value heads of a KDA layer, a multiple of linear_num_heads; None for the same number.
        linear_head_dim: key width K of a KDA head.
        linear_value_head_dim: value width V of a KDA head; None for the same as linear_head_dim.
        linear_conv_kernel_dim: taps of the short convolution.
        linear_gate_activation: "lower_bound" or "softplus".
        linear_lower_bound: lowest log-decay per token in [-5, 0) with "lower_bound"; None with "softplus".
        linear_decay: "channel" for a log-decay of each key channel, or "head" for one that all channels of a value head
            share, as in gated delta nets. It shapes the weights.
        linear_allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        linear_gate_rank: rank of the projection of the output gate, and of the log-decay's unless linear_decay_rank is
            given; None for linear_value_head_dim, 0 for full rank.
        linear_decay_rank: rank of the log-decay's projection; None for linear_gate_rank, 0 for full rank. With
            linear_decay "head" None or 0, as the rank is full.
        linear_learned_rate: False to fix the rate exp(A_log) at 1, without A_log; with "lower_bound" only.
        linear_output_gate_bias: True for an output gate with a bias.
        linear_state_dtype: "float32", "bfloat16" or "int8", in which caches and the slots of continuous batching keep
            recurrent states; float64 models take "float32" alone. It is no property of the weights and may be set
            at any time: it is read when a cache gets its first states, and when the slots are made.
        linear_recompute: `recompute` of `kda_layers.kda`: "always", "never", or "auto", by which all KDA layers
            together keep at most a tenth of the device's memory for the backward.
        linear_memory_share: `memory_share` of `kda_layers.kda` for each KDA layer with "auto"; None for that tenth.
        layer_types: for each layer "linear_attention" (KDA) or the kind of its softmax attention.
    """

    softmax_types: ClassVar[tuple[str, ...]] = ("full_attention",)

    linear_num_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_gate_activation: str = "lower_bound"
    linear_lower_bound: float | int | None = -5.0
    linear_decay: str = "channel"
    linear_allow_neg_eigval: bool = False
    linear_gate_rank: int | None = None
    linear_decay_rank: int | None = None
    linear_learned_rate: bool = True
    linear_output_gate_bias: bool = False
    linear_state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"  # checked when it is set, too
    linear_recompute: str | bool | float = "auto"  # the last two in checkpoints of version 0.1
    linear_memory_share: float | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_names(type(self), kwargs)
        self._read_recompute(warn=self.transformers_version is None)  # which a saved configuration has
        super().__post_init__(**kwargs)

    def _read_recompute(self, warn: bool = True) -> None:
        words = recompute_words(self.linear_recompute, self.linear_memory_share, warn)
        self.linear_recompute, self.linear_memory_share = words

    def layer_arguments(self) -> dict[str, Any]:
        """Return the arguments of `KimiDeltaAttention` by name, except layer_idx and backend."""
        self._read_recompute()  # `from_pretrained` sets fields that it is given after `__post_init__`
        names = (f.removeprefix("linear_") for f in KDAFields.__dataclass_fields__ if f.startswith("linear_"))
        arguments = {name: getattr(self, f"linear_{name}") for name in names}
        return dict(hidden_size=self.hidden_size, rms_norm_eps=self.rms_norm_eps, **arguments)

    def complete_kda_fields(self) -> None:
        """Give fields that are still None their defaults."""
        if self.linear_num_value_heads is None:
            self.linear_num_value_heads = self.linear_num_heads
        if self.linear_value_head_dim is None:
            self.linear_value_head_dim = self.linear_head_dim
        if self.linear_gate_rank is None:
            self.linear_gate_rank = self.linear_value_head_dim
        self.base_model_tp_plan = self._tensor_parallel_plan()

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """Return the class's plan with rules for the KDA layers: {module or parameter: style}.

        `modeling.parallel.tensor_parallel` defines the styles. transformers logs a rule that matches nothing.
        """
        plan = dict(self.base_model_tp_plan or {})
        types = set(self.layer_types or ())
        if not types & set(self.softmax_types):
            shared = tuple(f".self_attn.{name}_proj" for name in "qkvo")
            plan = {name: style for name, style in plan.items() if ".self_attn." not in name or name.endswith(shared)}
        attention = {"": "kda_local_heads"}
        if "linear_attention" in types:
            decay_rank = self.linear_gate_rank if self.linear_decay_rank is None else self.linear_decay_rank
            factors = decay_rank and self.linear_decay == "channel"
            gates = "f_b_proj" if factors else "f_proj", "g_b_proj" if self.linear_gate_rank else "g_proj"
            rate = ("A_log",) if self.linear_learned_rate else ()
            attention |= dict.fromkeys((*gates, "b_proj", *rate, "dt_bias"), "colwise")
        if types & set(self.softmax_types) and getattr(self, "attention_bias", None) == "key":
            attention |= {"dt_proj": "kda_rowwise_to_heads", "A": "colwise"}
        return plan | {f"layers.*.self_attn.{name}".rstrip("."): style for name, style in attention.items()}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the code that loads the checkpoint with trust_remote_code=True."""
        hub.write_code(self, save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def validate_kda_fields(self) -> None:
        """Raise a ValueError that names the fields which contradict each other."""
        check_kda_arguments(self.layer_arguments(), "linear_")
        check_epsilon("initializer_range", self.initializer_range)
        if not 0 <= (self.attention_dropout or 0) <= 1:
            raise ValueError(f"attention_dropout must be in [0, 1], got {self.attention_dropout}")
        types = ("linear_attention", *self.softmax_types)
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - set(types):
            n = self.num_hidden_layers
            hint = f": cut it, too, config.layer_types = config.layer_types[:{n}]" if len(self.layer_types) > n else ""
            raise ValueError(f"layer_types must hold {n} of {types}, got {self.layer_types}{hint}")


def check_names(config: type[PreTrainedConfig], names: Iterable[str]) -> None:
    """Raise a TypeError for names that are probably meant for a field of the configuration.

    These are arguments of the layer, names that begin with linear_, and names close to a field's. Other unknown names
    are kept and logged once, as a checkpoint of another version may hold some.
    """
    fields = config.__dataclass_fields__
    generation = vars(GenerationConfig())  # left in the configurations of old checkpoints
    known = {*fields, *UNDECLARED, *generation, *(ROPE if "rope_parameters" in fields else ())}
    wrong = []
    for name in names:
        if name in known or hasattr(config, name) or name.startswith("_") or name.endswith("_token_id"):
            continue
        meant = f"linear_{OLD_KEYWORDS['KimiDeltaAttention'].get(name, name)}"
        if meant in fields:
            wrong.append(f"{name} (use {meant})")
        elif name in ("layer_idx", "backend", "output_activation"):
            wrong.append(f"{name} (an argument of KimiDeltaAttention only)")
        elif name in OF_FLA:
            wrong.append(f"{name} (use the field of {OF_FLA[name]})")
        elif close := difflib.get_close_matches(name, fields, 1, 0.85):
            wrong.append(f"{name} (use {close[0]})")
        elif name.startswith("linear_"):
            wrong.append(f"{name} (use one of {', '.join(f for f in fields if f.startswith('linear_'))})")
        elif name not in _warned:
            _warned.add(name)
            logger.warning("%s has no field %s: it is kept, but no layer reads it", config.__name__, name)
    if wrong:
        raise TypeError(f"{config.__name__} has no field {', '.join(wrong)}")


def check_at_least_one(config: Any, names: str) -> None:
    """Raise a ValueError unless each of the fields is 1 or more."""
    for name in names.split():
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


@strict
class KDAConfig(KDAFields):
    """Configuration of `KDAModel` and `KDAForCausalLM`.

    Args:
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP; None for 8/3 of hidden_size, rounded up to a multiple of 64.
        num_hidden_layers: number of decoder layers.
        linear_...: fields of the KDA layers, see `KDAFields`.
        full_attention_interval: every so many layers, one is softmax attention: 4 is the 3:1 pattern of Kimi Linear,
            0 is all KDA. Read only if layer_types is None.
        layer_types: for each layer "linear_attention" (KDA) or "full_attention".
        num_attention_heads, num_key_value_heads, head_dim: sizes of the softmax layers, which have no position
            encoding; None for num_attention_heads, and for hidden_size // num_attention_heads.
        attention_bias: "none", or "key" for softmax layers whose scores get a learned bias for each key and head,
            exp(A softplus(dt_proj(v))) of the key's values v, see `modeling_kda.KDABiasedAttention`. Such layers run on
            `kda_layers.kernels.biased_attention` for any attn_implementation and return no attention weights.
        attention_dropout: dropout of softmax attention weights while training; 0 with attention_bias "key".
        initializer_range: standard deviation of linear and embedding weights.
        rms_norm_eps: epsilon of every RMS norm.

    Raises:
        TypeError: a name that is probably meant for a field, see `check_names`.
        StrictDataclassError: (of huggingface_hub) a field of a wrong type, or fields that contradict each other; its
            cause is the ValueError or TypeError that names the field.
    """

    model_type = "kda_lm"  # flash-linear-attention's own model is "kda"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    base_model_tp_plan = {  # noqa: RUF012  (class attributes that transformers reads)
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    linear_num_heads: int = 8
    linear_head_dim: int = 128
    full_attention_interval: int = 0
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: str = "none"
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // 3 // 64) * 64
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            n = self.full_attention_interval
            self.layer_types = [
                "full_attention" if n and (i + 1) % n == 0 else "linear_attention"
                for i in range(self.num_hidden_layers)
            ]
        super().__post_init__(**kwargs)
        self.complete_kda_fields()
        # The first configuration registers the models, so that `import kda_layers` need not import them.
        importlib.import_module("kda_layers.modeling.models.modeling_kda")

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a reference configuration: "tiny" (0.96 M parameters), "reference" (43 M), "120m" or "1.3b".

        Raises:
            ValueError: an unknown name.
        """
        names = sorted(path.stem for path in PRESETS.glob("*.json"))
        if name not in names:
            raise ValueError(f"name must be one of {', '.join(names)}, got {name!r}")
        return cls.from_json_file(PRESETS / f"{name}.json")

    def validate_kda(self) -> None:
        """Raise a ValueError that names the fields which contradict each other."""
        check_at_least_one(self, "vocab_size hidden_size intermediate_size num_hidden_layers")
        check_at_least_one(self, "num_attention_heads num_key_value_heads head_dim")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads = {self.num_key_value_heads}, "
                f"got {self.num_attention_heads}"
            )
        if self.full_attention_interval < 0:
            raise ValueError(f"full_attention_interval must be 0 or more, got {self.full_attention_interval}")
        if self.attention_bias not in ("none", "key"):
            raise ValueError(f"attention_bias must be 'none' or 'key', got {self.attention_bias!r}")
        if self.attention_bias == "key" and "full_attention" not in self.layer_types:
            raise ValueError(
                f"attention_bias must be 'none' without a layer of 'full_attention', got 'key' with layer_types "
                f"{self.layer_types}"
            )
        if self.attention_bias == "key" and self.attention_dropout:
            raise ValueError(
                f"attention_dropout must be 0 with attention_bias = 'key', as `biased_attention` has no dropout, "
                f"got {self.attention_dropout}"
            )


AutoConfig.register(KDAConfig.model_type, KDAConfig, exist_ok=True)
