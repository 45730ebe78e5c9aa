"""RecoverSSM of our layers for vLLM 0.33: drafts that leave the states as they are, and commits of the accepted ones,
against steps with a slot for the state after each token."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda_layers.engines import vllm_recover
from tests import stock_vllm_layers as stock
from tests.engine_wheels import wheel
from tests.kernels.cases import BEST_DEVICE
from tests.stock_vllm_layers import TAPS, Config, Engine, Metadata
from tests.test_engine_layers import Pools, check, engine_modules, hidden, layer_of, tensor

__all__ = ["engine_modules"]  # a fixture of every test
pytestmark = [pytest.mark.emulated] if BEST_DEVICE == "cpu" else []
KEPT, TOKENS = TAPS - 1, 3

CONFIGS = [
    Config(drafts=TOKENS - 1, recovers=True),
    Config("k3", bound=-5.0, drafts=TOKENS - 1, recovers=True),
    Config("k3", bound=-3.0, state="bfloat16", head_dim=128, drafts=TOKENS - 1, recovers=True),
]
on_every_config = pytest.mark.parametrize("c", CONFIGS, ids=lambda c: f"{c.family}-{c.head_dim}-{c.state}")


class Step:
    """Drafts of two requests with states in slots 1 and 4, beside other requests."""

    def __init__(self, c: Config, beside: str, drafted: tuple[int, int] = (3, 2)) -> None:
        self.c, self.drafted = c, drafted
        self.others = {"nothing": (), "prompts": (3, 1), "decodes": (1,)}[beside]
        self.count = sum(drafted) + sum(self.others)
        self.m = Metadata(
            self.count, num_spec_decodes=2, num_accepted_tokens=tensor((1, 1)),
            spec_query_start_loc=tensor((0, *itertools.accumulate(drafted))),
        )  # fmt: skip
        if not self.others:
            return
        first = range(drafted[0]), range(self.count - drafted[1], self.count)  # the others are between them
        spec = [*first[0], *first[1]]
        self.m.spec_token_indx = tensor(spec)
        self.m.non_spec_token_indx = tensor([t for t in range(self.count) if t not in spec])
        self.m.non_spec_state_indices_tensor = tensor((7, 8)[: len(self.others)])
        self.m.non_spec_query_start_loc = tensor((0, *itertools.accumulate(self.others)))
        self.m.has_initial_state = tensor((True,) * len(self.others), torch.bool)
        self.m.num_prefills, self.m.num_decodes = (0, 1) if beside == "decodes" else (len(self.others), 0)

    def run(self, engine: Engine, layer: Any, slots: Any, x: Tensor) -> Tensor:
        m = dataclasses.replace(self.m, spec_state_indices_tensor=tensor(slots))
        return engine.step(layer, m, x)


def with_slots(c: Config) -> tuple[Engine, Any, Pools]:
    """The same layer and pools, where the state after each token has a slot: those of slots 1 and 4 are read."""
    return layer_of(dataclasses.replace(c, recovers=False))


def commits_of(layer: Any) -> vllm_recover.Commits:
    """As vLLM's metadata gets the object that commits."""
    builder = layer.get_attn_backend().get_builder_cls()({layer.prefix: layer})
    found = builder._get_recoverssm_context()
    assert builder._get_recoverssm_context() is found
    return found


def commit(commits: vllm_recover.Commits, *args: Any, **options: Any) -> None:
    with torch.inference_mode():
        commits.commit(*args, **options)


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("beside", ["nothing", "prompts", "decodes"])
@on_every_config
def test_accepted_drafts(c: Config, beside: str) -> None:
    """Any part of the drafts, none and too many among them, with the bits of steps that keep each state."""
    slots, x = ((1,), (4,)), hidden(c, 9)
    step = Step(c, beside)
    kept_engine, kept_layer, kept = with_slots(c)
    want = step.run(kept_engine, kept_layer, ((1, 2, 3), (4, 5, 6)), x[: step.count])
    for taken in ((1, 2), (3, 0), (2, 1), (9, 9)):
        engine, layer, pools = layer_of(c)
        got = step.run(engine, layer, slots, x[: step.count])
        assert torch.equal(got, want)
        assert same(pools.state[1:7], pools.before[1][1:7]), "a state advanced"
        for n in (7, 8):
            assert torch.equal(pools.state[n], kept.state[n])
        requests = tensor((2, 0))  # their places in the batch
        in_batch = tensor((taken[1], 5, taken[0]))
        commit(
            commits_of(layer), in_batch, tensor(slots)[:, 0], step.m.spec_query_start_loc,
            request_indices=requests,
        )  # fmt: skip
        for slot, m, tokens in zip((1, 4), taken, step.drafted, strict=True):
            m = min(m, tokens)
            after = kept.state[slot + m - 1] if m else pools.before[1][slot]
            assert torch.equal(pools.state[slot], after), f"{m} tokens in slot {slot}"
            window = max(m, 1) - 1  # vLLM keeps the first token's input also of a request without a sample
            inputs = kept.channels[slot][:, window : window + KEPT]
            assert torch.equal(pools.channels[slot][:, :KEPT], inputs)
        others = [2, 3, 5, 6]
        assert same(pools.state[others], pools.before[1][others])


