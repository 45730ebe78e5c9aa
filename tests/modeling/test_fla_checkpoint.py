"""Whole checkpoints of flash-linear-attention: against its model written out in plain PyTorch, and where it is
installed and there is a GPU, against itself."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, sigmoid, silu, softplus

from kda_layers import KDAForCausalLM
from kda_layers.modeling.checkpoints.fla_checkpoint import convert_fla_checkpoint, kda_config_from_fla
from tests.kernels.cases import BF16, FP32, budget, error
from tests.modeling.common import same

# As its save_pretrained writes it, options that do not shape the logits included.
CONFIG: dict[str, Any] = {
    "architectures": ["KDAForCausalLM"], "model_type": "kda", "attn_mode": "chunk", "attn": None,
    "allow_neg_eigval": False, "attnres_block_size": None, "bos_token_id": 1, "conv_size": 4, "dtype": "float32",
    "eos_token_id": 2, "expand_v": 1.0, "fuse_cross_entropy": True, "fuse_norm": True, "fuse_swiglu": True,
    "head_dim": 8, "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 24, "initializer_range": 0.02,
    "intermediate_size": None, "lower_bound": None, "max_position_embeddings": 2048, "norm_eps": 1e-5, "num_heads": 2,
    "num_hidden_layers": 2, "num_v_heads": None, "pad_token_id": 3, "safe_gate": False, "tie_word_embeddings": False,
    "transformers_version": "5.17.0", "use_cache": True, "use_l2warp": False, "use_short_conv": True, "vocab_size": 31,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "softplus": {},
    "lower_bound": dict(safe_gate=True, lower_bound=-5.0),
    "lower_bound_without_safe_gate": dict(lower_bound=-2.5, conv_size=3),
    "grouped_wide_v": dict(num_v_heads=4, expand_v=1.5, allow_neg_eigval=True, norm_eps=1e-2),
    "given_mlp": dict(intermediate_size=40, hidden_ratio=None, head_dim=6, expand_v=0.5),
    "tied": dict(tie_word_embeddings=True, hidden_size=96, hidden_ratio=5),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def fla_weights(config: dict[str, Any], dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    """Random weights by the names and in the shapes of fla.models.KDAForCausalLM (0.6.0)."""
    D, H, K, vocab = (config[n] for n in ("hidden_size", "num_heads", "head_dim", "vocab_size"))
    HV, V = config["num_v_heads"] or H, int(K * config["expand_v"])
    ratio = 4 if config["hidden_ratio"] is None else config["hidden_ratio"]
    width = config["intermediate_size"]
    if width is None:
        width = 256 * ((int(D * ratio * 2 / 3) + 255) // 256)
    attn = {
        "q_proj.weight": (H * K, D), "k_proj.weight": (H * K, D), "v_proj.weight": (HV * V, D),
        "f_proj.0.weight": (V, D), "f_proj.1.weight": (HV * K, V), "b_proj.weight": (HV, D),
        "g_proj.0.weight": (V, D), "g_proj.1.weight": (HV * V, V), "g_proj.1.bias": (HV * V,),
        "A_log": (HV,), "dt_bias": (HV * K,), "o_norm.weight": (V,), "o_proj.weight": (D, HV * V),
    }  # fmt: skip
    attn |= {f"{n}_conv1d.weight": (attn[f"{n}_proj.weight"][0], 1, config["conv_size"]) for n in "qkv"}
    mlp = {"gate_proj.weight": (width, D), "up_proj.weight": (width, D), "down_proj.weight": (D, width)}
    block = {f"attn.{n}": s for n, s in attn.items()} | {f"mlp.{n}": s for n, s in mlp.items()}
    block |= {"attn_norm.weight": (D,), "mlp_norm.weight": (D,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (vocab, D), "model.norm.weight": (D,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{n}": s for n, s in block.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, D)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        random = torch.randn(shape, generator=generator)
        weights[name] = random * shape[-1] ** -0.5 if len(shape) == 2 else random * 0.5 + 0.5
        weights[name] = weights[name].to(FP32 if name.endswith(("A_log", "dt_bias")) else dtype)
    return weights


def fla_logits(w: dict[str, Tensor], config: dict[str, Any], tokens: Tensor) -> Tensor:
    """The model's logits for tokens [B, T] in the dtype of the weights, token by token."""
    eps, K = config["norm_eps"], config["head_dim"]
    V = int(K * config["expand_v"])

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], w[name], eps)

    def attention(x: Tensor, p: str) -> Tensor:
        q, k, v = (short_conv(x @ w[f"{p}{n}_proj.weight"].T, w[f"{p}{n}_conv1d.weight"]) for n in "qkv")
        q, k, v = (t.unflatten(-1, (-1, width)) for t, width in ((q, K), (k, K), (v, V)))
        group = v.shape[2] // q.shape[2]
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = q.repeat_interleave(group, 2) * K**-0.5, k.repeat_interleave(group, 2)
        logits = x @ w[p + "f_proj.0.weight"].T @ w[p + "f_proj.1.weight"].T + w[p + "dt_bias"]
        logits, rate = logits.unflatten(-1, (-1, K)), w[p + "A_log"].exp()[:, None]
        bound = config["lower_bound"]
        decay = torch.exp(-rate * softplus(logits, threshold=50) if bound is None else bound * sigmoid(rate * logits))
        beta = sigmoid(x @ w[p + "b_proj.weight"].T) * (2 if config["allow_neg_eigval"] else 1)
        o = delta_rule(q, k, v, decay, beta)
        gate = x @ w[p + "g_proj.0.weight"].T @ w[p + "g_proj.1.weight"].T + w[p + "g_proj.1.bias"]
        o = norm(o, p + "o_norm.weight") * sigmoid(gate.unflatten(-1, (-1, V)))
        return o.flatten(2) @ w[p + "o_proj.weight"].T

    x = w["model.embeddings.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        x = x + attention(norm(x, p + "attn_norm.weight"), p + "attn.")
        y = norm(x, p + "mlp_norm.weight")
        y = silu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)
        x = x + y @ w[p + "mlp.down_proj.weight"].T
    head = "model.embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head].T


