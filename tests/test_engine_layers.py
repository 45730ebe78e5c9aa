"""Our layers for vLLM 0.33: steps of prompts, decoded tokens and drafts on its pools, against each sequence in fp64."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda_layers.engines import vllm, vllm_core, vllm_layer, vllm_recover
from kda_layers.kernels.cuda.machine import Properties
from kda_layers.kernels.kda.cuda import forms
from kda_layers.kernels.kda.cuda.spec import Rows
from kda_layers.kernels.kda.reference import recurrence
from kda_layers.testing.budgets import budget, error
from kda_layers.testing.oracle import Inputs
from tests import stock_vllm_layers as stock
from tests.kernels.cases import BEST_DEVICE
from tests.kernels.emulated_layer_step import first_choice
from tests.kernels.test_forward_two_roles import signature
from tests.stock_vllm_layers import HIDDEN, TAPS, Config, Engine, Metadata

SLOTS = 9
FP64, FP32 = torch.float64, torch.float32
on_every_family = pytest.mark.parametrize("family", stock.NAMES)
pytestmark = [pytest.mark.emulated] if BEST_DEVICE == "cpu" else []


@pytest.fixture(autouse=True)
def engine_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in stock.modules().items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    vllm_layer._say_once.cache_clear()
    vllm_recover.backend.cache_clear()
    with first_choice() if BEST_DEVICE == "cpu" else contextlib.nullcontext():
        yield


class Pools:
    """Pages of both states: in slot n what sequence n begins with; NaN in the null slot, as nobody may read it."""

    def __init__(self, engine: Engine, layer: Any) -> None:
        c, P = layer.config, layer.local_projection_size
        kept = TAPS - 1 + c.drafts
        generator = torch.Generator().manual_seed(5)
        conv = torch.randn(SLOTS, 3 * P, kept, generator=generator).to(c.dtype)
        state = torch.randn(SLOTS, c.heads, c.head_dim, c.head_dim, generator=generator) / 4
        conv[0], state[0] = torch.nan, torch.nan
        conv = conv if engine.dim_first else conv.mT.contiguous()
        dtypes = layer.get_state_dtype()
        sizes = [conv[0].numel() * 2, state[0].numel() * dtypes[1].itemsize]
        pages = torch.zeros(SLOTS, sum(sizes) + 64, dtype=torch.uint8, device=BEST_DEVICE)  # padded, as vLLM's
        self.conv = pages[:, : sizes[0]].view(c.dtype).view(conv.shape)
        self.state = pages[:, sizes[0] : sum(sizes)].view(dtypes[1]).view(state.shape)
        self.conv.copy_(conv)
        self.state.copy_(state.to(dtypes[1]))
        layer.bind_kv_cache((self.conv, self.state))
        self.channels = self.conv if engine.dim_first else self.conv.mT
        self.before = self.channels.clone(), self.state.clone()


def layer_of(c: Config, dim_first: bool = False) -> tuple[Engine, Any, Pools]:
    torch.manual_seed(0)
    engine = Engine(c.family, dim_first)
    layer = engine.make(c)
    assert layer.core is not None
    return engine, layer, Pools(engine, layer)


def truth(layer: Any, x: Tensor, conv: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [T, hidden], and both states, of one sequence x [T, hidden]; what is between kernels is in `dtype`.

    Args:
        conv: [3 H D, W - 1]; state: [H, D, D].
    """
    H, D = layer.local_num_heads, layer.head_dim
    wide = FP64 if dtype == FP64 else FP32
    qkv, f, gate, beta = layer.logits(x)
    p = layer.core_parameters()
    rows = torch.cat((conv.to(qkv.dtype), qkv.mT), 1)
    y = nn.functional.silu((rows.to(wide).unfold(1, TAPS, 1) * p.conv_weight.to(wide)[:, None]).sum(-1))
    q, k, v = (t.to(wide)[None] for t in y.to(dtype).mT.unflatten(-1, (3, H, D)).unbind(1))
    inputs = Inputs(
        q, k, v, f.to(wide).unflatten(-1, (H, D))[None], beta.to(wide)[None], p.A_log.to(wide), p.dt_bias.to(wide),
        state.to(wide)[None], None, p.gate["gate_activation"], p.lower_bound or 0.0, "sigmoid", True, D**-0.5, True, 0,
    )  # fmt: skip
    o, after, _ = recurrence(inputs)
    o = nn.functional.rms_norm(o[0].to(dtype).to(wide), (D,), p.norm_weight.to(wide), p.norm_eps)
    o = (o * gate.to(wide).sigmoid().unflatten(-1, (H, D))).to(dtype).flatten(1)
    return o.to(wide) @ layer.o_proj.weight.to(wide).mT, rows[:, -(TAPS - 1) :], after[0]


