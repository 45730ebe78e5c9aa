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
    fused: tuple[str, ...] = ()  # our names of the weights that are one above the other in FUSED
    fused_multiple: int = 1  # FUSED has as many rows, the last ones zero

    def __str__(self) -> str:
        return self.family + {None: "", False: " (in memory)", True: " (on disk)"}[self.on_disk]

    def name(self, ours: str) -> str:
        if ours == "conv1d.weight" and self.separate_conv:
            return SEPARATE_CONV[0]
        return self.renamed.get(ours, ours)

    def names(self) -> set[str]:
        """Return every name that may occur."""
        own = {self.name(n) for n in (*self.shared, *self.gates) if n not in self.fused}
        return own | set(SEPARATE_CONV if self.separate_conv else ()) | set((FUSED,) if self.fused else ())

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
        if self.fused:
            parts = [copies.pop(n) for n in self.fused]
            padding = -sum(map(len, parts)) % self.fused_multiple
            copies[FUSED] = torch.cat([*parts, parts[0].new_zeros(padding, layer.hidden_size)])
        return copies

    def parts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's tensors with names and shapes of `views`.

        Beside the shapes that `export` writes, taps of the convolution may be [channels, W], as in inference engines.

        Raises:
            ValueError: FUSED has other rows than those of its parts and zeros.
        """
        if self.separate_conv:
            taps = {n: t[:, None] for n in SEPARATE_CONV if (t := tensors.get(n)) is not None and t.ndim == 2}
            tensors = tensors | taps
        if self.fused and {FUSED, "dt_bias", "o_norm.weight", "f_b_proj.weight"} <= tensors.keys():
            dim, rank = tensors["dt_bias"].numel(), tensors["f_b_proj.weight"].shape[-1]  # K = V and H = HV
            heads = dim // max(tensors["o_norm.weight"].numel(), 1)
            rows = dict.fromkeys("qkvg", dim) | dict(f_a=rank, b=heads)
            rest = {n: t for n, t in tensors.items() if n != FUSED}
            tensors = rest | _split(tensors[FUSED], {n: rows[n.removesuffix("_proj.weight")] for n in self.fused})
        A_log, beta = tensors.get("A_log"), tensors.get("b_proj.weight")
        if self.A_log_may_be_longer and A_log is not None and beta is not None and A_log.ndim == 1:
            tensors = tensors | {"A_log": A_log[: len(beta)]}
        return tensors


def _split(fused: Tensor, rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the weights with so many rows that are one above the other in `fused`, before rows of zeros."""
    total = sum(rows.values())
    if len(fused) < total or fused[total:].any():
        parts = ", ".join(f"{n} [{size}]" for n, size in rows.items())
        raise ValueError(f"{FUSED} must have the rows of {parts}, then zeros, got shape {list(fused.shape)}")
    return dict(zip(rows, fused[:total].split(list(rows.values())), strict=True))


class Format(NamedTuple):
    """Options and weight names that all KDA layers of a family share."""

    # Options of KimiDeltaAttention that every layer of the family has; a value may be the name of another option.
    options: Mapping[str, Any]
    namings: tuple[Naming, ...]  # `export_kda_weights` writes the first one for a place
    # Options that the text model's configuration shows, its linear_attn_config merged into it.
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    def naming(self, on_disk: bool = False) -> Naming:
        """Return the naming that is written for models, or for their files."""
        return next(n for n in self.namings if n.on_disk in (None, on_disk))


# Options of every KDA layer in transformers.
STOCK = dict(
    num_value_heads="num_heads", value_head_dim="head_dim", output_gate_bias=False, allow_neg_eigval=False,
    learned_rate=True, decay="channel",
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
        learned_rate=True,
        decay="channel",
    ),
    (Naming("fla", None, (*LOW_RANK, "g_b_proj.bias"), SEQUENTIAL, separate_conv=True),),
)


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
            "kimi_k3", True, LOW_RANK_DECAY, separate_conv=True, A_log_may_be_longer=True, fused=QKVGFAB,
            fused_multiple=16,
        ),
        Naming("kimi_k3", False, LOW_RANK_DECAY, fused=QKVGFAB, fused_multiple=16),
    ),
    _kimi_k3_settings,
)  # fmt: skip
ALICE_AI = Format(
    {n: v for n, v in STOCK.items() if n != "allow_neg_eigval"}
    | dict(gate_rank="head_dim", decay_rank="head_dim", gate_activation="softplus", lower_bound=None),
    (
        Naming("alice_ai", True, LOW_RANK, {"A_log": "a_log_bias"}, separate_conv=True),
        Naming("alice_ai", False, LOW_RANK, fused=QKVBFA),
    ),
    _alice_ai_settings,
)
