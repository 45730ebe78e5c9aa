"""Layers of Kimi K3 and AliceAI: files in their names against a token-by-token layer that reads the same files."""

from __future__ import annotations

import copy
import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention, swap_attention
from kda_layers.hub_kernel import layers as hub_layers
from kda_layers.modeling.checkpoints.weights import export_kda_weights, kda_layer_options, load_kda_weights
from tests.kernels.cases import FP32, FP64
from tests.modeling.common import same
from tests.modeling.stock_models import build, oracle, swapped_layers_of

D, H, K, W = 20, 3, 8, 4  # P = H K channels of q, of k and of v
P = H * K
SHAPES = {
    **{f"{n}_proj.weight": (P, D) for n in "qkv"}, **{f"{n}_conv1d.weight": (P, 1, W) for n in "qkv"},
    "f_a_proj.weight": (K, D), "f_b_proj.weight": (P, K), "b_proj.weight": (H, D), "dt_bias": (P,),
    "o_norm.weight": (K,), "o_proj.weight": (D, P),
}  # fmt: skip
FAMILIES: dict[str, dict[str, tuple[int, ...]]] = {  # names as vLLM 0.33 reads them from files
    "kimi_k3": SHAPES | {"g_proj.weight": (P, D), "A_log": (H,)},
    "alice_ai": SHAPES | {"g_a_proj.weight": (K, D), "g_b_proj.weight": (P, K), "a_log_bias": (H,)},
}
PREFIXES = {"kimi_k3": "language_model.model.layers.1.self_attn.", "alice_ai": "model.layers.1.linear_attn."}
CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_k3": dict(
        model_type="kimi_k3",
        text_config=dict(rms_norm_eps=1e-3, linear_attn_config=dict(gate_lower_bound=-2.0, use_full_rank_gate=True)),
    ),
    "alice_ai": dict(rms_norm_eps=1e-3, kda_allow_negative_eigenvalues=True),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def weights_of(family: str, layer: int = 1) -> dict[str, Tensor]:
    """A layer's weights by the names of its files."""
    generator = torch.Generator().manual_seed(layer)
    return {n: torch.rand(shape, generator=generator, dtype=FP64) - 0.3 for n, shape in FAMILIES[family].items()}