def check(layer: Any, x: Tensor, got: Tensor, conv: Tensor, state: Tensor, after: tuple[Tensor, Tensor]) -> None:
    """One sequence: outputs and the recurrent state within budgets, the convolution's state exactly."""
    dtype = layer.config.dtype
    exact, plain = (truth(layer, x, conv, state, d) for d in (FP64, dtype))
    assert error(got, exact[0]) <= budget(error(plain[0], exact[0]), dtype)
    assert torch.equal(after[0][:, : TAPS - 1], exact[1])
    state_dtype = after[1].dtype if after[1].dtype != FP32 else dtype  # of k and v, which are rounded
    assert error(after[1], exact[2]) <= budget(error(plain[2], exact[2]), state_dtype)


def hidden(c: Config, tokens: int) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).to(c.dtype).to(BEST_DEVICE)


def tensor(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=BEST_DEVICE)


def prompts(
    lengths: tuple[int, ...], slots: tuple[int, ...], begun: tuple[bool, ...], decodes: int, c: Config
) -> Metadata:
    return Metadata(
        sum(lengths), tensor(slots), num_prefills=len(lengths) - decodes, num_decodes=decodes,
        has_initial_state=tensor(begun, torch.bool),
        non_spec_query_start_loc=tensor((0, *itertools.accumulate(lengths))),
    )  # fmt: skip


CONFIGS = [
    Config(),
    Config(bound=-5.0, heads=3),
    Config("k3", bound=-5.0, head_dim=128, heads=2),
    Config("k3", bound=-3.0, state="bfloat16"),
    Config("glm", bound=-5.0),
    Config("ling", bound=-5.0),
    Config("ling"),
]
on_every_config = pytest.mark.parametrize("c", CONFIGS, ids=lambda c: f"{c.family}-{c.bound}-{c.head_dim}-{c.state}")


@on_every_config
@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
def test_prompts_beside_decoded_tokens(c: Config, dim_first: bool) -> None:
    """A decoded token, a prompt's second part, a new prompt in a slot that held NaN, one of a single token."""
    engine, layer, pools = layer_of(c, dim_first)
    lengths, slots, begun = (1, 5, 70, 1), (4, 2, 7, 1), (True, True, False, False)
    for slot in (7, 1):
        pools.channels[slot], pools.state[slot] = torch.nan, torch.nan
    m, x = prompts(lengths, slots, begun, 1, c), hidden(c, 77)
    got = engine.step(layer, m, x)
    start = 0
    for length, slot, old in zip(lengths, slots, begun, strict=True):
        part = slice(start, start := start + length)
        conv, state = (t[slot] if old else torch.zeros_like(t[slot]) for t in pools.before)
        check(layer, x[part], got[part], conv[:, : TAPS - 1], state, (pools.channels[slot], pools.state[slot]))
    unchanged(pools, {4, 2, 7, 1, 0})


def unchanged(pools: Pools, used: set[int]) -> None:
    others = [slot for slot in range(SLOTS) if slot not in used]
    assert torch.equal(pools.channels[others], pools.before[0][others])
    assert torch.equal(pools.state[others], pools.before[1][others])


