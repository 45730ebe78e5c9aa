"""Load and export the weights of one KDA layer in the naming of each family that has such layers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kda_layers.kernels.checks import DTYPES, dtype_names
from kda_layers.modeling.checks import DEQUANTISE, check_not_sharded, is_quantised, unwrapped_hint
from kda_layers.modeling.layer.checkpoint_names import ALICE_AI, FLA, KIMI_K3, OURS, Format, Naming
from kda_layers.modeling.layer.layer import KimiDeltaAttention
from kda_layers.modeling.swap import families

Source = Mapping[str, Tensor] | str | PathLike


@functools.cache
def formats() -> dict[str, Format]:
    """Return the format of each family by name."""
    stock = {name: weights for name in families.IN_PLACE if (weights := families.load(name).weights)}
    return {"kda_layers": OURS, **stock, "kimi_k3": KIMI_K3, "alice_ai": ALICE_AI, "fla": FLA}


@torch.no_grad()
def load_kda_weights(
    source: Source, layer: KimiDeltaAttention, *, family: str | None = None, prefix: str | None = None
) -> None:
    """Copy one layer's weights into `layer`: all of them, or none if an error is raised.

    Values are rounded only if the layer's dtype is narrower than theirs; the Parameter objects stay. Qwen3-Next's rows
    are in the order of key heads, whose number its weights do not show: from a state dict or a single file they load in
    a wrong order, without an error, if the layer's `num_heads` is not theirs. A folder's config.json is checked.

    Args:
        source: a state dict, a .safetensors file, or a checkpoint folder with model.safetensors or its index.
        layer: a KimiDeltaAttention with options that fit; see `kda_layer_options`.
        family: the family that names the weights: "kimi_linear", "glm5_next", "bailing_hybrid", "qwen3_next", "qwen3_5"
            (its models with experts and Qwen4, too) or "olmo_hybrid" of transformers, as in its models or on disk;
            "lara_mini" as on disk ("qwen3_5" in memory); "kimi_k3" or "alice_ai", as in their files or in vLLM's
            modules; "fla" for flash-linear-attention's KDAForCausalLM; "kda_layers" for ours. None recognises it.
        prefix: path of the layer in source, such as "model.layers.3.self_attn."; None if source holds one layer.

    Raises:
        FileNotFoundError: source is a path without a file, or a folder without safetensors.
        TypeError: source, layer or one of the tensors has a wrong type.
        ValueError: a family that the names do not fit, or None if they fit two; no KDA layer at prefix; tensors
            missing, unexpected or of a wrong shape, with the options that would fit; a gate that the family does not
            have, or key heads other than those in the config.json of a folder with gated delta nets, which weights do
            not show; a layer on the meta device, with adapters or sharded; a file that is not safetensors.
    """
    _check_layer(layer)
    naming, tensors = _read(source, family, prefix, layer.num_heads)
    views = naming.views(layer)
    wrong = differences(tensors, views, naming.stored())
    if wrong:
        raise ValueError(f"source must hold the {naming} weights of layer, got {wrong}{_hint(naming, tensors, layer)}")
    _check_options(naming.family, layer)
    if layer.head_gates and (unlike := _unlike(layer, _told(source, naming, ("num_heads", "head_dim")))):
        raise ValueError(f"layer must have the key heads of config.json in source: {', '.join(unlike)}")
    if any(view.is_meta for view in views.values()):
        raise ValueError("layer must have its parameters in memory, got some on the meta device: use to_empty first")
    for name, view in views.items():
        view.copy_(tensors[name])


@torch.no_grad()
def export_kda_weights(layer: KimiDeltaAttention, family: str, *, on_disk: bool = False) -> dict[str, Tensor]:
    """Return a layer's weights as a family names them, which `load_kda_weights` reads back bit for bit.

    Args:
        layer: the layer; its dtypes are kept.
        family: as in `load_kda_weights`.
        on_disk: True for names and shapes of checkpoint files, False for those of transformers' models, or of vLLM's
            for "kimi_k3" and "alice_ai"; no difference for "kda_layers" and "fla".

    Returns:
        dict[str, Tensor]: copies, by names relative to the layer.

    Raises:
        TypeError: layer is not a KimiDeltaAttention.
        ValueError: an unknown family; a layer with options that no layer of the family has, with adapters or sharded.
    """
    _check_layer(layer)
    _check_family(family)
    _check_options(family, layer)
    return formats()[family].naming(on_disk).export(layer)


def kda_layer_options(source: Source, *, family: str | None = None, prefix: str | None = None) -> dict[str, Any]:
    """Return the options of the KimiDeltaAttention that weights fit: `KimiDeltaAttention(**options, ...)`.

    Options that weights do not show are left out: rms_norm_eps and layer_idx; allow_neg_eigval for "kda_layers", "fla",
    "alice_ai" and "olmo_hybrid"; gate_activation and lower_bound except for families that have only one gate;
    output_activation for "kda_layers"; num_heads and head_dim with decay="head", where shapes depend on their product
    alone.
    The config.json of a folder with a "kimi_k3", an "alice_ai" or gated delta nets shows them, and rms_norm_eps.

    Args, raises: as in `load_kda_weights`; a ValueError for a config.json without these fields.
    """
    naming, tensors = _read(source, family, prefix)
    shown = _options_of_weights(naming, tensors)
    unseen = ("gate_activation", "lower_bound", "allow_neg_eigval", "output_activation")
    options = formats()[naming.family].options
    return shown | {n: options[n] for n in unseen if n in options} | _told(source, naming)


def _told(source: Source, naming: Naming, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the options, or those of these names, that the config.json of a checkpoint folder tells."""
    settings = formats()[naming.family].settings
    config = None if settings is None else _text_config(source)
    if settings is None or config is None:
        return {}
    try:
        return {n: value for n, value in settings(config).items() if names is None or n in names}
    except KeyError as error:
        raise ValueError(f"config.json in source must have the field {error} of {naming.family}") from error


