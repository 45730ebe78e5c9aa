"""Decode states in int8 with a scale per row: how they are rounded.

A row [K] of a state [V, K] is n * scale, with n from -127 to 127 and one fp32 scale. Rounding to the nearest n would
lose an update smaller than half a step at every token. An element is therefore rounded up with the probability of its
fraction, at every token. The random number is a hash of values at hand, so that equal inputs give equal bits and no
counter is kept. Which hash is not part of the definition: the CUDA kernel has another than `quantize_state`.
docs/internals/kernels/decode.md compares other roundings.

A scale is a row's largest magnitude / 127 with 15 bits of mantissa, rounded up. So 127 scale / 127 is scale again, and
a row that does not change keeps its bits: a scale that changed would round every element at every token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import DtypeError, check_is_tensor, dtype_names

LEAST_SCALE = 1e-37  # of smaller ones the reciprocal overflows: the row is rounded to 0
_HASH = 0x9E3779B1 - 2**32  # as an int32
_FLOATS = (torch.float32, torch.bfloat16)


def quantize_state(state: Tensor) -> tuple[Tensor, Tensor]:
    """Return a state as `kda_step` takes it with `state_scale`: a quarter of the bytes of fp32.

    Args:
        state: [..., V, K] fp32 or bf16, such as the `final_state` of `kda`.

    Returns:
        int8 [..., V, K] and fp32 [..., V]: an element is its integer times the scale of its row. The error of an
        element is less than its row's scale, 1/127 of the row's largest magnitude, and its mean is 0. A row with NaN or
        inf has a scale that is NaN or inf.

    Raises:
        TypeError: a state that is not a tensor, or of another dtype.
    """
    check_is_tensor("state", state)
    if state.dtype not in _FLOATS:
        raise DtypeError(f"state must be {dtype_names(_FLOATS)}, got {state.dtype}")
    x = state.float().contiguous()
    scale = _rounded_up(x.abs().amax(-1) * (1 / 127))
    inverse = torch.where(scale > LEAST_SCALE, 1 / scale, 0.0)
    y = (x * inverse[..., None] + 384).view(torch.int32)  # the mantissa is (128 + x / scale) 2^15
    random = x.view(torch.int32) * _HASH >> 17 & 0x7FFF
    return (((y + random) >> 15 & 0xFF) - 128).to(torch.int8), scale


def dequantize_state(state: Tensor, state_scale: Tensor) -> Tensor:
    """Return the fp32 state [..., V, K] of int8 `state` [..., V, K] and fp32 `state_scale` [..., V].

    Raises:
        TypeError: an argument that is not a tensor, or of another dtype.
        ValueError: a scale of another shape.
    """
    for name, t, dtype in (("state", state, torch.int8), ("state_scale", state_scale, torch.float32)):
        check_is_tensor(name, t)
        if t.dtype != dtype:
            raise DtypeError(f"{name} must be {dtype_names([dtype])}, got {t.dtype}")
    if state_scale.shape != state.shape[:-1]:
        raise ValueError(f"state_scale must have shape {list(state.shape[:-1])}, got {list(state_scale.shape)}")
    return state.float() * state_scale[..., None]


def _rounded_up(x: Tensor) -> Tensor:
    """x >= 0 to 15 bits of mantissa, upwards; NaN and inf as they are."""
    return torch.where(x < 1e38, ((x.view(torch.int32) + 0x1FF) & ~0x1FF).view(torch.float32), x)