@on_every_config
@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_decoded_tokens(c: Config, dim_first: bool, mode: str) -> None:
    """By one launch, also in a graph of a padded batch; the gates' factors are in it unless graphs are in pieces."""
    engine, layer, pools = layer_of(c, dim_first)
    engine.context.cudagraph_runtime_mode = SimpleNamespace(name=mode)
    slots = (3, 8, 5, 0)
    m, x = Metadata(4, tensor(slots), num_decodes=3), hidden(c, 4)
    got = engine.step(layer, m, x)
    factors = c.family in ("kimi", "k3") and mode == "FULL"
    assert [getattr(layer, n).calls for n in ("f_b_proj", "g_b_proj") if factors and hasattr(layer, n)] == (
        [] if not factors else [0] if c.family == "k3" else [0, 0]
    )
    for n, slot in enumerate(slots[:3]):
        conv, state = (t[slot] for t in pools.before)
        check(layer, x[n : n + 1], got[n : n + 1], conv, state, (pools.channels[slot], pools.state[slot]))
    assert not got[3].any()
    assert pools.state[0].isnan().all()
    unchanged(pools, {3, 8, 5, 0})


DRAFTS = [Config(drafts=2), Config("k3", bound=-5.0, drafts=2), Config("glm", bound=-5.0, drafts=2)]


@pytest.mark.parametrize("beside", ["nothing", "prompts", "decodes"])
@pytest.mark.parametrize("c", DRAFTS, ids=lambda c: c.family)
def test_drafts(c: Config, beside: str) -> None:
    """Three tokens of two requests, whose states begin after an accepted token, beside other requests."""
    engine, layer, pools = layer_of(c)
    spec, accepted = ((1, 2, 3), (4, 5, 6)), (2, 1)
    others = {"nothing": (), "prompts": (3, 1), "decodes": (1,)}[beside]
    slots = (7, 8)[: len(others)]
    T = 6 + sum(others)
    x = hidden(c, T)
    drafted = torch.zeros(T, dtype=torch.bool)
    drafted[1:4] = drafted[-3:] = True  # a token, or a part of a prompt, between them
    if not others:
        drafted[:] = True
    elif beside == "decodes":
        drafted[:] = torch.tensor([True, True, True, False, True, True, True])
    m = Metadata(
        T, num_spec_decodes=2, spec_state_indices_tensor=tensor(spec),
        spec_query_start_loc=tensor((0, 3, 6)), num_accepted_tokens=tensor(accepted),
        spec_token_indx=tensor(drafted.nonzero()[:, 0].tolist()),
        non_spec_token_indx=tensor((~drafted).nonzero()[:, 0].tolist()),
    )  # fmt: skip
    if others:
        m.non_spec_state_indices_tensor = tensor(slots)
        m.non_spec_query_start_loc = tensor((0, *itertools.accumulate(others)))
        m.has_initial_state = tensor((True,) * len(others), torch.bool)
        m.num_prefills, m.num_decodes = (0, 1) if beside == "decodes" else (len(others), 0)
    got = engine.step(layer, m, x)
    places = drafted.nonzero()[:, 0].split(3)
    for row, first, place in zip(spec, accepted, places, strict=True):
        conv, state = pools.before[0][row[0]][:, first - 1 : first + TAPS - 2], pools.before[1][row[first - 1]]
        for count in (1, 2, 3):
            at = place[:count].to(BEST_DEVICE)
            window = pools.channels[row[0]][:, count - 1 :]
            check(layer, x[at], got[at], conv, state, (window, pools.state[row[count - 1]]))
    for slot, place in zip(slots, (~drafted).nonzero()[:, 0].split(list(others)) if others else (), strict=True):
        at, conv, state = place.to(BEST_DEVICE), pools.before[0][slot][:, : TAPS - 1], pools.before[1][slot]
        check(layer, x[at], got[at], conv, state, (pools.channels[slot], pools.state[slot]))


def test_checkpoints_of_a_prefill() -> None:
    """The cache's specification asks for them at multiples of 64, and each has the states of its prefix."""
    c = Config()
    engine, layer, pools = layer_of(c)
    spec = layer.get_kv_cache_spec(None)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (1, 64)
    lengths, slots = (1, 130, 70, 90), (4, 2, 7, 3)
    m, x = prompts(lengths, slots, (True, False, True, False), 1, c), hidden(c, sum(lengths))
    m.checkpoint = SimpleNamespace(checkpoint_offsets=tensor((0, 128, 64, 0)), state_indices=tensor((0, 5, 6, 0)))
    engine.step(layer, m, x)
    for start, slot, kept, count in ((1, None, 5, 128), (131, 7, 6, 64)):
        conv, state = (torch.zeros_like(t[0]) if slot is None else t[slot] for t in pools.before)
        part = x[start : start + count]
        outputs = truth(layer, part, conv, state, c.dtype)[0]
        check(layer, part, outputs, conv, state, (pools.channels[kept], pools.state[kept]))
    unchanged(pools, {*slots, 5, 6, 0})