def _read(source: Source, family: str | None, prefix: str | None, heads: int = 1) -> tuple[Naming, dict[str, Tensor]]:
    """Return the naming of the tensors under a prefix, and the tensors by their names relative to it.

    Without a layer's key heads, rows of weights that are fused by head are in another order.
    """
    if family is not None:
        _check_family(family)
    weights = open_weights(source)
    biases = [n for n in weights if n.rpartition(".")[2] == "dt_bias"]  # every KDA layer has one
    layers = list(dict.fromkeys(n.removesuffix("dt_bias").removesuffix("forget_gate.") for n in biases))
    start = f"{prefix}." if prefix and not prefix.endswith(".") else prefix or ""  # layers.1 is not layers.10
    names = [n for n in weights if n.startswith(start)]
    one_layer = "" in layers or "q_proj.weight" in weights
    if not names or (prefix is None and not one_layer):
        raise ValueError(
            f"prefix must be the path of a KDA layer in source, got {prefix!r}; "
            + (f"there are layers at {', '.join(map(repr, layers))}" if layers else "no tensor is named dt_bias")
        )
    tensors = {n.removeprefix(start): weights[n] for n in names}
    check_values(tensors)
    naming = _recognise(tensors, family)
    return naming, naming.parts(tensors, heads)


def _recognise(tensors: Mapping[str, Tensor], family: str | None) -> Naming:
    """Return the naming with the fewest unknown names, of the given family or of the only one that fits.

    Without a given family, take the naming that knows all names and misses the fewest.
    """
    A_log = next((t for n, t in tensors.items() if n in ("A_log", "forget_gate.A_log")), None)

    def strangeness(naming: Naming) -> tuple[int, bool]:
        return len(tensors.keys() - naming.names()), A_log is not None and A_log.ndim != len(naming.A_log_shape)

    namings = [naming for format in formats().values() for naming in format.namings]
    least = min(map(strangeness, namings))
    near = [n for n in namings if strangeness(n) == least]
    if family is None:
        missing = [len(n.names() - tensors.keys()) for n in near]
        near = [n for n, count in zip(near, missing, strict=True) if count == min(missing)]
    families = list(dict.fromkeys(n.family for n in near))
    if (family is None and len(families) > 1) or (family is not None and family not in families):
        raise ValueError(
            f"family must be {' or '.join(map(repr, families))}, got {family!r}: that fits the names in source, "
            f"{', '.join(sorted(tensors))}" + ("" if A_log is None else f", A_log {list(A_log.shape)}")
        )
    return next(n for n in near if family in (None, n.family))


