"""Plug-ins for inference engines: the calls of vLLM 0.33 and SGLang 0.5.23, with their keywords, shapes, strides,
dtypes, pools and padding.

The truth is the recurrence of each sequence alone. `test_engine_calls.py` binds and runs the same calls against the
engines' own functions; `test_engine_imports.py` imports engines with the plug-ins.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import engines
from kda_layers.engines import sglang, sglang_kernel, vllm, vllm_functions
from kda_layers.kernels.kda.reference import recurrence
from kda_layers.testing.budgets import FP32, budget, error
from kda_layers.testing.oracle import Inputs

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_both_gates = pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bounded"])
D = 128
LENGTHS = (70, 1, 130)
SLOTS = (4, 2, 7)  # of 9


class Layer:
    """The inputs of a KDA layer's core in an engine, and their truth."""

    def __init__(self, device: str, bound: float | None, lengths: tuple[int, ...] = LENGTHS, heads: int = 2) -> None:
        self.bound, self.lengths, self.H = bound, lengths, heads
        self.dtype = torch.bfloat16 if device == "cuda" else FP32
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        T = sum(lengths)
        # q, k and v are views of a single convolution output.
        self.mixed_qkv = randn(T, 3 * heads * D).to(self.dtype)
        self.raw_g, self.raw_beta = (randn(1, T, heads, D) - 4).to(self.dtype), randn(1, T, heads).to(self.dtype)
        self.A_log, self.dt_bias = 0.1 * randn(heads), 0.1 * randn(heads * D)
        self.offsets = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device=device)
        self.states = randn(len(lengths), heads, D, D)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """[1, T, H, D], views with the strides of the whole row."""
        q, k, v = (t.unflatten(-1, (self.H, D))[None] for t in self.mixed_qkv.split(self.H * D, -1))
        return q, k, v

    def pool(self, size: int = 9) -> Tensor:
        """States in their slots of a pool whose slots are apart; NaN elsewhere."""
        buffer = torch.full((size, self.H * D * D + 32), torch.nan, device=self.states.device)
        pool = buffer[:, : self.H * D * D].view(size, self.H, D, D)
        pool[list(SLOTS[: len(self.lengths)])] = self.states
        return pool

    def truth(self, n: int, dtype: torch.dtype = torch.float64, end: int | None = None) -> tuple[Tensor, Tensor]:
        """o [1, length, H, D] and the state [1, H, D, D] after sequence n, or after its first `end` tokens."""
        start, stop = self.offsets[n : n + 2].tolist()
        tokens = slice(start, stop if end is None else start + end)
        q, k, v = (t[:, tokens].to(dtype) for t in self.qkv)
        x = Inputs(
            q, k, v, self.raw_g[:, tokens].to(dtype), self.raw_beta[:, tokens].to(dtype), self.A_log.to(dtype),
            self.dt_bias.view(self.H, D).to(dtype), self.states[n : n + 1].to(dtype), None,
            "softplus" if self.bound is None else "lower_bound", self.bound or 0.0, "sigmoid", True, D**-0.5, True, 0,
        )  # fmt: skip
        o, state, _ = recurrence(x)
        return o, state

    def check(self, o: Tensor, states: Tensor) -> None:
        """o [1, T, H, D] and the states [N, H, D, D] of every sequence alone."""
        assert o.dtype == self.dtype
        for n, (start, end) in enumerate(itertools.pairwise(self.offsets.tolist())):
            want, want32 = self.truth(n), self.truth(n, self.dtype)
            for got, exact, plain in zip((o[:, start:end], states[n : n + 1]), want, want32, strict=True):
                assert error(got, exact) <= budget(error(plain, exact), self.dtype), n


# ---------------------------------------------------------------- vLLM


def vllm_function(target: str) -> Any:
    """Our function for a full name of vLLM's."""
    module, _, name = target.rpartition(".")
    return getattr(vllm_functions, vllm.FUNCTIONS[module][name])


