"""The models that transformers' tests run on. To add one, append a `Case`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from kda_layers import KDAConfig, KDAForCausalLM, KDAModel, swap_attention
from kda_layers.modeling.models.configuration_variants import KDALlamaConfig, KDAMistralConfig, KDAQwen3Config
from kda_layers.modeling.models.variant import (
    KDALlamaForCausalLM,
    KDALlamaModel,
    KDAMistralForCausalLM,
    KDAMistralModel,
    KDAQwen3ForCausalLM,
    KDAQwen3Model,
)


@dataclass(frozen=True)
class Case:
    """One model.

    Args:
        name: what its tests are called by.
        config_class: of the configuration.
        fields: of a configuration of two layers.
        models: the classes made of it, base model first.
        skips: test by test what is skipped, and why.
        attributes: flags of transformers' test class.
    """

    name: str
    config_class: type[PreTrainedConfig]
    fields: dict[str, Any]
    models: tuple[type[PreTrainedModel], ...]
    skips: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PreTrainedConfig:
        return self.config_class(**self.fields)


def swapped(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A stock class whose models have their attention swapped as soon as they are made."""

    def __init__(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        stock.__init__(self, config)
        swap_attention(self)

    # With the stock class's name and module, by which transformers finds how its checkpoints are named.
    return type(stock.__name__, (stock,), {"__init__": __init__, "__module__": stock.__module__})


SIZES: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
HYBRID = dict(layer_types=["linear_attention", "full_attention"])
NO_WEIGHTS = dict.fromkeys(
    (
        "test_attention_outputs", "test_capture_outputs_decorator", "test_model_outputs_equivalence",
        "test_retain_grad_hidden_states_attentions",
    ),
    "attention with a bias for each key has no weights to return, and refuses to be asked",
)  # fmt: skip
KDA = SIZES | dict(linear_num_heads=2, linear_head_dim=16)

CASES = [
    Case("KDA", KDAConfig, KDA, (KDAModel, KDAForCausalLM)),
    Case("KDAHybrid", KDAConfig, KDA | HYBRID, (KDAModel, KDAForCausalLM)),
    Case("KDAKeyBias", KDAConfig, KDA | HYBRID | dict(attention_bias="key"), (KDAModel, KDAForCausalLM), NO_WEIGHTS),
    Case("KDALlama", KDALlamaConfig, SIZES | HYBRID, (KDALlamaModel, KDALlamaForCausalLM)),
    Case("KDAQwen3", KDAQwen3Config, SIZES | HYBRID | dict(head_dim=8), (KDAQwen3Model, KDAQwen3ForCausalLM)),
    Case(
        "KDAMistral", KDAMistralConfig,
        SIZES | dict(layer_types=["linear_attention", "sliding_attention"], sliding_window=4),
        (KDAMistralModel, KDAMistralForCausalLM),
    ),
]  # fmt: skip

# Latent attention and experts as the stock models have them.
EXPERTS = SIZES | dict(
    num_key_value_heads=4, kv_lora_rank=16, v_head_dim=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
    moe_intermediate_size=16, num_experts_per_tok=2, n_group=2, topk_group=1, mlp_layer_types=["dense", "sparse"],
)  # fmt: skip
KIMI = EXPERTS | HYBRID | dict(linear_num_heads=2, linear_head_dim=16, num_local_experts=8)
GLM = KIMI | dict(qk_rope_head_dim=0, q_lora_rank=32, n_routed_experts=8)
BAILING = EXPERTS | HYBRID | dict(num_local_experts=8, head_dim=8, first_k_dense_replace=1, num_mtp_layers=0)
FLAGS = dict(test_all_params_have_gradient=False)  # an expert that no token goes to has none
GLM_SKIPS = {
    "test_hidden_states_output": "hidden states have a dimension more (hyper-connections)",
    "test_training_overfit": "the text model has no head, hence no loss",
}
BAILING_SKIPS = {"test_reverse_loading_mapping": "fails on the stock model: its renamings do not fit its own names"}


def stock_cases() -> list[Case]:
    """The stock models with KDA layers that this version of transformers has, and the same ones swapped."""
    cases = []
    for name, fields, heads, skips in (
        ("KimiLinear", KIMI, ["Model", "ForCausalLM"], {}),
        ("Glm5NextText", GLM, ["Model"], GLM_SKIPS),
        ("BailingHybrid", BAILING, ["Model", "ForCausalLM"], BAILING_SKIPS),
    ):
        if hasattr(transformers, f"{name}Config"):
            config_class = getattr(transformers, f"{name}Config")
            stock = [getattr(transformers, name + head) for head in heads]
            for kind, models in (("Stock", stock), ("Swapped", map(swapped, stock))):
                cases.append(Case(kind + name, config_class, fields, tuple(models), skips, FLAGS))
    return cases


CASES += stock_cases()
