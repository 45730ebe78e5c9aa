"""Weights of one layer in and out: against transformers' own models and files, bit for bit, and every refusal."""

from __future__ import annotations

import copy
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kda_layers import KimiDeltaAttention
from kda_layers.modeling.checkpoints.weights import export_kda_weights, kda_layer_options, load_kda_weights
from tests.kernels.cases import BF16, FP32, FP64, budget, error
from tests.modeling.common import same
from tests.modeling.stock_models import FAMILIES, GATED_DELTA_FAMILIES, build, each, oracle, swapped_layers_of

every_linear_family = each(FAMILIES)
next_and_later = each([f for f in ("qwen3_next", "qwen3_5") if f in GATED_DELTA_FAMILIES])

D = 20
SOFTPLUS = dict(gate_activation="softplus", lower_bound=None)
GATED_DELTA = dict(
    num_heads=2, head_dim=8, num_value_heads=4, value_head_dim=6, gate_rank=0, decay="head", output_activation="silu",
    **SOFTPLUS,
)  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {  # a layer that each family can hold, and some that only ours can
    "kimi_linear": dict(num_heads=2, head_dim=8, **SOFTPLUS),
    "glm5_next": dict(num_heads=2, head_dim=8, conv_kernel_dim=3),
    "bailing_hybrid": dict(num_heads=2, head_dim=8, gate_rank=0),
    "qwen3_next": GATED_DELTA,
    "qwen3_5": GATED_DELTA,
    "olmo_hybrid": GATED_DELTA | dict(allow_neg_eigval=True),
    "fla": dict(
        num_heads=2, head_dim=8, num_value_heads=4, value_head_dim=6, output_gate_bias=True, allow_neg_eigval=True
    ),
    "kda_layers": dict(num_heads=2, head_dim=8, num_value_heads=4, value_head_dim=6),
    "kda_layers, full rank": dict(num_heads=1, head_dim=8, gate_rank=0, output_gate_bias=True),
    "kda_layers, one decay a head": dict(num_heads=2, head_dim=8, num_value_heads=4, decay="head"),
    "kda_layers, rank 3": dict(num_heads=3, head_dim=4, value_head_dim=8, gate_rank=3, output_gate_bias=True),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
on_disk_or_not = pytest.mark.parametrize("on_disk", [False, True], ids=["in_memory", "on_disk"])


def make_layer(name: str, seed: int = 0, dtype: torch.dtype = FP32, **changes: Any) -> KimiDeltaAttention:
    """A layer with random values in every parameter, which are not those of another seed."""
    layer = KimiDeltaAttention(**{"hidden_size": D, **LAYERS[name], **changes}).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
    return layer


def values(layer: torch.nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in layer.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def refused(problem: str, source: Any, layer: Any, kind: type[Exception] = ValueError, **options: Any) -> str:
    """The message of the error, after checking that the layer is as it was."""
    before = values(layer)
    with pytest.raises(kind, match=problem) as caught:
        load_kda_weights(source, layer, **options)
    assert equal(values(layer), before)
    return str(caught.value)


# ---------------------------------------------------------------- our own round trips


@every_layer
@on_disk_or_not
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_out_and_in_again_is_bit_identical(name: str, on_disk: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    family = name.partition(",")[0]
    layer, other = make_layer(name, 0, dtype), make_layer(name, 1, dtype)
    for made in (layer, other):
        made.A_log.data, made.dt_bias.data = made.A_log.data.float(), made.dt_bias.data.float()
    exported = export_kda_weights(layer, family, on_disk=on_disk)
    save_file(exported, tmp_path / "layer.safetensors")
    parameters = dict(other.named_parameters())

    load_kda_weights(tmp_path / "layer.safetensors", other, family=family)

    assert equal(values(other), values(layer))
    assert all(p is parameters[n] and p.requires_grad for n, p in other.named_parameters())
    assert not {t.data_ptr() for t in exported.values()} & {p.data_ptr() for p in layer.parameters()}


@every_layer
@on_disk_or_not
def test_the_family_is_recognised_where_only_one_has_the_names(name: str, on_disk: bool) -> None:
    family = name.partition(",")[0]
    layer, other = make_layer(name, 0), make_layer(name, 1)
    exported = export_kda_weights(layer, family, on_disk=on_disk)
    if family == "glm5_next" and on_disk:  # also Kimi-Linear's names, whose gate is another one
        refused(r"'glm5_next' or 'kimi_linear', got None", exported, other)
    else:
        load_kda_weights(exported, other)
        assert equal(values(other), values(layer))


@every_layer
def test_options_of_the_layer_that_weights_fit(name: str) -> None:
    family = name.partition(",")[0]
    layer = make_layer(name)
    options = kda_layer_options(export_kda_weights(layer, family), family=family)
    gate = {} if options.keys() >= SOFTPLUS.keys() else {k: v for k, v in LAYERS[name].items() if k in SOFTPLUS}
    heads = {n: LAYERS[name][n] for n in ("num_heads", "head_dim")}  # which one decay a head does not show
    other = KimiDeltaAttention(**(heads | options), **gate)
    assert {n: p.shape for n, p in other.named_parameters()} == {n: p.shape for n, p in layer.named_parameters()}
    assert other.kda_options["gate_activation"] == layer.kda_options["gate_activation"]


def test_names_and_shapes_on_disk_are_those_of_the_published_checkpoints() -> None:
    kimi = export_kda_weights(make_layer("kimi_linear"), "kimi_linear", on_disk=True)
    low_rank = {f"{n}_{p}_proj.weight" for n in "fg" for p in "ab"}
    conv = {f"{n}_conv1d.weight" for n in "qkv"}
    shared = {*(f"{n}_proj.weight" for n in "qkvb"), *conv, "A_log", "dt_bias", "o_norm.weight"}
    assert kimi.keys() == shared | low_rank | {"o_proj.weight"}
    assert kimi["A_log"].shape == (1, 1, 2, 1)
    assert kimi["q_conv1d.weight"].shape == (16, 1, 4)
    bailing = export_kda_weights(make_layer("bailing_hybrid"), "bailing_hybrid", on_disk=True)
    assert bailing.keys() == shared | {"f_proj.weight", "g_proj.weight", "dense.weight"}
    fla = export_kda_weights(make_layer("fla"), "fla")
    sequential = {"f_proj.0.weight", "f_proj.1.weight", "g_proj.0.weight", "g_proj.1.weight", "g_proj.1.bias"}
    assert fla.keys() == shared | sequential | {"o_proj.weight"}


def test_other_spellings_that_are_read() -> None:
    layer = make_layer("kimi_linear")
    flat = export_kda_weights(layer, "kimi_linear", on_disk=True)
    flat["A_log"] = flat["A_log"].flatten()
    other = make_layer("kimi_linear", 1)
    load_kda_weights(flat, other, family="kimi_linear")
    assert equal(values(other), values(layer))

    layer, other = make_layer("bailing_hybrid"), make_layer("bailing_hybrid", 1)
    weights = export_kda_weights(layer, "bailing_hybrid", on_disk=True)
    weights["o_proj.weight"] = weights.pop("dense.weight")
    load_kda_weights(weights, other)
    assert equal(values(other), values(layer))


def test_values_take_the_dtypes_of_the_layer() -> None:
    layer, narrow = make_layer("kimi_linear"), make_layer("kimi_linear", 1, BF16)
    narrow.A_log.data, narrow.dt_bias.data = narrow.A_log.data.float(), narrow.dt_bias.data.float()
    load_kda_weights(export_kda_weights(layer, "kimi_linear"), narrow)
    kept = {"A_log", "dt_bias"}
    assert equal(values(narrow), {n: t if n in kept else t.to(BF16) for n, t in values(layer).items()})


# ---------------------------------------------------------------- transformers' own models


@functools.cache
def stock_model(family: str) -> Any:
    return build(family)


@functools.cache
def saved(family: str, folder: Path, shards: bool) -> Path:
    stock_model(family).save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
    return folder


def ours_of(source: Any, stock: Any, dtype: torch.dtype = FP32, **where: Any) -> KimiDeltaAttention:
    """A layer built from the weights alone, but for what these do not show."""
    options = kda_layer_options(source, **where)
    if "gate_activation" not in options:
        options |= dict(gate_activation="lower_bound", lower_bound=-5.0)
    if hasattr(stock, "num_k_heads"):
        heads = dict(num_heads=stock.num_k_heads, head_dim=stock.head_k_dim)
        options = heads | dict(allow_neg_eigval=getattr(stock, "allow_neg_eigval", False)) | options
    norm = next(m for n, m in stock.named_children() if n in ("norm", "o_norm"))
    layer = KimiDeltaAttention(**options | dict(rms_norm_eps=norm.variance_epsilon)).to(dtype)
    load_kda_weights(source, layer, **where)
    return layer


def in_weights(family: str, on_disk: bool = False) -> str:
    """The family's name in `load_kda_weights`."""
    like_qwen = ("qwen3_5_moe", "qwen4_exp", *(() if on_disk else ("lara_mini",)))
    return "qwen3_5" if family in like_qwen else family


@every_linear_family
@torch.no_grad()
def test_outputs_are_those_of_the_stock_layer(family: str) -> None:
    stock = next(iter(swapped_layers_of(stock_model(family)).values()))
    ours, exact = (ours_of(stock.state_dict(), stock, dtype, family=in_weights(family)) for dtype in (FP32, FP64))
    x = torch.randn(2, 75, stock.hidden_size, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 75, dtype=torch.long)
    mask[0, :9] = 0
    for padding in (None, mask):
        real = slice(None) if padding is None else padding.bool()
        want = stock(x, attention_mask=padding)[real]
        truth = exact(x.double(), padding)[real]
        assert error(ours(x, padding)[real], truth) <= budget(error(want, truth), FP32)
    same([exact(x.double())], [oracle(copy.deepcopy(stock).double(), x.double())])


@every_linear_family
@pytest.mark.parametrize("shards", [False, True], ids=["one_file", "shards"])
def test_files_that_transformers_writes(family: str, shards: bool, tmp_path: Path) -> None:
    model = stock_model(family)
    in_memory, in_files = in_weights(family), in_weights(family, on_disk=True)
    folder = saved(family, tmp_path, shards)
    assert len(list(folder.glob("*.safetensors"))) > 1 if shards else (folder / "model.safetensors").exists()
    files = [load_file(f) for f in sorted(folder.glob("*.safetensors"))]
    on_disk = {n: t for file in files for n, t in file.items()}
    prefixes = sorted(n.removesuffix("A_log") for n in on_disk if n.endswith("A_log"))
    source = folder if shards else folder / "model.safetensors"
    for prefix, stock in zip(prefixes, swapped_layers_of(model).values(), strict=True):
        layer = ours_of(source, stock, family=in_files, prefix=prefix)
        exported = export_kda_weights(layer, in_memory)
        assert equal(exported, dict(stock.state_dict()))
        exported = export_kda_weights(layer, in_files, on_disk=True)
        assert equal(exported, {n.removeprefix(prefix): t for n, t in on_disk.items() if n.startswith(prefix)})
    stated = [repr(p) for p in prefixes]
    message = refused("prefix must be the path of a KDA layer", source, layer, family=in_files)
    assert all(p in message for p in stated)


# ---------------------------------------------------------------- gated delta nets


@next_and_later
@torch.no_grad()
def test_key_heads_that_weights_do_not_show(family: str, tmp_path: Path) -> None:
    """Qwen3-Next's rows are in the order of its key heads; a folder's configuration says how many there are."""
    stock = next(iter(swapped_layers_of(stock_model(family)).values()))
    weights, folder = stock.state_dict(), saved(family, tmp_path, False)
    right = dict(num_heads=stock.num_k_heads, head_dim=stock.head_k_dim)
    prefix = next(iter(swapped_layers_of(stock_model(family))))
    assert kda_layer_options(folder, prefix=prefix).items() >= right.items()
    assert not kda_layer_options(weights).keys() & right.keys()
    wrong = KimiDeltaAttention(**kda_layer_options(weights), num_heads=1, head_dim=2 * stock.head_k_dim)
    refused(
        r"key heads of config.json in source: num_heads=2 \(got 1\), head_dim=16 \(got 32\)",
        folder,
        wrong,
        prefix=prefix,
    )
    load_kda_weights(weights, wrong)  # nothing tells
    ours = ours_of(folder, stock, prefix=prefix)
    assert ours.rms_norm_eps == kda_layer_options(folder, prefix=prefix)["rms_norm_eps"]
    same_rows = torch.equal(wrong.q_proj.weight, ours.q_proj.weight)
    assert same_rows is (family != "qwen3_next")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json .* must have the field 'linear_num_key_heads' of qwen3"):
        kda_layer_options(folder, prefix=prefix)


GATED_DELTA_NAMES = {
    family: sorted(export_kda_weights(make_layer(family), family))
    for family in ("qwen3_next", "qwen3_5", "olmo_hybrid")
}


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, names in GATED_DELTA_NAMES.items() for n in names])
def test_a_tensor_of_a_gated_delta_net(family: str, name: str) -> None:
    """Missing, with too few rows, or too wide: its own name is in the message."""
    layer, weights = make_layer(family), export_kda_weights(make_layer(family), family)
    rest = {n: t for n, t in weights.items() if n != name}
    if name != "dt_bias":  # by which layers are found
        assert re.search(rf"missing: .*{re.escape(name)}", refused("missing", rest, layer, family=family))
    t = weights[name]
    for wrong in (t[:-1], torch.cat((t, t), -1)):
        assert name in refused("rows of|wrong shape|contradict", rest | {name: wrong}, layer, family=family)


def test_other_heads_than_rows_have() -> None:
    weights = export_kda_weights(make_layer("qwen3_next"), "qwen3_next")
    three = make_layer("qwen3_next", num_heads=3, num_value_heads=3)
    refused(
        r"in_proj_qkvz.weight must have for each of 3 key heads the rows of q_proj.weight \[16\], .* divided by 3, got "
        r"shape \[80, 20\]", weights, three,
    )  # fmt: skip


def test_a_gated_delta_net_in_a_layer_of_another_kind() -> None:
    """KDA's gates and the activation of its output gate."""
    weights = export_kda_weights(make_layer("qwen3_5"), "qwen3_5")
    for changes, problem in (
        (dict(output_activation="sigmoid"), r"output_activation='silu' \(got 'sigmoid'\)"),
        (dict(gate_activation="lower_bound", lower_bound=-5.0), r"gate_activation='softplus' \(got 'lower_bound'\)"),
        (dict(allow_neg_eigval=True), r"allow_neg_eigval=False \(got True\)"),
        (dict(decay="channel", decay_rank=0), r"dt_bias \(expected"),
    ):
        refused(problem, weights, make_layer("qwen3_5", **changes))
    with pytest.raises(ValueError, match=r"every layer of kimi_linear has: .*output_activation='sigmoid' \(got 'silu'"):
        export_kda_weights(make_layer("kimi_linear", output_activation="silu"), "kimi_linear")
    with pytest.raises(ValueError, match="output_activation must be 'sigmoid' or 'silu', got 'gelu'"):
        make_layer("qwen3_5", output_activation="gelu")


def test_names_that_only_files_have() -> None:
    layer, other = make_layer("qwen3_5"), make_layer("qwen3_5", 1)
    weights = export_kda_weights(layer, "lara_mini", on_disk=True)
    load_kda_weights(weights, other)
    assert equal(values(other), values(layer))
    with pytest.raises(ValueError, match="on_disk must be True for lara_mini, got False"):
        export_kda_weights(layer, "lara_mini")


# ---------------------------------------------------------------- refusals


def kimi(**changes: Any) -> dict[str, Tensor]:
    return export_kda_weights(make_layer("kimi_linear", **changes), "kimi_linear", on_disk=True)


@pytest.mark.parametrize("name", sorted(kimi()))
def test_a_missing_tensor_is_named(name: str) -> None:
    weights = {f"model.layers.1.self_attn.{n}": t for n, t in kimi().items() if n not in (name, "b_proj.weight")}
    message = refused(
        r"b_proj\.weight", weights, make_layer("kimi_linear"), family="kimi_linear", prefix="model.layers.1.self_attn"
    )
    assert f"missing: {name}" in message or f"{name}; " in message or f", {name}" in message


@pytest.mark.parametrize("name", ["kda_layers", "fla", "bailing_hybrid"])
def test_every_missing_and_unexpected_tensor_is_named(name: str) -> None:
    weights = export_kda_weights(make_layer(name), name)
    gone = sorted(weights)[2:5]
    weights = {n: t for n, t in weights.items() if n not in gone} | dict(extra=torch.ones(1), more=torch.ones(2))
    message = refused("missing: .*; unexpected: extra, more", weights, make_layer(name), family=name)
    assert all(n in message for n in gone)


@pytest.mark.parametrize("name", sorted(kimi()))
def test_a_wrong_shape_is_named(name: str) -> None:
    weights = kimi()
    weights[name] = torch.cat((weights[name], weights[name]), weights[name].ndim - 2 if name == "A_log" else -1)
    want, got = list(kimi()[name].shape), list(weights[name].shape)
    message = refused("of a wrong shape", weights, make_layer("kimi_linear"), family="kimi_linear")
    assert f"{name} (expected {want}, got {got})" in message


@pytest.mark.parametrize(
    "changes",
    [
        dict(gate_rank=5),
        dict(gate_rank=0),
        dict(output_gate_bias=True),
        dict(conv_kernel_dim=2),
        dict(num_heads=4),
        dict(num_value_heads=6),
        dict(head_dim=4, value_head_dim=8),
        dict(value_head_dim=4),
        dict(hidden_size=24),
    ],
    ids=str,
)
def test_a_layer_of_other_options_is_told_which_ones_fit(changes: dict[str, Any]) -> None:
    weights, layer = export_kda_weights(make_layer("kda_layers"), "kda_layers"), make_layer("kda_layers", **changes)
    message = refused("they fit a KimiDeltaAttention with", weights, layer)
    fitting = kda_layer_options(weights)
    differing = {n: v for n, v in changes.items() if n in fitting and v != fitting[n]}
    assert all(f"{n}={fitting[n]!r} (got {v!r})" in message for n, v in differing.items())


def test_wrong_families() -> None:
    layer = make_layer("kimi_linear")
    weights = kimi()
    assert "f_a_proj.weight" in refused(
        "family must be 'kimi_linear', got 'bailing_hybrid'", weights, layer, family="bailing_hybrid"
    )
    refused(
        "family must be 'kimi_linear', got 'glm5_next'.* A_log \\[1, 1, 2, 1\\]", weights, layer, family="glm5_next"
    )
    refused("family must be 'kimi_linear', got 'fla'", weights, layer, family="fla")
    refused("family must be one of 'kda_layers', .*, got 'kimi'", weights, layer, family="kimi")
    fla = export_kda_weights(make_layer("fla"), "fla")
    refused("family must be 'fla', got 'kimi_linear'.*g_proj.1.bias", fla, layer, family="kimi_linear")


def test_gates_that_a_family_does_not_have() -> None:
    bounded = make_layer("glm5_next", conv_kernel_dim=4)
    refused(r"every layer of kimi_linear has: gate_activation='softplus' \(got 'lower_bound'\)", kimi(), bounded)
    refused("allow_neg_eigval=False", kimi(), make_layer("kimi_linear", allow_neg_eigval=True))


def test_biases_of_the_convolution() -> None:
    weights = export_kda_weights(make_layer("fla"), "fla")
    biased = weights | {"q_conv1d.bias": torch.zeros(16)}
    refused("q_conv1d.bias; biases of the convolution are not supported", biased, make_layer("fla"))


@pytest.mark.parametrize(
    ("family", "name", "problem"),
    [
        ("kimi_linear", "glm5_next", "gate_activation='softplus'"),
        ("kimi_linear", "fla", r"num_value_heads=2 \(got 4\), value_head_dim=8 \(got 6\), output_gate_bias=False"),
        ("glm5_next", "bailing_hybrid", r"gate_rank=8 \(got 0\)"),
        ("bailing_hybrid", "glm5_next", r"gate_rank=0 \(got 8\)"),
        ("fla", "kda_layers", "output_gate_bias=True"),
        ("fla", "kda_layers, rank 3", r"gate_rank=8 \(got 3\)"),
        ("olmo", "kda_layers", "family must be one of"),
    ],
)
def test_layers_without_a_counterpart_are_not_exported(family: str, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        export_kda_weights(make_layer(name), family)


def test_prefixes() -> None:
    weights = {f"model.layers.{i}.self_attn.{n}": t for i in (1, 10) for n, t in kimi(seed=i).items()}
    layer = make_layer("kimi_linear")
    candidates = "'model.layers.1.self_attn.', 'model.layers.10.self_attn.'"
    refused(f"got None; there are layers at {candidates}", weights, layer)
    refused(f"got 'model.layers.2.self_attn'; .* at {candidates}", weights, layer, prefix="model.layers.2.self_attn")
    refused("no tensor is named dt_bias", {"layers.0.q_proj.weight": torch.ones(2, 2)}, layer)
    refused("missing: .*, k_proj.weight, ", {"q_proj.weight": torch.ones(16, D)}, layer, family="kimi_linear")
    for i in (1, 10):
        load_kda_weights(weights, layer, prefix=f"model.layers.{i}.self_attn" + "." * (i == 1))
        assert equal(values(layer), values(make_layer("kimi_linear", i)))


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    layer = make_layer("kimi_linear")
    refused(
        "must be an existing .safetensors file or checkpoint folder, got .*nowhere",
        tmp_path / "nowhere",
        layer,
        FileNotFoundError,
    )
    refused(r"must hold model.safetensors or model.safetensors.index.json", str(tmp_path), layer, FileNotFoundError)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00" * 20)
    refused("pytorch_model.bin must be a complete safetensors file", tmp_path / "pytorch_model.bin", layer)
    save_file(kimi(), tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-8])
    refused("cut.safetensors must be a complete safetensors file", tmp_path / "cut.safetensors", layer)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    refused("index.json must be a JSON object with a weight_map", tmp_path, layer)
    index.write_text('{"weight_map": {"dt_bias": "gone.safetensors"}}')
    refused("gone.safetensors", tmp_path, layer, FileNotFoundError)
    refused("source must be a state dict or a path, got int", 3, layer, TypeError)


def test_values_that_are_no_weights() -> None:
    layer = make_layer("kimi_linear")
    for bad, got in (
        (torch.ones(16, D, dtype=torch.int8), "int8 on cpu: .*scales: dequantise the model first"),
        (torch.ones(16, D).to(torch.float8_e4m3fn), "float8_e4m3fn on cpu: .*scales: dequantise the model first"),
        (torch.ones(16, D, device="meta"), "meta"),
        ([1.0], "list"),
    ):
        refused(
            f"q_proj.weight must be a tensor of bfloat16 or .* that holds values, got .*{got}",
            kimi() | {"q_proj.weight": bad},
            layer,
            TypeError,
        )
    with torch.device("meta"):
        unfilled = KimiDeltaAttention(D, **LAYERS["kimi_linear"])
    with pytest.raises(ValueError, match="meta device"):
        load_kda_weights(kimi(), unfilled)
    linear: Any = torch.nn.Linear(2, 2)
    refused("layer must be a KimiDeltaAttention, got Linear", kimi(), linear, TypeError)
    with pytest.raises(TypeError, match="layer must be a KimiDeltaAttention, got Linear"):
        export_kda_weights(linear, "kda_layers")


def test_options_of_weights_that_contradict_each_other() -> None:
    weights = kimi()
    weights["v_proj.weight"] = weights["v_proj.weight"][:-1]
    with pytest.raises(ValueError, match=r"v_proj.weight \(expected \[16, 20\], got \[15, 20\]\)"):
        kda_layer_options(weights)
    for scalar in ("q_proj.weight", "A_log"):
        with pytest.raises(ValueError, match=r"contradicting shapes|expected"):
            kda_layer_options(weights | {scalar: torch.tensor(1.0)}, family="kimi_linear")
    del weights["dt_bias"], weights["k_conv1d.weight"]
    with pytest.raises(ValueError, match=r"got missing: dt_bias, k_conv1d.weight"):
        kda_layer_options(weights, family="kimi_linear")


WITHOUT_MODELS = """
import json, sys, torch
from kda_layers import KimiDeltaAttention
from kda_layers.checkpoints import export_kda_weights, load_kda_weights
layers = [KimiDeltaAttention(16, 2, 8, gate_activation="softplus", lower_bound=None) for _ in range(2)]
weights = export_kda_weights(layers[0], "kimi_linear", on_disk=True)
load_kda_weights(weights, layers[1])
assert all(map(torch.equal, layers[0].parameters(), layers[1].parameters()))
print(json.dumps([m for m in sys.modules if m.startswith("transformers.models.") and ".modeling_" in m]))
"""


@pytest.mark.slow
def test_weights_are_read_without_importing_the_models_of_transformers() -> None:
    """The first call of a process would otherwise take 0.6 s longer."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_MODELS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