def slots_of(x: Layer, *more: int) -> Tensor:
    return torch.tensor([*SLOTS[: len(x.lengths)], *more], dtype=torch.int32, device=x.states.device)


def kimi_prefill(x: Layer, out: Tensor | None = None) -> tuple[str, dict[str, Any]]:
    """KimiK3DeltaAttention with the Triton backend: dense q, k and v, states gathered from the pool."""
    q, k, v = (t.contiguous() for t in x.qkv)
    return f"{vllm.KIMI}.chunk_kda_with_fused_gate", dict(
        q=q, k=k, v=v, raw_g=x.raw_g, raw_beta=x.raw_beta, A_log=x.A_log, g_bias=x.dt_bias, lower_bound=x.bound,
        initial_state=x.states, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=x.offsets, out=out,
    )  # fmt: skip


def kimi_decode(x: Layer, pool: Tensor) -> tuple[str, dict[str, Any]]:
    return f"{vllm.KIMI}.fused_recurrent_kda_packed_decode", dict(
        mixed_qkv=x.mixed_qkv, raw_g=x.raw_g, raw_beta=x.raw_beta, A_log=x.A_log, dt_bias=x.dt_bias,
        lower_bound=x.bound, initial_state=pool, state_indices=slots_of(x), out=None,
    )  # fmt: skip


def glm_prefill(x: Layer) -> tuple[str, dict[str, Any]]:
    """Glm5NextLinearAttention with the Triton backend: beta after its activation, q, k and v in rows of three."""
    q, k, v = x.qkv
    return f"{vllm.GLM}.chunk_kda_with_fused_gate", dict(
        q=q, k=k, v=v, raw_g=x.raw_g, beta=x.raw_beta.float().sigmoid(), A_log=x.A_log.view(1, 1, -1, 1),
        g_bias=x.dt_bias, initial_state=x.states, output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=x.offsets, safe_gate=x.bound is not None, lower_bound=-5.0,
    )  # fmt: skip


def glm_decode(x: Layer, pool: Tensor) -> tuple[str, dict[str, Any]]:
    """Logits of gate and beta, written into the layer's output; more slots than sequences."""
    q, k, v = x.qkv
    return f"{vllm.GLM}.fused_recurrent_kda", dict(
        q=q, k=k, v=v, g=x.raw_g, beta=x.raw_beta, initial_state=pool, use_qk_l2norm_in_kernel=True,
        cu_seqlens=x.offsets, ssm_state_indices=slots_of(x, 0, 0), out=torch.empty(v.shape, dtype=v.dtype).to(v.device),
        sigmoid_beta=True, a_log=x.A_log.view(1, 1, -1, 1), g_bias=x.dt_bias, compute_gate=True, lower_bound=x.bound,
    )  # fmt: skip


def decays(x: Layer) -> Tensor:
    """Return the log-decay [1, T, H, D] in fp32, as Ling's `fused_kda_gate` does."""
    logits, rate = x.raw_g.float() + x.dt_bias.view(x.H, D), x.A_log.exp()[:, None]
    softplus = torch.nn.functional.softplus
    return -rate * softplus(logits) if x.bound is None else x.bound * (rate * logits).sigmoid()


def ling_prefill(x: Layer) -> tuple[str, dict[str, Any]]:
    """BailingMoeV3KimiDeltaAttention: log-decay and beta in fp32; safe_gate and lower_bound speak of the gate."""
    q, k, v = (t.contiguous() for t in x.qkv)
    return f"{vllm.LING}.chunk_kda", dict(
        q=q, k=k, v=v, g=decays(x), beta=x.raw_beta.float().sigmoid(), initial_state=x.states, output_final_state=True,
        use_qk_l2norm_in_kernel=True, safe_gate=x.bound is not None, lower_bound=x.bound, cu_seqlens=x.offsets,
    )  # fmt: skip


