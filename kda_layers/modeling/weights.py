"""One KDA layer's weights into a KimiDeltaAttention and out again, in the naming of every family that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_layers.modeling.checks import unwrapped_hint
from kda_layers.modeling.layer import KimiDeltaAttention
from kda_layers.modeling.safetensors_files import Source, open_weights

# What a layer of each family is bound to be, as options of KimiDeltaAttention. The value may name another option.
_STOCK = dict(num_v_heads="num_heads", head_v_dim="head_dim", output_gate_bias=False, allow_neg_eigval=False)
FAMILIES: dict[str, dict[str, Any]] = {
    "kda_layers": {},
    "kimi_linear": _STOCK | dict(gate_rank="head_dim", gate_activation="softplus", lower_bound=None),
    "glm5_next": _STOCK | dict(gate_rank="head_dim"),
    "bailing_hybrid": _STOCK | dict(gate_rank=0),
    "fla": dict(gate_rank="head_v_dim", output_gate_bias=True),
}

SHARED = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "conv1d.weight", "b_proj.weight", "A_log", "dt_bias",
    "o_norm.weight", "o_proj.weight",
)  # fmt: skip
LOW_RANK = ("f_a_proj.weight", "f_b_proj.weight", "g_a_proj.weight", "g_b_proj.weight")
FULL_RANK = ("f_proj.weight", "g_proj.weight")
SEPARATE_CONV = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
FORGET_GATE = {
    n: f"forget_gate.{n}" for n in ("f_a_proj.weight", "f_b_proj.weight", "f_proj.weight", "A_log", "dt_bias")
}
SEQUENTIAL = {
    "f_a_proj.weight": "f_proj.0.weight", "f_b_proj.weight": "f_proj.1.weight",
    "g_a_proj.weight": "g_proj.0.weight", "g_b_proj.weight": "g_proj.1.weight", "g_b_proj.bias": "g_proj.1.bias",
}  # fmt: skip


class Naming(NamedTuple):
    """How the weights of a layer are named, split and shaped in one place."""

    family: str
    on_disk: bool | None  # None where it makes no difference
    gates: tuple[str, ...]  # which of our gate weights there are
    renamed: Mapping[str, str] = {}  # our names to theirs, where they differ
    separate_conv: bool = False
    A_log_shape: tuple[int, ...] = (-1,)

    def __str__(self) -> str:
        return self.family + {None: "", False: " (in memory)", True: " (on disk)"}[self.on_disk]

    def name(self, ours: str) -> str:
        if ours == "conv1d.weight" and self.separate_conv:
            return SEPARATE_CONV[0]
        return self.renamed.get(ours, ours)

    def names(self) -> set[str]:
        """Every name there may be."""
        return {self.name(n) for n in (*SHARED, *self.gates)} | set(SEPARATE_CONV if self.separate_conv else ())

    def views(self, layer: KimiDeltaAttention) -> dict[str, Tensor]:
        """The layer's parameters by their names and in their shapes here, in the same memory."""
        views: dict[str, Tensor] = {}
        for ours, parameter in layer.named_parameters():
            p = parameter.detach()
            if ours == "conv1d.weight" and self.separate_conv:
                q_dim, v_dim = layer.num_heads * layer.head_dim, layer.num_v_heads * layer.head_v_dim
                views |= zip(SEPARATE_CONV, p.split([q_dim, q_dim, v_dim]), strict=True)
            else:
                views[self.name(ours)] = p.view(self.A_log_shape) if ours == "A_log" else p
        return views


# The first one of a family and place is what `export_kda_weights` writes.
NAMINGS = (
    Naming("kda_layers", None, (*LOW_RANK, "g_b_proj.bias", *FULL_RANK, "g_proj.bias")),
    Naming("kimi_linear", False, LOW_RANK, FORGET_GATE, A_log_shape=(1, 1, -1, 1)),
    Naming("kimi_linear", True, LOW_RANK, separate_conv=True, A_log_shape=(1, 1, -1, 1)),
    Naming("kimi_linear", True, LOW_RANK, separate_conv=True),
    Naming("glm5_next", False, LOW_RANK, FORGET_GATE),
    Naming("glm5_next", True, LOW_RANK, separate_conv=True),
    Naming("bailing_hybrid", False, FULL_RANK, FORGET_GATE),
    Naming("bailing_hybrid", True, FULL_RANK, {"o_proj.weight": "dense.weight"}, separate_conv=True),
    Naming("bailing_hybrid", True, FULL_RANK, separate_conv=True),  # transformers loads this, too
    Naming("fla", None, (*LOW_RANK, "g_b_proj.bias"), SEQUENTIAL, separate_conv=True),
)


def naming_of(family: str, on_disk: bool = False) -> Naming:
    return next(n for n in NAMINGS if n.family == family and n.on_disk in (None, on_disk))


