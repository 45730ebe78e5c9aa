"""The last tokens of sequences, at most `LAST_TOKENS` after the whole chunks, computed by the decode kernel.

A chunk costs the same with one token as with 64. So in calls without gradients a sequence of 65 tokens is one chunk
and one decoding step, and sequences of one token beside a prefill are decoded, in the same call. This depends on a
sequence's own length alone: it has the same bits alone, in any batch and in parts of whole chunks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....cuda.machine import Launch, Machine
from ....cuda.params import Params
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Inputs, PrefillInputs, state_shape
from ..decode import decode
from ..decode.decode import index_values
from ..spec import LAST_TOKENS, PLANS, Signature, row_stride

PARAMS = Params("OrderParams", """
    const void* cu_seqlens;  // [sequences + 1]
    const void* stops;       // [sequences], tokens after which an engine wants a state, or null
    int* order;              // [sequences]
    int* positions;          // [sequences]
    int sequences, int64_offsets, int64_stops;
    int in_place;            // the final state of a sequence without tokens is where the initial one is
""")  # fmt: skip
SOURCE = str(Path(__file__).with_name("order.cu"))
DEFINES = {"LAST_TOKENS": LAST_TOKENS}
THREADS = 256  # of order.cu
# Sequences from which those that have chunks are listed: measured (docs/internals/kernels/forward.md). Engines pad a
# step's sequences, up to one for each token, with empty ones, which need nothing where states are updated in place.
MANY, MANY_IN_PLACE = 96, 64


class Order(NamedTuple):
    """Tensors that order.cu writes."""

    order: Tensor  # [N] int32
    positions: Tensor  # [N] int32


def possible(T: int, packed: bool) -> bool:
    """Return True if a call may have last tokens; only the GPU knows the lengths of packed sequences."""
    return packed or 1 <= T % CHUNK <= LAST_TOKENS


def has_chunks(T: int) -> bool:
    """Return True if sequences of T tokens have any."""
    return T > LAST_TOKENS


def order_of(x: Inputs | PrefillInputs, stops: Tensor | None, machine: Machine) -> Order | None:
    """List the sequences that have chunks; None if there are too few sequences for a list to pay."""
    cu_seqlens, in_place = x.cu_seqlens, isinstance(x, PrefillInputs)
    if cu_seqlens is None or (N := cu_seqlens.shape[0] - 1) < (MANY_IN_PLACE if in_place else MANY):
        return None
    new = functools.partial(torch.empty, dtype=torch.int32, device=cu_seqlens.device)
    order = Order(new(N), new(N))
    pointers = PARAMS.point(cu_seqlens=cu_seqlens, stops=stops, order=order.order, positions=order.positions)
    params = pointers + PARAMS.set(
        sequences=N, int64_offsets=cu_seqlens.dtype == torch.int64,
        int64_stops=stops is not None and stops.dtype == torch.int64, in_place=in_place,
    )  # fmt: skip
    machine.load(SOURCE, "kda_order", DEFINES, cu_seqlens.device).launch(1, THREADS, 1, 2 * 4 * THREADS, params)
    return order


def states_before(x: Inputs | PrefillInputs, order: Order | None) -> Tensor:
    """Return memory for the states before last tokens, fp32 [rows, HV, V, K], of a call that keeps no final states."""
    rows, *state = state_shape(x)
    if order is not None:
        rows = min(rows, x.v.shape[1] // CHUNK)  # sequences with chunks come first
    return x.q.new_empty(rows, *state, dtype=torch.float32)


Strides = tuple[int, ...]


@functools.lru_cache(PLANS)
def plan_of(
    machine: Machine, s: Signature, strides: tuple[Strides, ...], slots: tuple[int, int, int, bool],
    offsets: tuple[int, int, int, bool], slot_stride: int, slot_count: int,
) -> tuple[Launch, bytes]:  # fmt: skip
    """Return the launch of a call and the values of its parameters.

    Strides are those of tokens and heads of q, k, v, g and beta, and of slots.
    """
    (_, T, H, K), HV, N = s.q_shape, s.v_shape[2], s.sequences
    variant = decode.variant_for(K, K, s.dtype, torch.float32)
    variant = variant._replace(last_tokens=LAST_TOKENS, head_gates=s.head_gates)
    q, k, v, g, beta = strides
    piece = 4  # elements of fp32 in 16 bytes
    values = decode.PARAMS.set(
        q_at=(0, *q, 0), k_at=(0, *k, 0), v_at=(0, *v, 0), g_at=(0, *g, s.g_wide),
        beta_at=(0, *beta, s.beta_dtype == torch.float32), slots_at=slots, offsets_at=offsets,
        group_inverse=-(-(2**32) // (HV // H)), slot_stride=slot_stride // piece, head_stride=K * K // piece,
        slot_count=slot_count, sequences=N, tokens=T, stage=LAST_TOKENS, gate=GATE_CODES[s.gate_activation],
        beta_activation=BETA_CODES[s.beta_activation], qk_l2norm=s.qk_l2norm, lower_bound=s.lower_bound, scale=s.scale,
    )  # fmt: skip
    return decode.launch_of(machine, s.device, variant, HV, N, LAST_TOKENS), values


def finish(
    x: Inputs | PrefillInputs, s: Signature, o: Tensor, before: Tensor | None, after: Tensor | None,
    final: Tensor | None, machine: Machine, order: Order | None = None, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute the outputs of last tokens, and the states after them.

    Args:
        x: as the forward or `one_role.prefill` read it, with the signature `s`
        o: [B, T, HV, V] contiguous, the outputs
        before: initial states, fp32 [N, HV, V, K], or a pool of them, heads side by side; None: zero
        after: states after whole chunks, likewise; if they are not `final`, in the order of `order` where that is given
        final: where final states go, likewise; None: nowhere
        slots: [N], of before, after and final
    """
    N, HV, V, K = s.state_shape
    pool = next((t for t in (final, before, after) if t is not None), None)
    count = N if slots is None else 0 if final is None else final.shape[0]
    launch, values = plan_of(
        machine, s, tuple((row_stride(t), t.stride(2)) for t in (x.q, x.k, x.v, x.g, x.beta)), index_values(slots),
        index_values(x.cu_seqlens), HV * V * K if pool is None else pool.stride(0), count,
    )  # fmt: skip
    positions = order.positions if order is not None and after is not final else None
    params = decode.PARAMS.point(
        q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, state=final, o=o, A_log=x.A_log, dt_bias=x.dt_bias, slots=slots,
        offsets=x.cu_seqlens, before=before, after=after, positions=positions,
    )  # fmt: skip
    launch.run(params + values)