def token_by_token(w: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence x [T, D] -> outputs [T, D], last inputs of the convolution [3 P, W], state [H, V, K]."""
    low_rank_gate, softplus_gate, two_beta = ("g_a_proj.weight" in w,) * 3  # AliceAI, as configured above
    A_log = w["a_log_bias" if softplus_gate else "A_log"]
    S, o = [torch.zeros(K, K, dtype=x.dtype) for _ in range(H)], []
    inputs = {n: torch.cat((torch.zeros(W, P, dtype=x.dtype), x @ w[f"{n}_proj.weight"].T)) for n in "qkv"}
    for t in range(len(x)):
        window = {n: inputs[n][t + 1 : t + 1 + W] for n in "qkv"}
        taps = {n: w[f"{n}_conv1d.weight"].reshape(P, W).T for n in "qkv"}
        y = {n: nn.functional.silu((window[n] * taps[n]).sum(0)).view(H, K) for n in "qkv"}
        q, k = (y[n] / (y[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in "qk")
        z = (w["f_b_proj.weight"] @ (w["f_a_proj.weight"] @ x[t]) + w["dt_bias"]).view(H, K)
        rate = A_log.exp()[:, None]
        log_decay = -rate * (1 + z.exp()).log() if softplus_gate else -2.0 / (1 + (-rate * z).exp())
        beta = torch.sigmoid(w["b_proj.weight"] @ x[t]) * (2 if two_beta else 1)
        gate = w["g_b_proj.weight"] @ (w["g_a_proj.weight"] @ x[t]) if low_rank_gate else w["g_proj.weight"] @ x[t]
        heads = []
        for h in range(H):
            decayed = S[h] * log_decay[h].exp()
            S[h] = decayed + beta[h] * torch.outer(y["v"][h] - decayed @ k[h], k[h])
            out = S[h] @ q[h] / K**0.5
            heads.append(out / (out.square().mean() + 1e-3).sqrt() * w["o_norm.weight"])
        o.append(w["o_proj.weight"] @ (torch.cat(heads) * torch.sigmoid(gate)))
    return torch.stack(o), torch.cat([inputs[n][-W:] for n in "qkv"], 1).T, torch.stack(S)


def saved(family: str, folder: Path, shards: bool = False, **changes: Tensor) -> Path:
    """A checkpoint folder with a softmax layer, two KDA layers and a configuration."""
    parts: list[dict[str, Tensor]] = []
    for i in (0, 1):
        prefix = PREFIXES[family].replace("layers.1", f"layers.{i}")
        parts.append({prefix + n: t for n, t in (weights_of(family, i) | changes).items()})
    parts[0] |= {"model.layers.2.self_attn.q_a_proj.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(3, 2)}
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    if shards:
        files = {f"model-{i}.safetensors": part for i, part in enumerate(parts)}
        index = {n: file for file, part in files.items() for n in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        files = {"model.safetensors": parts[0] | parts[1]}
    for file, part in files.items():
        save_file(part, folder / file)
    return folder


def loaded(family: str, source: Any, **where: Any) -> KimiDeltaAttention:
    options = kda_layer_options(source, **where)
    if "rms_norm_eps" not in options:
        options |= dict(rms_norm_eps=1e-3)
        options |= dict(allow_neg_eigval=True) if family == "alice_ai" else dict(lower_bound=-2.0)
    layer = KimiDeltaAttention(**options, layer_idx=0).double()
    load_kda_weights(source, layer, **where)
    return layer


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def layer(family: str, tmp_path: Path) -> KimiDeltaAttention:
    return loaded(family, saved(family, tmp_path), prefix=PREFIXES[family])


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(3), dtype=FP64)


def new_cache() -> DynamicCache:
    return DynamicCache(config=KDAConfig(num_hidden_layers=1))


# ---------------------------------------------------------------- the layer of a file


def test_outputs_and_gradients(family: str, layer: KimiDeltaAttention) -> None:
    """Compare gradients of the input and of every weight, by the names of the files."""
    w = {n: t.requires_grad_() for n, t in weights_of(family).items()}
    x, d_o = tokens(2, 67).requires_grad_(), tokens(2, 67).flip(1)
    want = torch.stack([token_by_token(w, row)[0] for row in x])
    d_x, *d_w = torch.autograd.grad((want * d_o).sum(), (x, *w.values()))
    got = layer(x)
    same((got,), (want,))
    (d_got,) = torch.autograd.grad((got * d_o).sum(), x, retain_graph=True)
    (got * d_o).sum().backward()
    gradients = copy.deepcopy(layer)
    with torch.no_grad():
        for p, new in zip(layer.parameters(), gradients.parameters(), strict=True):
            new.copy_(p.grad)
    same((d_got,), (d_x,))
    exported = export_kda_weights(gradients, family, on_disk=True)
    same([exported[n] for n in w], d_w)


def test_cache(family: str, layer: KimiDeltaAttention) -> None:
    x, cache = tokens(2, 9), new_cache()
    want = [token_by_token(weights_of(family), row) for row in x]
    with torch.no_grad():
        o = [layer(part, past_key_values=cache) for part in x.split((5, 1, 1, 1, 1), 1)]
    states = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
    same((torch.cat(o, 1), *states), [torch.stack(t) for t in zip(*want, strict=True)])


@pytest.mark.parametrize("many", [False, True], ids=["packed", "padded"])
def test_several_sequences(many: bool, family: str, layer: KimiDeltaAttention) -> None:
    lengths, x = (3, 1, 66), tokens(1, 70)
    want = torch.cat([token_by_token(weights_of(family), row)[0] for row in x[0].split(lengths)])
    if many:
        rows, mask = torch.full((3, 66, D), 1e3, dtype=FP64), torch.zeros(3, 66, dtype=torch.long)
        for n, (a, b) in enumerate(pairwise(accumulate(lengths, initial=0))):
            rows[n, a - b :], mask[n, a - b :] = x[0, a:b], 1
        got = layer(rows, attention_mask=mask)[mask == 1]
    else:
        got = layer(x, cu_seqlens=torch.tensor([0, *accumulate(lengths)]))[0]
    same((got,), (want,))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("shards", [False, True], ids=["one_file", "shards"])
def test_files_are_written_as_they_were_read(shards: bool, family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path, shards)
    for i in (0, 1):
        prefix = PREFIXES[family].replace("layers.1", f"layers.{i}")
        exported = export_kda_weights(loaded(family, folder, prefix=prefix), family, on_disk=True)
        save_file(exported, tmp_path / "again.safetensors")
        again, want = load_file(tmp_path / "again.safetensors"), weights_of(family, i)
        assert again.keys() == want.keys()
        assert all(torch.equal(again[n], t) for n, t in want.items())
    with pytest.raises(ValueError, match=rf"there are layers at .*'{PREFIXES[family]}'"):
        kda_layer_options(folder)


def test_options_of_a_configuration(family: str, tmp_path: Path) -> None:
    """Read beside the weights; left out without it, but for what every layer of the family has."""
    folder, prefix = saved(family, tmp_path), PREFIXES[family]
    ranks = dict(decay_rank=K, gate_rank=0 if family == "kimi_k3" else K)
    options = kda_layer_options(folder, prefix=prefix)
    alone = kda_layer_options(folder / "model.safetensors", prefix=prefix)
    assert options | ranks == options
    assert alone | ranks == alone
    if family == "kimi_k3":
        assert {n: options[n] for n in options.keys() - alone.keys()} == dict(
            rms_norm_eps=1e-3, gate_activation="lower_bound", lower_bound=-2.0
        )
        del CONFIGS[family]["text_config"]["linear_attn_config"]["gate_lower_bound"]
        try:
            unbounded = kda_layer_options(saved(family, tmp_path), prefix=prefix)
        finally:
            CONFIGS[family]["text_config"]["linear_attn_config"]["gate_lower_bound"] = -2.0
        assert (unbounded["gate_activation"], unbounded["lower_bound"]) == ("softplus", None)
    else:
        assert {n: options[n] for n in options.keys() - alone.keys()} == dict(rms_norm_eps=1e-3, allow_neg_eigval=True)
        assert (alone["gate_activation"], alone["lower_bound"]) == ("softplus", None)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json in source must have the field '.*' of " + family):
        kda_layer_options(folder, prefix=prefix)


ROWS = {"kimi_k3": ("q", "k", "v", "g", "f_a", "b"), "alice_ai": ("q", "k", "v", "b", "f_a")}


def fused(family: str, padding: int, conv: bool = True) -> dict[str, Tensor]:
    """The weights by the names of vLLM 0.33's modules on one GPU."""
    w = weights_of(family)
    w["A_log"] = w.pop("a_log_bias", w.get("A_log"))
    parts = [w.pop(f"{n}_proj.weight") for n in ROWS[family]]
    w["in_proj_qkvgfab.weight"] = torch.cat([*parts, torch.zeros(padding, D, dtype=FP64)])
    return w | {"conv1d.weight": torch.cat([w.pop(f"{n}_conv1d.weight") for n in "qkv"])} if conv else w


def test_fused_projections_and_convolution(family: str, layer: KimiDeltaAttention, tmp_path: Path) -> None:
    want = fused(family, 5 if family == "kimi_k3" else 0)  # 107 rows, up to a multiple of 16
    exported = export_kda_weights(layer, family)
    assert exported.keys() == want.keys()
    assert all(torch.equal(exported[n], t) for n, t in want.items())
    save_file(want, tmp_path / "fused.safetensors")
    again = loaded(family, tmp_path / "fused.safetensors")
    assert all(map(torch.equal, again.parameters(), layer.parameters()))


def test_spellings_of_kimi_k3(tmp_path: Path) -> None:
    """Shapes that its loaders read: A_log with old dimensions or more than the heads, taps [P, W], other padding."""
    w = weights_of("kimi_k3")
    longer = torch.cat((w["A_log"], torch.full((5,), torch.nan, dtype=FP64)))
    spellings = [
        w | {"A_log": w["A_log"].view(1, 1, H, 1)},
        w | {"A_log": longer},
        w | {n: t[:, 0] for n, t in w.items() if "conv1d" in n},
        fused("kimi_k3", 0),
        fused("kimi_k3", 21, conv=False),
    ]
    for i, spelling in enumerate(spellings):
        save_file(spelling, tmp_path / f"{i}.safetensors")
        exported = export_kda_weights(loaded("kimi_k3", tmp_path / f"{i}.safetensors"), "kimi_k3", on_disk=True)
        assert all(torch.equal(exported[n], t) for n, t in w.items())


def test_fused_rows_that_do_not_fit() -> None:
    w, layer = fused("kimi_k3", 5), loaded("kimi_k3", weights_of("kimi_k3"))
    before = layer.q_proj.weight.clone()
    rows = w["in_proj_qkvgfab.weight"]
    for wrong in (rows[:100], torch.cat((rows, rows[:1]))):
        problem = (
            rf"in_proj_qkvgfab.weight must have the rows of q_proj.weight \[24\], .*got shape \[{len(wrong)}, 20\]"
        )
        with pytest.raises(ValueError, match=problem):
            load_kda_weights(w | {"in_proj_qkvgfab.weight": wrong}, layer)
    del w["in_proj_qkvgfab.weight"]
    with pytest.raises(ValueError, match="missing"):
        load_kda_weights(w, layer)
    assert torch.equal(layer.q_proj.weight, before)


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("kimi_k3", {}, r"gate_rank=0 \(got 8\)"),
        ("kimi_k3", dict(gate_rank=0), r"decay_rank=8 \(got 0\)"),
        ("kimi_k3", dict(gate_rank=0, decay_rank=8, learned_rate=False), r"learned_rate=True \(got False\)"),
        ("kimi_k3", dict(gate_rank=0, decay_rank=8, allow_neg_eigval=True), r"allow_neg_eigval=False \(got True\)"),
        ("alice_ai", {}, r"gate_activation='softplus' \(got 'lower_bound'\)"),
        ("kimi_linear", dict(gate_rank=0, decay_rank=8), r"gate_rank=8 \(got 0\)"),
        ("bailing_hybrid", dict(gate_rank=0, decay_rank=8), r"decay_rank=0 \(got 8\)"),
        ("glm5_next", dict(learned_rate=False), r"learned_rate=True \(got False\)"),
        ("fla", dict(decay_rank=0, output_gate_bias=True), r"decay_rank=8 \(got 0\)"),
    ],
)
def test_layers_that_a_family_does_not_have(family: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        export_kda_weights(KimiDeltaAttention(D, H, K, **options), family)


# ---------------------------------------------------------------- models and stock layers

MIXED = dict(linear_gate_rank=0, linear_decay_rank=3, linear_learned_rate=False)


def tiny(**fields: Any) -> KDAConfig:
    sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, bos_token_id=None)
    return KDAConfig(**sizes, linear_num_heads=2, linear_head_dim=8, eos_token_id=None, **fields)


