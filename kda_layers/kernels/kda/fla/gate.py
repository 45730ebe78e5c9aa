"""The gates of flash-linear-attention's interface (`api`): `fused_kda_gate` and the gate arguments of the others.

Source of names and meaning: flash-linear-attention 0.6.0, fla.ops.kda.gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks import DtypeError, check_is_tensor, dtype_names
from ..activations import log_decay
from ..checks import check_lower_bound
from ..contract import state_dtype


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | int | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    *,
    g_bias: Tensor | None = None,
) -> Tensor:
    """Log-decay from gate logits, differentiable in g, A_log and dt_bias.

    -exp(A_log) softplus(g + dt_bias), or if lower_bound is given lower_bound sigmoid(exp(A_log) (g + dt_bias)),
    computed in fp32 (fp64 for fp64 g). `chunk_kda(use_gate_in_kernel=True)` does not store it.

    Args:
        g: [..., HV, K], any float dtype.
        A_log: HV elements in any shape; with lower_bound, None means a rate of 1.
        dt_bias: [HV * K] or [HV, K], and any dimensions of size 1.
        lower_bound: in [-5, 0).
        output_dtype: dtype of the result; g's if None.
        g_bias: dt_bias in the signature of version 0.4.0, which Moonshot's published Kimi-Linear code calls:
            `fused_kda_gate(g, A_log, head_k_dim, g_bias=dt_bias)` with g [..., HV * K].

    Returns:
        [..., HV, K] in output_dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_is_tensor("g", g)
    if isinstance(dt_bias, int):
        if dt_bias < 1 or g.ndim < 1 or g.shape[-1] % dt_bias:
            raise ValueError(f"g must have shape [..., HV * {dt_bias}] with head_k_dim={dt_bias}, got {list(g.shape)}")
        g, dt_bias = g.unflatten(-1, (-1, dt_bias)), g_bias
    elif g_bias is not None:
        raise ValueError("g_bias needs head_k_dim as the third argument; with g [..., HV, K] pass dt_bias")
    if not g.is_floating_point():
        raise DtypeError(f"g must be of a float dtype, got {dtype_names([g.dtype])}")
    activation = "softplus" if lower_bound is None else "lower_bound"
    bound, wide = check_lower_bound(activation, lower_bound), state_dtype(g.dtype)
    A_log, dt_bias = _gate_parameters(g, A_log, dt_bias, lower_bound, wide)
    return log_decay(g.to(wide), A_log, dt_bias, activation, bound).to(output_dtype or g.dtype)


def gates(
    q: Tensor,
    g: Tensor,
    use_gate: bool,
    lower_bound: float | None,
    beta_logits: bool,
    allow_neg_eigval: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> dict[str, Any]:
    """Translate the gate and beta arguments of `chunk_kda` to those of `kda`."""
    if allow_neg_eigval and not beta_logits:
        raise ValueError("use_beta_sigmoid_in_kernel must be True with allow_neg_eigval=True, got False")
    beta = ("2sigmoid" if allow_neg_eigval else "sigmoid") if beta_logits else "given"
    if not use_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name} must be None with use_gate_in_kernel=False: g is then used as it is")
        return {"gate_activation": "log_decay", "beta_activation": beta}  # lower_bound is ignored
    check_is_tensor("g", g)
    A_log, dt_bias = _gate_parameters(g, A_log, dt_bias, lower_bound, state_dtype(q.dtype))
    return {
        "gate_activation": "softplus" if lower_bound is None else "lower_bound",
        "lower_bound": lower_bound,
        "beta_activation": beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }


def _gate_parameters(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Check A_log and dt_bias against g [..., HV, K]; return them as [HV] and [HV, K] in `dtype`."""
    if g.ndim < 2:
        raise ValueError(f"g must have shape [..., HV, K], got {list(g.shape)}")
    HV, K = g.shape[-2:]
    if A_log is None and lower_bound is None:
        raise ValueError("A_log must be given for a gate without lower_bound, got None")
    if A_log is not None:
        check_is_tensor("A_log", A_log)
        if A_log.numel() != HV:
            raise ValueError(f"A_log must have {HV} elements, one for each head of g, got shape {list(A_log.shape)}")
        A_log = A_log.reshape(HV).to(dtype)
    if dt_bias is not None:
        check_is_tensor("dt_bias", dt_bias)
        if dt_bias.numel() != HV * K or tuple(dt_bias.shape[-1:]) not in ((HV * K,), (K,)):
            raise ValueError(f"dt_bias must have shape [{HV * K}] or [{HV}, {K}], got {list(dt_bias.shape)}")
        dt_bias = dt_bias.reshape(HV, K).to(dtype)
    return A_log, dt_bias