def _check_layer(layer: Any) -> None:
    if not isinstance(layer, KimiDeltaAttention):
        raise TypeError(f"layer must be a KimiDeltaAttention, got {type(layer).__name__}{unwrapped_hint(layer)}")
    if unknown := [name for name, _ in layer.named_parameters() if name not in OURS.naming().names()]:
        raise ValueError(
            f"layer must have the parameters of a plain KimiDeltaAttention, got {', '.join(unknown)}: merge adapters "
            "first (merge_and_unload)"
        )
    check_values({name: p for name, p in layer.named_parameters() if not p.is_meta})
    check_not_sharded(
        "layer", layer, "use a model loaded without distributed_config; save_pretrained saves unsharded weights"
    )


def _check_family(family: str) -> None:
    if family not in formats():
        raise ValueError(f"family must be one of {', '.join(map(repr, formats()))}, got {family!r}")


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise a TypeError for tensors that hold no numbers, such as quantised weights and meta tensors."""
    for name, tensor in tensors.items():
        quantised = isinstance(tensor, Tensor) and is_quantised(tensor)
        if quantised or not isinstance(tensor, Tensor) or tensor.is_meta:
            got = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            hint = f": {DEQUANTISE}" if quantised else ""
            raise TypeError(f"{name} must be a tensor of {dtype_names(DTYPES)} that holds values, got {got}{hint}")


def differences(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], stored: Mapping[str, str] | None = None
) -> str:
    """Describe every name that is missing, unexpected or of a wrong shape; return '' if none is.

    Args:
        stored: names of the tensors that others are parts of.
    """
    whole = stored or {}
    shapes = [
        f"{n}{f' in {whole[n]}' if n in whole else ''} (expected {list(t.shape)}, got {list(tensors[n].shape)})"
        for n, t in wanted.items()
        if n in tensors and t.shape != tensors[n].shape
    ]
    kinds = {
        "missing": list(dict.fromkeys(whole.get(n, n) for n in wanted if n not in tensors)),
        "unexpected": [n for n in tensors if n not in wanted],
        "of a wrong shape": shapes,
    }
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)


def _options_of_weights(naming: Naming, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options that shapes show; raise a ValueError if they contradict each other."""
    stored = naming.stored()
    missing = naming._replace(gates=(), fused=()).names() - tensors.keys()
    if missing:
        wrong = ", ".join(sorted({stored.get(n, n) for n in missing}))
        raise ValueError(f"source must hold the {naming} weights of one layer, got missing: {wrong}")
    q, conv, dt_bias, norm = (
        tensors[naming.name(n)] for n in ("q_proj.weight", "conv1d.weight", "dt_bias", "o_norm.weight")
    )
    try:
        heads = tensors[naming.name("b_proj.weight")].shape[0]
        by_head = naming.name("f_proj.weight") in tensors and dt_bias.numel() == heads
        # With one decay a head, q and k show the product H K only, which H = 1 stands for here.
        head_dim = q.shape[0] if by_head else dt_bias.numel() // max(heads, 1)
        firsts = {n: tensors.get(naming.name(f"{n}_a_proj.weight")) for n in "fg"}
        ranks = {n: 0 if first is None else first.shape[0] for n, first in firsts.items()}
        options: dict[str, Any] = dict(
            hidden_size=q.shape[-1], num_heads=q.shape[0] // max(head_dim, 1), head_dim=head_dim,
            num_value_heads=heads, value_head_dim=norm.numel(), conv_kernel_dim=conv.shape[-1], gate_rank=ranks["g"],
            decay_rank=ranks["f"], decay="head" if by_head else "channel", learned_rate=naming.name("A_log") in tensors,
            output_gate_bias=any(naming.name(n) in tensors for n in ("g_b_proj.bias", "g_proj.bias")),
        )  # fmt: skip
        with torch.device("meta"):
            layer = KimiDeltaAttention(**options)
    except (ValueError, IndexError) as error:  # no layer has such options; a tensor without dimensions
        raise ValueError(f"source must hold the {naming} weights of one layer, got contradicting shapes") from error
    wrong = differences(tensors, naming.views(layer), stored)
    if wrong:
        raise ValueError(f"source must hold the {naming} weights of one layer, got, for {options}, {wrong}")
    return {n: option for n, option in options.items() if not (by_head and n in ("num_heads", "head_dim"))}