@torch.no_grad()
def test_a_model(tmp_path: Path) -> None:
    """Built from its configuration, saved, loaded, and decoded as in one pass."""
    torch.manual_seed(0)
    model, ids = KDAForCausalLM(tiny(**MIXED)).eval(), torch.arange(2, 11)[None]
    names = {n.partition("self_attn.")[2] for n in model.state_dict() if "layers.0.self_attn" in n}
    gates = {"f_a_proj.weight", "f_b_proj.weight", "g_proj.weight", "dt_bias"}
    assert (
        names - {f"{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "o_norm", "conv1d")} == gates
    )
    assert "decay_rank=3, gate_rank=0, learned_rate=False" in repr(model)
    model.save_pretrained(tmp_path)
    again = KDAForCausalLM.from_pretrained(tmp_path).eval()
    assert {n: getattr(again.config, n) for n in MIXED} == MIXED
    assert torch.equal(again(ids).logits, model(ids).logits)
    generated = again.generate(ids, max_new_tokens=4, do_sample=False)
    for t in range(9, 13):
        assert again(generated[:, :t]).logits[0, -1].argmax() == generated[0, t]


def test_plan_of_tensor_parallelism() -> None:
    """A rule for each weight that is cut by heads, and none that matches nothing."""
    by_head = dict(linear_decay="head", linear_num_value_heads=4)
    for fields in ({}, MIXED, dict(linear_gate_rank=0), dict(linear_gate_rank=2, linear_decay_rank=0), by_head):
        config = tiny(**fields)
        plan = config.base_model_tp_plan
        model = KDAForCausalLM(config)
        cut = {n.partition("self_attn.")[2].removesuffix(".weight") for n in model.state_dict() if "layers.0.self" in n}
        cut -= {"conv1d", "o_norm", "f_a_proj", "g_a_proj"}
        assert {n.rpartition("self_attn.")[2] for n in plan if "self_attn." in n} == cut


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (dict(linear_decay_rank=-1), "linear_decay_rank must be 0 .full rank. or more, got -1"),
        (
            dict(linear_learned_rate=False, linear_gate_activation="softplus", linear_lower_bound=None),
            "linear_learned_rate must be True with gate_activation='softplus', got False",
        ),
        (dict(decay_rank=3), "decay_rank .use linear_decay_rank"),
        (dict(learned_rate=False), "learned_rate .use linear_learned_rate"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match=problem):  # huggingface_hub's error, or a TypeError
        tiny(**fields)


@pytest.mark.parametrize(
    ("options", "problem", "error"),
    [
        (dict(decay_rank=-2), "decay_rank must be 0 .full rank. or more, got -2", ValueError),
        (dict(decay_rank=1.5), "decay_rank must be an integer, got 1.5", TypeError),
        (
            dict(learned_rate=False, gate_activation="softplus", lower_bound=None),
            "learned_rate must be True",
            ValueError,
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], problem: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=problem):
        KimiDeltaAttention(D, H, K, **options)


OLD = """{
  "architectures": ["KDAForCausalLM"], "attention_bias": "none", "attention_dropout": 0.0, "bos_token_id": null,
  "eos_token_id": null, "full_attention_interval": 0, "head_dim": 2, "hidden_size": 16, "initializer_range": 0.02,
  "intermediate_size": 24, "layer_types": ["linear_attention", "linear_attention"], "linear_allow_neg_eigval": false,
  "linear_conv_kernel_dim": 4, "linear_gate_activation": "lower_bound", "linear_gate_rank": 5, "linear_head_dim": 8,
  "linear_lower_bound": -5.0, "linear_num_heads": 2, "linear_num_value_heads": 2, "linear_output_gate_bias": false,
  "linear_recompute": "auto", "linear_value_head_dim": 8, "max_position_embeddings": 1048576, "model_type": "kda_lm",
  "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 8, "pad_token_id": null,
  "rms_norm_eps": 1e-06, "tie_word_embeddings": false, "transformers_version": "5.23.0", "use_cache": true,
  "vocab_size": 11
}"""  # a file written before there was linear_decay_rank, and what the model of that version computed in fp64
OLD_LOGITS = (
    0.855503480044, 0.940631403579, -1.57744583002, 0.270071263968, 1.37016391042, -1.3216833509, -0.355761052254,
    1.59473288881, -0.868209575301, -0.928374888553, 1.58074494904,
)  # fmt: skip


def test_an_old_configuration_means_both_ranks(tmp_path: Path) -> None:
    """The parameters in the same order, and the same numbers from them; written and read again, too."""
    (tmp_path / "config.json").write_text(OLD)
    config = KDAConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        model = KDAForCausalLM(KDAConfig.from_pretrained(folder)).double().eval()
        names = [n.partition("self_attn.")[2] for n in model.state_dict() if "layers.0.self_attn" in n]
        assert names == [
            "A_log", "dt_bias", "q_proj.weight", "k_proj.weight", "v_proj.weight", "conv1d.weight", "f_a_proj.weight",
            "f_b_proj.weight", "g_a_proj.weight", "g_b_proj.weight", "b_proj.weight", "o_norm.weight", "o_proj.weight",
        ]  # fmt: skip
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel(), dtype=FP64) * (i + 1)).view(p.shape) / 2)
            logits = model(torch.arange(9)[None]).logits[0, -1]
        assert (logits - torch.tensor(OLD_LOGITS, dtype=FP64)).abs().max() < 1e-10
    overridden = KDAConfig.from_pretrained(tmp_path / "again", linear_gate_rank=0)
    layer: Any = KDAForCausalLM(overridden).model.layers[0].self_attn
    assert (layer.decay_rank, layer.gate_rank) == (0, 0)


