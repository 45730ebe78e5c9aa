"""How a family names, splits and shapes the weights of a KDA layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from kda_layers.modeling.layer import KimiDeltaAttention

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
    """Names, splits and shapes of a layer's weights in a model, or in its files."""

    family: str
    on_disk: bool | None  # None if model and files agree
    gates: tuple[str, ...]  # our names of the gate weights
    renamed: Mapping[str, str] = {}  # our names to theirs if they differ
    separate_conv: bool = False
    A_log_shape: tuple[int, ...] = (-1,)

    def __str__(self) -> str:
        return self.family + {None: "", False: " (in memory)", True: " (on disk)"}[self.on_disk]

    def name(self, ours: str) -> str:
        if ours == "conv1d.weight" and self.separate_conv:
            return SEPARATE_CONV[0]
        return self.renamed.get(ours, ours)

    def names(self) -> set[str]:
        """Return every name that may occur."""
        return {self.name(n) for n in (*SHARED, *self.gates)} | set(SEPARATE_CONV if self.separate_conv else ())

    def views(self, layer: KimiDeltaAttention) -> dict[str, Tensor]:
        """Return views of the layer's parameters, in this naming and its shapes."""
        views: dict[str, Tensor] = {}
        for ours, parameter in layer.named_parameters():
            p = parameter.detach()
            if ours == "conv1d.weight" and self.separate_conv:
                q_dim, v_dim = layer.num_heads * layer.head_dim, layer.num_v_heads * layer.head_v_dim
                views |= zip(SEPARATE_CONV, p.split([q_dim, q_dim, v_dim]), strict=True)
            else:
                views[self.name(ours)] = p.view(self.A_log_shape) if ours == "A_log" else p
        return views


class Format(NamedTuple):
    """Options and weight names that all KDA layers of a family share."""

    # Options of KimiDeltaAttention that every layer of the family has; a value may be the name of another option.
    options: Mapping[str, Any]
    namings: tuple[Naming, ...]  # `export_kda_weights` writes the first one for a place

    def naming(self, on_disk: bool = False) -> Naming:
        """Return the naming that is written for models, or for their files."""
        return next(n for n in self.namings if n.on_disk in (None, on_disk))


# Options of every KDA layer in transformers.
STOCK = dict(num_v_heads="num_heads", head_v_dim="head_dim", output_gate_bias=False, allow_neg_eigval=False)
OURS = Format({}, (Naming("kda_layers", None, (*LOW_RANK, "g_b_proj.bias", *FULL_RANK, "g_proj.bias")),))
FLA = Format(
    dict(gate_rank="head_v_dim", output_gate_bias=True),
    (Naming("fla", None, (*LOW_RANK, "g_b_proj.bias"), SEQUENTIAL, separate_conv=True),),
)
