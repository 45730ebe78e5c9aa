"""Launcher of layer_step.cu: a KDA layer's decode step between its projections, in one kernel."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call_cache import CallCache, leading_tensors
from ....cuda.arch import OVERLAPS
from ....cuda.machine import Launch, Machine
from ....cuda.params import Params
from ...activations import BETA_CODES, GATE_CODES
from ..decode.decode import INDEX, MOST_ROWS, STATES, TYPES, index_values
from ..spec import aligned
from .contract import Inputs, of_heads

SOURCE = str(Path(__file__).with_suffix(".cu"))
PARAMS = Params("LayerStepParams", """
    const u16 *q, *k, *v, *f, *gate, *beta;  // [B, 1, ...], channels of a token contiguous
    const void *conv_weight;                 // [D, TAPS], the channels of q first, then those of k and of v
    u16* conv_state;                         // [slots, D, HISTORY]
    unsigned char* state;                    // [slots, HV, V, K]
    u16* o;                                  // [B, HV, V], contiguous
    const u16 *f_weight, *gate_weight;       // [HV K, DECAY_RANK] and [HV V, GATE_RANK], or null with a rank of 0
    const u16 *gate_bias, *norm_weight;      // [HV V] or null, and [V]
    const float *A_log, *dt_bias;            // [HV] and [HV, K] ([HV] with HEAD_GATES), or null
    const void* slots;                       // [B], or null: sequence n has slot n
    Index slots_at;
    u64 group_inverse;                       // 2^32 / (HV / H), rounded up
    u32 q_stride, k_stride, v_stride, f_stride, gate_stride, beta_stride;  // of sequences, in elements
    u32 conv_slot_stride, conv_channel_stride, conv_tap_stride;  // in elements
    u32 slot_stride, head_stride, slot_count, first_slot;  // strides of the state in 16 bytes
    u32 sequences, qk_channels;              // channels of q: H K
    int gate_activation, beta_activation, silu;  // silu: 1 for an output gate by SiLU, 0 by sigmoid
    float lower_bound, scale, norm_eps;
""", INDEX)  # fmt: skip
RANKS = (64, 128)  # of the factors of decays and gate
TAPS = (2, 3, 4)
MOST_GROUP = 8  # value heads of a q/k head: a portable cluster
LINE = 8  # elements of 16 bytes
TOKENS = ("q", "k", "v", "f", "gate", "beta")  # contiguous within a sequence
WEIGHTS = ("conv_weight", "f_weight", "gate_weight", "gate_bias", "norm_weight", "A_log", "dt_bias")  # contiguous
_weights = operator.attrgetter(*WEIGHTS)


class Variant(NamedTuple):
    """A compiled variant, and what follows from its parameters."""

    K: int  # and V
    dtype: torch.dtype
    state_dtype: torch.dtype
    decay_rank: int  # 0: logits are given
    gate_rank: int  # the same of the output gate
    taps: int
    group: int  # value heads of a q/k head
    history: int | None = None  # inputs of the convolution that are kept, taps or taps - 1; None: taps
    fp32_taps: bool = False  # conv_weight in fp32
    head_gates: bool = False  # one decay of a head

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "IO": TYPES[self.dtype], "STATE_BYTES": self.state_dtype.itemsize,
            "LANES": self.K // 8, "ROWS": 4, "WARPS": self.warps, "DECAY_RANK": self.decay_rank,
            "GATE_RANK": self.gate_rank, "TAPS": self.taps, "CLUSTER": self.group,
            "HISTORY": self.history or self.taps, "TAP_BYTES": 4 if self.fp32_taps else 2,
            "HEAD_GATES": int(self.head_gates), "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip

    @property
    def warps(self) -> int:
        """Warps that hold all rows of a state, four to a lane."""
        return self.K * self.K // (8 * 4 * 32)

    @property
    def shared_bytes(self) -> int:
        """struct Shared of layer_step.cu: the state, seven vectors and four numbers."""
        return self.K**2 * self.state_dtype.itemsize + 4 * (7 * self.K + 4)


def variants(widths: Iterable[int], dtypes: Iterable[torch.dtype]) -> Iterator[Variant]:
    """The variants for the usual layers: four taps, no grouped heads; factors of rank K, of decays alone, or none. Of
    gated delta nets, those of two value heads for a q/k head, as Qwen's have."""
    for K, dtype, state, (f, gate) in itertools.product(widths, dtypes, STATES, ((1, 1), (1, 0), (0, 0))):
        yield Variant(K, dtype, state, f * K, gate * K, 4, 1)
        if not f:
            yield Variant(K, dtype, state, 0, 0, 4, 2, head_gates=True)