@pytest.mark.parametrize("c", CONFIGS[:2], ids=lambda c: c.family)
def test_steps_one_after_another(c: Config) -> None:
    """Outputs and states of the accepted tokens of three steps, against fp64."""
    engine, layer, pools = layer_of(c)
    commits, x, slots = commits_of(layer), hidden(c, 12), tensor(((1,), (4,)))
    inputs, outputs = [x[:0], x[:0]], [x[:0], x[:0]]
    for first, (drafted, taken) in enumerate((((3, 2), (2, 1)), ((1, 3), (1, 3)), ((2, 3), (1, 2)))):
        step = Step(c, "nothing", drafted)
        given = x[first : first + step.count]
        got = step.run(engine, layer, slots.tolist(), given)
        commit(commits, tensor(taken), slots[:, 0], step.m.spec_query_start_loc)
        for n, (y, o) in enumerate(zip(given.split(list(drafted)), got.split(list(drafted)), strict=True)):
            inputs[n], outputs[n] = torch.cat((inputs[n], y[: taken[n]])), torch.cat((outputs[n], o[: taken[n]]))
            slot = slots[n, 0]
            conv, state = pools.before[0][slot][:, :KEPT], pools.before[1][slot]
            check(layer, inputs[n], outputs[n], conv, state, (pools.channels[slot], pools.state[slot]))


@dataclasses.dataclass
class Aligned:
    """A request with prefix caching, whose states belong to blocks of four tokens."""

    computed: int  # tokens before the step
    accepted: int
    state: int | None  # block whose slot gets the state after the accepted tokens; None: it stays where it was read
    boundary: int | None = None  # block that ends within the accepted tokens

    @property
    def read(self) -> int:
        """The block of the last drafted token, whose slot has the state."""
        return (self.computed + TOKENS - 1) // 4


@pytest.mark.parametrize("case", [
    Aligned(6, 3, None, 1),  # the state after two tokens is kept
    Aligned(5, 3, None),  # three tokens end at the boundary: one slot is both
    Aligned(6, 2, 1),  # likewise, in another slot than the one that is read
    Aligned(6, 1, 1),
    Aligned(6, 0, None),
    Aligned(1, 2, None),
], ids=str)  # fmt: skip
def test_states_of_blocks(case: Aligned) -> None:
    """With prefix caching, the states after the accepted tokens and at a boundary go to the slots of their blocks."""
    c = CONFIGS[1]
    engine, layer, pools = layer_of(c)
    kept_engine, kept_layer, kept = with_slots(c)
    blocks = [7, 2, 6]
    blocks[case.read] = 1
    x, step = hidden(c, 5), Step(c, "nothing")
    step.run(kept_engine, kept_layer, ((1, 3, 5), (4, 8, 6)), x)
    step.run(engine, layer, ((1,), (4,)), x)
    before = pools.state.clone(), pools.channels.clone()
    commit(
        commits_of(layer), tensor((case.accepted, 0)), tensor((1, 4)), step.m.spec_query_start_loc,
        block_table=tensor((blocks, (4, 4, 4))), num_computed_tokens=tensor((case.computed, 0)),
        mamba_block_size=4,
    )  # fmt: skip
    written = {}
    if case.accepted:
        written[1 if case.state is None else blocks[case.state]] = case.accepted
    if case.boundary is not None:
        written[blocks[case.boundary]] = 4 * (case.boundary + 1) - case.computed
    for slot, m in written.items():
        assert torch.equal(pools.state[slot], kept.state[(1, 3, 5)[m - 1]])
        assert torch.equal(pools.channels[slot][:, :KEPT], kept.channels[1][:, m - 1 : m - 1 + KEPT])
    others = [slot for slot in range(9) if slot not in written]
    assert same(pools.state[others], before[0][others])
    assert same(pools.channels[others], before[1][others])


