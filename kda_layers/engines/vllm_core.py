"""The part of vLLM's KDA layers between the projections and the output projection, on its pools of states.

Pages are read and written in place: no recurrent state is gathered, scattered or copied. A step of decoded tokens is
one launch; one with prompts is one convolution, one packed prefill and one gated norm in place. Slot 0 of a pool is
nobody's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_layers.engines import calls
from kda_layers.kernels.fused.gated_norm import gated_rms_norm_
from kda_layers.kernels.fused.short_conv import short_convs, tokens_of_every_kernel
from kda_layers.kernels.kda.contract import CHUNK, NO_SLOT
from kda_layers.kernels.kda.cuda.layer_step.op import has_kernel, layer_step, why_no_kernel
from kda_layers.kernels.kda.drafts import kda_commit, kda_verify
from kda_layers.kernels.kda.op import kda_prefill

FIRST_SLOT = 1  # slot 0, vLLM's null block, stands for padding
CHECKPOINTS = CHUNK  # a prefill returns states at multiples of so many tokens of its part


class Parameters(NamedTuple):
    """Parameters of a layer's core: H heads of D channels, W taps."""

    conv_weight: Tensor  # [3 H D, W]
    A_log: Tensor  # [H] fp32
    dt_bias: Tensor  # [H, D] fp32
    norm_weight: Tensor  # [D]
    norm_eps: float
    lower_bound: float | None  # None: softplus

    @property
    def gate(self) -> dict[str, Any]:
        """The gate's arguments of the operators."""
        activation = "softplus" if self.lower_bound is None else "lower_bound"
        return dict(A_log=self.A_log, dt_bias=self.dt_bias, gate_activation=activation, lower_bound=self.lower_bound)


class Tokens(NamedTuple):
    """The projections of some tokens of a step, logits of the gates among them."""

    qkv: Tensor  # [T, 3 H D], rows of any stride
    f: Tensor  # [T, H D] of the decays
    gate: Tensor  # [T, H D] of the output gate
    beta: Tensor  # [T, H]

    def first(self, count: int) -> Tokens:
        """Return the first `count` tokens."""
        return Tokens(*(t[:count] for t in self))

    def at(self, index: Tensor) -> Tokens:
        """Return copies of the tokens at `index`."""
        return Tokens(*(t.index_select(0, index) for t in self))


class Slots(NamedTuple):
    """Slots of one step's prefills, the same in every layer of a cache group."""

    slots: Tensor  # [N]; NO_SLOT for padding
    fresh: Tensor  # [prefills] int64, the slots of sequences that begin here; 0 for the others
    checkpoint_at: Tensor | None  # [N]; -1 for none


def refusals(
    device: torch.device, dtype: torch.dtype, states: tuple[torch.dtype, ...], head_dim: int, taps: int,
    lower_bound: float | None,
) -> list[str]:  # fmt: skip
    """Return the reasons for which `Core` cannot serve a layer; none if it can.

    Args:
        device: of the layer's weights.
        dtype: of the activations.
        states: dtypes of the convolution's state and of the recurrent one.
    """
    found = []
    if states[0] != dtype:
        found.append(f"the convolution's state is {states[0]}, needs {dtype} of the activations")
    gate = "softplus" if lower_bound is None else "lower_bound"
    problem = dtype, states[1], head_dim, head_dim, 1, taps, 0, 0, gate, "sigmoid"
    if not has_kernel(None, device, *problem):
        found.append(f"no kernel for its decode step ({why_no_kernel(None, device, *problem)})")
    return found