class Plan(NamedTuple):
    """Everything of a launch that does not depend on the addresses of tensors."""

    launch: Launch
    overlapped: Launch  # the same with overlap, where the GPU can
    values: bytes
    aligned: bool  # strides of the factors and of the state, which are read 16 bytes at a time


_plans: CallCache[Plan] = CallCache(leading_tensors(Inputs))


def layer_step(x: Inputs, machine: Machine, plan: Plan | None = None) -> Tensor:
    """Return o [B, T, HV, V], or `x.out`; `x.state` and `x.conv_state` are updated in place.

    `plan` is `plan_for` of such inputs.
    """
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device) if x.out is None else x.out
    state, plan = x.state, plan or plan_for(x, machine)
    overlap = x.overlap
    if not plan.aligned or _misaligned(x) or not all(t is None or t.is_contiguous() for t in _weights(x)):
        x, overlap = _copies(x), False  # which the kernel would read before they are made
        plan = plan_for(x, machine)
    pointers = PARAMS.point(
        q=x.q, k=x.k, v=x.v, f=x.f, gate=x.gate, beta=x.beta, conv_weight=x.conv_weight, conv_state=x.conv_state,
        state=x.state, o=o, f_weight=x.f_weight, gate_weight=x.gate_weight, gate_bias=x.gate_bias,
        norm_weight=x.norm_weight, A_log=x.A_log, dt_bias=x.dt_bias, slots=x.state_indices,
    )  # fmt: skip
    (plan.overlapped if overlap else plan.launch).run(pointers + plan.values)
    if x.state is not state:
        state.copy_(x.state)
    return o


def plan_for(x: Inputs, machine: Machine) -> Plan:
    """The plan for tensors of these shapes, strides and types, made once."""
    return _plans.get(x, machine) or _plans.put(x, _plan(x, machine), machine)


def _misaligned(x: Inputs) -> int:
    """Nonzero if a tensor that is read 16 bytes at a time does not start at a multiple of them."""
    weights = 0 if x.f_weight is None else x.f_weight.data_ptr()
    weights |= 0 if x.gate_weight is None else x.gate_weight.data_ptr()
    return (x.f.data_ptr() | x.gate.data_ptr() | x.state.data_ptr() | weights) & 15


def _copies(x: Inputs) -> Inputs:
    """`x` with copies of the tensors that the kernel cannot read as they are."""
    names = ("f", "gate", "state", *WEIGHTS)
    copies: dict[str, Any] = {n: aligned(t) for n in names if (t := getattr(x, n)) is not None}
    return x._replace(**copies)


def _plan(x: Inputs, machine: Machine) -> Plan:
    """The plan for tensors of these shapes, strides and types."""
    (B, _, H, K), HV, slot_count, device = x.q.shape, x.v.shape[2], x.state.shape[0], x.q.device
    factors = (x.f, x.f_weight), (x.gate, x.gate_weight)
    f_rank, gate_rank = (0 if weight is None else weight.shape[1] for _, weight in factors)
    taps, history, fp32_taps = x.conv_weight.shape[1], x.conv_state.shape[2], x.conv_weight.dtype is torch.float32
    variant = Variant(K, x.q.dtype, x.state.dtype, f_rank, gate_rank, taps, HV // H, history, fp32_taps, of_heads(x))
    piece, state = 16 // x.state.dtype.itemsize, x.state.stride()
    conv_slot, conv_channel, conv_tap = x.conv_state.stride()
    values = PARAMS.set(
        **{f"{name}_stride": getattr(x, name).stride(0) for name in TOKENS}, slots_at=index_values(x.state_indices),
        group_inverse=-(-(2**32) // (HV // H)), conv_slot_stride=conv_slot, conv_channel_stride=conv_channel,
        conv_tap_stride=conv_tap, slot_stride=state[0] // piece, head_stride=state[1] // piece, slot_count=slot_count,
        first_slot=x.first_slot, sequences=B, qk_channels=H * K, gate_activation=GATE_CODES[x.gate_activation],
        beta_activation=BETA_CODES[x.beta_activation], silu=int(x.output_activation == "silu"),
        lower_bound=x.lower_bound, scale=x.scale, norm_eps=x.norm_eps,
    )  # fmt: skip
    read = [(slot_count, state[0], piece), (HV, state[1], piece)]
    read += [(B, t.stride(0), LINE) for t, weight in factors if weight is not None]
    strides_aligned = all(stride % line == 0 for size, stride, line in read if size > 1)
    kernel = machine.load(SOURCE, "kda_layer_step", variant.defines, device)
    grid = HV, min(B, MOST_ROWS), -(-B // MOST_ROWS)
    launch = Launch(kernel, grid, 32 * variant.warps, variant.group, variant.shared_bytes)
    overlapped = launch._replace(overlap=machine.properties(device).capability >= OVERLAPS)
    return Plan(launch, overlapped, values, strides_aligned)
