"""The backends of a layer's decode step: plain PyTorch, and our kernel for each family of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from ....checks import OUTPUT_ACTIVATIONS, accumulator_dtype
from ....cuda.gpu import OnArchs
from ....declarations import OneOf
from ...activations import BETA_CODES, GATE_CODES, GIVEN
from ...contract import NO_SLOT, DecodeInputs, Names, Widths
from ...eager.decode import check_slots_exist, decode
from ..spec import WIDTHS
from . import layer_step
from .contract import Backend, Inputs, Problem


class EagerBackend(Backend):
    """Plain PyTorch: any device and dtype. A layer uses it nowhere, as its own operations do the same; tests do."""

    name = "eager"
    priority = 15  # above kernels that flash-linear-attention comes before, as in `kda`

    def step(self, x: Inputs) -> Tensor:
        (B, _, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
        if x.state_indices is not None and x.first_slot:
            x = x._replace(state_indices=x.state_indices.where(x.state_indices >= x.first_slot, NO_SLOT))
        q, k, v = convolve(x).split((H * K, H * K, HV * V), -1)
        f = x.f if x.f_weight is None else torch.nn.functional.linear(x.f, x.f_weight)
        gate = x.gate if x.gate_weight is None else torch.nn.functional.linear(x.gate, x.gate_weight, x.gate_bias)
        dt_bias = None if x.dt_bias is None else x.dt_bias.view(HV, -1)
        inputs = DecodeInputs(
            q.view(B, 1, H, K), k.view(B, 1, H, K), v.view(B, 1, HV, V), f.reshape(B, 1, HV, -1), x.beta, x.state,
            x.A_log, dt_bias, x.state_indices, None, None, None, None, None, None, None, None, x.gate_activation,
            x.lower_bound, x.beta_activation, True, x.scale,
        )  # fmt: skip
        o = decode(inputs)
        wide = accumulator_dtype(o.dtype)
        y = torch.nn.functional.rms_norm(o.to(wide), (V,), x.norm_weight.to(wide), x.norm_eps)
        y = (y * OUTPUT_ACTIVATIONS[x.output_activation](gate.reshape(o.shape).to(wide))).to(o.dtype)
        return y if x.out is None else x.out.copy_(y)


def convolve(x: Inputs) -> Tensor:
    """Outputs [B, 1, D] of convolution and SiLU; updates `x.conv_state`."""
    inputs = torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)], -1)
    slots = torch.arange(len(inputs)) if x.state_indices is None else x.state_indices.long()
    check_slots_exist(slots.tolist(), x.conv_state.shape[0])
    wide, W, kept = accumulator_dtype(inputs.dtype), x.conv_weight.shape[1], x.conv_state.shape[2]
    window = torch.cat((x.conv_state[slots], inputs.mT), -1)
    used = slots != NO_SLOT
    x.conv_state[slots[used]] = window[used][..., -kept:]
    y = (window[..., -W:].to(wide) * x.conv_weight.to(wide)).sum(-1)
    return torch.nn.functional.silu(y).to(inputs.dtype)[:, None]


class CudaBackend(OnArchs, Backend):
    """Our kernel on the GPUs of some compute capabilities: one launch for everything between a layer's projections."""

    serves = {  # noqa: RUF012
        "dtype": OneOf(*layer_step.TYPES),
        "state_dtype": OneOf(*layer_step.STATES),
        "widths": Widths(*WIDTHS),
        "taps": OneOf(*layer_step.TAPS),
        "decay_rank": OneOf(0, *layer_step.RANKS),
        "gate_rank": OneOf(0, *layer_step.RANKS),
        "gate_activation": Names(*GATE_CODES),
        "beta_activation": Names(*(name for name in BETA_CODES if name != GIVEN)),
        "output_activation": OneOf(*OUTPUT_ACTIVATIONS),
    }

    def more_reasons(self, problem: Problem) -> list[str]:
        clusters = all(arch.bulk_copies for arch in self.archs)
        most = layer_step.MOST_GROUP if clusters else 1
        return [] if problem.group <= most else [f"HV/H is {problem.group}, needs at most {most}: a cluster of CTAs"]

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        if any(a.target == arch for a in self.archs):
            yield from ((layer_step.SOURCE, v.defines) for v in layer_step.variants(WIDTHS, layer_step.TYPES))

    def step(self, x: Inputs) -> Tensor:
        return layer_step.layer_step(x, self.machine)

    def repeated(self, x: Inputs) -> Callable[[Inputs], Tensor]:
        return partial(layer_step.layer_step, machine=self.machine, plan=layer_step.plan_for(x, self.machine))


BACKENDS = (EagerBackend(), *CudaBackend.every())
