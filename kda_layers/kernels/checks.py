"""Checks of tensors and numbers for the validators of all operators; errors name the argument and the way out."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .torch_private import constant_to_compile

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OUTPUT_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]]  # of output gates
OUTPUT_ACTIVATIONS = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}

_TENSORS, _STRIDED = frozenset((Tensor, Parameter)), torch.strided


class DtypeError(TypeError, ValueError):
    """A dtype outside the contract, which may be caught as a TypeError or as a ValueError."""


def check_tensor(
    name: str, t: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor, like_name: str = "q"
) -> None:
    """Raise unless `t` is a tensor of this shape, of one of these dtypes and on the device of the argument `like`."""
    check_is_tensor(name, t)
    if t.shape != shape:
        swapped = t.ndim > 2 and (t.shape[0], t.shape[2], t.shape[1], *t.shape[3:]) == shape
        hint = f"; {name} looks like [B, H, T, D], pass {name}.transpose(1, 2)" if swapped else ""
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(t.shape)}{hint}")
    if t.dtype not in dtypes:
        raise DtypeError(
            f"{name} must be {dtype_names(dtypes)} with {like_name} of {dtype_names([like.dtype])}, got {t.dtype}"
        )
    if t.device != like.device:
        raise ValueError(f"{name} must be on {like_name}'s device {like.device}, got {t.device}")


def check_is_tensor(name: str, t: Any, instead: str = "") -> None:
    """Raise a TypeError unless `t` is a dense tensor of this process; `instead` ends the message for another type."""
    if type(t) in _TENSORS and t.layout is _STRIDED and not t.is_nested:
        return
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}{instead}")
    if t.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested (jagged) one: pass the sequences packed, "
            f"{name}.values()[None] and cu_seqlens={name}.offsets()"
        )
    if t.layout is not _STRIDED:
        raise TypeError(f"{name} must be a dense tensor, got layout {t.layout}: pass {name}.to_dense()")
    if hasattr(t, "to_local"):
        raise TypeError(
            f"{name} must be a tensor of this process, got {type(t).__name__}: pass {name}.to_local() where it holds "
            f"full sequences and heads, else {name}.full_tensor()"
        )


def check_index(name: str, t: Any, q: Tensor, like: str = "q") -> None:
    """Raise unless `t` is an int32 or int64 tensor on the device of q, which messages call `like`."""
    check_is_tensor(name, t, f": pass torch.tensor({name}, dtype=torch.int32, device={str(q.device)!r})")
    if t.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name} must be int32 or int64, got {t.dtype}")
    if t.device != q.device:
        raise ValueError(f"{name} must be on {like}'s device {q.device}, got {t.device}")


def check_offsets(cu_seqlens: Tensor, x: Tensor, name: str = "cu_seqlens", like: str = "q") -> None:
    """Raise unless cu_seqlens has the dtype and shape of offsets into packed x [1, T, ...]; reads no value.

    Messages call the two arguments `name` and `like`.
    """
    check_index(name, cu_seqlens, x, like)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        hint = f": pass {name}[0]" if cu_seqlens.ndim == 2 and cu_seqlens.shape[0] == 1 else ""
        raise ValueError(f"{name} must have shape [N + 1] with N >= 1, got {tuple(cu_seqlens.shape)}{hint}")
    if x.shape[0] != 1:
        raise ValueError(f"{name} needs packed sequences with B = 1, got B = {x.shape[0]}")


def check_scale(q: Any, scale: Any) -> float:
    """The scale as a float: `scale`, or q.shape[-1] ** -0.5 if None."""
    if scale is None:
        return _default_scale(operator.index(q.shape[-1])) if isinstance(q, Tensor) and q.ndim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not abs(scale) < math.inf:
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


@constant_to_compile  # a symbolic float would be traced twice
def _default_scale(K: int) -> float:
    return max(K, 1) ** -0.5


def dtype_names(dtypes: Any) -> str:
    """The dtypes as errors list them: float32 or bfloat16."""
    return " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))


def sequence_offsets(cu_seqlens: Tensor, T: int, name: str = "cu_seqlens") -> list[int]:
    """Check the values of the argument `name` and return them as Python integers (a host read)."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b < a:
            raise ValueError(f"{name} must not decrease, got {a} then {b} at positions {n} and {n + 1}")
    if offsets[-1] != T:
        raise ValueError(f"{name} must end at T = {T}, got {offsets[-1]}")
    return offsets


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which inputs of `dtype` are computed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