def ling_decode(x: Layer, pool: Tensor) -> tuple[str, dict[str, Any]]:
    q, k, v = (t.contiguous() for t in x.qkv)
    return f"{vllm.LING}.fused_recurrent_kda", dict(
        q=q, k=k, v=v, g=decays(x), beta=x.raw_beta.float().sigmoid(), initial_state=pool,
        use_qk_l2norm_in_kernel=True, safe_gate=x.bound is not None, lower_bound=x.bound, cu_seqlens=x.offsets,
        ssm_state_indices=slots_of(x, 0),
    )  # fmt: skip


def ling_drafts(x: Layer, pool: Tensor, slots: Tensor, accepted: Tensor) -> tuple[str, dict[str, Any]]:
    q, k, v = (t.contiguous() for t in x.qkv)
    return f"{vllm.LING}.fused_recurrent_kda_fwd", dict(
        q=q, k=k, v=v, g=decays(x), beta=x.raw_beta.float().sigmoid(), scale=D**-0.5, initial_state=pool,
        inplace_final_state=True, cu_seqlens=x.offsets, ssm_state_indices=slots, num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


@on_every_device
@on_both_gates
@pytest.mark.parametrize("prefill", [kimi_prefill, glm_prefill, ling_prefill])
def test_vllm_prefill(prefill: Any, bound: float | None, device: str) -> None:
    x = Layer(device, bound)
    target, arguments = prefill(x)
    x.check(*vllm_function(target)(**arguments))


@on_every_device
def test_vllm_prefill_into_a_slice_of_the_layers_output(device: str) -> None:
    """Kimi-K3's prefills beside drafts, which stand before them in the layer's output."""
    x = Layer(device, -5.0)
    whole = torch.full((1, sum(LENGTHS) + 6, x.H, D), 7.0, dtype=x.dtype, device=device)
    target, arguments = kimi_prefill(x, whole[:, 4:-2])
    o, states = vllm_function(target)(**arguments)
    assert o.data_ptr() == whole[:, 4:].data_ptr()
    x.check(whole[:, 4:-2], states)
    assert (whole[:, :4] == 7).all()
    assert (whole[:, -2:] == 7).all()


@on_every_device
def test_vllm_prefill_returns_states_as_the_pool_has_them(device: str) -> None:
    """Kimi-Linear puts them back without a cast."""
    x = Layer("cpu", -5.0)
    x.mixed_qkv, x.raw_g, x.raw_beta = (t.to(torch.bfloat16) for t in (x.mixed_qkv, x.raw_g, x.raw_beta))
    x.states = x.states.to(torch.bfloat16)
    target, arguments = kimi_prefill(x)
    arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    assert vllm_function(target)(**arguments)[1].dtype == torch.bfloat16


@on_every_device
@on_both_gates
@pytest.mark.parametrize("decode", [kimi_decode, glm_decode, ling_decode])
def test_vllm_decode(decode: Any, bound: float | None, device: str) -> None:
    x = Layer(device, bound, (1, 1, 1))
    pool = x.pool()
    target, arguments = decode(x, pool)
    o, same = vllm_function(target)(**arguments)
    assert same is pool
    x.check(o, pool[list(SLOTS)])
    assert pool[[0, 1, 3, 5, 6, 8]].isnan().all()


@on_every_device
@on_both_gates
def test_ling_drafts(bound: float | None, device: str) -> None:
    """Each sequence starts from the state after its accepted tokens and keeps the state after every token."""
    x = Layer(device, bound, (3, 3))
    pool = x.pool(20)
    pool[[10, 2]] = pool[[4, 2]]  # of the first, two tokens were accepted
    pool[4] = torch.nan
    slots = torch.tensor([[4, 10, 11], [2, 12, 13]], dtype=torch.int32, device=device)
    target, arguments = ling_drafts(x, pool, slots, torch.tensor([2, 1], dtype=torch.int32, device=device))
    o, _ = vllm_function(target)(**arguments)
    x.check(o, pool[[11, 13]])
    for token, of_tokens in enumerate(((4, 2), (10, 12))):
        for n, slot in enumerate(of_tokens):
            _, want = x.truth(n, end=token + 1)
            assert error(pool[slot][None], want) <= budget(error(x.truth(n, FP32, token + 1)[1], want), x.dtype)


@on_every_device
@on_both_gates
def test_vllm_decode_of_a_padded_batch(bound: float | None, device: str) -> None:
    """One token of each sequence, in rows of a padded batch: slot 0 is vLLM's null block."""
    x = Layer(device, bound, (1, 1, 1))
    pool = x.pool()
    slots = torch.tensor([*SLOTS, 0, 0], dtype=torch.int32, device=device)
    padded = torch.cat((x.mixed_qkv, torch.full_like(x.mixed_qkv[:2], torch.nan)))
    g, beta = (torch.cat((t, torch.full_like(t[:, :2], torch.nan)), 1) for t in (x.raw_g, x.raw_beta))
    o, same = vllm_functions.packed_decode(
        mixed_qkv=padded, raw_g=g, raw_beta=beta, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=bound,
        initial_state=pool, state_indices=slots,
    )  # fmt: skip
    assert same is pool
    x.check(o[:, :3], pool[list(SLOTS)])
    assert not o[:, 3:].any()
    assert pool[[0, 1, 3, 5, 6, 8]].isnan().all()


@on_every_device
@on_both_gates
def test_vllm_drafts(bound: float | None, device: str) -> None:
    """Speculative decoding: a slot for the state after each token; the next call starts after the accepted ones."""
    x = Layer(device, bound, (3, 3))
    pool = x.pool(20)
    slots = torch.tensor([[4, 10, 11], [2, 12, 13], [0, 0, 0]], dtype=torch.int32, device=device)
    offsets = torch.cat((x.offsets, x.offsets[-1:]))  # a padding sequence without tokens
    q, k, v = x.qkv
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    o, _ = vllm_functions.recurrent(
        q=q, k=k, v=v, raw_g=x.raw_g, raw_beta=x.raw_beta, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=bound,
        initial_state=pool, cu_seqlens=offsets, ssm_state_indices=slots,
        num_accepted_tokens=torch.tensor([1, 1, 1], dtype=torch.int32, device=device), out=out,
    )  # fmt: skip
    assert o.data_ptr() == out.data_ptr()
    x.check(o, pool[[11, 13]])
    for token, of_tokens in enumerate(((4, 2), (10, 12), (11, 13))):
        for n, slot in enumerate(of_tokens):
            _, want = x.truth(n, end=token + 1)
            assert error(pool[slot][None], want) <= budget(error(x.truth(n, FP32, token + 1)[1], want), x.dtype)
    assert pool[0].isnan().all()


@on_every_device
def test_vllm_drafts_of_a_padded_batch(device: str) -> None:
    """Rows of slots beyond the offsets, and as many rows as tokens."""
    x = Layer(device, -5.0, (3, 3))
    q, k, v = x.qkv
    empty = [[0, 0, 0]]
    slots = torch.tensor([[4, 10, 11], [2, 12, 13], *empty * 4], dtype=torch.int32, device=device)
    accepted = torch.ones(6, dtype=torch.int32, device=device)
    for offsets in (x.offsets, torch.cat((x.offsets, x.offsets[-1:].expand(4)))):  # of 2 and of 6 sequences
        pool = x.pool(20)
        o, _ = vllm_functions.recurrent(
            q=q, k=k, v=v, raw_g=x.raw_g, raw_beta=x.raw_beta, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=-5.0,
            initial_state=pool, cu_seqlens=offsets, ssm_state_indices=slots, num_accepted_tokens=accepted,
        )  # fmt: skip
        x.check(o, pool[[11, 13]])


def test_vllm_states_that_are_not_updated_in_place_are_refused() -> None:
    x = Layer("cpu", -5.0, (1, 1, 1))
    target, arguments = ling_decode(x, x.pool())
    with pytest.raises(ValueError, match="inplace_final_state True"):
        vllm_function(target)(**arguments, inplace_final_state=False)


# ---------------------------------------------------------------- SGLang


class Stock:
    """A stand-in of SGLang's TritonKDAKernel."""

    def extend(self, *_: Any, **__: Any) -> Any:
        return "stock extend"

    def packed_decode(self, *_: Any, **__: Any) -> Any:
        return "stock packed_decode"

    def target_verify(self, *_: Any, **__: Any) -> Any:
        return "stock target_verify"


@on_every_device
@on_both_gates
@pytest.mark.parametrize("raw", [True, False], ids=["logits", "beta"])
def test_sglang_extend(raw: bool, bound: float | None, device: str) -> None:
    """States of a pool in place, and one state of each sequence before a chunk."""
    x = Layer(device, bound)
    q, k, v = x.qkv
    pool, track = x.pool(), torch.full((3, x.H, D, D), torch.nan, device=device)
    beta = x.raw_beta if raw else x.raw_beta.float().sigmoid()
    o, none = sglang_kernel.kernel(Stock)().extend(
        q=q, k=k, v=v, g=x.raw_g[0], beta=beta, ssm_states=pool,
        cache_indices=torch.tensor(SLOTS, dtype=torch.int32, device=device), query_start_loc=x.offsets, A_log=x.A_log,
        dt_bias=x.dt_bias, lower_bound=bound, beta_is_raw=raw, return_intermediate_states=True, track_state=track,
        track_chunk_idx=torch.tensor([1, -1, 2], dtype=torch.int32, device=device), extend_seq_lens_cpu=list(LENGTHS),
    )  # fmt: skip
    assert none is None
    x.check(o, pool[list(SLOTS)])
    for n, tokens in ((0, 64), (2, 128)):
        _, want = x.truth(n, end=tokens)
        assert error(track[n][None], want) <= budget(error(x.truth(n, x.dtype, tokens)[1], want), x.dtype)


@on_every_device
@on_both_gates
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
def test_sglang_decode(packed: bool, bound: float | None, device: str) -> None:
    """A padded batch of one token of each sequence: slot -1 is padding."""
    x = Layer(device, bound, (1, 1, 1))
    pool = x.pool()
    slots = torch.tensor([*SLOTS, -1], dtype=torch.int32, device=device)
    x.mixed_qkv = torch.cat((x.mixed_qkv, torch.full_like(x.mixed_qkv[:1], torch.nan)))
    a, b = (torch.cat((t, torch.full_like(t[:, :1], torch.nan)), 1) for t in (x.raw_g, x.raw_beta))
    given = dict(A_log=x.A_log, dt_bias=x.dt_bias, ssm_states=pool, cache_indices=slots, lower_bound=bound)
    kernel = sglang_kernel.kernel(Stock)()
    if packed:
        o = kernel.packed_decode(
            x.mixed_qkv, a[0].flatten(1), b[0], scale=D**-0.5, num_v_heads=x.H, head_v_dim=D, **given
        )
    else:
        q, k, v = x.qkv
        offsets = torch.arange(5, dtype=torch.int32, device=device)
        o = kernel.decode(q, k, v, a, b, query_start_loc=offsets, **given)
    assert o.shape == (1, 4, x.H, D)
    x.check(o[:, :3], pool[list(SLOTS)])
    assert not o[:, 3].any()
    assert pool[[0, 1, 3, 5, 6, 8]].isnan().all()


@on_every_device
def test_sglang_tracks_ends_of_sequences_by_the_pool(device: str) -> None:
    """SGLang gives no buffer if every boundary to keep ends a sequence, and copies states from the pool."""
    x = Layer(device, -5.0, (64, 1, 128))
    q, k, v = x.qkv
    pool = x.pool()
    o, none = sglang_kernel.kernel(Stock)().extend(
        q=q, k=k, v=v, g=x.raw_g, beta=x.raw_beta, ssm_states=pool, cache_indices=slots_of(x),
        query_start_loc=x.offsets, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=-5.0, beta_is_raw=True,
        return_intermediate_states=True, track_state=None, track_chunk_idx=None,
        track_ssm_h_src=torch.empty(0, dtype=torch.int64, device=device),
    )  # fmt: skip
    assert none is None
    x.check(o, pool[list(SLOTS)])


@on_every_device
@on_both_gates
def test_sglang_captured_prefill(bound: float | None, device: str) -> None:
    """A captured prefill has room for more sequences, without slots, and more tokens, whose rows SGLang clears."""
    x = Layer(device, bound)
    rows, T = 6, sum(LENGTHS)
    padded = torch.cat((x.mixed_qkv, torch.full_like(x.mixed_qkv[:9], torch.nan)))
    q, k, v = (t.unflatten(-1, (x.H, D))[None] for t in padded.split(x.H * D, -1))
    g, beta = (torch.cat((t, torch.full_like(t[:, :9], torch.nan)), 1) for t in (x.raw_g, x.raw_beta))
    pool, track = x.pool(), torch.full((rows, x.H, D, D), torch.nan, device=device)
    o = sglang_kernel.kernel(Stock)().extend(
        q=q, k=k, v=v, g=g, beta=beta, ssm_states=pool, cache_indices=slots_of(x, -1, -1, -1),
        query_start_loc=torch.cat((x.offsets, x.offsets[-1:].expand(3))), A_log=x.A_log, dt_bias=x.dt_bias,
        lower_bound=bound, beta_is_raw=True, extend_seq_lens_cpu=None, is_spec_decode=False,
        return_intermediate_states=False, track_state=track,
        track_chunk_idx=torch.tensor([1, -1, 2, -1, -1, -1], dtype=torch.int32, device=device),
        chunk_indices=torch.zeros(12, 2, dtype=torch.int32, device=device), chunk_offsets=None,
    )  # fmt: skip
    x.check(o[:, :T], pool[list(SLOTS)])
    assert pool[[0, 1, 3, 5, 6, 8]].isnan().all()
    for n, tokens in ((0, 64), (2, 128)):
        _, want = x.truth(n, end=tokens)
        assert error(track[n][None], want) <= budget(error(x.truth(n, x.dtype, tokens)[1], want), x.dtype)


def sglang_verify(x: Layer, pool: Tensor, buffer: Tensor, slots: Tensor, rows: Tensor) -> dict[str, Any]:
    """Chains of drafts: q, k and v in rows of three, the gate and beta as the layer has them; more slots than
    sequences."""
    q, k, v = x.qkv
    return dict(
        A_log=x.A_log, dt_bias=x.dt_bias, q=q, k=k, v=v, a=x.raw_g.flatten(2), b=x.raw_beta, ssm_states=pool,
        cache_indices=slots, query_start_loc=x.offsets, intermediate_states_buffer=buffer,
        intermediate_state_indices=rows, cache_steps=buffer.shape[1], retrieve_parent_token=None, lower_bound=x.bound,
    )  # fmt: skip


@on_every_device
@on_both_gates
@pytest.mark.parametrize("lengths", [(2, 2, 2), (3, 1, 2)], ids=["even", "ragged"])
def test_sglang_verifies_chains_of_drafts(lengths: tuple[int, ...], bound: float | None, device: str) -> None:
    """States after each token go to a buffer, a row for each request, and those of the pool stay; -1 is padding."""
    x = Layer(device, bound, lengths)
    pool = x.pool()
    pool[SLOTS[1]] = torch.nan
    before, T = pool.clone(), max(lengths)
    slots = torch.tensor([SLOTS[0], -1, SLOTS[2], -1, -1], dtype=torch.int32, device=device)
    buffer = torch.full((4, 5, x.H, D, D), torch.nan, device=device)  # room for more drafts than this round's
    rows = torch.tensor([2, 3, 0, 3, 3], dtype=torch.int32, device=device)
    o = sglang_kernel.kernel(Stock)().target_verify(**sglang_verify(x, pool, buffer[:, :T], slots, rows))
    assert o.shape == (1, sum(lengths), x.H, D)
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))
    for n, row in ((0, 2), (2, 0)):
        start, end = x.offsets[n : n + 2].tolist()
        want, want32 = (x.truth(n, dtype)[0] for dtype in (torch.float64, x.dtype))
        assert error(o[:, start:end], want) <= budget(error(want32, want), x.dtype)
        for t in range(end - start):
            _, want = x.truth(n, end=t + 1)
            assert error(buffer[row, t][None], want) <= budget(error(x.truth(n, x.dtype, t + 1)[1], want), x.dtype)
        assert buffer[row, end - start :].isnan().all()
    assert not o[:, slice(*x.offsets[1:3].tolist())].any()
    assert buffer[[1, 3]].isnan().all()


