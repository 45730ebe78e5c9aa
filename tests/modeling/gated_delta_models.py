"""Tiny random models with gated delta nets, and these layers from their definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor
from torch.nn.functional import silu, softplus

GATED_DELTA_NETS = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen4_exp": "Qwen4ExpTextGatedDeltaNet",
    "lara_mini": "LaraMiniGatedDeltaNet",
}
# Experts are of Qwen3-Next and Qwen3.5 alone, the vision model around the text model of the latter.
CLASSES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM"),
    "lara_mini": ("LaraMiniConfig", "LaraMiniForCausalLM"),
}
HERE = [family for family in GATED_DELTA_NETS if hasattr(transformers, CLASSES[family][0])]


def make(family: str, common: dict[str, Any], dense: bool, layers: int, **fields: Any) -> Any:
    """A model with parameters as its class makes them; dense: without a router's jumps."""
    kinds = common.get("layer_types") or ["linear_attention", "full_attention", "linear_attention"]
    of_family: dict[str, Any] = dict(
        num_hidden_layers=layers, layer_types=kinds, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=8,
    )  # fmt: skip
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    if family != "olmo_hybrid":
        of_family["head_dim"] = 16
    if family == "qwen3_next":
        of_family |= experts | dict(mlp_only_layers=list(range(layers)) * dense)
    if family == "qwen4_exp":  # n-grams before the first layer; more tokens than the tests have are seen as they are
        of_family |= dict(
            hc_count=2, hc_lowrank=8, ple_layer_ids=[1], ple_embed_dim=16, heads_per_ngram=2, ngram_vocab_size_base=50,
            make_ngram_vocab_size_divisible_by=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16,
            indexer_budget=64, indexer_compress_ratio=4, split_ngram_parts=2,
        )  # fmt: skip
        common = common | dict(eos_token_id=2)
        if set(kinds) == {"linear_attention"}:  # n-grams would span packed documents
            of_family["ple_layer_ids"] = []
    if family in ("qwen3_5_moe", "qwen4_exp", "lara_mini"):
        of_family |= experts | (dict(num_experts=1, num_experts_per_tok=1) if dense else {})
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings", "initializer_range",
    )  # fmt: skip
    text = {n: common[n] for n in names} | of_family | fields
    if family == "lara_mini":
        del text["intermediate_size"]  # it has experts only
        text["tie_word_embeddings"] = False
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[family])
    if family == "qwen3_5_moe":
        vision = dict(
            depth=1, hidden_size=32, num_heads=2, out_hidden_size=32, intermediate_size=32, num_position_embeddings=16,
            patch_size=4, spatial_merge_size=2,
        )  # fmt: skip
        ids = {f"{name}_token_id": 90 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
        model = model_class(config_class(text_config=text, vision_config=vision, **ids))
    else:
        model = model_class(config_class(**text))
    if family == "qwen4_exp":
        model.generation_config.eos_token_id = None
    if dense and text.get("num_experts") == 1:  # one expert, which the other implementations do not compute in fp64
        model.set_experts_implementation("eager")
    return model


def inputs_of(layer: Any, x: Tensor, w: dict[str, Tensor]) -> Sequence[Tensor]:
    """q, k, v before their convolution [B, T, heads, width], decay logits, beta logits [B, T, HV] and output gate."""
    H, K, HV, V = layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim

    def project(name: str, *shape: int) -> Tensor:
        return (x @ w[f"{name}.weight"].T).unflatten(-1, shape)

    if "g_proj.weight" in w:  # a projection for each
        parts = [project(f"{n}_proj", *shape) for n, shape in zip("qkv", ((H, K), (H, K), (HV, V)), strict=True)]
        return [*parts, *(project(f"{n}_proj", HV) for n in "ab"), project("g_proj", HV, V)]
    if "in_proj_qkv.weight" in w:
        q, k, v = project("in_proj_qkv", -1).split([H * K, H * K, HV * V], -1)
        parts = [q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))]
        return [*parts, project("in_proj_a", HV), project("in_proj_b", HV), project("in_proj_z", HV, V)]
    group = HV // H
    of_head, gates = project("in_proj_qkvz", H, -1), project("in_proj_ba", H, 2, group)
    values = of_head[..., 2 * K :].unflatten(-1, (2, group, V))
    v, z = values[..., 0, :, :].flatten(2, 3), values[..., 1, :, :].flatten(2, 3)
    b, a = gates.flatten(-2).split(group, -1)
    return of_head[..., :K], of_head[..., K : 2 * K], v, a.flatten(2), b.flatten(2), z


def decays(layer: Any, a: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Decays [B, T, HV, 1] from their logits."""
    return (-w["A_log"].exp() * softplus(a + w["dt_bias"], threshold=50)).exp()[..., None]


def gate_and_project(layer: Any, o: Tensor, z: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The layer's output from the operator's o [B, T, HV, V]."""
    norm, out = ("o_norm", "o_proj") if "o_norm.weight" in w else ("norm", "out_proj")
    eps = getattr(layer, norm).variance_epsilon
    o = o / ((o * o).mean(-1, keepdim=True) + eps).sqrt() * w[f"{norm}.weight"] * silu(z)
    return o.flatten(2) @ w[f"{out}.weight"].T