def test_steps_of_a_cache_group_share_what_they_derive_from_slots() -> None:
    c = Config()
    engine, layer, _ = layer_of(c)
    m = prompts((3,), (2,), (False,), 0, c)
    engine.step(layer, m, hidden(c, 3))
    shared = m.kda_layers_slots
    engine.step(layer, m, hidden(c, 3))
    assert m.kda_layers_slots is shared


@on_every_family
def test_a_run_without_states_computes_nothing(family: str) -> None:
    """As vLLM's runs that measure memory are."""
    engine, layer, pools = layer_of(Config(family, bound=-5.0))
    assert engine.step(layer, None, hidden(layer.config, 3)).shape == (3, HIDDEN)
    unchanged(pools, {0})


@on_every_family
def test_the_core_is_where_graphs_in_pieces_break(family: str) -> None:
    engine, _, _ = layer_of(Config(family, bound=-5.0))
    assert len(engine.breaks) == (family != "ling")
    split = f"vllm::{vllm_layer.OPERATOR}" in engine.compilation.splitting_ops
    assert split == (family == "ling")


LEFT = [
    (Config(dtype=torch.float32), "no kernel for its decode step"),
    (Config(head_dim=96), "no kernel for its decode step"),
    (Config("k3", bound=-5.0, drafts=16, recovers=True), "RecoverSSM is on with 16 drafted tokens, needs at most 15"),
]


@pytest.mark.parametrize("family", ["kimi", "k3", "glm", "ling"])
def test_weights_that_are_loaded_in_place_are_read(family: str) -> None:
    c = Config(family, bound=-5.0)
    e, layer, pools = layer_of(c)
    x, step = hidden(c, 2), Metadata(2, tensor((3, 4)), num_decodes=2)

    def run() -> Tensor:
        pools.channels.copy_(pools.before[0])
        pools.state.copy_(pools.before[1])
        return e.step(layer, step, x).clone()

    before = run()
    for name in ("conv1d", "q_conv1d", "k_conv1d", "v_conv1d"):
        if hasattr(layer, name):
            weight = getattr(layer, name).weight
            weight.detach().copy_(torch.randn_like(weight))
    after = run()
    layer._parameters_here = None
    assert torch.equal(after, run())
    assert not torch.equal(after, before)


def test_a_layer_that_is_left_has_its_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's Kimi-Linear reads one of the two options for dtypes, ours both."""
    monkeypatch.setattr(stock.StockLayer, "get_state_dtype", lambda self: (torch.bfloat16, torch.float32))
    layer = Engine("kimi").make(Config("kimi", state="bfloat16", head_dim=96))
    assert layer.core is None
    assert layer.get_state_dtype()[1] == torch.float32