def short_conv(x: Tensor, taps: Tensor) -> Tensor:
    """x [B, T, C], taps [C, 1, W]: the last tap is the present token's."""
    W = taps.shape[-1]
    before = torch.cat((x.new_zeros(x.shape[0], W - 1, x.shape[2]), x), 1)
    return silu(sum(before[:, i : i + x.shape[1]] * taps[:, 0, i] for i in range(W)))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """q, k, decay [B, T, HV, K], v [B, T, HV, V], beta [B, T, HV] -> [B, T, HV, V]."""
    S, outputs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        S = decay[:, t, ..., None] * S
        correction = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outputs, 1)


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    """A checkpoint folder as save_pretrained writes it."""
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({n: t for n, t in weights.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def ids(*shape: int, high: int = 31) -> Tensor:
    return torch.randint(4, high, shape, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- conversion


@every_variant
@torch.no_grad()
def test_logits_of_a_folder(variant: str, tmp_path: Path) -> None:
    config = CONFIG | VARIANTS[variant]
    weights = fla_weights(config)
    model = convert_fla_checkpoint(write(tmp_path, config, weights, shards=1 + len(variant) % 3))
    truth = fla_logits({n: t.double() for n, t in weights.items()}, config, ids(2, 70))
    same([copy.deepcopy(model).double()(ids(2, 70)).logits], [truth])
    assert error(model(ids(2, 70)).logits, truth) <= budget(error(fla_logits(weights, config, ids(2, 70)), truth), FP32)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_every_value_is_carried_over_in_its_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = fla_weights(CONFIG, dtype)
    model = convert_fla_checkpoint(weights, CONFIG)
    left = {n: t for n, t in model.state_dict().items() if not n.endswith("conv1d.weight")}
    assert sorted(t.sum().item() for t in left.values()) == sorted(
        t.sum().item() for n, t in weights.items() if "conv1d" not in n
    )
    for n, t in left.items():
        assert t.dtype == (FP32 if n.endswith(("A_log", "dt_bias")) else dtype), n
    conv = torch.cat([weights[f"model.layers.1.attn.{n}_conv1d.weight"] for n in "qkv"])
    assert torch.equal(model.model.layers[1].self_attn.conv1d.weight, conv)
    assert model.model.layers[0].self_attn.A_log._no_weight_decay

    model.save_pretrained(tmp_path)  # and it is a checkpoint of this package from now on
    again = KDAForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert all(torch.equal(t, again[n]) and t.dtype == again[n].dtype for n, t in model.state_dict().items())


def test_weights_of_several_dtypes_are_not_rounded() -> None:
    weights = fla_weights(CONFIG, BF16)
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 1e-6
    model = convert_fla_checkpoint(weights, CONFIG)
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"])


def test_configuration() -> None:
    config = kda_config_from_fla(CONFIG | VARIANTS["grouped_wide_v"] | dict(eos_token_id=[2, 5], use_cache=False))
    assert (config.model_type, config.linear_num_value_heads, config.linear_value_head_dim) == ("kda_lm", 4, 12)
    assert (config.linear_gate_activation, config.linear_allow_neg_eigval) == ("softplus", True)
    assert (config.pad_token_id, config.eos_token_id, config.use_cache) == (3, [2, 5], False)
    assert (config.intermediate_size, config.rms_norm_eps) == (256, 1e-2)
    assert config.layer_types == ["linear_attention"] * 2
    bare = kda_config_from_fla({})  # what its own defaults are
    assert (bare.hidden_size, bare.intermediate_size, bare.num_hidden_layers) == (2048, 5632, 24)
    assert (bare.linear_num_heads, bare.linear_head_dim, bare.linear_gate_activation) == (16, 128, "softplus")


def test_a_tied_head_may_be_named() -> None:
    config = CONFIG | VARIANTS["tied"]
    weights = fla_weights(config)
    named = weights | {"lm_head.weight": weights["model.embeddings.weight"].clone()}
    model = convert_fla_checkpoint(named, config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, named["lm_head.weight"])
    with pytest.raises(ValueError, match=r"lm_head.weight must equal model.embeddings.weight"):
        convert_fla_checkpoint(named | {"lm_head.weight": named["lm_head.weight"] + 1}, config)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (dict(use_short_conv=False), "use_short_conv must be True, got False"),
        (dict(conv_bias=True), "conv_bias must be False, got True"),
        (dict(hidden_act="powlu"), "hidden_act must be 'swish', got 'powlu'"),
        (dict(attn=dict(layers=[1], num_heads=2)), "attn must be None, got .* rotary"),
        (dict(attnres_block_size=2), "attnres_block_size must be None, got 2"),
        (dict(expand_v=0.3), "expand_v must give an integer for head_dim = 8, got 0.3"),
        (dict(safe_gate=True), "lower_bound must be given with safe_gate"),
        (dict(model_type="kda_lm"), "config must be of model_type 'kda', .* got 'kda_lm'"),
    ],
    ids=str,
)
def test_options_that_our_model_has_not(option: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        convert_fla_checkpoint({}, CONFIG | option)


@pytest.mark.parametrize("option", [dict(lower_bound=-7.0), dict(num_v_heads=3)], ids=str)
def test_contradicting_fields_are_named_by_our_configuration(option: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="linear_"):  # StrictDataclassError of huggingface_hub
        convert_fla_checkpoint({}, CONFIG | option)


def test_tensors_that_do_not_fit() -> None:
    weights = fla_weights(CONFIG)
    gone = ["model.layers.1.attn.A_log", "model.layers.0.mlp_norm.weight", "model.embeddings.weight"]
    some = {n: t for n, t in weights.items() if n not in gone}
    with pytest.raises(ValueError, match="missing: ") as caught:
        convert_fla_checkpoint(some | {"model.layers.0.attn.q_conv1d.bias": torch.ones(16)}, CONFIG)
    assert all(n in str(caught.value) for n in gone)
    assert "unexpected: model.layers.0.attn.q_conv1d.bias" in str(caught.value)
    with pytest.raises(ValueError, match=r"model.norm.weight \(expected \[24\], got \[23\]\)"):
        convert_fla_checkpoint(weights | {"model.norm.weight": torch.ones(23)}, CONFIG)
    with pytest.raises(ValueError, match=r"unexpected: .*, model.layers.1.attn_norm.weight, "):
        convert_fla_checkpoint(weights, CONFIG | dict(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"missing: model.embeddings.weight, "):
        convert_fla_checkpoint({}, CONFIG)
    with pytest.raises(TypeError, match=r"model.norm.weight must be a tensor of bfloat16 or .* that holds values"):
        convert_fla_checkpoint(weights | {"model.norm.weight": torch.ones(24, dtype=torch.int8)}, CONFIG)


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"with a config.json, got .*nowhere"):
        convert_fla_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(FileNotFoundError, match=r"must hold model.safetensors or"):
        convert_fla_checkpoint(tmp_path)
    with pytest.raises(TypeError, match="config must be given with a state dict"):
        convert_fla_checkpoint(fla_weights(CONFIG))


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '"kda"'])
def test_a_config_that_is_no_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json must be a JSON object, got: ") as caught:
        convert_fla_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "option", [dict(norm_eps=-1e-5), dict(norm_eps=math.nan), dict(hidden_size="24"), dict(expand_v=math.inf)], ids=str
)
def test_a_number_that_none_can_be_is_named(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"^{name} must be a finite number of at least 0, got {value!r}$"):
        convert_fla_checkpoint({}, CONFIG | option)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors", "..", "", "weights.bin", 7, None],
)
def test_an_index_names_files_of_its_folder_only(file: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weights = fla_weights(CONFIG)
    write(folder, CONFIG, weights, shards=2)
    save_file(weights, tmp_path / "model.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"must name \.safetensors files beside it") as caught:
        convert_fla_checkpoint(folder)
    assert f"{path} " in str(caught.value)
    assert f"got {file!r} for model.norm.weight" in str(caught.value)


def test_a_shard_may_be_a_link_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir(), folder.mkdir()
    write(blobs, CONFIG, fla_weights(CONFIG), shards=2)
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(blob)
    whole = convert_fla_checkpoint(blobs).state_dict()
    assert all(torch.equal(t, whole[n]) for n, t in convert_fla_checkpoint(folder).state_dict().items())


# ---------------------------------------------------------------- flash-linear-attention itself


@pytest.mark.compiles
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(safe_gate=True, lower_bound=-5.0),
        dict(num_v_heads=4, allow_neg_eigval=True),
        dict(expand_v=2.0, tie_word_embeddings=True),
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_of_flash_linear_attention(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Its own save_pretrained, read by us: we are at most twice as far from fp64 as it is, plus one rounding."""
    pytest.importorskip("fla")
    from fla.models import KDAConfig as FlaConfig
    from fla.models import KDAForCausalLM as FlaModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=128, num_heads=2, head_dim=64, num_hidden_layers=2, vocab_size=97, initializer_range=0.1)
    fla = FlaModel(FlaConfig(**sizes, **options)).cuda().eval()
    for name, p in fla.named_parameters():
        if name.endswith(("norm.weight", "g_proj.1.bias")):  # those left at ones and zeros would hide a mistake
            p.copy_(torch.rand_like(p) + 0.5)
        if not name.endswith(("A_log", "dt_bias")):
            p.data = p.data.to(dtype)
    fla.save_pretrained(tmp_path)
    model = convert_fla_checkpoint(tmp_path)
    assert model.model.embed_tokens.weight.dtype == dtype

    tokens = ids(2, 130, high=97)
    truth = copy.deepcopy(model).double()(tokens).logits
    want = fla(tokens.cuda(), use_cache=False).logits
    got = model.cuda()(tokens.cuda()).logits
    assert got.dtype == want.dtype == dtype
    assert error(got, truth) <= budget(error(want, truth), dtype)


def test_the_names_that_the_tests_write_are_those_of_flash_linear_attention() -> None:
    """On any machine where it can be imported: its model on the meta device has the names and shapes of our files."""
    pytest.importorskip("triton")
    pytest.importorskip("fla")
    from fla.models import KDAConfig as FlaConfig
    from fla.models import KDAForCausalLM as FlaModel

    for options in VARIANTS.values():
        config = CONFIG | options
        skipped = ("architectures", "model_type", "transformers_version", "dtype")
        with torch.device("meta"):
            model: nn.Module = FlaModel(FlaConfig(**{n: v for n, v in config.items() if n not in skipped}))
        theirs = {n: p.shape for n, p in model.named_parameters()}
        assert theirs == {n: t.shape for n, t in fla_weights(config).items()}
