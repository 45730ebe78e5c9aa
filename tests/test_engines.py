"""Plug-ins for inference engines, against stand-ins of the engines' call sites: vLLM 0.33 and SGLang 0.5.23.

A stand-in calls with the keywords, shapes, strides, dtypes, pools and padding of the engine; the truth is the
recurrence of each sequence alone. The engines themselves are not run.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import sys
import types
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import engines
from kda_layers.engines import sglang, vllm
from kda_layers.kernels.kda.reference import recurrence
from kda_layers.testing.budgets import FP32, budget, error
from kda_layers.testing.oracle import Inputs

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts stand-ins of an engine's modules into sys.modules: name -> its attributes."""

    def install(**of_modules: dict[str, Any]) -> dict[str, types.ModuleType]:
        made = {}
        for name, attributes in of_modules.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                path = ".".join(parts[:i])
                if path not in sys.modules or path == name:
                    module = types.ModuleType(path)
                    module.__path__ = []  # type: ignore[attr-defined]
                    monkeypatch.setitem(sys.modules, path, module)
            vars(sys.modules[name]).update(attributes)
            made[name] = sys.modules[name]
        return made

    return install


# ---------------------------------------------------------------- vLLM

KIMI, GLM, LING = vllm.FUNCTIONS


@on_every_device
@on_both_gates
def test_vllm_prefill(bound: float | None, device: str) -> None:
    """As KimiK3DeltaAttention calls it: states gathered before, put back after."""
    x = Layer(device, bound)
    q, k, v = x.qkv
    o, states = vllm.chunk_from_logits(
        q=q, k=k, v=v, raw_g=x.raw_g, raw_beta=x.raw_beta, A_log=x.A_log, g_bias=x.dt_bias, lower_bound=bound,
        initial_state=x.states, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=x.offsets,
    )  # fmt: skip
    assert states is not None
    x.check(o, states)


