"""The last tokens of sequences, at most `TAIL` after the whole chunks, computed by the decode kernel.

A chunk costs the same with one token as with 64. So in calls without gradients a sequence of 65 tokens is one chunk
and one decoding step, and sequences of one token beside a prefill are decoded, in the same call. This depends on a
sequence's own length alone: it has the same bits alone, in any batch and in parts of whole chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....cuda.machine import Launchable, Machine
from ....cuda.params import Params, addresses
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput, PrefillInputs, outputs_like
from ..decode import decode
from ..decode.decode import MOST_ROWS, index_values
from . import forward as whole
from . import segments, two_roles
from .cut import cuts
from .forward import TAIL

PARAMS = Params("OrderParams", """
    const void* cu_seqlens;  // [sequences + 1]
    const void* stops;       // [sequences], tokens after which an engine wants a state, or null
    int* order;              // [sequences]
    int* places;             // [sequences]
    int sequences, int64_offsets, int64_stops;
""")  # fmt: skip
SOURCE = str(Path(__file__).with_name("order.cu"))
DEFINES = {"TAILS": TAIL}
THREADS = 256  # of order.cu
MANY = 96  # sequences from which those that have chunks are listed: measured (docs/internals/kernels/forward.md)


class Order(NamedTuple):
    """Tensors that order.cu writes."""

    order: Tensor  # [N] int32
    places: Tensor  # [N] int32


def possible(T: int, packed: bool) -> bool:
    """Return True if a call may have last tokens; only the GPU knows the lengths of packed sequences."""
    return packed or 1 <= T % CHUNK <= TAIL


def has_chunks(T: int) -> bool:
    """Return True if sequences of T tokens have any."""
    return T > TAIL


def order_of(x: Inputs | PrefillInputs, stops: Tensor | None, machine: Machine) -> Order | None:
    """List the sequences that have chunks; None if there are too few sequences for a list to pay."""
    cu_seqlens = x.cu_seqlens
    if cu_seqlens is None or (N := cu_seqlens.shape[0] - 1) < MANY:
        return None
    new = functools.partial(torch.empty, dtype=torch.int32, device=cu_seqlens.device)
    order = Order(new(N), new(N))
    params = PARAMS.pack(
        addresses((cu_seqlens, stops, *order)), N, cu_seqlens.dtype == torch.int64,
        stops is not None and stops.dtype == torch.int64,
    )  # fmt: skip
    machine.load(SOURCE, "kda_order", DEFINES, cu_seqlens.device).launch(1, THREADS, 1, 2 * 4 * THREADS, params)
    return order


def handover(x: Inputs | PrefillInputs, order: Order | None) -> Tensor:
    """Memory for the states before last tokens, fp32 [rows, HV, V, K], of a call that keeps no final states."""
    (B, T, HV, V), K = x.v.shape, x.q.shape[3]
    rows = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    if order is not None:
        rows = min(rows, T // CHUNK)  # sequences with chunks come first
    return x.q.new_empty(rows, HV, V, K, dtype=torch.float32)


def row_stride(t: Tensor) -> int:
    """Elements from a token of t [B, T, ...] to the next one. A dimension of size 1 may have any stride."""
    return t.stride(1) if t.shape[1] > 1 else t.stride(0)


class Plan(NamedTuple):
    """Everything that a launch needs except pointers."""

    kernel: Launchable
    threads: int
    grid: tuple[int, int, int]
    shared_bytes: int
    rest: bytes


Strides = tuple[int, ...]


@functools.lru_cache(4096)
def plan_of(
    machine: Machine, device: torch.device, dtype: torch.dtype, g_wide: bool, beta_wide: bool,
    q_shape: tuple[int, ...], HV: int, N: int, strides: tuple[Strides, ...], slots: tuple[int, int, int, bool],
    offsets: tuple[int, int, int, bool], slot_stride: int, slot_count: int,
    gate_activation: str, lower_bound: float, beta_activation: str, qk_l2norm: bool, scale: float,
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and strides: of tokens and heads, and of the states' slots in elements."""
    T, H, K = q_shape[1:]
    variant = decode.variant_for(K, K, dtype, torch.float32)._replace(tails=TAIL)
    q, k, v, g, beta = strides
    piece = 4  # elements of fp32 in 16 bytes
    rest = decode.PARAMS.pack_values(
        0, *q, 0, 0, *k, 0, 0, *v, 0, 0, *g, g_wide, 0, *beta, beta_wide, *slots, *index_values(None), *offsets,
        -(-(2**32) // (HV // H)), slot_stride // piece, K * K // piece, slot_count, 0, 0, N, T, TAIL,
        GATE_CODES[gate_activation], BETA_CODES[beta_activation], qk_l2norm, lower_bound, scale,
    )  # fmt: skip
    kernel = machine.load(decode.SOURCE, "kda_decode", variant.defines, device)
    grid = (HV * variant.slices, min(N, MOST_ROWS), -(-N // MOST_ROWS))
    return Plan(kernel, variant.threads, grid, variant.shared_bytes(TAIL), rest)


def finish(
    x: Inputs | PrefillInputs, o: Tensor, before: Tensor | None, after: Tensor | None, final: Tensor | None,
    machine: Machine, order: Order | None = None, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute the outputs of last tokens, and the states after them.

    Args:
        x: as `forward.forward` or `prefill.prefill` read it
        o: [B, T, HV, V] contiguous, the outputs
        before: initial states, fp32 [N, HV, V, K], or a pool of them, heads side by side; None: zero
        after: states after whole chunks, likewise; if they are not `final`, in the order of `order` where that is given
        final: where final states go, likewise; None: nowhere
        slots: [N], of before, after and final
    """
    HV, V = x.v.shape[2:]
    K = x.q.shape[3]
    N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    pool = next((t for t in (final, before, after) if t is not None), None)
    count = N if slots is None else 0 if final is None else final.shape[0]
    plan = plan_of(
        machine, x.q.device, x.q.dtype, x.g.dtype == torch.float32, x.beta.dtype == torch.float32, x.q.shape, HV, N,
        tuple((row_stride(t), t.stride(2)) for t in (x.q, x.k, x.v, x.g, x.beta)), index_values(slots),
        index_values(x.cu_seqlens), HV * V * K if pool is None else pool.stride(0), count,
        x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale,
    )  # fmt: skip
    places = order.places if order is not None and after is not final else None
    tensors = (
        x.q, x.k, x.v, x.g, x.beta, final, o, x.A_log, x.dt_bias, slots, None, x.cu_seqlens, None, before, after,
        places,
    )  # fmt: skip
    params = decode.PARAMS.pack_pointers(*addresses(tensors)) + plan.rest
    plan.kernel.launch(plan.grid, plan.threads, 1, plan.shared_bytes, params)


def forward(x: Inputs, machine: Machine) -> KDAOutput:
    """Return the outputs of a call without gradients.

    Raises:
        ValueError: as `forward.forward`
    """
    T, packed, cut = x.v.shape[1], x.cu_seqlens is not None, cuts(x, machine)
    run: Callable[..., tuple[KDAOutput, Any]] = segments.forward_in_segments if cut else whole.forward
    if not cut and two_roles.serves(x, machine):
        run = two_roles.forward
    if not possible(T, packed):
        return run(x, machine)[0]
    x = whole.aligned_inputs(x)
    order = kept = None
    if packed or has_chunks(T):
        order = order_of(x, None, machine) if not cut else None
        kept = None if x.final_state else handover(x, order)
        out, _ = run(x, machine, tails=whole.Tails(None if order is None else order.order, kept))
    else:
        out = outputs_like(x)
    finish(x, out.o, x.initial_state, out.final_state if kept is None else kept, out.final_state, machine, order)
    return out