def with_full_rank_gate(layer: Any) -> Any:
    """A stock layer of Kimi-Linear that computes the same, with the product of the gate's factors as g_proj."""
    layer = copy.deepcopy(layer)
    layer.g_proj = nn.Linear(layer.g_a_proj.in_features, layer.g_b_proj.out_features, bias=False, dtype=FP64)
    with torch.no_grad():
        layer.g_proj.weight.copy_(layer.g_b_proj.weight @ layer.g_a_proj.weight)
    del layer.g_a_proj, layer.g_b_proj
    return layer


def test_stock_layers_with_a_full_rank_gate() -> None:
    """A Hub kernel's layer, and `swap_attention`, see which projections a layer has. The stock norm is in fp32."""
    model = build("kimi_linear", dense=True).double()
    path, stock = next(iter(swapped_layers_of(model).items()))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=FP64)
    want = oracle(stock, x)
    mixed = with_full_rank_gate(stock)
    same((hub_layers.KimiLinearDeltaAttention.forward(stock, x),), (want,), 1e-6)
    same((hub_layers.KimiLinearDeltaAttention.forward(mixed, x),), (want,), 1e-6)
    model.set_submodule(path, mixed)
    swap_attention(model, layers=[0])
    swapped: Any = model.get_submodule(path)
    assert (swapped.decay_rank, swapped.gate_rank) == (16, 0)
    same((swapped(x),), (want,), 1e-6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        o = [hub_layers.KimiLinearDeltaAttention.forward(mixed, part, cache) for part in x.split((5, 1, 1, 1, 1), 1)]
    same((torch.cat(o, 1),), (want,), 1e-6)


def test_a_fixed_rate_is_a_rate_of_one() -> None:
    torch.manual_seed(0)
    learned, fixed = KimiDeltaAttention(D, H, K), KimiDeltaAttention(D, H, K, learned_rate=False)
    assert fixed.A_log is None
    assert learned.state_dict().keys() - fixed.state_dict().keys() == {"A_log"}
    fixed.load_state_dict({n: t for n, t in learned.state_dict().items() if n != "A_log"})  # whose rates start at 1
    x = tokens(2, 70).to(FP32)
    assert torch.equal(fixed(x), learned(x))
    assert torch.equal(copy.deepcopy(fixed)(x), learned(x))
    exported = export_kda_weights(fixed, "kda_layers")
    assert exported.keys() == fixed.state_dict().keys()
    options = kda_layer_options(exported)
    assert options["learned_rate"] is False
    other = KimiDeltaAttention(**options)
    load_kda_weights(exported, other)
    assert torch.equal(other(x), learned(x))
