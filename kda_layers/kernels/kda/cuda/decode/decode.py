"""Launcher of decode.cu and verify.cu: one or a few tokens of many sequences, in one kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call_cache import CallCache, leading_tensors
from ....cuda.machine import Launch, Machine
from ....cuda.params import Params
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CommitInputs, DecodeInputs, state_shape
from ..spec import LAST_TOKENS, OF_HEADS, TYPES, WIDTHS, has_head_gates

SOURCE, VERIFY_SOURCE = (str(Path(__file__).with_name(f"{name}.cu")) for name in ("decode", "verify"))
INDEX = """struct Index {  // of a tensor [N] or [N, columns]: strides in elements
    u32 row, column;
    u32 columns;  // 0: [N]
    u32 int64;    // 1: int64, 0: int32
};

"""  # filled by `index_values`
PARAMS = Params("DecodeParams", """
    const u16 *q, *k, *v;
    const void *g, *beta;
    unsigned char* state;
    u16* o;                        // [B, T, HV, V], contiguous
    const float *A_log, *dt_bias;  // [HV] and [HV, K] ([HV] if HEAD_GATES), or null
    const void* slots;             // null: sequence n has slot n. [N, columns]: a slot for the state after each token
    const void* accepted;          // null, or [N]: the state of sequence n is in column accepted[n] - 1 of its slots
    const void* offsets;           // null, or cu_seqlens [N + 1]
    float* state_scale;            // [slots, HV, V] of an int8 state, or null
    // Read if LAST_TOKENS; then `state` may be null
    const unsigned char *before, *after;  // with the strides of state, or null: zero
    const int* positions;                 // [N], rows of `after`, or null: those of state
    const unsigned char* initial;         // [initial_count, HV, V, K], read in place of state, or null
    const void* initial_slots;            // [N]
    // Read by verify.cu
    float* updates;
    const void* commits;       // null, or [N]: by how many updates the state of sequence n advances first
    const void* update_slots;  // null: a state's slot is that of its updates, or [N]
    // Above are pointers, packed at every launch; below, what a launch plan remembers.
    Rows q_at, k_at, v_at, g_at, beta_at;
    Index slots_at, accepted_at, offsets_at;
    u64 group_inverse;                         // 2^32 / (HV / H), rounded up: a multiplication divides by the group
    u32 slot_stride, head_stride, slot_count;  // strides of the state in 16 bytes
    u32 scale_slot_stride, scale_head_stride;  // in elements
    Index initial_at;
    u32 initial_slot_stride, initial_head_stride, initial_count;
    u32 sequences, tokens, stage;  // tokens of each sequence; how many of them shared memory holds at a time
    Rows updates_at;               // a slot in place of a batch row
    Index commits_at, update_slots_at;
    u32 update_count, most_tokens;  // slots of updates, and tokens in each
    int gate, beta_activation, qk_l2norm;
    float lower_bound, scale;
""", """
struct Rows {  // of a tensor [B, T, heads, ...]: strides in elements; of the last dimension it is 1
    u32 batch, token, head;
    u32 fp32;  // 1: fp32, 0: IO
};