def _unlike(layer: KimiDeltaAttention, options: Mapping[str, Any]) -> list[str]:
    """Describe the options that have another value in the layer; a wanted value may be the name of another option."""
    same = (
        "hidden_size", "num_heads", "head_dim", "num_value_heads", "value_head_dim", "gate_rank", "decay_rank", "decay",
    )  # fmt: skip
    has = {n: getattr(layer, n) for n in same} | dict(
        conv_kernel_dim=layer.conv1d.weight.shape[-1],
        learned_rate=layer.A_log is not None,
        output_gate_bias=(layer.g_b_proj if layer.gate_rank else layer.g_proj).bias is not None,
        gate_activation=layer.kda_options["gate_activation"],
        lower_bound=layer.kda_options["lower_bound"],
        allow_neg_eigval=layer.kda_options["beta_activation"] == "2sigmoid",
        output_activation=layer.output_activation,
    )
    wanted = {n: has[v] if isinstance(v, str) and v in has else v for n, v in options.items()}
    return [f"{n}={v!r} (got {has[n]!r})" for n, v in wanted.items() if v != has[n]]


def _check_options(family: str, layer: KimiDeltaAttention) -> None:
    """Raise a ValueError for a layer with options that no layer of the family has."""
    unlike = _unlike(layer, formats()[family].options)
    if unlike:
        raise ValueError(f"layer must have what every layer of {family} has: {', '.join(unlike)}")


def _hint(naming: Naming, tensors: Mapping[str, Tensor], layer: KimiDeltaAttention) -> str:
    """Return a hint why weights differ from those a layer needs, or ''."""
    if any(n.endswith("conv1d.bias") for n in tensors):
        return "; biases of the convolution are not supported"
    try:
        unlike = _unlike(layer, _options_of_weights(naming, tensors))
    except ValueError:
        return ""
    return f"; they fit a KimiDeltaAttention with {', '.join(unlike)}" if unlike else ""


class SafetensorsFiles(Mapping[str, Tensor]):
    """The tensors of a .safetensors file or of a checkpoint folder, each read on access."""

    def __init__(self, path: str | PathLike):
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"source must be an existing .safetensors file or checkpoint folder, got {path}")
        if path.is_dir():
            path, index = path / "model.safetensors", path / "model.safetensors.index.json"
            if not path.exists() and index.exists():
                self._files = {name: path.parent / file for name, file in _weight_map(index).items()}
                return
            if not path.exists():
                raise FileNotFoundError(f"source must hold {path.name} or {index.name}, got neither in {path.parent}")
        with _open(path) as file:
            self._files = dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with _open(self._files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} must be a complete safetensors file, got: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    files = read_json(index, "a JSON object with a weight_map").get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index} must be a JSON object with a weight_map, got: {files!r}")
    for name, file in files.items():
        if not (isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")):
            raise ValueError(f"{index} must name .safetensors files beside it, no paths, got {file!r} for {name}")
    return files


def read_json(path: Path, what: str = "a JSON object") -> dict[str, Any]:
    """Return the object in a JSON file; raise a ValueError that says `what` must be there if there is none."""
    try:
        contents = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be {what}, got: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} must be {what}, got: {type(contents).__name__}")
    return contents


def _text_config(source: Source) -> dict[str, Any] | None:
    """Return the text model's configuration in a checkpoint folder, its linear_attn_config merged into it.

    None for a file, a state dict or a folder without config.json.
    """
    path = Path(source) / "config.json" if isinstance(source, str | PathLike) else None
    if path is None or not path.exists():
        return None
    config = read_json(path)
    text = config.get("text_config", config)
    try:
        return text | (text.get("linear_attn_config") or {})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path} must be the configuration of a model, got: {error!r}") from error


def open_weights(source: Source) -> Mapping[str, Tensor]:
    """Return `source` as a mapping of tensors: itself, or the contents of the file or folder."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str | PathLike):
        return SafetensorsFiles(source)
    raise TypeError(f"source must be a state dict or a path, got {type(source).__name__}")