@torch.no_grad()
def load_kda_weights(
    source: Source, layer: KimiDeltaAttention, *, family: str | None = None, prefix: str | None = None
) -> None:
    """Copies one layer's weights into `layer`, every one of them or, where an error is raised, none.

    The values are rounded only where the layer's dtype is narrower than theirs; the Parameter objects stay.

    Args:
        source: a state dict, a .safetensors file, or a checkpoint folder with model.safetensors or its index.
        layer: a KimiDeltaAttention of fitting options; see `kda_layer_options`.
        family: whose names these are: "kimi_linear", "glm5_next" or "bailing_hybrid" of transformers, as in its models
            or as on disk, "fla" for flash-linear-attention's KDAForCausalLM, "kda_layers" for ours. None recognises it.
        prefix: where the layer stands in source, as "model.layers.3.self_attn."; None where source is one layer's.

    Raises:
        FileNotFoundError: source is a path where there is no file, or a folder without safetensors.
        TypeError: source, layer or one of the tensors is of a wrong type.
        ValueError: another family than the names show, or none given where two fit; no KDA layer at prefix; tensors
            missing, unexpected or of a wrong shape, with the options that would fit; a gate that the family does not
            have; a layer on the meta device or with adapters; a file that is not safetensors.
    """
    _check_layer(layer)
    naming, tensors = _read(source, family, prefix)
    views = naming.views(layer)
    wrong = differences(tensors, views)
    if wrong:
        raise ValueError(f"source must hold the {naming} weights of layer, got {wrong}{_hint(naming, tensors, layer)}")
    _check_options(naming.family, layer)
    if any(view.is_meta for view in views.values()):
        raise ValueError("layer must have its parameters in memory, got some on the meta device: use to_empty first")
    for name, view in views.items():
        view.copy_(tensors[name])


@torch.no_grad()
def export_kda_weights(layer: KimiDeltaAttention, family: str, *, on_disk: bool = False) -> dict[str, Tensor]:
    """A layer's weights as a family names them: what `load_kda_weights` reads back bit for bit.

    Args:
        layer: the layer; its dtypes are kept.
        family: as in `load_kda_weights`.
        on_disk: names and shapes as in checkpoint files, not as in transformers' models; the same for "kda_layers"
            and "fla".

    Returns:
        Copies, by names relative to the layer.

    Raises:
        TypeError: layer is no KimiDeltaAttention.
        ValueError: an unknown family; a layer with options that no layer of the family has, or with adapters.
    """
    _check_layer(layer)
    _check_family(family)
    _check_options(family, layer)
    naming = naming_of(family, on_disk)
    return {name: view.clone(memory_format=torch.contiguous_format) for name, view in naming.views(layer).items()}


def kda_layer_options(source: Source, *, family: str | None = None, prefix: str | None = None) -> dict[str, Any]:
    """The options of the KimiDeltaAttention that weights fit: `KimiDeltaAttention(**options, ...)`.

    All but what weights do not show: norm_eps and layer_idx, for "kda_layers" and "fla" allow_neg_eigval, and but for
    "kimi_linear", which has one gate only, gate_activation and lower_bound.

    Args, raises: as in `load_kda_weights`.
    """
    naming, tensors = _read(source, family, prefix)
    shown = _options_of_weights(naming, tensors)
    unseen = ("gate_activation", "lower_bound", "allow_neg_eigval")
    return shown | {n: FAMILIES[naming.family][n] for n in unseen if n in FAMILIES[naming.family]}


def _read(source: Source, family: str | None, prefix: str | None) -> tuple[Naming, dict[str, Tensor]]:
    """The tensors under a prefix, by their names relative to it, and the naming that these follow."""
    if family is not None:
        _check_family(family)
    weights = open_weights(source)
    logs = [n for n in weights if n.rpartition(".")[2] == "A_log"]  # every KDA layer has one
    layers = list(dict.fromkeys(n.removesuffix("A_log").removesuffix("forget_gate.") for n in logs))
    start = f"{prefix}." if prefix and not prefix.endswith(".") else prefix or ""  # layers.1 is not layers.10
    names = [n for n in weights if n.startswith(start)]
    one_layer = "" in layers or "q_proj.weight" in weights
    if not names or (prefix is None and not one_layer):
        raise ValueError(
            f"prefix must be where a KDA layer stands in source, got {prefix!r}; "
            + (f"there are A_log of layers at {', '.join(map(repr, layers))}" if layers else "no tensor is named A_log")
        )
    tensors = {n.removeprefix(start): weights[n] for n in names}
    check_values(tensors)
    return _recognise(tensors, family), tensors


def _recognise(tensors: Mapping[str, Tensor], family: str | None) -> Naming:
    """The naming with the fewest unknown names, of the given family or of the only one that it can be."""
    A_log = next((t for n, t in tensors.items() if n in ("A_log", "forget_gate.A_log")), None)

    def strangeness(naming: Naming) -> tuple[int, bool]:
        return len(tensors.keys() - naming.names()), A_log is not None and A_log.ndim != len(naming.A_log_shape)

    least = min(map(strangeness, NAMINGS))
    near = [n for n in NAMINGS if strangeness(n) == least]
    families = list(dict.fromkeys(n.family for n in near))
    if (family is None and len(families) > 1) or (family is not None and family not in families):
        raise ValueError(
            f"family must be {' or '.join(map(repr, families))}, got {family!r}: that is what the names fit, "
            f"which are {', '.join(sorted(tensors))}" + ("" if A_log is None else f", A_log {list(A_log.shape)}")
        )
    return next(n for n in near if family in (None, n.family))