class Core:
    """The core of one layer; the functions are those of vLLM's module that has the layer.

    With `updates` [requests, tokens, H, 3 D] drafts leave the recurrent states as they are, and vllm_recover.py commits
    those that are accepted; without, the state after each drafted token has a slot.
    """

    def __init__(
        self, heads: int, head_dim: int, conv_update: Any, exporter: Any, updates: Tensor | None = None
    ) -> None:
        self.heads, self.head_dim, self.updates = heads, head_dim, updates
        if updates is not None:  # a step's requests have the first rows
            self.rows = torch.arange(len(updates), dtype=torch.int32, device=updates.device)
        self._conv_update, self._exporter = conv_update, exporter

    def run(self, m: Any, x: Tokens, p: Parameters, conv_state: Tensor, state: Tensor, out: Tensor) -> None:
        """Write the step's normed outputs to out [1, at least m.num_actual_tokens, H, D].

        Args:
            m: the step's metadata (GDNAttentionMetadata).
            conv_state: [slots, 3 H D, W - 1 or more]; with drafts, its first W - 1 are those of one accepted token.
            state: [slots, H, D, D].
        """
        count = m.num_actual_tokens
        x, out = x.first(count), out[:, :count]
        if m.num_spec_decodes and (m.num_prefills or m.num_decodes):
            self._drafts_and_others(m, x, p, conv_state, state, out)
        elif m.num_spec_decodes:
            self.drafts(m, x, p, conv_state, state, out)
        elif m.num_prefills:
            self.prefill(m, x, p, conv_state, state, out)
        else:
            self.decode(m.non_spec_state_indices_tensor[:count], x, p, conv_state, state, out)
            return  # the kernel norms
        self.norm(out, x, p)

    def norm(self, out: Tensor, x: Tokens, p: Parameters) -> None:
        """Norm and gate out [1, T, H, D] in place."""
        gated_rms_norm_(out[0], x.gate.unflatten(-1, (self.heads, self.head_dim)), p.norm_weight, p.norm_eps)

    def _drafts_and_others(
        self, m: Any, x: Tokens, p: Parameters, conv_state: Tensor, state: Tensor, out: Tensor
    ) -> None:
        drafted, others = x.at(m.spec_token_indx), x.at(m.non_spec_token_indx)
        outputs = [out.new_empty(1, part.qkv.shape[0], *out.shape[2:]) for part in (drafted, others)]
        self.drafts(m, drafted, p, conv_state, state, outputs[0])
        if m.num_prefills:
            self.prefill(m, others, p, conv_state, state, outputs[1])
        else:
            slots = m.non_spec_state_indices_tensor[: others.qkv.shape[0]]
            self._decode_unnormed(slots, others, p, conv_state, state, outputs[1])
        for index, o in zip((m.spec_token_indx, m.non_spec_token_indx), outputs, strict=True):
            out.index_copy_(1, index.long(), o)

    def decode(
        self, slots: Tensor, x: Tokens, p: Parameters, conv_state: Tensor, state: Tensor, out: Tensor,
        factors: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:  # fmt: skip
        """Decode one token of each sequence, by one launch; out [1, T, H, D] is normed.

        Args:
            slots: [T]; below FIRST_SLOT: padding, whose outputs are zeros.
            factors: weights [H D, R] by which `x.f` and `x.gate` are still to be multiplied, or None.
        """
        q, k, v = x.qkv.unflatten(-1, (3, self.heads, self.head_dim)).unsqueeze(1).unbind(2)
        layer_step(
            q, k, v, x.f.unsqueeze(1), x.gate.unsqueeze(1), x.beta.unsqueeze(1), p.conv_weight,
            conv_state[..., : p.conv_weight.shape[1] - 1], state, norm_weight=p.norm_weight, f_weight=factors[0],
            gate_weight=factors[1], state_indices=slots, norm_eps=p.norm_eps, overlap=True, first_slot=FIRST_SLOT,
            out=out.transpose(0, 1), **p.gate,
        )  # fmt: skip

    def prefill(self, m: Any, x: Tokens, p: Parameters, conv_state: Tensor, state: Tensor, out: Tensor) -> None:
        """Run sequences of any length, decoded tokens among them; out [1, T, H, D] is not normed."""
        offsets = m.non_spec_query_start_loc
        step = self._slots(m, offsets.shape[0] - 1)
        state.index_fill_(0, step.fresh, 0)
        conv_state.index_fill_(0, step.fresh, 0)
        slots = m.non_spec_state_indices_tensor[: offsets.shape[0] - 1]  # slot 0 of padding may be overwritten
        y = convolve(x.qkv, p.conv_weight, conv_state, slots, offsets)
        found = kda_prefill(
            *self._split(y), x.f.unflatten(-1, (self.heads, self.head_dim))[None], x.beta[None], state,
            cu_seqlens=offsets, state_indices=step.slots, checkpoint_at=step.checkpoint_at, out=out, **p.gate,
        )  # fmt: skip
        if found.checkpoints is not None:
            self._exporter.export(
                m.checkpoint, raw_qkv=x.qkv, conv_state=conv_state, recurrent_checkpoint=found.checkpoints,
                recurrent_state=state, cu_seqlens=offsets,
            )  # fmt: skip

    def drafts(self, m: Any, x: Tokens, p: Parameters, conv_state: Tensor, state: Tensor, out: Tensor) -> None:
        """Run drafted tokens; out [1, T, H, D] is not normed."""
        slots, offsets = m.spec_state_indices_tensor, m.spec_query_start_loc
        most = slots.shape[1] if self.updates is None else self.updates.shape[1]
        y = self._conv_update(
            x.qkv, conv_state, p.conv_weight, None, activation="silu",
            conv_state_indices=slots[: m.num_spec_decodes, 0], num_accepted_tokens=m.num_accepted_tokens,
            query_start_loc=offsets, max_query_len=most, validate_data=False, out=x.qkv.new_empty(x.qkv.shape),
        )  # fmt: skip
        count = m.num_spec_decodes
        self.recur_drafts(y, x, p, state, slots[:count], offsets[: count + 1], m.num_accepted_tokens[:count], out)

    def recur_drafts(
        self, y: Tensor, x: Tokens, p: Parameters, state: Tensor, slots: Tensor, offsets: Tensor, accepted: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Run drafted tokens after their convolution.

        Args:
            y: [T, 3 H D] of the convolution.
            slots: [N, tokens] for the state after each token, or with updates [N, 1].
            offsets: [N + 1] of the tokens.
            accepted: [N], the column plus one of the state before the first token; not read with updates.
        """
        slots = slots.where(slots >= FIRST_SLOT, NO_SLOT)
        if self.updates is None:
            calls.step(*self._split(y), x.f, x.beta, state, slots, offsets, out, num_accepted=accepted, **p.gate)
            return
        kda_verify(
            *self._split(y), x.f.unflatten(-1, (self.heads, self.head_dim))[None], x.beta[None], state, self.updates,
            state_indices=slots[:, 0], update_indices=self.rows[: len(slots)], cu_seqlens=offsets, out=out, **p.gate,
        )  # fmt: skip

    def _decode_unnormed(
        self, slots: Tensor, x: Tokens, p: Parameters, conv_state: Tensor, state: Tensor, out: Tensor
    ) -> None:
        """`decode` beside drafts, whose outputs the norm takes together."""
        y = self._conv_update(
            x.qkv, conv_state, p.conv_weight, None, activation="silu", conv_state_indices=slots, validate_data=True,
            out=x.qkv.new_empty(x.qkv.shape),
        )  # fmt: skip
        slots = slots.where(slots >= FIRST_SLOT, NO_SLOT)
        calls.step(*self._split(y), x.f, x.beta, state, slots, None, out, **p.gate)

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [1, T, H, D] of rows [T, 3 H D]."""
        q, k, v = y.unflatten(-1, (3, self.heads, self.head_dim))[None].unbind(2)
        return q, k, v

    def _slots(self, m: Any, count: int) -> Slots:
        """Return the `Slots` of a step, which its metadata keeps for the next layers; no graph captures a prefill."""
        found = getattr(m, "kda_layers_slots", None)
        if found is None:
            slots = m.non_spec_state_indices_tensor[:count]
            first = m.num_decodes  # which come first, and have states
            fresh = slots[first:].where(~m.has_initial_state[first:count] & (slots[first:] >= FIRST_SLOT), 0).long()
            at = None
            if m.checkpoint is not None:
                offsets = m.checkpoint.checkpoint_offsets
                at = offsets.where(offsets > 0, -1)
            found = Slots(slots.where(slots >= FIRST_SLOT, NO_SLOT), fresh, at)
            m.kda_layers_slots = found
        return found


def convolve(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """Return the convolution with SiLU of packed rows x [T, D], and update its states in their slots.

    Args:
        x: [T, D], rows of any stride.
        weight: [D, W].
        pool: [slots, D, W - 1 or more]; the first W - 1 are a state's.
        slots: [N], of each sequence.
        offsets: [N + 1] of the sequences.
    """
    pool = pool[..., : weight.shape[1] - 1]
    (y,), _ = short_convs([x[None]], weight, pool.index_select(0, slots), offsets, into=(pool, slots))
    return y[0]


# Ends of the packed sequences of each warm-up prompt. Together they select every kernel that 1 to 64 sequences of up to
# 8,192 tokens in all select. None has more than 4,096 tokens, since activations take memory beside vLLM's cache.
PROMPTS = (71,), (70, 71), (2048,), *(tuple(4096 * (n + 1) // N for n in range(N)) for N in (1, 2, 5, 16, 64))
_warm: set[Any] = set()


def warm_up(
    heads: int, dtype: torch.dtype, conv_first: bool, state: Tensor, p: Parameters, tokens: int, recovers: bool
) -> None:
    """Compile what the steps of a layer call, once per kind of layer, before a graph captures one; on GPUs alone.

    Args:
        conv_first: memory layout of the convolution's states: [channels, inputs] if True, [inputs, channels] if False.
        state: the layer's pool; only its dtype and device are read.
        tokens: of a request in a step with drafts, 1 without.
        recovers: True if drafts leave the states as they are.
    """
    taps, D = p.conv_weight.shape[1], p.norm_weight.shape[0]
    dtypes, softplus = (p.conv_weight.dtype, dtype, state.dtype), p.lower_bound is None
    kind = heads, D, taps, conv_first, dtypes, softplus, tokens, recovers, state.device
    if state.device.type != "cuda" or kind in _warm:
        return
    _warm.add(kind)
    with torch.inference_mode(), torch.device(state.device):
        updates = torch.zeros(2, tokens, heads, 3 * D, dtype=torch.float32) if recovers else None
        core, pool = Core(heads, D, None, None, updates), torch.zeros(3, heads, D, D, dtype=state.dtype)
        width, inputs = 3 * heads * D, taps - 1
        conv = torch.zeros(3, *((width, inputs) if conv_first else (inputs, width)), dtype=dtype)
        conv = conv if conv_first else conv.mT
        sizes = width, heads * D, heads * D, heads
        x = Tokens(*(torch.zeros(2, size, dtype=dtype) for size in sizes))
        slots, out = torch.tensor([1, 2], dtype=torch.int32), torch.empty(1, 2, heads, D, dtype=dtype)
        core.decode(slots, x, p, conv, pool, out)
        for more in {0, heads % 16}:  # Triton specialises on strides that are multiples of 16
            for count in tokens_of_every_kernel(width):
                rows = torch.zeros(count, width + more, dtype=dtype)[:, :width]
                convolve(rows, p.conv_weight, conv, slots, torch.tensor([0, 1, count], dtype=torch.int32))
        core.norm(out, x, p)
        for ends in PROMPTS:
            run_prompts(heads, dtype, pool, p, ends)
        if tokens == 1:
            return
        offsets, one = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        columns = slots[:, None] if recovers else slots[:, None].expand(-1, tokens)
        x = Tokens(*(torch.zeros(2 * tokens, size, dtype=dtype) for size in sizes))
        out = torch.empty(1, 2 * tokens, heads, D, dtype=dtype)
        core.recur_drafts(x.qkv, x, p, pool, columns, offsets, one, out)
        if updates is not None:
            kda_commit(pool, updates, one, state_indices=slots, update_indices=core.rows)


def run_prompts(heads: int, dtype: torch.dtype, pool: Tensor, p: Parameters, ends: tuple[int, ...]) -> None:
    """Run packed sequences of zeros: the first two in slots 1 and 2, the others without a slot.

    Args:
        heads: H, of the layer on this rank.
        dtype: of the activations.
        pool: [3, H, D, D], states, updated in place; nothing reads or writes slot 0.
        p: parameters of the layer.
        ends: of the sequences, in tokens, ascending.
    """
    T, D = ends[-1], p.norm_weight.shape[0]
    q, k, v = torch.zeros(1, T, 3, heads, D, dtype=dtype).unbind(2)
    slots = torch.full((len(ends),), NO_SLOT, dtype=torch.int32)
    slots[:2] = torch.arange(1, 3)[: len(ends)]
    kda_prefill(
        q, k, v, torch.zeros_like(v), torch.zeros(1, T, heads, dtype=dtype), pool, state_indices=slots,
        out=torch.empty_like(v, memory_format=torch.contiguous_format),
        cu_seqlens=torch.tensor([0, *ends], dtype=torch.int32), **p.gate,
    )  # fmt: skip