@on_every_device
@on_both_gates
def test_vllm_decode(bound: float | None, device: str) -> None:
    """One token of each sequence, in rows of a padded batch: slot 0 is vLLM's null block."""
    x = Layer(device, bound, (1, 1, 1))
    pool = x.pool()
    slots = torch.tensor([*SLOTS, 0, 0], dtype=torch.int32, device=device)
    padded = torch.cat((x.mixed_qkv, torch.full_like(x.mixed_qkv[:2], torch.nan)))
    g, beta = (torch.cat((t, torch.full_like(t[:, :2], torch.nan)), 1) for t in (x.raw_g, x.raw_beta))
    o, same = vllm.packed_decode_from_logits(
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
    o, _ = vllm.recurrent_from_logits(
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
        o, _ = vllm.recurrent_from_logits(
            q=q, k=k, v=v, raw_g=x.raw_g, raw_beta=x.raw_beta, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=-5.0,
            initial_state=pool, cu_seqlens=offsets, ssm_state_indices=slots, num_accepted_tokens=accepted,
        )  # fmt: skip
        x.check(o, pool[[11, 13]])


@on_every_device
@on_both_gates
def test_vllm_activations(bound: float | None, device: str) -> None:
    """As GLM-5.3-Flash and Ling call: beta activated, in decoding the log-decay as well."""
    x = Layer(device, bound)
    q, k, v = x.qkv
    beta = x.raw_beta.float().sigmoid()
    o, states = vllm.chunk_from_beta(
        q=q, k=k, v=v, raw_g=x.raw_g, beta=beta, A_log=x.A_log.view(1, 1, -1, 1), g_bias=x.dt_bias,
        initial_state=x.states, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=x.offsets,
        safe_gate=bound is not None, lower_bound=-5.0,
    )  # fmt: skip
    assert states is not None
    x.check(o, states)

    x = Layer(device, bound, (1, 1, 1))
    q, k, v = x.qkv
    logits, rate = x.raw_g.float() + x.dt_bias.view(x.H, D), x.A_log.exp()[:, None]
    softplus = torch.nn.functional.softplus
    decay = -rate * softplus(logits) if bound is None else bound * (rate * logits).sigmoid()
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    common = dict(initial_state=None, use_qk_l2norm_in_kernel=True, cu_seqlens=x.offsets, ssm_state_indices=slots)
    pool = x.pool()
    o, _ = vllm.recurrent_from_decays(
        q=q, k=k, v=v, g=decay, beta=x.raw_beta.float().sigmoid(), **common | {"initial_state": pool}
    )
    x.check(o, pool[list(SLOTS)])
    if bound is not None:
        pool = x.pool()
        o, _ = vllm.recurrent_from_decays(
            q=q, k=k, v=v, g=x.raw_g, beta=x.raw_beta, sigmoid_beta=True, compute_gate=True,
            a_log=x.A_log.view(1, 1, -1, 1), g_bias=x.dt_bias, lower_bound=bound, **common | {"initial_state": pool},
        )  # fmt: skip
        x.check(o, pool[list(SLOTS)])
    with pytest.raises(ValueError, match="inplace_final_state True"):
        vllm.recurrent_from_decays(q=q, k=k, v=v, g=decay, beta=decay, inplace_final_state=False)


def stock(*_: Any, **__: Any) -> None:
    raise AssertionError("the engine's own function was called")


def test_vllm_functions_are_replaced_where_asked(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their module, and in models that imported them before."""
    names = vllm.FUNCTIONS[LING]
    own = {name: (lambda *_, name=name: name) for name in names}
    found = modules(**{LING: dict(own), "vllm.model_executor.models.ling": {"run": own["fused_recurrent_kda"]}})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    monkeypatch.delenv(engines.ENVIRONMENT_VARIABLE, raising=False)
    vllm.register()
    assert found[LING].fused_recurrent_kda is own["fused_recurrent_kda"], "off unless asked for"
    monkeypatch.setenv(engines.ENVIRONMENT_VARIABLE, "vllm")
    vllm.register()
    assert found[LING].fused_recurrent_kda is vllm.recurrent_from_decays
    assert found[LING].chunk_kda_with_fused_gate is vllm.chunk_from_beta
    assert found["vllm.model_executor.models.ling"].run is vllm.recurrent_from_decays
    modules(**{"vllm": {}})
    del sys.modules[LING]
    with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0 has none of vllm\.models\.kimi_k3.*the variable empty"):
        vllm.register()


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
    o, none = sglang.kernel(Stock)().extend(
        q=q, k=k, v=v, g=x.raw_g[0], beta=beta, ssm_states=pool,
        cache_indices=torch.tensor(SLOTS, dtype=torch.int32, device=device), query_start_loc=x.offsets, A_log=x.A_log,
        dt_bias=x.dt_bias, lower_bound=bound, beta_is_raw=raw, return_intermediate_states=True, track_state=track,
        track_chunk_idx=torch.tensor([1, -1, 2], dtype=torch.int32, device=device), extend_seq_lens_cpu=list(LENGTHS),
    )  # fmt: skip
    assert none is None
    x.check(o, pool[list(SLOTS)])
    assert track[1].isnan().all()
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
    kernel = sglang.kernel(Stock)()
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


def test_what_is_left_to_sglang_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = Layer("cpu", None)
    kernel = sglang.kernel(Stock)()
    with caplog.at_level(logging.WARNING, "kda_layers"):
        for _ in range(2):
            states = dict(ssm_states=x.pool(), cache_indices=torch.tensor(SLOTS))
            got = kernel.extend(
                *x.qkv, x.raw_g, x.raw_beta, query_start_loc=x.offsets, return_intermediate_states=True, **states
            )
            assert got == "stock extend"
            gate = dict(A_log=x.A_log, dt_bias=x.dt_bias, scale=1.0, num_v_heads=2, head_v_dim=D)
            assert kernel.packed_decode(x.mixed_qkv, x.raw_g, x.raw_beta, **gate, **states, replayssm_write_pos=1) == (
                "stock packed_decode"
            )
    assert [record.message.partition(" not ")[0] for record in caplog.records] == [
        "SGLang's own kernel serves extend,", "SGLang's own kernel serves packed_decode,",
    ]  # fmt: skip
    assert kernel.target_verify() == "stock target_verify"


def test_sglang_class_is_replaced_where_asked(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = defaultdict(list)

    class HookType(Enum):
        REPLACE = "replace"

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
            registered[target].append((hook, hook_type))

    hooks = {"HookRegistry": HookRegistry, "HookType": HookType}
    found = modules(**{"sglang.srt.plugins.hook_registry": hooks, sglang.MODULE: {sglang.CLASS: Stock}})
    monkeypatch.setenv(engines.ENVIRONMENT_VARIABLE, "vllm")
    sglang.register()
    assert not registered
    monkeypatch.setenv(engines.ENVIRONMENT_VARIABLE, "vllm, sglang")
    sglang.register()
    ((target, [(hook, kind)]),) = registered.items()
    assert target == f"{sglang.MODULE}.{sglang.CLASS}"
    assert issubclass(hook, Stock)
    assert kind is HookType.REPLACE
    del found[sglang.MODULE].TritonKDAKernel
    with pytest.raises(ImportError, match=r"has no TritonKDAKernel: use SGLang 0\.5\.23, or leave"):
        sglang.register()


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