def _check_layer(layer: Any) -> None:
    if not isinstance(layer, KimiDeltaAttention):
        raise TypeError(f"layer must be a KimiDeltaAttention, got {type(layer).__name__}{unwrapped_hint(layer)}")
    if unknown := [name for name, _ in layer.named_parameters() if name not in NAMINGS[0].names()]:
        raise ValueError(
            f"layer must have the parameters of a plain KimiDeltaAttention, got {', '.join(unknown)}: merge adapters "
            "first (merge_and_unload)"
        )


def _check_family(family: str) -> None:
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(map(repr, FAMILIES))}, got {family!r}")


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raises a TypeError for what holds no floating-point values, as quantised weights and meta tensors."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            got = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating-point tensor that holds values, got {got}")


def differences(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Every name that is missing, unexpected or of a wrong shape, in words; empty for none."""
    shapes = [
        f"{n} (expected {list(t.shape)}, got {list(tensors[n].shape)})"
        for n, t in wanted.items()
        if n in tensors and t.shape != tensors[n].shape
    ]
    kinds = {
        "missing": [n for n in wanted if n not in tensors],
        "unexpected": [n for n in tensors if n not in wanted],
        "of a wrong shape": shapes,
    }
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)


def _options_of_weights(naming: Naming, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The options that shapes show; a ValueError where they contradict each other."""
    wrong = ", ".join(sorted(naming._replace(gates=()).names() - tensors.keys()))
    if wrong:
        raise ValueError(f"source must hold the {naming} weights of one layer, got missing: {wrong}")
    q, conv, A_log, dt_bias, norm = (
        tensors[naming.name(n)] for n in ("q_proj.weight", "conv1d.weight", "A_log", "dt_bias", "o_norm.weight")
    )
    head_dim = dt_bias.numel() // max(A_log.numel(), 1)
    rank = tensors.get(naming.name("f_a_proj.weight"))
    try:
        options: dict[str, Any] = dict(
            hidden_size=q.shape[-1], num_heads=q.shape[0] // max(head_dim, 1), head_dim=head_dim,
            num_v_heads=A_log.numel(), head_v_dim=norm.numel(), conv_size=conv.shape[-1],
            gate_rank=0 if rank is None else rank.shape[0],
            output_gate_bias=any(naming.name(n) in tensors for n in ("g_b_proj.bias", "g_proj.bias")),
        )  # fmt: skip
        with torch.device("meta"):
            layer = KimiDeltaAttention(**options)
    except (ValueError, IndexError) as error:  # no layer has such options; a tensor without dimensions
        raise ValueError(f"source must hold the {naming} weights of one layer, got contradicting shapes") from error
    wrong = differences(tensors, naming.views(layer))
    if wrong:
        raise ValueError(f"source must hold the {naming} weights of one layer, got, for {options}, {wrong}")
    return options


def _unlike(layer: KimiDeltaAttention, options: Mapping[str, Any]) -> list[str]:
    """The options of which the layer has another value, which may be given as the name of another option, in words."""
    sizes = ("hidden_size", "num_heads", "head_dim", "num_v_heads", "head_v_dim", "gate_rank")
    has = {n: getattr(layer, n) for n in sizes} | dict(
        conv_size=layer.conv1d.weight.shape[-1],
        output_gate_bias=(layer.g_b_proj if layer.gate_rank else layer.g_proj).bias is not None,
        gate_activation=layer.kda_options["gate_activation"],
        lower_bound=layer.kda_options["lower_bound"],
        allow_neg_eigval=layer.kda_options["beta_activation"] == "2sigmoid",
    )
    wanted = {n: has[v] if isinstance(v, str) and v in has else v for n, v in options.items()}
    return [f"{n}={v!r} (got {has[n]!r})" for n, v in wanted.items() if v != has[n]]


def _check_options(family: str, layer: KimiDeltaAttention) -> None:
    """Raises a ValueError for a layer that computes what no layer of the family does."""
    unlike = _unlike(layer, FAMILIES[family])
    if unlike:
        raise ValueError(f"layer must have what every layer of {family} has: {', '.join(unlike)}")


def _hint(naming: Naming, tensors: Mapping[str, Tensor], layer: KimiDeltaAttention) -> str:
    """Why weights may differ from what a layer needs."""
    if any(n.endswith("conv1d.bias") for n in tensors):
        return "; biases of the convolution are not supported"
    try:
        return f"; they fit a KimiDeltaAttention with {', '.join(_unlike(layer, _options_of_weights(naming, tensors)))}"
    except ValueError:
        return ""
