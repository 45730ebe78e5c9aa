"""The forward of a KDA layer, over whatever module holds its parameters; decode steps by few launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ...kernels.checks import OUTPUT_ACTIVATIONS, check_offsets, sequence_offsets
from ...kernels.compilers import load_early
from ...kernels.declarations import arch_of
from ...kernels.fused.gated_norm import gated_rms_norm
from ...kernels.fused.short_conv import short_convs
from ...kernels.kda.contract import KDA, MOST_SAVED, Problem, state_dtype
from ...kernels.kda.cuda.layer_step.op import has_kernel, why_no_kernel
from ...kernels.kda.op import kda
from ...kernels.over_ranks.kda import kda_over_ranks
from ...kernels.over_ranks.shards import Shards
from ...kernels.over_ranks.short_conv import short_convs_over_ranks
from ..checks import check_no_adapter, stored_dtype
from .decode_plan import DecodePlan, key_of_step
from .fast_paths import (
    Call,
    FastPath,
    Reason,
    SupposedCall,
    additions,
    fast_path,
    hooks,
    is_plain,
    name_of,
    other_dtype,
)
from .fused_sums import SHARED_INPUT, projections
from .remembered import Remembered
from .slots import PooledState, Slots
from .states import LayerState, read_state
from .weights import MERGED_WEIGHTS, MergedWeights, as_local, forget_local, loads_weights_of

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# Value heads of all sequences for which a decode step's kernel multiplies the factors of decays and gate itself. For
# more, a batched GEMM is faster (docs/internals/kernels/layer_step.md).
MOST_FACTORED = 256
MOST_KEPT = 0.1  # share of the device's memory that the KDA layers of a model may keep together with recompute="auto"
ALIGNED = 8  # outputs of the projections together are a multiple
READ_HERE = ("conv1d", "o_norm")  # submodules whose weights are read here, not in their own forward


@fast_path("decode step by one kernel", instead="the operators of a decode step one by one")
def DECODE_KERNEL(call: Any, layer: KDAForward, state: Any, in_kernel: list[Any]) -> Iterator[Reason]:
    """A call with a cache, without gradients and autocast, in dtypes and sizes that a kernel serves.

    `in_kernel` gets the layer's `_factors` as far as the kernel multiplies them.
    """
    if not state.cached:
        yield Reason("has no cache")
    if call.grad:
        yield Reason("runs with gradients enabled", "call it under torch.no_grad()" if call.tokens == 1 else "")
    if call.autocast:
        yield Reason("runs under autocast", "load the model in bfloat16 instead")
    if layer._kept_dtype(call, state) == torch.int8:
        yield Reason("keeps states in int8", "'bfloat16' for linear_state_dtype is served")
    factors = layer._factors()
    few = call.rows * layer._heads()[1] <= MOST_FACTORED and all(f is None or is_plain(f) for f in factors)
    if not (few and has_kernel(*layer._step_problem(call, state, layer.decay_rank, layer.gate_rank))):
        factors, problem = (None, None), layer._step_problem(call, state, 0, 0)
        if not has_kernel(*problem):
            yield Reason(lambda: f"has no kernel ({why_no_kernel(*problem)})")
    in_kernel += factors
    for module in (layer.conv1d, layer.o_norm, *factors):
        if module is not None:
            yield from other_dtype(module, call.dtype)
    if state.conv is not None and state.conv.dtype != call.dtype:
        yield Reason(f"has a cache in {name_of(state.conv.dtype)} for inputs in {name_of(call.dtype)}")


class KDAForward:
    """The forward of a KDA layer, with the parameters of `KimiDeltaAttention` by name; a mixin of modules.

    A layer whose projections are stored in another way overrides `_inputs` and `_split`.

    From a forward to its backward, every KDA layer of a model keeps what the operator saves. With recompute="auto",
    each of n layers may keep a share MOST_KEPT / n of the device's memory, at most the MOST_SAVED of a layer that is
    used alone. With gradient checkpointing, one layer at a time keeps anything: between its second forward and its
    backward. Its share is then that of a layer alone, because an operator that recomputes would run its forward three
    times. In a model that `swap_attention` changed in place, layers that transformers' every_n_layers leaves out count
    as checkpointed, too.
    """

    merged_weights: MergedWeights  # q, k, v, log-decay, output gate, beta
    factors: MergedWeights  # the second factors of log-decay and output gate, if both have one
    plan: Remembered[DecodePlan]  # of decode steps
    head_gates: bool = False  # one decay for each head, as gated delta nets have: dt_bias is [HV]
    output_activation: str = "sigmoid"  # of the output gate
    state_dtype: str = "float32"  # of states in caches that are begun
    recompute: str = "auto"  # as in `kda`
    memory_share: float | None = None
    layers_in_model: int = 1  # KDA layers that keep their share at the same time
    gradient_checkpointing: bool  # of a layer in a model; transformers sets it

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def new_weights() -> dict[str, Any]:
        """Return the attributes of a new layer by name, and begin to load what its calls need."""
        load_early()
        return dict(merged_weights=MergedWeights(ALIGNED), factors=MergedWeights(), plan=Remembered())

    def operator_recompute(self) -> dict[str, Any]:
        """Return `recompute` and `memory_share` of one call of the operator."""
        share = self.memory_share
        shares = self.layers_in_model > 1 and not (self.gradient_checkpointing and self.training)
        if self.recompute == "auto" and share is None and shares:
            share = min(MOST_SAVED, MOST_KEPT / self.layers_in_model)
        return dict(recompute=self.recompute, memory_share=share)

    @loads_weights_of(*READ_HERE)
    def compute(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | Slots | None,
        cu_seqlens: Tensor | None,
        shards: Shards | None = None,
        by_kernel: bool = True,
    ) -> Tensor:
        """Compute `forward`, whose arguments these are; without `by_kernel`, a decode step by its operators."""
        check_no_adapter(self, READ_HERE)
        mask, sequences = _read_call(hidden_states, self.hidden_size, attention_mask, cache, cu_seqlens, shards)
        state = read_state(cache, self.layer_idx, sequences)
        self._watch(hidden_states)
        step = state if cu_seqlens is None else state.step
        if by_kernel and step is not None and mask is shards is None:
            rows = hidden_states[0, :, None] if state.one_each else hidden_states
            plan = self.plan_step(rows, step)  # also of other calls, which lay the weights for later steps
            if plan is not None and (cu_seqlens is None or state.one_each):
                return self.o_proj(plan.run(self, rows, step)).view(hidden_states.shape)
        x = hidden_states if mask is None else hidden_states.masked_fill(~mask[..., None], 0)
        backend = self.kda_options.get("backend")

        qkv, f, beta, gate = self._split(self._projections(x, self._inputs(), state))
        taps = self.conv1d.weight.squeeze(1)
        if shards is None:
            (q, k, v), conv_state = short_convs(
                qkv, taps, state.conv, cu_seqlens, mask, state.cached, backend, state.conv_into
            )
        else:
            shards = shards.of_layer(self)
            q, k, v = short_convs_over_ranks(qkv, taps, shards, cu_seqlens, backend)
        q, k = (rearrange(t, "b t (h k) -> b t h k", k=self.head_dim) for t in (q, k))
        v = rearrange(v, "b t (h v) -> b t h v", v=self.value_head_dim)

        g = self.f_b_proj(f) if self.decay_rank else f
        if not self.head_gates:
            g = rearrange(g, "b t (h k) -> b t h k", k=self.head_dim)
        if mask is not None:  # at the lowest logits decay and write are exactly none
            if g.dtype == torch.float16:  # its lowest value times a small exp(A_log) would still decay
                g = g.float()
            g = g.masked_fill(~mask.view(*mask.shape, *(1,) * (g.ndim - 2)), torch.finfo(g.dtype).min)
            beta = beta.masked_fill(~mask[..., None], torch.finfo(beta.dtype).min)

        wide = state_dtype(q.dtype)
        A_log = None if self.A_log is None else self.A_log.to(wide)
        dt_bias = self.dt_bias.to(wide)
        if not self.head_gates:
            dt_bias = dt_bias.view(-1, self.head_dim)
        options = dict(cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, **self.kda_options)
        inputs, recompute = (q, k, v, g, beta), self.operator_recompute()
        if state.cached:
            state.new_dtype = stored_dtype(self.state_dtype, q.dtype)
        if shards is not None:
            o = kda_over_ranks(*inputs, shards, **recompute | options).o
        elif state.recording:
            o = state.attend_and_record(inputs, options, recompute, torch.cat(qkv, -1), taps.shape[-1], mask)
        elif state.cached:
            o = state.attend(inputs, options, recompute)
        else:
            o = kda(*inputs, **recompute | options).o
        if state.cached:
            state.write_conv(conv_state, x)

        gate = self.g_b_proj(gate) if self.gate_rank else gate
        gate = rearrange(gate, "b t (h v) -> b t h v", v=self.value_head_dim)
        norm = self.o_norm.weight, self.rms_norm_eps, self.gated_norm, self.output_activation
        o = gated_rms_norm(o, gate, *norm, backend=backend)
        return self.o_proj(rearrange(o, "b t h v -> b t (h v)"))

    def gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        """Return o [B, T, HV, V] normalised over V, times the activated gate [B, T, HV, V], in plain PyTorch."""
        return self.o_norm(o.to(self.o_norm.weight.dtype)) * OUTPUT_ACTIVATIONS[self.output_activation](gate)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        forget_local(self)  # type: ignore[arg-type]
        module: nn.Module = super()._apply(fn, recurse)  # type: ignore[misc]
        self.merged_weights.refresh(module)
        self.factors.refresh(module)
        self.plan.forget()
        return module

    def bypassed(self) -> Iterator[Reason]:
        """Yield what calling the layer does that running its plan leaves out."""
        yield from additions(self.o_proj, biased=False)
        for module in (self, self.conv1d, self.o_norm):
            yield from hooks(module)

    def fast_paths(self, call: SupposedCall) -> Iterator[tuple[FastPath, tuple[Any, ...]]]:
        """Yield the paths that a call on cached states (training: on none) would ask for, and their facts."""
        layers = self._inputs()
        if call.records:
            yield SHARED_INPUT, (layers,)
        elif call.tokens == 1:
            state = LayerState(None, None, call.rows)
            state.cached = True
            yield DECODE_KERNEL, (self, state, [])
            yield MERGED_WEIGHTS, (layers, self.merged_weights)

    def plan_step(
        self, x: Tensor, state: LayerState | PooledState, norm: nn.RMSNorm | None = None
    ) -> DecodePlan | None:
        """Return the plan of a decode step on x [B, 1, D] by one kernel, or None if no kernel serves it.

        With `norm`, which x is normalised by first, the caller caches the plan; without it, the layer does.

        Raises:
            ValueError: an adapter on a layer whose weight is read.
        """
        check_no_adapter(self, READ_HERE)
        self._watch(x)
        key = None if norm is not None else key_of_step(x)
        plan = None if key is None else self.plan.get(self, key)  # compiled code guards on what it reads
        if plan is not None and plan.fits(self, state):
            return plan
        in_kernel: list[Any] = []
        if not DECODE_KERNEL.serves(Call(x), self, state, in_kernel):
            return None
        whole = self.merged_weights.weight(self._inputs())
        if state.conv is None or state.recurrent is None or state.recording or x.shape[1] != 1:
            if self.decay_rank and self.gate_rank:
                self.factors.weight(self._factors())  # before a decode step is compiled or captured
            return None
        plan = DecodePlan(self, x, state, norm, in_kernel, whole)
        if plan.lasts and key is not None:
            self.plan.put(self, key, plan)
        return plan

    def _projections(self, x: Tensor, layers: Sequence[nn.Module], state: LayerState) -> tuple[Tensor, ...]:
        """Return layer(x) for each of `layers`; on a cache by the one product of decode steps, if it serves those."""
        call = Call(x)
        found = None
        if state.cached and not (call.grad or call.autocast or call.compiling):
            found = self.merged_weights.products(x, layers)
        return projections(x, layers) if found is None else found

    def problem(self, device: torch.device, dtype: torch.dtype, **fields: Any) -> Problem:
        """Return the problem of `kda` or `kda_step` that calls of the layer pose, with these further fields."""
        (H, HV), options = self._heads(), self.kda_options
        if fields.get("decode"):
            kept = stored_dtype(self.state_dtype, dtype)
            fields |= dict(bf16_state=kept == torch.bfloat16, int8_state=kept == torch.int8)
        return KDA.problem(
            device.type, arch_of(device), dtype, dtype, self.head_dim, self.value_head_dim, HV // H,
            options["gate_activation"], options["beta_activation"], True, head_gates=self.head_gates, **fields,
        )  # fmt: skip

    def _step_problem(self, call: Any, state: Any, *ranks: int) -> tuple[Any, ...]:
        """Return the arguments of `has_kernel`."""
        (H, HV), options = self._heads(), self.kda_options
        state_is = self._kept_dtype(call, state)
        sizes = self.head_dim, self.value_head_dim, HV // H, self.conv1d.weight.shape[2]
        activations = options["gate_activation"], options["beta_activation"]
        gates = self.head_gates, self.output_activation
        return options.get("backend"), call.device, call.dtype, state_is, *sizes, *ranks, *activations, *gates

    def _kept_dtype(self, call: Any, state: LayerState) -> torch.dtype:
        return stored_dtype(self.state_dtype, call.dtype) if state.recurrent is None else state.recurrent.dtype

    def _heads(self) -> tuple[int, int]:
        """Return the numbers of q/k and of value heads, which are this rank's under tensor parallelism."""
        HV = self.dt_bias.numel() // (1 if self.head_gates else self.head_dim)
        return (self.conv1d.weight.shape[0] - HV * self.value_head_dim) // (2 * self.head_dim), HV

    def _factors(self) -> tuple[Any, ...]:
        """Return the second factors of the log-decay's and the output gate's projections; None for one of full rank."""
        factors = self.f_b_proj if self.decay_rank else None, self.g_b_proj if self.gate_rank else None
        return tuple(None if factor is None else as_local(factor) for factor in factors)

    def _watch(self, x: Tensor) -> None:
        self.merged_weights.watch(x)
        self.factors.watch(x)

    def _inputs(self) -> tuple[Any, ...]:
        """Return the linear layers that read the input."""
        f = self.f_a_proj if self.decay_rank else self.f_proj
        g = self.g_a_proj if self.gate_rank else self.g_proj
        return tuple(map(as_local, (self.q_proj, self.k_proj, self.v_proj, f, g, self.b_proj)))

    def _split(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Return, of the outputs of `_inputs`, q, k, v [B, T, ...], those for the log-decay, beta and output gate."""
        *qkv, f, gate, beta = outputs
        return qkv, f, beta, gate


def _read_call(
    x: Tensor, D: int, mask: Tensor | None, cache: Any, cu_seqlens: Tensor | None, shards: Shards | None
) -> tuple[Tensor | None, int]:
    """Check a call's arguments; return the mask of its tokens, [B, T] bool, and its number of sequences."""
    if shards is not None and (mask is not None or cache is not None):
        name = "cache" if mask is None else "attention_mask"
        raise ValueError(f"{name} must be None with shards: sequences over ranks have no padding and no cache")
    if x.ndim != 3 or x.shape[-1] != D:
        raise ValueError(f"hidden_states must have shape [B, T, D = {D}], got {list(x.shape)}")
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError("attention_mask must be None with cu_seqlens: packed sequences have no padding")
        check_offsets(cu_seqlens, x)
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():  # no wait for a device
            sequence_offsets(cu_seqlens, T if shards is None else len(shards.places) * T)
        return None, cu_seqlens.shape[0] - 1
    if mask is None:
        return None, B
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have 2 dimensions [B, S], nonzero for real tokens, got shape {tuple(mask.shape)}"
        )
    if mask.shape[0] != B or mask.shape[1] < T:
        raise ValueError(f"attention_mask must have shape [{B}, at least {T}], got {list(mask.shape)}")
    return mask[:, -T:] != 0, B
