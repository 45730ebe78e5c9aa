"""An addition to the residual stream and the RMSNorm of the sum."""

from __future__ import annotations

from torch import Tensor

from .. import torch_private
from ..fla.layer import few_tokens
from ..tracing import is_plain
from .dispatch import ADD_RMS_NORM


def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return residual + x and its RMSNorm over the last dimension, differentiable.

    Args:
        residual: [B, T, D], any float dtype.
        x: as residual, or None to normalise the residual alone. torch.compile, torch.func, and tensors of another rank
            or class or unlike each other get the plain form, which broadcasts and raises as PyTorch does.
        weight: [D].
        eps: added to the mean of squares.
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        (sum, y), both [B, T, D]. The sum is rounded to its dtype before it is normalised. For x=None it is `residual`
        itself or a view of it: if the stream goes on from there, the backward adds its gradient in the norm's kernel.

    Raises:
        RuntimeError: a second derivative of a fused kernel; shapes that PyTorch cannot broadcast.
    """
    tensors = (residual, weight) if x is None else (residual, weight, x)
    alike = all(t.dtype == residual.dtype and t.device == residual.device for t in tensors)
    shaped = residual.ndim == 3 and weight.shape == residual.shape[2:] and (x is None or x.shape == residual.shape)
    fused = is_plain(tensors) and alike and shaped
    if not fused or torch_private.transforms_active() or torch_private.forward_ad_active():
        name = "eager"
    else:
        name = ADD_RMS_NORM.choose(backend, residual.device, residual.dtype, few_tokens(residual))
    return ADD_RMS_NORM.backend(name).normalise(residual, x, weight, eps)
