"""Names, splits and shapes of the weights of a KDA layer in each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_layers.modeling.layer.layer import KimiDeltaAttention

SHARED = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "conv1d.weight", "b_proj.weight", "A_log", "dt_bias",
    "o_norm.weight", "o_proj.weight",
)  # fmt: skip
LOW_RANK = ("f_a_proj.weight", "f_b_proj.weight", "g_a_proj.weight", "g_b_proj.weight")
FULL_RANK = ("f_proj.weight", "g_proj.weight")
LOW_RANK_DECAY = ("f_a_proj.weight", "f_b_proj.weight", "g_proj.weight")
FUSED = "in_proj_qkvgfab.weight"
QKVGFAB = tuple(f"{n}_proj.weight" for n in ("q", "k", "v", "g", "f_a", "b"))
QKVBFA = tuple(f"{n}_proj.weight" for n in ("q", "k", "v", "b", "f_a"))
SEPARATE_CONV = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
FORGET_GATE = {
    n: f"forget_gate.{n}" for n in ("f_a_proj.weight", "f_b_proj.weight", "f_proj.weight", "A_log", "dt_bias")
}
SEQUENTIAL = {
    "f_a_proj.weight": "f_proj.0.weight", "f_b_proj.weight": "f_proj.1.weight",
    "g_a_proj.weight": "g_proj.0.weight", "g_b_proj.weight": "g_proj.1.weight", "g_b_proj.bias": "g_proj.1.bias",
}  # fmt: skip


class Fused(NamedTuple):
    """A weight of a family with several of ours in its rows."""

    name: str
    parts: tuple[str, ...]  # our names
    multiple: int = 1  # it has as many rows, the last ones zero
    by_head: bool = False  # rows of all parts for each key head in turn, not part after part

    def join(self, parts: list[Tensor], heads: int) -> Tensor:
        """Return it from its parts, [rows, D] each."""
        if self.by_head:
            return torch.cat([t.unflatten(0, (heads, -1)) for t in parts], 1).flatten(0, 1)
        padding = -sum(map(len, parts)) % self.multiple
        return torch.cat([*parts, parts[0].new_zeros(padding, parts[0].shape[-1])])

    def split(self, fused: Tensor, rows: Mapping[str, int], shown_by: str, heads: int) -> dict[str, Tensor]:
        """Return its parts, which have so many rows, as tensors show that a message names.

        Raises:
            ValueError: it has other rows than those of its parts and zeros.
        """
        sizes, total = [rows[n] for n in self.parts], sum(rows[n] for n in self.parts)
        listed = ", ".join(f"{n} [{size}]" for n, size in zip(self.parts, sizes, strict=True))
        if self.by_head:
            if fused.ndim != 2 or len(fused) != total or any(size % heads for size in sizes):
                heads_of = f"each of {heads} key heads the rows of {listed} divided by {heads}"
                got = f"got shape {list(fused.shape)}, with {shown_by}"
                raise ValueError(f"{self.name} must have for {heads_of}, {got}")
            of_heads = fused.unflatten(0, (heads, -1)).split([size // heads for size in sizes], 1)
            return dict(zip(self.parts, (t.flatten(0, 1) for t in of_heads), strict=True))
        if fused.ndim != 2 or len(fused) < total or fused[total:].any():
            got = f"got shape {list(fused.shape)}, with {shown_by}"
            raise ValueError(f"{self.name} must have the rows of {listed}, then zeros, {got}")
        return dict(zip(self.parts, fused[:total].split(sizes), strict=True))


class Naming(NamedTuple):
    """Names, splits and shapes of a layer's weights in a model, or in its files."""

    family: str
    on_disk: bool | None  # None if model and files agree
    gates: tuple[str, ...]  # our names of the gate weights; a layer has some of them
    renamed: Mapping[str, str] = {}  # our names to theirs if they differ
    separate_conv: bool = False
    A_log_shape: tuple[int, ...] = (-1,)
    A_log_may_be_longer: bool = False  # than the number of heads: the first ones count
    shared: tuple[str, ...] = SHARED  # our names of what every layer has
    fused: tuple[Fused, ...] = ()

    def __str__(self) -> str:
        return self.family + {None: "", False: " (in memory)", True: " (on disk)"}[self.on_disk]

    def name(self, ours: str) -> str:
        if ours == "conv1d.weight" and self.separate_conv:
            return SEPARATE_CONV[0]
        return self.renamed.get(ours, ours)

    def stored(self) -> dict[str, str]:
        """Return the names of fused weights by those of their parts."""
        return {part: fused.name for fused in self.fused for part in fused.parts}

    def names(self) -> set[str]:
        """Return every name that may occur."""
        own = {self.name(n) for n in (*self.shared, *self.gates) if n not in self.stored()}
        return own | set(SEPARATE_CONV if self.separate_conv else ()) | {fused.name for fused in self.fused}

    def views(self, layer: KimiDeltaAttention) -> dict[str, Tensor]:
        """Return views of the layer's parameters, in this naming and its shapes, but none of them fused."""
        views: dict[str, Tensor] = {}
        for ours, parameter in layer.named_parameters():
            p = parameter.detach()
            if ours == "conv1d.weight" and self.separate_conv:
                q_dim, v_dim = layer.num_heads * layer.head_dim, layer.num_value_heads * layer.value_head_dim
                views |= zip(SEPARATE_CONV, p.split([q_dim, q_dim, v_dim]), strict=True)
            else:
                views[self.name(ours)] = p.view(self.A_log_shape) if ours == "A_log" else p
        return views

    def export(self, layer: KimiDeltaAttention) -> dict[str, Tensor]:
        """Return copies of the layer's parameters, in this naming and its shapes."""
        copies = {n: view.clone(memory_format=torch.contiguous_format) for n, view in self.views(layer).items()}
        for fused in self.fused:
            copies[fused.name] = fused.join([copies.pop(n) for n in fused.parts], layer.num_heads)
        return copies

    def parts(self, tensors: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
        """Return a layer's tensors with names and shapes of `views`; its key heads matter for weights fused by head.

        Beside the shapes that `export` writes, taps of the convolution may be [channels, W], as in inference engines.

        Raises:
            ValueError: a fused weight has other rows than those of its parts and zeros.
        """
        if self.separate_conv:
            taps = {n: t[:, None] for n in SEPARATE_CONV if (t := tensors.get(n)) is not None and t.ndim == 2}
            tensors = tensors | taps
        if self.fused and (found := self._rows(tensors)) is not None:
            for fused in self.fused:
                if fused.name in tensors:
                    rest = {n: t for n, t in tensors.items() if n != fused.name}
                    tensors = rest | fused.split(tensors[fused.name], *found, heads)
        A_log, beta = tensors.get("A_log"), tensors.get("b_proj.weight")
        if self.A_log_may_be_longer and A_log is not None and beta is not None and A_log.ndim == 1:
            tensors = tensors | {"A_log": A_log[: len(beta)]}
        return tensors

    def _rows(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, int], str] | None:
        """Return the rows of every weight that may be fused, and shapes that show them; None if one is missing."""
        by_rank = "f_b_proj.weight" in self.gates
        needed = "dt_bias", self.name("o_norm.weight"), "f_b_proj.weight" if by_rank else "conv1d.weight"
        if any(n not in tensors or not tensors[n].ndim for n in needed):
            return None
        dt_bias, norm, last = (tensors[n] for n in needed)
        if by_rank:  # K = V and H = HV
            dim = dt_bias.numel()
            rows = dict.fromkeys("qkvg", dim) | dict(f_a=last.shape[-1], b=dim // max(norm.numel(), 1))
        else:  # one decay a head
            heads, values = dt_bias.numel(), dt_bias.numel() * norm.numel()
            keys = max(len(last) - values, 0) // 2
            rows = dict(q=keys, k=keys, v=values, g=values, f=heads, b=heads)
        shown_by = ", ".join(f"{n} {list(tensors[n].shape)}" for n in needed)
        return {f"{n}_proj.weight": size for n, size in rows.items()}, shown_by


class Format(NamedTuple):
    """Options and weight names that all KDA layers of a family share."""

    # Options of KimiDeltaAttention that every layer of the family has; a value may be the name of another option.
    options: Mapping[str, Any]
    namings: tuple[Naming, ...]  # `export_kda_weights` writes the first one for a place
    # Options that the text model's configuration shows, its linear_attn_config merged into it.
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    def naming(self, on_disk: bool = False) -> Naming:
        """Return the naming that is written for models, or for their files; raise a ValueError if there is none."""
        found = next((n for n in self.namings if n.on_disk in (None, on_disk)), None)
        if found is None:
            raise ValueError(f"on_disk must be {not on_disk} for {self.namings[0].family}, got {on_disk}")
        return found


# Options of every KDA layer in transformers.
STOCK = dict(
    num_value_heads="num_heads", value_head_dim="head_dim", output_gate_bias=False, output_activation="sigmoid",
    allow_neg_eigval=False, learned_rate=True, decay="channel",
)  # fmt: skip
# And of every gated delta net.
GATED_DELTA = dict(
    gate_rank=0, decay_rank=0, output_gate_bias=False, output_activation="silu", gate_activation="softplus",
    lower_bound=None, learned_rate=True, decay="head",
)  # fmt: skip
OURS = Format(
    {},
    (
        Naming(
            "kda_layers", None, (*LOW_RANK, "g_b_proj.bias", *FULL_RANK, "g_proj.bias", "A_log"),
            shared=tuple(n for n in SHARED if n != "A_log"),
        ),
    ),
)  # fmt: skip
FLA = Format(
    dict(
        gate_rank="value_head_dim",
        decay_rank="value_head_dim",
        output_gate_bias=True,
        output_activation="sigmoid",
        learned_rate=True,
        decay="channel",
    ),
    (Naming("fla", None, (*LOW_RANK, "g_b_proj.bias"), SEQUENTIAL, separate_conv=True),),
)


def gated_delta_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the gated delta nets of a model with this configuration."""
    sizes = dict(num_heads=config["linear_num_key_heads"], head_dim=config["linear_key_head_dim"])
    return sizes | dict(rms_norm_eps=config["rms_norm_eps"])


def _kimi_k3_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    bound = config.get("gate_lower_bound")
    gate = dict(gate_activation="softplus" if bound is None else "lower_bound", lower_bound=bound)
    return gate | dict(rms_norm_eps=config["rms_norm_eps"])


def _alice_ai_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(allow_neg_eigval=config["kda_allow_negative_eigenvalues"], rms_norm_eps=config["rms_norm_eps"])


# Models that transformers does not have. On disk: published files; in memory: vLLM 0.33's modules on one GPU.
KIMI_K3 = Format(
    STOCK | dict(gate_rank=0, decay_rank="head_dim"),
    (
        Naming("kimi_k3", True, LOW_RANK_DECAY, separate_conv=True, A_log_may_be_longer=True),
        Naming("kimi_k3", True, LOW_RANK_DECAY, separate_conv=True, A_log_shape=(1, 1, -1, 1)),
        Naming(
            "kimi_k3", True, LOW_RANK_DECAY, separate_conv=True, A_log_may_be_longer=True,
            fused=(Fused(FUSED, QKVGFAB, 16),),
        ),
        Naming("kimi_k3", False, LOW_RANK_DECAY, fused=(Fused(FUSED, QKVGFAB, 16),)),
    ),
    _kimi_k3_settings,
)  # fmt: skip
ALICE_AI = Format(
    {n: v for n, v in STOCK.items() if n != "allow_neg_eigval"}
    | dict(gate_rank="head_dim", decay_rank="head_dim", gate_activation="softplus", lower_bound=None),
    (
        Naming("alice_ai", True, LOW_RANK, {"A_log": "a_log_bias"}, separate_conv=True),
        Naming("alice_ai", False, LOW_RANK, fused=(Fused(FUSED, QKVBFA),)),
    ),
    _alice_ai_settings,
)