def test_padding() -> None:
    """A captured batch has more requests than a step; and a step may have no drafts to commit."""
    c = CONFIGS[0]
    x, step = hidden(c, 5), Step(c, "nothing")
    engine, layer, pools = layer_of(c)
    want = step.run(engine, layer, ((1,), (4,)), x)
    step.m.num_spec_decodes, step.m.num_accepted_tokens = 3, tensor((1, 1, 1))
    step.m.spec_query_start_loc = tensor((0, 3, 5, 5))
    engine, layer, pools = layer_of(c)
    assert torch.equal(step.run(engine, layer, ((1,), (4,), (0,)), x), want)
    before = pools.state.clone(), layer.core.updates.clone()
    assert not before[1][2:].any(), "padding has updates"
    slots = tensor(((0,), (4,), (0,)))[:, 0]
    commit(commits_of(layer), tensor((2, 2, 1)), slots, step.m.spec_query_start_loc)
    assert same(pools.state[[0, 1, 2, 3]], before[0][[0, 1, 2, 3]])
    assert not torch.equal(pools.state[4], before[0][4])
    commit(commits_of(layer), tensor((2,)), slots[:0], step.m.spec_query_start_loc[:1])


# ---------------------------------------------------------------- what vLLM sees


@on_every_config
def test_updates_are_beside_the_cache(c: Config) -> None:
    """A row for each request, allocated with the layer; vLLM's own records are given back."""
    _, layer, _ = layer_of(c)
    assert layer.core.updates.shape == (stock.MOST_REQUESTS, TOKENS, c.heads, 3 * c.head_dim)
    assert getattr(layer, "recoverssm_records", None) is None
    assert not isinstance(layer, nn.Module) or "updates" not in dict(layer.named_buffers())


def test_layers_share_a_backend() -> None:
    """vLLM groups layers by it; without RecoverSSM it is their own."""
    backends = [layer_of(c)[1].get_attn_backend() for c in CONFIGS[:2]]
    assert backends[0] is backends[1]
    assert issubclass(backends[0], stock.Backend)
    assert issubclass(backends[0].get_builder_cls(), stock.Builder)
    assert layer_of(Config(drafts=2))[1].get_attn_backend() == "vLLM's"


def test_a_layer_of_vllm_that_cannot_recover_is_refused() -> None:
    """Its Kimi-Linear has no RecoverSSM, but is not stopped: its one slot would keep rejected drafts."""
    with pytest.raises(ValueError, match=r"must be served without --use-replayssm: it has no RecoverSSM.* at most 15"):
        Engine("kimi").make(Config(drafts=16, recovers=True))


def test_a_model_runner_that_commits_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.config"].get_current_vllm_config(), "use_v2_model_runner", False)
    with pytest.raises(ValueError, match=r"set VLLM_USE_V2_MODEL_RUNNER=1"):
        Engine("kimi").make(CONFIGS[0])
    assert Engine("k3").make(CONFIGS[1]).core is None  # stays vLLM's, which says so in its log


def test_blocks_that_are_too_short() -> None:
    _, layer, _ = layer_of(CONFIGS[0])
    table = tensor(((1, 2),))
    with pytest.raises(ValueError, match=r"must be at least 3, .*got 2: pass a larger --mamba-block-size"):
        commit(
            commits_of(layer), table[:, 0], table[:, 0], table[0], block_table=table, num_computed_tokens=table[:, 0],
            mamba_block_size=2,
        )  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("mode", ["none", "align"])
def test_metadata_and_kernels_of_the_wheel(mode: str) -> None:
    """vLLM's builder, its metadata and its kernels of a commit, in a batch with prompts (tests/stock_recover.py)."""
    command = [sys.executable, "-m", "tests.stock_recover", str(wheel("vllm")), mode]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
