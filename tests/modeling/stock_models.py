"""Tiny random models of the families that `swap_attention` changes in place, and their layers from their definition."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import conv1d, pad, sigmoid, silu, softplus

from tests.modeling import gated_delta_models

KDA_LAYERS = {
    "kimi_linear": "KimiLinearDeltaAttention",
    "glm5_next": "Glm5NextTextLinearAttention",
    "bailing_hybrid": "BailingHybridDeltaAttention",
}
LIKE_OTHERS = ("qwen3_5", "qwen4_exp", "lara_mini")  # their layers are those of qwen3_5_moe


def each(families: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrise a test by families; those with the layers of another one are slow."""
    slow = [pytest.mark.slow]
    return pytest.mark.parametrize("family", [pytest.param(f, marks=slow * (f in LIKE_OTHERS)) for f in families])


KDA_FAMILIES = [f for f in KDA_LAYERS if f != "bailing_hybrid" or hasattr(transformers, "BailingHybridConfig")]
GATED_DELTA_FAMILIES = gated_delta_models.HERE
FAMILIES = [*KDA_FAMILIES, *GATED_DELTA_FAMILIES]  # with layers of linear attention
MIXING = ("glm5_next", "qwen4_exp")  # other layers mix packed documents
every_kda_family = pytest.mark.parametrize("family", KDA_FAMILIES)
every_gated_delta_family = each(GATED_DELTA_FAMILIES)
every_family = each(FAMILIES)
RANDOM = ("A_log", "dt_bias", "o_norm.weight", "q_norm.weight", "k_norm.weight", "linear_attn.norm.weight")
IN_PLACE = [*FAMILIES, "doge"]
every_family_in_place = each(IN_PLACE)