@pytest.mark.parametrize(("c", "reason"), LEFT, ids=["fp32", "96", "recoverssm"])
def test_a_layer_that_is_left_to_vllm_says_why_once(c: Config, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kda_layers")
    engine = Engine(c.family)
    layers = [engine.make(c) for _ in range(2)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"kda_layers leaves {engine.module.__name__}.{engine.layer.__name__} to vLLM")
    assert reason in record.getMessage()
    assert layers[0].get_kv_cache_spec(None).prefill_checkpoint_alignment is None
    with pytest.raises(AssertionError, match="of vLLM"):
        engine.step(layers[0], Metadata(1, tensor((1,)), num_decodes=1), hidden(c, 1))


def test_a_layer_with_another_core_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("kimi")
    engine.layer._forward = lambda self, mixed_qkv, gates: None
    vllm_layer.register(engine.module)
    assert engine.layer.replacement is None
    assert "kda_layers has no layer for" in caplog.text
    assert "mixed_qkv, gates: its functions are replaced" in caplog.text


@on_every_family
def test_names_of_modules_are_theirs(family: str) -> None:
    """vLLM walks through modules, their parameters and buffers."""
    ours = {n for layer in vllm_layer.LAYERS[stock.NAMES[family]][2].__mro__[:-1] for n in vars(layer)}
    assert {n for n in ours & set(dir(nn.Module)) if not n.startswith("__")} <= {"forward"}


def test_every_module_with_a_layer_has_one_of_ours() -> None:
    assert set(vllm_layer.LAYERS) == set(vllm.LAYERS)
    assert vllm_core.FIRST_SLOT == 1


# ---------------------------------------------------------------- what is compiled before the first prompts


@pytest.mark.parametrize("ends", vllm_core.PROMPTS, ids=len)
def test_prompts_of_a_warm_up(ends: tuple[int, ...]) -> None:
    """They have the slots of two sequences, and leave the null slot alone."""
    _, layer, _ = layer_of(Config("kimi", heads=1, head_dim=64))
    with torch.device(BEST_DEVICE):
        pool = torch.ones(3, 1, 64, 64)
        vllm_core.run_prompts(1, torch.bfloat16, pool, layer.core_parameters(), ends)
    assert [bool((state == 1).all()) for state in pool] == [True, False, len(ends) == 1]


@pytest.mark.gpu
@pytest.mark.parametrize("c", [Config(heads=4, head_dim=128), Config("k3", heads=18, head_dim=128)], ids=str)
@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
def test_no_prompt_compiles_a_triton_kernel(c: Config, dim_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up has compiled it, for any number of sequences and tokens."""
    import triton

    from kda_layers.kernels.fused.triton import rows, short_conv

    for kernel in (rows.gated_norm_forward_kernel, short_conv.conv_forward_kernel, short_conv.conv_state_kernel):
        kernel.device_caches.clear()
    vllm_core._warm.clear()
    engine, layer, _ = layer_of(c, dim_first)  # warms up
    seen: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **given: seen.append(given["fn"].name))
    for lengths in ((1,), (3,), (16,), (100, 1), (513, 1000, 7), (4096,), (8000, 192)):
        slots = tuple(range(1, len(lengths) + 1))
        engine.step(layer, prompts(lengths, slots, (False,) * len(slots), 0, c), hidden(c, sum(lengths)))
    assert seen == []
    short_conv.conv_forward_kernel.device_caches.clear()
    p = layer.core_parameters()
    conv = torch.zeros(2, 128, 1, dtype=c.dtype, device=BEST_DEVICE)
    rows = torch.zeros(9, 128, dtype=c.dtype, device=BEST_DEVICE)
    weight = p.conv_weight[:128, :2]
    vllm_core.convolve(rows, weight, conv, tensor((1,)), tensor((0, 9)))
    assert seen  # of another number of taps


class Listing:
    """A machine that lists the kernels which are loaded, and runs none."""

    def __init__(self) -> None:
        self.kernels: set[Any] = set()

    def properties(self, device: torch.device) -> Properties:
        return Properties(132, 90, 2**37)

    def load(self, source: str, entry: str, defines: dict[str, Any], device: torch.device) -> Any:
        self.kernels.add((source, *defines.items()))


@pytest.mark.parametrize("heads", [4, 8, 12, 16, 24, 32, 48, 64, 96])
def test_every_prompt_finds_its_kernel_compiled(heads: int) -> None:
    """The warm-up compiles it, for any number of sequences and tokens."""

    def kernels(shapes: Iterable[tuple[int, int]]) -> set[Any]:
        machine = Listing()
        for N, T in shapes:
            offsets = None if N == 1 else (N + 1, torch.int32)
            rows = Rows(*(0,) * 8)
            s = signature(1, T, heads, states=2)._replace(offsets=offsets, rows=rows)
            forms.choose(s, machine.properties(s.device)).plan_of(machine, s)  # type: ignore[arg-type]
        return machine.kernels

    lengths = [64 * n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]
    every = kernels((N, N * T) for N in (1, 2, 3, 4, 8, 16, 32, 64) for T in lengths if N * T <= 2**13)
    assert every <= kernels((len(ends), ends[-1]) for ends in vllm_core.PROMPTS)
