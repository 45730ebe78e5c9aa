"""Stock KDA layers of transformers seen as a `KimiDeltaAttention`: the same forward over their parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...kernels.kda.checks import check_lower_bound
from ..layer.forward import KDAForward


class StockParameters(KDAForward):
    """The parameters of a stock KDA layer under the names that `KDAForward` reads; a mixin."""

    A_log = property(lambda self: self.forget_gate.A_log.flatten())
    dt_bias = property(lambda self: self.forget_gate.dt_bias)
    f_a_proj = property(lambda self: self.forget_gate.f_a_proj)
    f_b_proj = property(lambda self: self.forget_gate.f_b_proj)
    f_proj = property(lambda self: self.forget_gate.f_proj)
    value_head_dim = property(lambda self: self.head_dim)
    decay_rank: Any = property(lambda self: _rank(self.forget_gate, "f_a_proj"))
    gate_rank: Any = property(lambda self: _rank(self, "g_a_proj"))
    rms_norm_eps = property(lambda self: self.o_norm.variance_epsilon)

    def gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_norm(o, gate)


def _rank(owner: Any, name: str) -> int:
    """Return the rank of the projection whose first factor has this name; 0 if it has full rank."""
    first = owner._modules.get(name)
    return 0 if first is None else first.out_features


def kda_options(lower_bound: float | None, backend: str | None = None) -> dict[str, Any]:
    """Return `kda_options` of a stock layer whose gate has this bound; None for softplus."""
    gate = "softplus" if lower_bound is None else "lower_bound"
    return dict(gate_activation=gate, lower_bound=lower_bound, beta_activation="sigmoid", backend=backend)


def check_stock_layer(layer: Any, lower_bound: float | None) -> None:
    """Raise a ValueError unless the forward above computes what the stock layer does."""
    if layer.activation not in ("silu", "swish"):
        raise ValueError(f"the convolution's activation must be 'silu', got {layer.activation!r}")
    if layer.conv1d.bias is not None:
        raise ValueError("conv1d must have no bias")
    try:
        check_lower_bound("softplus" if lower_bound is None else "lower_bound", lower_bound)
    except TypeError as error:
        raise ValueError(str(error)) from error
