"""Find and import flash-linear-attention (fla-core 0.6). No other file imports it, and none at import time."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from types import SimpleNamespace

import torch
from torch import Tensor

PACKAGE, VERSION = "fla-core", "0.6"
CHUNK = 64  # tokens; the chunk size that its kernels are called with


@functools.cache
def problems() -> list[str]:
    """Reasons why its kernels cannot be used; finding out imports them, which takes seconds."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return [f"{PACKAGE} is not installed, needs pip install flash-linear-attention==0.6.0"]
    if version != VERSION and not version.startswith(VERSION + "."):
        return [f"{PACKAGE} is {version}, needs {VERSION}"]
    try:
        operator_stages(), layer_functions()
        intruder = _tilelang()
    except Exception as error:  # importing it with an incompatible Triton may raise anything
        return [f"{PACKAGE} {version} cannot be imported ({type(error).__name__}: {error})"]
    if intruder:
        return ["tilelang is installed, and its kernels would run in the place of fla-core's, needs FLA_TILELANG=0"]
    return []


def _tilelang() -> bool:
    """True if the stages would call TileLang's kernels, which do not support our table of packed chunks."""
    registries = importlib.import_module("fla.backends")._operation_registries
    backends = (
        b for name in ("kda", "common", "gla") if name in registries for b in registries[name]._backends.values()
    )
    return any(b.backend_type == "tilelang" and b.is_available() and b.is_enabled() for b in backends)


@functools.cache
def operator_stages() -> SimpleNamespace:
    """The stages of its KDA operator."""
    return _functions(
        {
            "fla.modules.norm.l2norm": ("l2norm_fwd", "l2norm_bwd"),
            "fla.ops.common.chunk_delta_h": (
                "chunk_gated_delta_rule_fwd_h",
                "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
            ),
            "fla.ops.common.gate": ("fused_beta_sigmoid_fwd", "fused_beta_sigmoid_bwd"),
            "fla.ops.gla.chunk": ("chunk_gla_fwd_o_gk",),
            "fla.ops.kda.chunk_bwd": ("chunk_kda_bwd",),
            "fla.ops.kda.chunk_intra": ("chunk_kda_fwd_intra",),
            "fla.ops.kda.fused_recurrent": ("fused_recurrent_kda_fwd",),
            "fla.ops.kda.gate": ("kda_gate_chunk_cumsum",),
            "fla.ops.utils": ("chunk_local_cumsum",),
        }
    )


@functools.cache
def layer_functions() -> SimpleNamespace:
    """The other functions of a layer: forward and backward of the convolution, and the differentiable gated norm."""
    return _functions(
        {
            "fla.modules.causal_conv1d": ("causal_conv1d_fwd", "causal_conv1d_bwd"),
            "fla.modules.norm.fused_norm_gate": ("rms_norm_gated",),
        }
    )


def _functions(names: dict[str, tuple[str, ...]]) -> SimpleNamespace:
    """Import functions by module, without their decorators, which add checks and dispatch to other packages."""
    found = {n: getattr(importlib.import_module(module), n) for module, ns in names.items() for n in ns}
    return SimpleNamespace(**{n: inspect.unwrap(f) for n, f in found.items()})


def table_rows(T: int, N: int) -> int:
    """The most chunks that N sequences of T tokens in all can have."""
    return (T + (CHUNK - 1) * N) // CHUNK


def chunk_table(cu_seqlens: Tensor | None, T: int) -> list[Tensor]:
    """Return [(sequence, chunk in it) of every chunk, each sequence's first chunk]; [] without packed sequences.

    Surplus rows name a chunk beyond the end of the last sequence, for which the kernels read and write nothing.
    """
    if cu_seqlens is None:
        return []
    first = torch.nn.functional.pad(((cu_seqlens.diff() + CHUNK - 1) // CHUNK).cumsum(0), (1, 0))
    N = first.shape[0] - 1
    rows = torch.arange(table_rows(T, N), device=first.device)
    sequence = (torch.searchsorted(first, rows, right=True) - 1).clamp(max=N - 1)
    table = torch.stack((sequence, rows - first[sequence]), 1)
    return [table.to(cu_seqlens.dtype), first.to(cu_seqlens.dtype)]