""" + INDEX)  # fmt: skip
STATES = (torch.float32, torch.bfloat16)  # without a scale
STAGE = 8  # tokens in shared memory at a time
MOST_ROWS = 2**16 - 1  # limit of a grid's y and z
FEW = 4  # tokens of a sequence; with more, compute and not memory is the limit
MANY_HEADS = 128  # of all sequences together, about the number of multiprocessors
MANY_INT8_HEADS = 4 * MANY_HEADS  # from which an int8 state has a block per head; with half as many both are as fast


class Variant(NamedTuple):
    """The compile-time parameters of the kernel. Results depend on `lanes` but not on `rows` and `warps`."""

    K: int
    V: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    lanes: int  # that share a row of a state
    rows: int  # per lane
    warps: int  # per block
    last_tokens: int = 0  # if not 0, only the last tokens of each sequence, so many at most (forward/last_tokens.py)
    verify: bool = False  # of verify.cu
    head_gates: bool = False  # one gate for all channels of a head

    @property
    def source(self) -> str:
        return VERIFY_SOURCE if self.verify else SOURCE

    @property
    def entry(self) -> str:
        return "kda_verify" if self.verify else "kda_decode"

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.V, "IO": TYPES[self.dtype], "STATE_BYTES": self.state_dtype.itemsize,
            "LANES": self.lanes, "ROWS": self.rows, "WARPS": self.warps, "LAST_TOKENS": self.last_tokens,
            "SHARED_BYTES": self.shared_bytes(1), "HEAD_GATES": int(self.head_gates),
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def slices(self) -> int:
        """Blocks per head."""
        return self.V // self._block_rows

    def shared_bytes(self, stage: int) -> int:
        """Size in bytes of struct Shared in decode.cu with room for `stage` tokens."""
        rows = self._block_rows
        state, errors, token = rows * self.K * self.state_dtype.itemsize, 8 * rows, 4 * (3 * self.K + rows + 4)
        if self.state_dtype == torch.int8:
            errors, token = 4 * rows, 4 * (7 * self.K + rows + 24)
        return state + errors + stage * token

    @property
    def _block_rows(self) -> int:
        return self.rows * (32 // self.lanes) * self.warps


@functools.cache
def variant_for(K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype, busy: bool = False) -> Variant:
    """The variant for these widths and dtypes.

    `busy`, for many tokens of many sequences (int8 states: for many heads), gives the same bits with fewer instructions
    but half as many blocks.
    """
    if state_dtype == torch.int8:
        return Variant(K, V, dtype, state_dtype, 4, *((8, V // 64) if busy else (2, 4)))
    lanes = K // 8
    return Variant(K, V, dtype, state_dtype, lanes, *((8, V // 32) if busy else (4, 4)))


@functools.cache
def variant_to_verify(K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype) -> Variant:
    """The variant of verify.cu for these widths and dtypes: a block has a head, in as many warps as prepare tokens."""
    lanes = K // 8
    rows = 8 if K == 128 else 4
    return Variant(K, V, dtype, state_dtype, lanes, rows, V * lanes // (32 * rows), verify=True)


def variants() -> Iterator[Variant]:
    """Every variant of a call with K = V of the widths that the backend serves; of gates of heads, those `OF_HEADS`."""
    for width, dtype in dict.fromkeys(of_heads[:2] for of_heads in OF_HEADS):
        variant = variant_for(width, width, dtype, torch.float32)._replace(head_gates=True)
        yield from (variant, variant._replace(last_tokens=LAST_TOKENS))
        yield variant_to_verify(width, width, dtype, torch.float32)._replace(head_gates=True)
    for width, dtype, state in itertools.product(WIDTHS, TYPES, STATES):
        yield variant_to_verify(width, width, dtype, state)
    for width, dtype, state, busy in itertools.product(WIDTHS, TYPES, (*STATES, torch.int8), (False, True)):
        variant = variant_for(width, width, dtype, state, busy)
        yield variant
        if state == torch.float32 and not busy:
            yield variant._replace(last_tokens=LAST_TOKENS)


class Plan(NamedTuple):
    """Everything of a launch that does not depend on the addresses of tensors."""

    launch: Launch
    values: bytes
    qk_align: int  # bytes less one
    g_align: int
    bias_align: int
    aligned: bool  # the strides of tensors read with vector loads, which are copied if not
    states_aligned: bool


_plans: CallCache[Plan] = CallCache(leading_tensors(DecodeInputs))


def decode(x: DecodeInputs, machine: Machine, variant: Variant | None = None, plan: Plan | None = None) -> Tensor:
    """See `Backend.decode` and, of inputs with updates, `Backend.verify`; `plan` is `plan_for` of such inputs."""
    o = x.out
    if o is None:
        v = x.v
        o = torch.empty_like(v) if v.is_contiguous() else torch.empty_like(v, memory_format=torch.contiguous_format)
    plan, params, inputs = pack(x, o, machine, variant, plan)
    plan.launch.run(params)
    for given, written in ((x.state, inputs.state), (x.updates, inputs.updates)):
        if given is not None and written is not None and written is not given:
            given.copy_(written)
    return o


def commit(x: CommitInputs, machine: Machine) -> None:
    """See `Backend.commit`: verify.cu without tokens."""
    (_, HV, V, K), N = x.state.shape, x.num_accepted.shape[0]
    state, updates = x.state, x.updates
    if not _are_aligned(state, updates) or (state.data_ptr() | updates.data_ptr()) & 15:
        state, updates = (t.clone(memory_format=torch.contiguous_format) for t in (state, updates))
    variant = variant_to_verify(K, V, torch.bfloat16, state.dtype)  # without tokens, their dtype does not matter
    values = PARAMS.set(
        slots_at=index_values(x.state_indices), commits_at=index_values(x.num_accepted), sequences=N,
        **_values_of_states(state, updates, x.update_indices), **_values_of_initial(state, x.initial_indices),
    )  # fmt: skip
    pointers = PARAMS.point(
        state=state, slots=x.state_indices, updates=updates, update_slots=x.update_indices, commits=x.num_accepted,
        initial=None if x.initial_indices is None else state, initial_slots=x.initial_indices,
    )  # fmt: skip
    launch_of(machine, state.device, variant, HV, N, 1).run(pointers + values)
    if state is not x.state:
        x.state.copy_(state)


def plan_for(x: DecodeInputs, machine: Machine, variant: Variant | None = None) -> Plan:
    """Return the plan for tensors of these shapes, strides and types, made once."""
    return _plans.get(x, machine, variant) or _plans.put(x, _plan(x, machine, variant), machine, variant)


def pack(
    x: DecodeInputs, o: Tensor, machine: Machine, variant: Variant | None = None, plan: Plan | None = None
) -> tuple[Plan, bytes, DecodeInputs]:
    """Return the launch plan, its parameters and the inputs that these point to: x, or copies where not aligned."""
    plan = plan or plan_for(x, machine, variant)
    q, k, v, g, beta, state, A_log, dt_bias, slots, accepted, offsets, scale, *rest = x[:17]
    _, updates, update_slots, initial, sources = rest
    q_at, k_at, g_at, state_at = q.data_ptr(), k.data_ptr(), g.data_ptr(), state.data_ptr()
    bias_at, commits = 0 if dt_bias is None else dt_bias.data_ptr(), None
    if updates is not None:
        state_at, commits, accepted = state_at | updates.data_ptr(), accepted, None
    if initial is not None and (initial.data_ptr() & 15 or not _are_aligned(initial, None)):
        initial = initial.clone(memory_format=torch.contiguous_format)
        return pack(x._replace(initial_state=initial), o, machine, variant)
    if not plan.states_aligned or state_at & 15:
        updates = None if updates is None else updates.clone(memory_format=torch.contiguous_format)
        state = state.clone(memory_format=torch.contiguous_format)
        return pack(x._replace(state=state, updates=updates), o, machine, variant)
    if not plan.aligned or (q_at | k_at) & plan.qk_align or g_at & plan.g_align or bias_at & plan.bias_align:
        return pack(_copies(x), o, machine, variant)
    pointers = PARAMS.point(
        q=q, k=k, v=v, g=g, beta=beta, state=state, o=o, A_log=A_log, dt_bias=dt_bias, slots=slots, accepted=accepted,
        offsets=offsets, state_scale=scale, updates=updates, update_slots=update_slots, commits=commits,
        initial=initial, initial_slots=sources,
    )  # fmt: skip
    return plan, pointers + plan.values, x


def launch_of(machine: Machine, device: torch.device, variant: Variant, HV: int, N: int, stage: int) -> Launch:
    """Return the launch for N sequences of HV heads, `stage` of whose tokens shared memory holds at a time."""
    kernel = machine.load(variant.source, variant.entry, variant.defines, device)
    grid = HV * variant.slices, min(N, MOST_ROWS), -(-N // MOST_ROWS)
    return Launch(kernel, grid, variant.threads, 1, variant.shared_bytes(stage))


def _plan(x: DecodeInputs, machine: Machine, variant: Variant | None) -> Plan:
    """The plan for tensors of these shapes, strides and dtypes."""
    (N, HV, V, K), (T, H), state_dtype = state_shape(x), x.q.shape[1:3], x.state.dtype
    tokens = T if x.cu_seqlens is None else T // N
    heads = N * HV
    busy = heads >= MANY_HEADS if tokens > FEW else state_dtype == torch.int8 and heads >= MANY_INT8_HEADS
    verifies = x.updates is not None
    if variant is None:
        widths = K, V, x.q.dtype, state_dtype
        variant = variant_to_verify(*widths) if verifies else variant_for(*widths, busy)
    variant = variant._replace(head_gates=has_head_gates(x))
    stage, channels = min(T, STAGE if x.updates is None else x.updates.shape[1]), K // 32  # a lane reads `channels`
    launch = launch_of(machine, x.q.device, variant, HV, N, stage)
    q, k, v, g = (t.stride() for t in (x.q, x.k, x.v, x.g))
    scale = (0, 0) if x.state_scale is None else x.state_scale.stride()
    values = PARAMS.set(
        q_at=(*q[:3], 0), k_at=(*k[:3], 0), v_at=(*v[:3], 0), g_at=(*g[:3], x.g.dtype is torch.float32),
        beta_at=(*x.beta.stride(), x.beta.dtype is torch.float32), slots_at=index_values(x.state_indices),
        offsets_at=index_values(x.cu_seqlens), group_inverse=-(-(2**32) // (HV // H)),
        scale_slot_stride=scale[0], scale_head_stride=scale[1], sequences=N, tokens=T,
        stage=stage, gate=GATE_CODES[x.gate_activation], beta_activation=BETA_CODES[x.beta_activation],
        qk_l2norm=x.qk_l2norm, lower_bound=x.lower_bound, scale=x.scale,
        **{"commits_at" if verifies else "accepted_at": index_values(x.num_accepted)},
        **_values_of_states(x.state, x.updates, x.update_indices),
        **_values_of_initial(x.initial_state, x.initial_indices),
    )  # fmt: skip
    in_vectors = (q, k) if variant.head_gates else (q, k, g)  # a head's gate is one element, wherever it is
    contiguous = all(t is None or t.is_contiguous() for t in (x.A_log, x.dt_bias))
    contiguous = contiguous and all(strides[3] == 1 for strides in (*in_vectors, v))
    return Plan(
        launch, values,
        qk_align=channels * x.q.dtype.itemsize - 1,
        g_align=0 if variant.head_gates else channels * x.g.dtype.itemsize - 1,
        bias_align=0 if variant.head_gates else 15,
        aligned=contiguous and all(stride % channels == 0 for strides in in_vectors for stride in strides[:3]),
        states_aligned=_are_aligned(x.state, x.updates),
    )  # fmt: skip


def _values_of_states(state: Tensor, updates: Tensor | None, update_indices: Tensor | None) -> dict[str, Any]:
    """The values of the parameters that describe the states, and the updates of drafted tokens."""
    piece = 16 // state.element_size()
    values: dict[str, Any] = dict(
        slot_stride=state.stride(0) // piece, head_stride=state.stride(1) // piece, slot_count=state.shape[0]
    )
    if updates is not None:
        values |= dict(
            updates_at=(*updates.stride()[:3], 1), update_slots_at=index_values(update_indices),
            update_count=updates.shape[0], most_tokens=updates.shape[1],
        )  # fmt: skip
    return values


def _values_of_initial(initial: Tensor | None, indices: Tensor | None) -> dict[str, Any]:
    """The values of the parameters that describe the pool `initial`, whose slots `indices` are read."""
    if initial is None or indices is None:
        return {}
    slot, head = (stride // (16 // initial.element_size()) for stride in initial.stride()[:2])
    return dict(
        initial_at=index_values(indices), initial_slot_stride=slot, initial_head_stride=head,
        initial_count=initial.shape[0],
    )  # fmt: skip


def _are_aligned(state: Tensor, updates: Tensor | None) -> bool:
    """True if slots and heads of both are at multiples of 16 bytes from their first element."""
    strides = state.stride()[:2], () if updates is None else updates.stride()[:3]
    pieces = 16 // state.element_size(), 4
    return all(s % piece == 0 for of_one, piece in zip(strides, pieces, strict=True) for s in of_one)


def index_values(t: Tensor | None) -> tuple[int, int, int, bool]:
    """The values of struct Index for a tensor [N] or [N, columns]."""
    if t is None:
        return 0, 0, 0, False
    row, column = t.stride() if t.ndim == 2 else (t.stride(0), 0)
    return row, column, t.shape[1] if t.ndim == 2 else 0, t.dtype is torch.int64


def _copies(x: DecodeInputs) -> DecodeInputs:
    """`x` with copies of the tensors that decode.cu reads with vector loads."""
    names = ("q", "k", "v", "g", "A_log", "dt_bias")
    tensors = {n: t for n in names if (t := getattr(x, n)) is not None}
    return x._replace(**{n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()})
