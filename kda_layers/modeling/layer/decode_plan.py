"""Decode steps of a KDA layer by one kernel: everything that does not change between steps, and the launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...kernels import torch_private, tracing
from ...kernels.fused.linear_step import RepeatedLinearStep
from ...kernels.kda.checks import check_lower_bound
from ...kernels.kda.contract import state_dtype
from ...kernels.kda.cuda.layer_step.op import RepeatedLayerStep
from ...kernels.registry import requested
from .slots import PooledState
from .states import LayerState
from .weights import is_capturing

if TYPE_CHECKING:
    from .forward import KDAForward

OPTIONS = ("gate_activation", "lower_bound", "beta_activation", "backend")  # of the operator


def key_of_step(x: Tensor, *more: Any) -> Any:
    """Return what the plan of a step on x depends on besides the module, or None if plans must not be cached."""
    if torch.compiler.is_compiling() or is_capturing(x.device):
        return None
    if torch_private.transforms_active() or torch_private.forward_ad_active() or torch_private.dispatch_modes():
        return None
    return (
        type(x), x.shape, x.stride(), x.dtype, x.device, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        tracing.autocasts(x.device.type), torch_private.has_global_hooks(), requested(), *more,
    )  # fmt: skip


class DecodePlan:
    """Shapes, options and weights of the decode steps of one layer, which is passed to the methods.

    Attributes:
        lasts: True if the plan may be cached: all of its weights are the layer's parameters or views of them.
    """

    def __init__(
        self,
        layer: KDAForward,
        x: Tensor,
        state: LayerState | PooledState,
        norm: Any,
        in_kernel: Sequence[Any],
        whole: Tensor | None,
    ) -> None:
        """Plan steps on x [B, 1, D].

        Args:
            norm: norm of the layer's input, `is_plain`; None if x is already normalised.
            in_kernel: the layer's second factors that the kernel multiplies, None for each that it does not.
            whole: merged weights of the layers that read x; None if these layers must be called.
        """
        assert state.conv is not None
        assert state.recurrent is not None
        self._norm, self._options = norm, dict(layer.kda_options)
        self._product = None if whole is None else RepeatedLinearStep(whole, norm)
        self._output: RepeatedLinearStep | None = None
        self._states = _signature(state.conv), _signature(state.recurrent), state.index is None
        K, V, (H, HV), (B, T) = layer.head_dim, layer.value_head_dim, layer._heads(), x.shape[:2]
        self._q, self._v = (B, T, H, K), (B, T, HV, V)
        self._sizes: list[int] = []
        if whole is not None:
            self._sizes = [part.out_features for part in layer._inputs()]
            self._sizes.append(whole.shape[0] - sum(self._sizes))
        self._factors_in_kernel = tuple(in_kernel) == layer._factors()
        self._whole_factors = None if self._factors_in_kernel else self._products(layer)
        f_weight, gate_weight = (None if part is None else part.weight for part in in_kernel)
        A_log, dt_bias, wide = layer.A_log, layer.dt_bias, state_dtype(x.dtype)
        rate, bias = None if A_log is None else A_log.to(wide), dt_bias.to(wide)
        views = rate is A_log and bias is dt_bias
        taps, scale = layer.conv1d.weight, layer.o_norm.weight
        # PEFT wraps them (modules_to_save) with those of the active adapter; a rank has copies of its channels.
        is_held = taps is layer.conv1d._parameters.get("weight") and scale is layer.o_norm._parameters.get("weight")
        own = is_held and type(taps) is nn.Parameter
        self.lasts = (
            views and own and whole is not None and (self._factors_in_kernel or self._whole_factors is not None)
        )
        self._taps = taps[:, 0]
        gate_bias = None if gate_weight is None else in_kernel[1].bias
        gate, bound, beta, backend = (layer.kda_options.get(name) for name in OPTIONS)
        options = (
            f_weight, gate_weight, gate_bias, scale, rate, bias if layer.head_gates else bias.view(-1, K), None, None,
            gate, check_lower_bound(gate, bound), beta, K**-0.5, layer.rms_norm_eps, views, 0, layer.output_activation,
        )  # fmt: skip
        self._step = RepeatedLayerStep(options, backend)

    def fits(self, layer: KDAForward, state: LayerState | PooledState) -> bool:
        """Return True if the plan serves steps on this state with the layer's current options."""
        conv, recurrent = state.conv, state.recurrent
        if conv is None or recurrent is None or state.recording:
            return False
        same = (_signature(conv), _signature(recurrent), state.index is None) == self._states
        return same and layer.kda_options == self._options

    def run(self, layer: KDAForward, x: Tensor, state: LayerState | PooledState) -> Tensor:
        """Normalise x [B, 1, D] if the plan has a norm, and return o [B, 1, HV V]; the state is updated in place."""
        (q, k, v), f, b, g = layer._split(self._projections(layer, x))
        if not self._factors_in_kernel:
            f, g = self._logits(layer, f, g)
        q, k, v = q.view(self._q), k.view(self._q), v.view(self._v)
        o = self._step(q, k, v, f, g, b, self._taps, state.conv, state.recurrent, state_indices=state.index)
        state.count(x)
        return o.flatten(2)

    def output(self, layer: KDAForward, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual [B, 1, D] + o_proj(x) of x [B, 1, HV V]; o_proj `is_plain`."""
        if self._output is None:
            self._output = RepeatedLinearStep(layer.o_proj.weight, overlap=True)
        return self._output(x, residual)

    def _projections(self, layer: KDAForward, x: Tensor) -> Sequence[Tensor]:
        """Return part(x) of the layers that read x, by one product if possible."""
        if self._product is None:
            x = x if self._norm is None else self._norm(x)
            return [part(x) for part in layer._inputs()]
        return self._product(x).split(self._sizes, -1)[:-1]

    def _logits(self, layer: KDAForward, f: Tensor, g: Tensor) -> Sequence[Tensor]:
        """Return the logits of decays and gate from their projections [B, 1, ...], by one product if possible."""
        if self._whole_factors is None:
            pairs = zip(layer._factors(), (f, g), strict=True)
            return [part if factor is None else factor(part) for factor, part in pairs]
        if self._product is None:
            pair = torch.stack((f[:, 0], g[:, 0]))
        else:  # side by side in a row
            pair = f.as_strided((2, f.shape[0], f.shape[2]), (f.shape[2], f.stride(0), 1))
        f, g = torch.bmm(pair, self._whole_factors)
        return f[:, None], g[:, None]

    @staticmethod
    def _products(layer: KDAForward) -> Tensor | None:
        """Return the two factors [2, rank, outputs] that one batched product multiplies; None where it cannot."""
        factors = layer._factors()
        if layer.decay_rank and layer.gate_rank and factors[0].out_features == factors[1].out_features:
            whole = layer.factors.weight(factors)
            return None if whole is None else whole.unflatten(0, (2, -1)).mT
        return None


def _signature(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.shape, t.stride(), t.dtype, t.device