def test_sglang_decodes_bounded_gates_from_packed_rows() -> None:
    """Otherwise its dispatcher splits rows for `decode`."""
    assert sglang_kernel.kernel(Stock).supports_packed_decode_safe_gate


def test_what_is_left_to_sglang_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = Layer("cpu", None, (1, 1, 1))
    kernel = sglang_kernel.kernel(Stock)()
    gate = dict(A_log=x.A_log, dt_bias=x.dt_bias, scale=D**-0.5, num_v_heads=2, head_v_dim=D)
    ring = {f"replayssm_{name}": 1 for name in ("d", "k", "g", "write_pos")}
    with caplog.at_level(logging.WARNING, "sglang.kda_layers"):
        for source in (None, torch.ones(1)):
            pool = x.pool()
            states = dict(ssm_states=pool, cache_indices=slots_of(x))
            got = kernel.extend(
                *x.qkv, x.raw_g, x.raw_beta, query_start_loc=x.offsets, return_intermediate_states=True,
                track_ssm_h_src=source, **states,
            )  # fmt: skip
            assert got == "stock extend"
            got = kernel.packed_decode(x.mixed_qkv, x.raw_g, x.raw_beta, **gate, **states, **ring)
            assert got == "stock packed_decode"
            verify = sglang_verify(x, pool, pool[:, None], slots_of(x), slots_of(x))
            for change in (
                {"retrieve_parent_token": slots_of(x)[:, None]},
                {"intermediate_states_buffer": None, "cache_ring": True},
                {"intermediate_states_buffer": pool[:, None].double()},
            ):
                assert kernel.target_verify(**verify | change) == "stock target_verify"
    assert [record.message.partition(" not ")[0] for record in caplog.records] == [
        f"SGLang's own kernel serves {name}," for name in ("extend", "packed_decode", *["target_verify"] * 3)
    ]
    x.bound = -5.0  # SGLang buffers no states of bounded gates
    o = kernel.packed_decode(x.mixed_qkv, x.raw_g, x.raw_beta, lower_bound=-5.0, **gate, **states, **ring)
    x.check(o, pool[list(SLOTS)])


# ---------------------------------------------------------------- the switch


def test_unknown_engines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engines.ENVIRONMENT_VARIABLE, "vllm,tgi")
    with pytest.raises(ValueError, match="KDA_LAYERS_ENGINES must name engines of sglang, vllm, got tgi"):
        engines.wanted("vllm")


def test_entry_points() -> None:
    try:
        importlib.metadata.distribution("kda_layers")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kda_layers is imported from its sources and not installed: it has no entry points")
    groups = "vllm.general_plugins", "sglang.srt.plugins"
    found = {group: importlib.metadata.entry_points(group=group) for group in groups}
    loaded = {group: [e.load() for e in entries if e.name == "kda_layers"] for group, entries in found.items()}
    assert loaded == {"vllm.general_plugins": [vllm.register], "sglang.srt.plugins": [sglang.register]}