def build(
    family: str,
    *,
    dense: bool = False,
    linear_only: bool = False,
    softplus: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Any:
    """A model with every parameter of its layers at a value that matters; dense: without a router's jumps."""
    common: dict[str, Any] = dict(
        vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=2, num_experts_per_tok=2, kv_lora_rank=16, v_head_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, max_position_embeddings=512, qk_nope_head_dim=16, initializer_range=0.2,
    )  # fmt: skip
    layers = 3
    if linear_only:
        common["layer_types"] = ["linear_attention"] * layers
    if dense:
        common["mlp_layer_types"] = ["dense"] * layers
    linear: dict[str, Any] = dict(linear_head_dim=16, linear_num_heads=2)
    torch.manual_seed(seed)
    if family in GATED_DELTA_FAMILIES:
        model = gated_delta_models.make(family, common, dense, **dict(layers=layers) | fields)
    elif family == "kimi_linear":
        common.setdefault("layer_types", ["linear_attention", "full_attention", "linear_attention"])
        fields = common | linear | dict(num_hidden_layers=layers, num_local_experts=4, qk_rope_head_dim=8) | fields
        model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**fields))
    elif family == "doge":
        own = ("hidden_size", "vocab_size", "intermediate_size", "initializer_range", "max_position_embeddings")
        tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
        special = dict(num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2)
        config = transformers.DogeConfig(**{n: common[n] for n in own + tokens} | special | fields)
        model = transformers.DogeForCausalLM(config)
        model.set_attn_implementation("eager")  # with sdpa that of transformers 5.17 is not causal
    elif family == "bailing_hybrid":
        special = dict(
            num_hidden_layers=layers, layer_group_size=3, qk_rope_head_dim=8, head_dim=16, n_group=2, topk_group=1,
            num_local_experts=4, first_k_dense_replace=1, num_mtp_layers=0, kda_safe_gate=not softplus,
        )  # fmt: skip
        model = transformers.BailingHybridForCausalLM(transformers.BailingHybridConfig(**(common | special | fields)))
    else:
        special = dict(
            num_hidden_layers=layers + (not linear_only), n_routed_experts=4, q_lora_rank=16, index_topk=64,
            index_head_dim=16, index_n_heads=2, index_kpool=4, hc_mult=2, hc_sinkhorn_iters=3,
            linear_lower_bound=None if softplus else -5.0,
        )  # fmt: skip
        if dense and not linear_only:
            common["mlp_layer_types"] = ["dense"] * (layers + 1)
        vision = dict(
            depth=1, hidden_size=32, num_heads=2, out_hidden_size=32, intermediate_size=32,
            projection_intermediate_size=32, image_size=28, patch_size=14,
        )  # fmt: skip
        names = ("image", "video", "image_start", "image_end", "video_start", "video_end")
        config = transformers.Glm5NextConfig(
            text_config=common | linear | special | fields, vision_config=vision,
            **{f"{name}_token_id": 90 + i for i, name in enumerate(names)},
        )  # fmt: skip
        model = transformers.Glm5NextForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("linear_attn.A_log"):
                p.copy_(2 * torch.rand_like(p) - 2)
            elif name.endswith("ple.conv1d.weight"):
                p.copy_(torch.randn_like(p) / 2)
            elif name.endswith(RANDOM):
                p.copy_(torch.rand_like(p) + 0.5)
            elif name.endswith("self_attn.A"):
                p.copy_(torch.randn_like(p) / 2)
    return model.eval()


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model in a dtype but for what its class keeps in fp32, as from_pretrained loads it."""
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.float32 if any(k in name for k in kept) else dtype)
    return model


def swapped_layers_of(model: torch.nn.Module) -> dict[str, Any]:
    """The layers that `swap_attention` changes, by path, swapped or not."""
    names = (*KDA_LAYERS.values(), *gated_delta_models.GATED_DELTA_NETS.values(), "DogeAttention")
    return {p: m for p, m in model.named_modules() if any(c.__name__ in names for c in type(m).__mro__)}


def with_oracle(model: Any) -> Any:
    """A copy in fp64 whose layers compute token by token, or score by score."""
    exact = copy.deepcopy(model).double()
    if any(hasattr(m, "experts") for m in exact.modules()):
        exact.set_experts_implementation("eager")  # the other ones have no fp64
    for layer in swapped_layers_of(exact).values():
        layer.forward = MethodType(doge_oracle if model.config.model_type == "doge" else oracle, layer)
    return exact


def doge_oracle(
    layer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    """Doge's attention on whole rows [B, T, D], from its parameters alone, with the keys that a query keeps."""
    w, x = dict(layer.named_parameters()), hidden_states
    T, d = x.shape[1], layer.head_dim

    def normed(name: str) -> Tensor:
        t = (x @ w[f"{name}_proj.weight"].T).unflatten(-1, (-1, d))
        t = t / torch.sqrt((t * t).mean(-1, keepdim=True) + layer.q_norm.variance_epsilon) * w[f"{name}_norm.weight"]
        cos, sin = (p[:, :, None] for p in position_embeddings)
        return (t * cos + torch.cat((-t[..., d // 2 :], t[..., : d // 2]), -1) * sin).transpose(1, 2)

    q, k, v = normed("q"), normed("k"), x @ w["v_proj.weight"].T
    bias = torch.exp(w["A"] * softplus(v @ w["dt_proj.weight"].T)).mT[:, :, None].expand(-1, -1, T, -1)
    hidden = ~torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    bias = bias.masked_fill(hidden, -torch.inf)
    least = bias.sort(-1, descending=True).values[..., min(layer.keep_window_size, T) - 1, None]
    bias = bias.masked_fill(bias < least, -torch.inf)
    k, v, bias = (
        t.repeat_interleave(layer.num_key_value_groups, 1) for t in (k, v.unflatten(-1, (-1, d)).transpose(1, 2), bias)
    )
    o = torch.softmax(q @ k.mT / d**0.5 + bias, -1) @ v
    return o.transpose(1, 2).flatten(2) @ w["o_proj.weight"].T, None


def oracle(layer: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    """A layer of linear attention of any family on whole rows [B, T, D], from its parameters alone."""
    if hasattr(layer, "num_k_heads"):
        return gated_delta_oracle(layer, hidden_states)
    B, T, _ = hidden_states.shape
    H, K = layer.num_heads, layer.head_dim
    w = dict(layer.named_parameters())
    x = hidden_states
    q, k, v = convolved([(x @ w[f"{n}_proj.weight"].T).view(B, T, H, K) for n in "qkv"], w["conv1d.weight"])

    if "g_proj.weight" in w:  # gates of full rank
        g, gate = x @ w["forget_gate.f_proj.weight"].T, x @ w["g_proj.weight"].T
        bound = layer.forget_gate.lower_bound if layer.forget_gate.safe_gate else None
    else:
        g = x @ w["forget_gate.f_a_proj.weight"].T @ w["forget_gate.f_b_proj.weight"].T
        gate = x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
        bound = getattr(layer.forget_gate, "safe_gate_lower_bound", None)
    g = (g + w["forget_gate.dt_bias"]).view(B, T, H, K)
    rate = torch.exp(w["forget_gate.A_log"]).view(H, 1)
    decay = torch.exp(-rate * softplus(g, threshold=50) if bound is None else bound * sigmoid(rate * g))
    beta = sigmoid(x @ w["b_proj.weight"].T)

    y = recurrence(q, k, v, decay, beta)
    y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + layer.o_norm.variance_epsilon) * w["o_norm.weight"]
    return (y.flatten(2) * sigmoid(gate)) @ w["o_proj.weight"].T


def gated_delta_oracle(layer: Any, x: Tensor) -> Tensor:
    """A gated delta net on whole rows [B, T, D], from its parameters alone."""
    w = dict(layer.named_parameters())
    *qkv, a, b, z = gated_delta_models.inputs_of(layer, x, w)
    q, k, v = convolved(qkv, w["conv1d.weight"])
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    beta = sigmoid(b) * (2 if getattr(layer, "allow_neg_eigval", False) else 1)
    o = recurrence(q, k, v, gated_delta_models.decays(layer, a, w), beta)
    return gated_delta_models.gate_and_project(layer, o, z, w)


def convolved(qkv: Sequence[Tensor], taps: Tensor) -> list[Tensor]:
    """q, k and v [B, T, heads, width] after their short convolution and SiLU, q and k with length 1."""
    x = torch.cat([t.flatten(2) for t in qkv], -1).mT
    x = silu(conv1d(pad(x, (taps.shape[-1] - 1, 0)), taps, groups=len(taps))).mT
    parts = x.split([t.shape[2:].numel() for t in qkv], -1)
    q, k, v = (part.unflatten(-1, t.shape[2:]) for part, t in zip(parts, qkv, strict=True))
    q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    return [q, k, v]


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """o [B, T, H, V] of the delta rule, token by token; decay [B, T, H, K or 1]."""
    (B, T, H, K), V = q.shape, v.shape[3]
    S, o = q.new_zeros(B, H, K, V), []
    for t in range(T):
        S = S * decay[:, t, :, :, None]
        written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * written[:, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / K**0.5)
    return torch.stack(o, 1)
