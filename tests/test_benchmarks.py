"""The benchmarks' own logic, on a CPU: inputs, floors, the rule that who is wrong is not timed, reports, comparison.

The sections for a GPU run here at tiny sizes with the eager backend and a wall clock.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import (
    biased_attention,
    compare,
    decode_lengths,
    prefixes,
    report,
    serving,
    state_dtypes,
    swap,
    timing,
    training_curves,
)
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import cases, contenders, kernel_shares, layer, operator, precompile, tables, truth
from benchmarks.gpu.cases import Case, Sizes
from benchmarks.gpu.contenders import (
    Contender,
    Prepared,
    Refusal,
    forwards,
    graphed,
    in_one_role,
    ours_forward,
    ours_step,
    trainings,
)
from benchmarks.gpu.harness import Budget, ContextLost, Job, compete, failures, run_all, run_job
from benchmarks.gpu.machine import CaptureError, CudaMachine, Machine
from benchmarks.gpu.peers import softmax_forward, softmax_truth
from kda_layers import KDAOutput, kda
from kda_layers.kernels import fla_api
from kda_layers.kernels.cuda.machine import Properties
from kda_layers.kernels.kda.contract import KDA, Inputs
from kda_layers.kernels.kda.cuda.forward import two_roles
from kda_layers.kernels.kda.reference import activate, log_decay
from kda_layers.modeling.cuda_graphs import training_step
from tests.engine_wheels import wheel
from tests.modeling.taped_graphs import TapedGraphs
from tools import docs_figures, docs_tables

GDN = Case(1, 66, 1, group=2, gate="softplus", head_gates=True)  # a gated delta net


class WallClock(Machine):
    """A CPU with a clock: few calls, no memory, 'graphs' that are calls."""

    device = "cpu"

    def __init__(self) -> None:
        self.timed: list[Callable[[], Any]] = []
        self.graphs: list[Callable[[], Any]] = []
        self.lives = True

    def warm_up(self, run: Callable[[], Any], before: Callable[[], Any] | None = None) -> int:
        self.timed.append(run)
        self.turn(run, before, 1)
        return 1

    def turn(self, run: Callable[[], Any], before: Callable[[], Any] | None, calls: int) -> list[float]:
        return timing.wall_ms(run, before, calls=calls)

    def graph(self, run: Callable[[], Any], before: Callable[[], Any] | None = None) -> Callable[[], Any]:
        for _ in range(2):
            if before is not None:
                before()
            run()
        self.graphs.append(lambda: run())
        return self.graphs[-1]

    def peak_extra_mib(self, run: Callable[[], Any]) -> float:
        run()
        return 1.0

    def synchronize(self) -> None:
        if not self.lives:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def free_bytes(self) -> int:
        return 2**30

    def collect(self) -> None:
        """Nothing: a test has no memory to give back, and collecting takes a third of a second."""

    def host_us(self, runs: dict[str, Callable[[], Any]], batches: int = 1, calls: int = 1) -> dict[str, Any]:
        return super().host_us(runs, batches, calls)


# ---------------------------------------------------------------- inputs


def decay_of(gates: str) -> tuple[Tensor, Tensor]:
    """Log-decay of a large case, and its dt_bias."""
    x = cases.make_inputs(Case(2, 256, 8, gates), "cpu")
    return log_decay(x.g.float(), x.A_log, x.dt_bias, "lower_bound", -5.0), x.dt_bias


def test_fast_gates_forget_in_some_ten_tokens() -> None:
    """The recipe's mean is -3.2 nats a token; the record that has the recipe rounds it to 'about -2.5'."""
    decay, _ = decay_of("fast")
    assert -3.5 < decay.mean() < -2.0
    assert (16 * decay.mean()).exp() < 1e-12


def test_slow_gates_live_for_hundreds_of_tokens() -> None:
    decay, dt_bias = decay_of("slow")
    dt = torch.nn.functional.softplus(dt_bias)
    assert 0.99e-3 < dt.min() < 2e-3
    assert 0.05 < dt.max() < 0.101
    assert decay.mean() == pytest.approx(-5 * dt.mean().item(), rel=0.1)
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.15)  # log-uniform


@pytest.mark.parametrize("gates", ["fast", "slow"])
def test_inputs(gates: str) -> None:
    x = cases.make_inputs(Case(1, 64, 2, gates, group=2, lengths=(40, 24), checkpoints=True), "cpu")
    assert (x.q.shape, x.v.shape, x.g.shape) == ((1, 64, 2, 128), (1, 64, 4, 128), (1, 64, 4, 128))
    assert {t.dtype for t in x[:5]} == {torch.bfloat16}
    assert x.cu_seqlens.tolist() == [0, 40, 64]
    assert x.checkpoint_every == 64
    assert torch.equal(
        x.q, cases.make_inputs(Case(1, 64, 2, gates, group=2, lengths=(40, 24), checkpoints=True), "cpu").q
    )


def test_given_activations() -> None:
    x = cases.make_inputs(Case(1, 64, 2, given=True), "cpu")
    assert (x.gate_activation, x.beta_activation, x.qk_l2norm, x.A_log) == ("log_decay", "given", False, None)
    assert (x.q.dtype, x.g.dtype, x.beta.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert x.q.float().norm(dim=-1).sub(1).abs().max() < 1e-2
    assert (x.g <= 0).all()


def test_every_case_of_the_full_run_is_distinct() -> None:
    for section in (cases.FULL.forward, cases.FULL.training):
        assert len({tuple(c.fields().items()) for c in section}) == len(section)
    fields = {(c.B, c.T, c.H) for c in cases.FULL.forward}
    assert {(1, 1024, 32), (1, 65536, 8), (8, 2048, 32), (1, 8192, 96)} <= fields
    assert all(sum(c.lengths) in (0, c.T) for c in cases.FULL.forward)


def hard(name: str) -> dict[str, Any]:
    return cases.HARD[name](64, 128, 2)


def test_correlated_keys() -> None:
    k = torch.nn.functional.normalize(hard("correlated keys, beta 0.9, slow gates")["k"][0].transpose(0, 1), dim=-1)
    cosines = (k @ k.mT)[:, ~torch.eye(64, dtype=torch.bool)]
    assert cosines.mean().item() == pytest.approx(0.7, abs=0.05)
    assert (hard("correlated keys, beta 0.9, slow gates")["beta"] == 2.2).all()


def test_repeated_token() -> None:
    x = hard("one token repeated, beta 0.98, no decay")
    assert (x["k"] == x["k"][:, :1]).all()
    assert torch.sigmoid(x["beta"]).mean().item() == pytest.approx(0.98, abs=0.005)
    assert (x["g"] == -30).all()
    assert x["dt_bias"] is None
    assert not x["A_log"].any()


def test_turning_keys() -> None:
    """By hand: the key after a quarter turn, half of one, and rest; which channels decay where."""
    x = hard("keys turning, the rest decays")
    k, g = x["k"][0, :, 0], x["g"][0, :, 0]
    half = math.sqrt(0.5)
    for token, first_two in ((1, (-half, half)), (3, (-1, 0)), (5, (-1, 0)), (9, (-half, half)), (12, (0, 1))):
        assert k[token, :2].tolist() == pytest.approx(first_two, abs=1e-6)
        assert torch.equal(k[token], k[token + 16])
    assert not k[:, 2:].any()
    never = {0: (0, 1), 5: (1,), 10: (0, 1), 13: (0,)}
    for token, channels in never.items():
        assert (g[token] == -30).nonzero()[:, 0].tolist() == list(channels)
        assert (g[token] == 30).sum() == 128 - len(channels)
    assert (x["beta"] == 15).all()


def test_reflections() -> None:
    beta = hard("correlated keys, beta 2 x sigmoid")["beta"]
    assert (beta > 1).double().mean().item() == pytest.approx(0.84, abs=0.1)  # P(N(1, 1) > 0)
    x = cases.hard_inputs("correlated keys, beta 2 x sigmoid", 64, 2, "cpu")
    assert x.beta_activation == "given"
    assert torch.equal(x.beta, beta.bfloat16())


@pytest.mark.parametrize(("name", "share"), [("gates at the bound", 1.0), ("no decay but for resets", 0.05)])
def test_gates(name: str, share: float) -> None:
    """Each token's channels decay alike: nearly by the bound, or hardly."""
    decay = activate(cases.hard_inputs(name, 512, 4, "cpu")).g
    reset = decay < -4.95
    assert (reset | (decay > -0.002)).all()
    assert (reset.all(-1) == reset.any(-1)).all()
    assert reset.double().mean().item() == pytest.approx(share, abs=0.02)


def test_hard_inputs_have_a_state() -> None:
    x = cases.hard_inputs("random keys, slow gates", 64, 2, "cpu")
    assert x.final_state
    assert x.initial_state.std().item() == pytest.approx(0.1, rel=0.05)


# ---------------------------------------------------------------- floors, by hand


def test_gates_of_heads_are_those_of_the_first_channel() -> None:
    """Everything else is the same, so that what is timed differs in the gates only."""
    for more in (dict(), dict(given=True)):
        case = Case(1, 70, 2, "fast", group=2, gate="softplus", **more)
        of_channels = cases.make_inputs(case, "cpu")
        x = cases.make_inputs(dataclasses.replace(case, head_gates=True), "cpu")
        assert torch.equal(x.g, of_channels.g[..., 0])
        assert x.g.shape == (1, 70, 4)
        assert x.g.is_contiguous()
        assert x.dt_bias is None or torch.equal(x.dt_bias, of_channels.dt_bias[:, 0])
        assert all(
            torch.equal(a, b) for a, b in zip((*x[:3], x.beta), (*of_channels[:3], of_channels.beta), strict=True)
        )
    raw = cases.make_inputs(dataclasses.replace(case, given=False, head_gates=True), "cpu")
    half = cases.activated(raw, norm=False)
    assert (half.q is raw.q, half.qk_l2norm, half.gate_activation, half.beta_activation) == (
        True, True, "log_decay", "given"
    )  # fmt: skip
    whole = cases.activated(half)
    assert (whole.qk_l2norm, whole.q.dtype, whole.g.shape) == (False, torch.bfloat16, (1, 70, 4))


def test_cases_of_gated_delta_nets_say_so() -> None:
    cases_ = (*cases.FULL.gdn_forward, *cases.FULL.gdn_training)
    assert all("softplus gates of heads" in c.fields()["what"] for c in cases_)
    assert len({tuple(c.fields().items()) for c in cases.FULL.gdn_forward}) == len(cases.FULL.gdn_forward)
    grouped = {c.HV for c in cases_ if c.H == 16}
    assert grouped == {32}
    assert {c.gates for c in cases.FULL.gdn_training} == {"fast", "slow"}


def test_byte_floors() -> None:
    tensor = 8192 * 32 * 128 * 2  # bytes of [1, 8192, 32, 128] in bf16
    assert cases.forward_floor_ms(Case(1, 8192, 32)) == pytest.approx(5 * tensor / 4.25e9)
    assert round(cases.forward_floor_ms(Case(1, 8192, 32)), 3) == 0.079
    assert round(cases.training_floor_ms(Case(1, 8192, 32)), 2) == 0.22
    assert cases.training_floor_ms(Case(8, 2048, 32)) == pytest.approx(2 * 14 * tensor / 4.25e9)
    assert round(cases.decode_floor_ms(256, 32), 3) == 0.253
    assert round(cases.decode_floor_ms(256, 32, "int8"), 3) == 0.065
    grouped = cases.forward_floor_ms(Case(1, 8192, 16, group=2))
    assert grouped == pytest.approx((2 * tensor / 2 + 3 * tensor) / 4.25e9)
    of_heads = Case(1, 8192, 16, group=2, head_gates=True)
    gates = 8192 * 32 * 2
    assert cases.forward_floor_ms(of_heads) == pytest.approx((2 * tensor / 2 + 2 * tensor + gates) / 4.25e9)
    assert cases.training_floor_ms(of_heads) == pytest.approx((6 * tensor / 2 + 5 * tensor + 3 * gates) / 4.25e9)
    states = 128 * 32 * 128 * 128 * 4
    assert cases.forward_floor_ms(Case(1, 8192, 32, checkpoints=True)) == pytest.approx((5 * tensor + states) / 4.25e9)


# ---------------------------------------------------------------- the rule


def fake(name: str, result: Tensor | Exception, ours: bool = False) -> Contender:
    def prepare() -> Prepared:
        if isinstance(result, Exception):
            raise result
        return Prepared(lambda: result, lambda o: {"o": o})

    return Contender(name, prepare, ours)


TRUTH = {"o": torch.arange(1.0, 5.0)}


def test_who_is_wrong_or_refuses_is_listed_and_not_timed() -> None:
    machine = WallClock()
    contenders = [
        fake("right", TRUTH["o"] * 1.01),
        fake("wrong", TRUTH["o"] * 1.1),
        fake("nan", TRUTH["o"] * math.nan),
        fake("short", TRUTH["o"][:2]),
        fake("refuses", Refusal("needs another shape")),
        fake("missing", ModuleNotFoundError("No module named 'peer'")),
        fake("broken", RuntimeError("kernel\nfailed")),
    ]
    rows = {r["contender"]: r for r in compete({"T": 4}, contenders, TRUTH, machine, floor_ms=2.0, memory=True)}
    assert {n: r["status"] for n, r in rows.items()} == {
        "right": "timed", "wrong": "wrong", "nan": "wrong", "short": "failed", "refuses": "refused",
        "missing": "refused", "broken": "failed",
    }  # fmt: skip
    assert len(machine.timed) == 1
    assert [n for n, r in rows.items() if "time" in r] == ["right"]
    assert rows["right"]["errors"]["o"] == pytest.approx(0.01)
    assert rows["right"]["times floor"] == pytest.approx(rows["right"]["time"]["median"] / 2.0)
    assert rows["wrong"]["reason"] == "relative L2 error o 0.1"
    assert rows["short"]["reason"] == "ValueError: result must have shape [4], got [2]"
    assert rows["refuses"]["reason"] == "needs another shape"
    assert rows["missing"]["reason"] == "ModuleNotFoundError: No module named 'peer'"
    assert rows["broken"]["reason"] == "RuntimeError: kernel failed"
    assert all(r["T"] == 4 for r in rows.values())


def test_a_sum_over_tokens_has_a_wider_limit() -> None:
    def prepare() -> Prepared:
        return Prepared(lambda: None, lambda _: {"d_A_log": TRUTH["o"] * 1.05, "d_v": TRUTH["o"]})

    truths = {"d_A_log": TRUTH["o"], "d_v": TRUTH["o"]}
    assert compete({}, [Contender("c", prepare)], truths, WallClock())[0]["status"] == "timed"


def test_a_lost_device_ends_the_run_and_says_so() -> None:
    machine = WallClock()

    def lose() -> Prepared:
        machine.lives = False
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def job(i: int, prepare: Callable[[], Prepared]) -> Job:
        return Job({"T": i}, lambda: compete({"T": i}, [Contender("c", prepare)], TRUTH, machine))

    good = fake("c", TRUTH["o"]).prepare
    rows: list[dict[str, Any]] = []
    run_all([("s", job(1, good)), ("s", job(2, lose)), ("s", job(3, good))], machine, Budget(None), rows.extend)
    assert [(r["T"], r["status"]) for r in rows] == [(1, "timed"), (2, "failed"), (3, "left out")]
    assert "illegal memory access" in rows[2]["reason"]
    assert len(failures(rows)) == 1
    with pytest.raises(ContextLost):
        run_job("s", job(2, lose), machine)


def test_a_case_that_fails_is_a_row_and_the_next_one_runs() -> None:
    def explode() -> list[dict[str, Any]]:
        raise RuntimeError("the fp32 reference disagrees")

    rows: list[dict[str, Any]] = []
    after = Job({"T": 2}, lambda: compete({"T": 2}, [fake("c", TRUTH["o"])], TRUTH, WallClock()))
    run_all([("s", Job({"T": 1}, explode)), ("s", after)], WallClock(), Budget(None), rows.extend)
    assert [r["status"] for r in rows] == ["failed", "timed"]
    assert failures(rows) == ["s every contender: failed: RuntimeError: the fp32 reference disagrees"]


def test_a_spent_budget_leaves_jobs_out_and_says_so() -> None:
    rows: list[dict[str, Any]] = []
    run_all([("s", Job({"T": 1}, lambda: pytest.fail("started")))], WallClock(), Budget(-1), rows.extend)
    assert [(r["status"], r["reason"]) for r in rows] == [("left out", "the budget of -1 s was spent")]
    assert failures(rows) == ["nothing was timed"]


@pytest.mark.parametrize(
    ("status", "ours", "count"), [("wrong", True, 1), ("failed", True, 1), ("refused", True, 0), ("wrong", False, 0)]
)
def test_what_makes_a_run_fail(status: str, ours: bool, count: int) -> None:
    rows = [
        {"section": "s", "contender": "a", "ours": False, "status": "timed"},
        {"section": "s", "contender": "b", "ours": ours, "status": status, "reason": "because"},
    ]
    assert len(failures(rows)) == count


def test_a_wrong_backend_of_ours_fails_the_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    eager = KDA.backends()["eager"]
    right = eager.forward

    def wrong(x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        out, saved = right(x, save)
        return out._replace(o=out.o * (1 + (x.q.dtype != torch.float32))), saved

    monkeypatch.setattr(eager, "forward", wrong)
    assert run(tmp_path, "forward") == 1
    (row,) = [r for r in rows_of(tmp_path) if r["contender"] == "eager"][:1]
    assert row["status"] == "wrong"
    assert "time" not in row


# ---------------------------------------------------------------- in turns


def test_the_order_is_rotated_and_reversed() -> None:
    assert ["".join(timing.order("abc", r, 0)) for r in range(4)] == ["abc", "bca", "cab", "abc"]
    assert ["".join(timing.order("abc", r, 1)) for r in range(3)] == ["cba", "bac", "acb"]
    assert timing.order([], 0, 0) == []


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd"])
def test_everyone_is_equally_often_at_every_place(names: str) -> None:
    order: list[str] = []
    results = timing.in_turns({n: (lambda n=n: order.append(n) or [1.0, 2.0]) for n in names})
    rounds, entries = timing.rounds_of(len(names)), len(names) + 1
    assert rounds >= 3
    assert len(order) == 2 * rounds * entries
    for place in range(entries):
        for n in names:
            share = 2 if n == names[0] else 1
            assert order[place::entries].count(n) == share * 2 * rounds / entries
    assert [len(p) for p in results[names[-1]].passes] == [2 * rounds] * 2
    assert len(results[names[0]].again) == 4 * rounds
    assert all(not results[n].again for n in names[1:])


def test_who_fails_in_its_turn_takes_no_further_part() -> None:
    calls: list[str] = []

    def fail() -> list[float]:
        calls.append("bad")
        raise RuntimeError("no")

    results = timing.in_turns({"good": lambda: [1.0], "bad": fail})
    assert isinstance(results["bad"], RuntimeError)
    assert results["good"].summary()["median"] == 1.0
    assert calls == ["bad"]
    contenders = [Contender(n, lambda f=f: Prepared(f, lambda _: TRUTH)) for n, f in (("a", int), ("b", fail_later()))]
    rows = compete({}, contenders, TRUTH, WallClock())
    assert [(r["status"], r.get("reason")) for r in rows] == [("timed", None), ("failed", "RuntimeError: spent")]


def fail_later() -> Callable[[], None]:
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("spent")

    return run


def test_all_are_warmed_up_before_any_is_timed() -> None:
    events: list[str] = []

    class Recording(WallClock):
        def warm_up(self, run: Callable[[], Any], before: Callable[[], Any] | None = None) -> int:
            events.append("warm")
            return super().warm_up(run, before)

        def turn(self, run: Callable[[], Any], before: Callable[[], Any] | None, calls: int) -> list[float]:
            events.append("turn")
            return super().turn(run, before, calls)

    compete({}, [fake(n, TRUTH["o"]) for n in "abc"], TRUTH, Recording())
    assert events[:6] == ["warm", "turn"] * 3  # a warm-up of this clock is a turn
    assert set(events[6:]) == {"turn"}
    runs: list[str] = []
    timing.compare_ms({n: (lambda n=n: runs.append(n)) for n in "ab"})
    assert "".join(runs[:7]) == "aabb" + "aba"


def test_passes_that_do_not_agree_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steady, drifting = (timing.Times(p, [1.0]).summary() for p in ([[1.0], [1.04]], [[1.0], [1.5]]))
    assert (steady["agree"], drifting["agree"]) == (True, False)
    assert (drifting["passes"], drifting["again"]) == ([1.0, 1.5], 1.0)
    rows = [{"case": "decode", "B": 1, "ours times": steady, "theirs times": drifting}]
    path = report.save(tmp_path, report.document("cpu-x", "A title", rows, ["case", "B"]))
    text = report.text(report.load(path))
    assert "Passes differ, decode, 1, theirs times: medians 1 / 1.5, first to last decile" in text
    assert "ours times" not in text
    assert "entered twice: medians at most 20.0% apart" in text
    assert compare.main([str(path), str(path)]) == 0
    row = {"section": "forward", "contender": "c", "ours": False, "status": "timed", "time": drifting, "errors": {}}
    assert "**passes differ:** 1 / 1.5" in tables.markdown(report.document("gpu-x", "A title", [row]))
    capsys.readouterr()


class Planning:
    """Softmax attention that takes 100 ms more for a length of the keys that it has not seen in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: set[int] = set()
        attend = torch.nn.functional.scaled_dot_product_attention

        def planning(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if q.shape[2] == 1 and torch.backends.cuda.cudnn_sdp_enabled() and k.shape[2] not in self.seen:
                time.sleep(0.1)
                self.seen.add(k.shape[2])
            return attend(q, k, *args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", planning)


@pytest.mark.parametrize("family", ["kimi_linear", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_the_first_to_decode_does_not_plan_for_the_others(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both models spend most of a step in the same 'plan', if they make one."""
    Planning(monkeypatch)
    small = dict(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], hidden_size=32, intermediate_size=32,
        vocab_size=32,
    )  # fmt: skip
    small |= (
        dict(linear_num_heads=1)
        if family == "kimi_linear"
        else dict(
            linear_num_key_heads=1, linear_num_value_heads=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
        )
    )
    monkeypatch.setitem(swap.SIZES[family], "cpu", small)
    monkeypatch.setitem(swap.CASES, "cpu", [("decode step", 1, 1)])
    monkeypatch.setattr(swap, "CONTEXT", 16)
    monkeypatch.setattr(swap, "memory", lambda *_: 1.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(sys, "argv", ["swap", "--model", family, "--output", str(tmp_path)])
    swap.main()
    (path,) = tmp_path.iterdir()
    assert path.name == {"kimi_linear": "cpu-swap.json", "qwen3_next": "cpu-swap-qwen3-next.json"}[family]
    (row,) = json.loads(path.read_text())["rows"]
    assert row["times faster"] < 10  # a plan takes 60 to 120 steps of this size on two cores
    assert row["stock times"]["median"] < 90


def test_a_swapped_model_is_judged_against_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models as far from fp32 as each other, and further apart; one that is further off than its rounding."""
    truth, noise = torch.randn(4, 8, 16).double(), torch.randn(2, 4, 8, 16).double()

    class Model:
        dtype, device, config = torch.bfloat16, torch.device("cpu"), SimpleNamespace(vocab_size=16)

        def __init__(self, error: Tensor):
            self.error = error

        def __call__(self, tokens: Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=truth + self.error)

        def float(self) -> Model:
            return Model(torch.zeros(()).double())

    scaled = 0.0347 * noise / (noise.flatten(1).norm(dim=1)[:, None, None, None] / truth.norm())
    a, b = Model(scaled[0]), Model(scaled[1])
    difference = (a.error - b.error).norm() / truth.norm()
    assert difference > 10 * 2**-8
    swap.check(a, b)
    with pytest.raises(RuntimeError, match=r"0\.0416 from fp32 .* stock model 0\.0347"):
        swap.check(a, Model(1.2 * scaled[1]))


def test_scores_of_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each form of the states loses something, fp32 nothing; recall asks for values that the sequence told."""
    arguments = ["--recall", "small", "--recall-steps", "2", "--fillers", "3", "--sequences", "2"]
    state_dtypes.main([*arguments, "--device", "cpu", "--output", str(tmp_path)])
    contents = report.load(tmp_path / "cpu-state-dtypes.json")
    trained = contents["details"]["recall"]
    assert (trained["steps"], trained["share_of_the_task"]) == (2, 0)  # nothing is learned in two steps
    assert [r["states"] for r in contents["rows"]] == [*state_dtypes.STATES]
    assert [r["each_differs_by"] > 0 for r in contents["rows"]] == [False, True, True, True, True]

    task = state_dtypes.RECALL["small"]
    model, _ = state_dtypes.train_recall("small", torch.device("cpu"), 1)
    rows = state_dtypes.text_rows(model, torch.randint(3 * task.kinds, (50,)), 2, 20)
    assert [r["tokens"] for r in rows[:5]] == ["0-20", "0-5", "5-10", "10-15", "15-20"]
    tokens, mask = state_dtypes.recall_batch(task, 5, 7, 3, torch.Generator().manual_seed(0))
    assert tokens.shape == (3, 27)
    assert mask.nonzero().flatten().tolist() == [18, 20, 22, 24, 26]
    for row in tokens.tolist():
        told = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert all(told[key] == value for key, value in zip(row[17::2], row[18::2], strict=True))
    with pytest.raises(SystemExit):
        state_dtypes.main([])
    assert "needs --run FOLDER or --recall SIZE" in capsys.readouterr().err


def test_steps_at_new_lengths_and_at_the_same_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody finds another one's plan; cuDNN's attention is on again in the end."""
    planning = Planning(monkeypatch)
    monkeypatch.setattr(decode_lengths, "STEPS", 3)
    monkeypatch.setitem(decode_lengths.CONTEXTS, "cpu", (16,))
    decode_lengths.main(["--device", "cpu", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "cpu-decode-lengths.json").read_text())["rows"]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    planned = {(r["visit"], r["attention"]): [] for r in rows}
    for r in rows:
        least = "min" if r["visit"] == "new length" else "median"
        planned[r["visit"], r["attention"]].append(r["times"][least])
    new, again = (planned[v, decode_lengths.DEFAULT] for v in decode_lengths.VISITS)
    assert {len(times) for times in planned.values()} == {4}
    assert min(new) > 100
    assert max(again) < 90
    assert len(planning.seen) >= 4 * 2 * 3
    header, *body = capsys.readouterr().out.splitlines()
    assert "| visit |" in header
    assert any("| new length |" in line for line in body)


@pytest.mark.parametrize("section", ["forward", "training", "decode", "gdn_forward", "context"])
def test_the_operator_is_timed_in_graphs(section: str, tmp_path: Path) -> None:
    machine = WallClock()
    gpu.main(["--backends", "eager", "--only", section, "--output", str(tmp_path)], machine, TINY)
    rows = [r for r in rows_of(tmp_path) if r["status"] == "timed"]
    assert rows
    assert {r["mode"] for r in rows} == {"CUDA graph"}
    assert machine.timed
    assert all(run in machine.graphs for run in machine.timed)


def test_what_cannot_be_captured_is_called_and_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise CaptureError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(WallClock, "graph", refuse)
    assert run(tmp_path, "forward") == 0
    row = next(r for r in rows_of(tmp_path) if r["status"] == "timed")
    assert row["mode"] == "call"
    assert row["note"].endswith("operation not permitted when stream is capturing")
    text = tables.markdown(report.load(tmp_path / "gpu-forward.json"))
    assert "MiB, called" in text  # perhaps with a note on passes that differ
    assert "timed without a CUDA graph" in text


def test_host_time_has_a_section_of_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, "host") == 0
    rows = [r for r in rows_of(tmp_path) if r["contender"] == "eager"]
    assert [(r["pass"], r["T"], r["status"]) for r in rows] == [
        ("forward", 64, "timed"), ("forward + backward", 64, "timed"), ("decode", 1, "timed")
    ]  # fmt: skip
    assert all(r["time"]["median"] > 10 for r in rows)  # microseconds
    assert "Host microseconds of a call" in tables.markdown(report.load(tmp_path / "gpu-host.json"))


# ---------------------------------------------------------------- truth


@pytest.mark.parametrize("case", [Case(1, 66, 3, group=2), Case(1, 66, 4, lengths=(30, 36), checkpoints=True)], ids=str)
def test_first_and_last_heads_alone_are_those_of_the_whole(case: Case) -> None:
    x = cases.make_inputs(case, "cpu")
    heads = truth.Heads.first_and_last(x)
    whole, alone = truth.outputs(truth.call(x, "eager")), truth.outputs(truth.call(heads.inputs(x), "eager"))
    for name, got in heads.results(whole).items():
        assert torch.equal(got, alone[name])


def test_gradients_of_first_and_last_heads() -> None:
    x = cases.make_inputs(Case(1, 66, 3, group=2), "cpu")
    heads, d_o = truth.Heads.first_and_last(x), truth.upstream(x)
    whole = truth.training_truth(x, d_o)
    alone = truth.training_truth(heads.inputs(x), d_o[:, :, heads.v])
    assert alone.keys() == {"o", *(f"d_{n}" for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"))}
    for name, got in heads.results(whole).items():
        assert truth.error(got, alone[name]) < 1e-5


def test_a_wrong_reference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = truth.recurrence
    monkeypatch.setattr(truth, "recurrence", lambda x: (right(x)[0] * 1.001, *right(x)[1:]))
    with pytest.raises(RuntimeError, match="disagrees with the fp64 recurrence"):
        truth.forward_truth(cases.make_inputs(Case(1, 64, 1), "cpu"))


def test_softmax_truth_is_that_of_torch() -> None:
    x = cases.make_inputs(Case(1, 80, 3), "cpu")
    wide = x._replace(q=x.q.double(), k=x.k.double(), v=x.v.double())
    prepared = softmax_forward(wide, [0, 2]).prepare()
    got = prepared.results(prepared.run())["o"]
    assert truth.error(got, softmax_truth(x, [0, 2])["o"]) < 1e-12


# ---------------------------------------------------------------- peers, with stand-ins of the same arguments


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the peers' names, whose functions compute with our eager backend."""
    below = SimpleNamespace(fused_recurrent_kda_fwd=fla_api.fused_recurrent_kda)
    ops = SimpleNamespace(kimi_delta_attention=cudnn_stand_in, gated_delta_net=cudnn_gdn_stand_in)
    for name, module in (
        ("fla", SimpleNamespace()), ("fla.ops", SimpleNamespace()), ("fla.ops.kda", fla_api),
        ("fla.ops.gated_delta_rule", fla_api), ("fla.ops.kda.fused_recurrent", below),
        ("flash_qla", SimpleNamespace(chunk_gated_delta_rule=flash_qla_stand_in)),
        ("cudnn", SimpleNamespace(cudnnGraphNotSupportedError=GraphNotSupportedError)),
        ("cudnn.linear_attention", SimpleNamespace(ops=ops)), ("cudnn.linear_attention.ops", ops),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


class GraphNotSupportedError(Exception):
    """Error of cuDNN for a graph that it has no kernel for."""


def cudnn_stand_in(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool, use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, safe_gate: bool, gate_lower_bound: float | None, a_log: Tensor | None,
    dt_bias: Tensor | None, checkpoint_every_n_tokens: int, plan_name: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """nvidia-cudnn-frontend 1.32's function for packed tokens [tokens, heads, D], as far as its Hopper engine goes."""
    assert plan_name == "kda_hopper_cuda"
    assert (g.dtype, beta.dtype, cu_seqlens.dtype) == (torch.float32, torch.float32, torch.int32)
    assert all(t.is_contiguous() for t in (q, k, v, g, beta))
    if checkpoint_every_n_tokens:
        raise GraphNotSupportedError("state_checkpoints are not produced")
    if safe_gate and torch.is_grad_enabled() and q.requires_grad:
        raise GraphNotSupportedError("the backward takes log-space g")
    out = kda(
        *(t[None] for t in (q, k, v, g, beta)), A_log=a_log, dt_bias=dt_bias, initial_state=initial_state,
        cu_seqlens=cu_seqlens, gate_activation="lower_bound" if safe_gate else "log_decay",
        lower_bound=gate_lower_bound, beta_activation="sigmoid" if use_beta_sigmoid_in_kernel else "given",
        qk_l2norm=use_qk_l2norm_in_kernel, scale=scale, return_final_state=output_final_state,
    )  # fmt: skip
    return out.o[0], out.final_state if output_final_state else q.new_empty(0)


def cudnn_gdn_stand_in(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool, use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, safe_gate: bool, a_log: Tensor | None, dt_bias: Tensor | None,
    checkpoint_every_n_tokens: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """nvidia-cudnn-frontend 1.32's function, as far as its cuTile engine goes: applied gates and beta in fp32."""
    assert (g.ndim, g.dtype, beta.dtype, cu_seqlens.dtype) == (2, torch.float32, torch.float32, torch.int32)
    assert (use_beta_sigmoid_in_kernel, safe_gate, a_log, dt_bias) == (False, False, None, None)
    assert all(t.is_contiguous() for t in (q, k, v, g, beta))
    assert not checkpoint_every_n_tokens
    out = kda(
        *(t[None] for t in (q, k, v, g, beta)), initial_state=initial_state, cu_seqlens=cu_seqlens,
        gate_activation="log_decay", beta_activation="given", qk_l2norm=use_qk_l2norm_in_kernel, scale=scale,
        return_final_state=output_final_state,
    )  # fmt: skip
    return out.o[0], out.final_state if output_final_state else q.new_empty(0)


def flash_qla_stand_in(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor | None,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor | None, state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """flash-qla 0.1.3's function, which takes applied gates and beta only."""
    assert (q.dtype, g.dtype, beta.dtype, state_v_first) == (torch.bfloat16, torch.float32, torch.float32, True)
    out = kda(
        q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, gate_activation="log_decay",
        beta_activation="given", qk_l2norm=use_qk_l2norm_in_kernel, scale=scale, return_final_state=output_final_state,
    )  # fmt: skip
    return out.o, out.final_state


@pytest.mark.parametrize(
    ("peer", "file", "function", "stand_in"),
    [
        ("flash_qla", "flash_qla/ops/gated_delta_rule/chunk/__init__.py", "chunk_gated_delta_rule", flash_qla_stand_in),
        ("cudnn", "cudnn/linear_attention/ops/gdn.py", "gated_delta_net", cudnn_gdn_stand_in),
        ("cudnn", "cudnn/linear_attention/ops/kda.py", "kimi_delta_attention", cudnn_stand_in),
    ],
)
def test_stand_ins_take_what_the_peers_take(peer: str, file: str, function: str, stand_in: Callable[..., Any]) -> None:
    """By the sources of their wheels, as they cannot be imported without a GPU."""
    (there,) = (
        node
        for node in ast.parse((wheel(peer) / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    names, parameters = [a.arg for a in there.args.args], inspect.signature(stand_in).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[:5] == names[:5] == ["q", "k", "v", "g", "beta"]
    assert names[5] == "cu_seqlens" or peer != "cudnn"
    assert {p.name for p in parameters} <= set(names)
    without_default = names[: len(names) - len(there.args.defaults)]
    assert set(without_default) <= {p.name for p in parameters}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("section", "case", "refusing"),
    [
        ("forward", Case(2, 66, 2), ()),
        ("forward", Case(1, 66, 1, "fast", group=2, lengths=(30, 36)), ()),
        ("forward", Case(1, 128, 2, checkpoints=True), ("cuDNN",)),
        ("forward", Case(1, 66, 2, gate="softplus"), ("cuDNN",)),
        ("training", Case(2, 66, 2), ("cuDNN",)),
        ("training", Case(1, 66, 1, group=2, given=True), ()),
        ("backward", Case(1, 66, 1, given=True), ()),
        ("gdn_forward", GDN, ()),
        ("gdn_forward", dataclasses.replace(GDN, gates="fast", lengths=(30, 36), states=True), ()),
        ("gdn_forward", dataclasses.replace(GDN, gate="lower_bound"), ("FLA",)),
        ("gdn_training", GDN, ()),
        ("gdn_training", dataclasses.replace(GDN, B=2, given=True, gates="fast"), ()),
    ],
    ids=str,
)
def test_peers_get_and_give_what_the_case_says(
    section: str, case: Case, refusing: tuple[str, ...], tmp_path: Path
) -> None:
    assert run(tmp_path, section, sizes=dataclasses.replace(TINY, **{section: (case,)})) == 0
    rows = rows_of(tmp_path)
    for r in rows:
        assert r["status"] == ("refused" if r["contender"] in refusing else "timed"), r
        assert (r.get("inputs") == "activated") == (case.head_gates and r["contender"] in ("FlashQLA", "cuDNN"))
    assert ("FlashQLA" in {r["contender"] for r in rows}) == case.head_gates


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("section", ["decode", "gdn_decode", "hard", "hard_gradients"])
def test_peers_with_states(section: str, tmp_path: Path) -> None:
    assert run(tmp_path, section) == 0
    rows = [r for r in rows_of(tmp_path) if (section, r["contender"]) != ("hard_gradients", "cuDNN")]
    assert {r["status"] for r in rows} == {"timed" if section.endswith("decode") else "right"}
    if section == "gdn_decode":
        assert {r["contender"] for r in rows} == {
            "eager", "eager, bf16 states", "eager, int8 states", "eager, gates of channels", "FLA"
        }  # fmt: skip


@pytest.mark.usefixtures("stand_ins")
def test_a_step_is_judged_by_the_gates_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KDA beside gated delta nets has a truth of its own, which those of heads would not pass."""
    monkeypatch.setattr(operator, "_judged", lambda c, *_: c)
    fast = dataclasses.replace(TINY.gdn_decode[0], gates="fast")  # slow ones hardly tell in one token
    assert run(tmp_path, "gdn_decode", sizes=dataclasses.replace(TINY, gdn_decode=(fast,))) == 1
    status = {r["contender"]: r["status"] for r in rows_of(tmp_path)}
    assert status["eager, gates of channels"] == "wrong"
    assert {status["eager"], status["FLA"]} == {"timed"}


def test_peers_that_are_not_installed_say_so(tmp_path: Path) -> None:
    missing = {name: importlib.util.find_spec(name) is None for name in ("fla", "flash_qla", "cudnn")}
    assert run(tmp_path, "gdn_forward") == 0
    for row in rows_of(tmp_path):
        package = {"FLA": "fla", "FlashQLA": "flash_qla", "cuDNN": "cudnn"}.get(row["contender"])
        if package is not None and missing[package]:
            assert (row["status"], row["reason"]) == ("refused", f"ModuleNotFoundError: No module named '{package}'")


# ---------------------------------------------------------------- machine


def test_graphs_start_from_the_state_before() -> None:
    """Warming up and capturing advance a state; what is judged starts from the first one again."""
    x = cases.decode_inputs(Case(2, 1, 2), "cpu")
    steps = [graphed(ours_step("eager", x, kept), WallClock()) for kept in ("fp32", "int8")]
    exact, rounded = compete({}, steps, truth.oracle(x), WallClock())
    assert {(r["status"], r["mode"]) for r in (exact, rounded)} == {("timed", "CUDA graph")}
    assert exact["errors"]["final_state"] < 1e-6
    assert 1e-3 < rounded["errors"]["final_state"] < 2e-2  # half a step of 127 in the first state and in the last


class FakeEvent:
    """A CUDA event whose clock advances by two milliseconds a record."""

    now = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 2
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.mark.parametrize(("limits", "calls"), [((10, 300), 25), ((40, 300), 40), ((1, 5), 5)])
def test_cuda_times(limits: tuple[int, int], calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calls as fit into the time, within limits; before each of them what must come before."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(CudaMachine, "device", "cpu")
    machine = CudaMachine(warmup_ms=8, measure_ms=50, calls=limits)
    machine.flushed = torch.empty(1)
    order: list[str] = []
    times = machine.times_ms(lambda: order.append("run"), lambda: order.append("before"))
    assert times == [2.0] * calls
    assert order == ["before", "run"] * (len(order) // 2)
    assert len(order) // 2 == 2 + 3 + min(4, limits[1]) + calls


def test_host_times_take_turns() -> None:
    order: list[str] = []
    WallClock().host_us({n: (lambda n=n: order.append(n)) for n in "ab"}, batches=2, calls=1)
    turns = "".join(order).removeprefix("aaabbb")
    assert turns == "".join(2 * n for n in "ababaaaabababaaaab")


def test_one_role_is_chosen_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = cases.make_inputs(Case(1, 8, 1), "cpu"), []
    monkeypatch.setattr(contenders, "call", lambda *_: seen.append(two_roles.declined))
    monkeypatch.setattr(contenders, "require", lambda *_: None)
    for contender in (ours_forward("sm90", x), in_one_role(ours_forward("sm90", x))):
        contender.prepare().run()
    assert seen == [None, "is switched off"]
    assert two_roles.declined is None
    assert [c.name for c in forwards(["eager", "sm90"], x)] == ["eager", "sm90"]  # on a CPU
    assert [c.name for c in trainings(["eager", "sm90"], x, x.v)] == ["eager", "sm90"]


@pytest.mark.parametrize("head_gates", [False, True])
def test_one_role_is_timed_beside_two(head_gates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = cases.make_inputs(Case(1, 4096, 32, head_gates=head_gates), "cpu")
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(KDA.backends()["sm90"].machine, "properties", lambda _: Properties(132, 90, 2**37))
    assert [c.name for c in forwards(["sm90"], x)] == ["sm90", "sm90, one role"]


def test_a_backend_that_does_not_serve_is_refused_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = KDA.backends()["eager"]
    monkeypatch.setattr(eager, "unsupported", lambda problem: ["it is Monday", "needs a GPU"])
    (row,) = compete({}, [ours_forward("eager", cases.make_inputs(Case(1, 8, 1), "cpu"))], TRUTH, WallClock())
    assert row["status"] == "refused"
    assert row["reason"].endswith("it is Monday; needs a GPU")


def test_summary_has_the_spread() -> None:
    s = report.summary([float(i) for i in range(11)])
    assert (s["median"], s["p10"], s["p90"], s["min"], s["max"], s["calls"]) == (5, 1, 9, 0, 10, 11)
    assert report.summary([2.0])["p90"] == 2.0


# ---------------------------------------------------------------- where kernels come from


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args, "ph": "X"}


def test_shares_of_kernels() -> None:
    """Four microseconds of each kind, found by the launch call or else by the innermost operator's number."""
    events = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::mm", 1, 8, **{"External id": 11}),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
        event("user_annotation", kernel_shares.RANGE, 20, 30),
        event("cuda_driver", "cuLaunchKernelEx", 22, 1, correlation=2),
        event("cpu_op", "aten::mm", 30, 5),  # a product inside the operator is the operator's
        event("cuda_runtime", "cudaLaunchKernel", 31, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 32, 1, tid=2, correlation=4),  # another thread at that time
        event("cpu_op", "aten::mul", 30, 9, tid=2),
        event("cuda_runtime", "cudaMemsetAsync", 70, 1, correlation=5),
        event("kernel", "gemm", 100, 3, correlation=1),
        event("kernel", "gemm without launch", 103, 1, correlation=77, **{"External id": 11}),
        event("kernel", "scan", 110, 1, correlation=2),
        event("kernel", "gemm", 120, 3, correlation=3),
        event("kernel", "mul", 130, 3, correlation=4),
        event("gpu_memset", "Memset", 140, 1, correlation=5),
        event("kernel", "from nowhere", 150, 4, correlation=99),
        event("gpu_user_annotation", kernel_shares.RANGE, 110, 20),
        {"ph": "M", "name": "process_name"},
    ]
    got = kernel_shares.shares(events, calls=2)
    assert got == {"GPU ms": 0.008} | {f"{kind} %": 25.0 for kind in kernel_shares.KINDS}


def test_without_the_operator_there_are_no_shares() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        kernel_shares.shares([event("kernel", "gemm", 0, 3, correlation=1)], calls=1)


def test_the_operator_is_a_range_in_the_trace() -> None:
    x = cases.make_inputs(Case(1, 8, 1), "cpu")
    eager = KDA.backends()["eager"]
    with kernel_shares.marked(eager):
        events = kernel_shares.trace(WallClock(), ours_forward("eager", x).prepare().run, calls=2)
    assert sum(e.get("name") == kernel_shares.RANGE and e.get("cat") == "user_annotation" for e in events) == 2
    assert vars(eager).keys().isdisjoint(("forward", "backward", "decode"))


# ---------------------------------------------------------------- reports

RESULTS = Path(report.__file__).parent / "results"
RECORDS = RESULTS.parents[1] / "docs" / "internals" / "records"


def test_results_are_json_of_one_schema() -> None:
    assert {p.suffix for p in RESULTS.iterdir()} == {".json"}
    for path in RESULTS.iterdir():
        assert report.load(path)["rows"], path.name


@pytest.mark.parametrize("path", [*RESULTS.iterdir(), *RECORDS.iterdir()], ids=lambda path: path.stem)
def test_a_result_file_is_as_it_would_be_written(path: Path) -> None:
    written = path.read_text()
    contents = json.loads(written)
    assert report.serialise(contents) == written
    assert all(f"\n  {json.dumps(row)}" in written for row in contents["rows"])


def test_superseded_runs_are_dated() -> None:
    for path in RECORDS.iterdir():
        contents = json.loads(path.read_text())
        name = f"{contents['stamp']['date']}-{contents['name']}"
        assert path.stem in (name, f"{name}-{contents['stamp']['commit']}")  # of several runs on a day
        assert any(contents["name"].startswith(result.stem) for result in RESULTS.iterdir())  # what replaced it


def test_no_timed_row_is_missing_from_the_tables() -> None:
    """Older files have a contender twice in a case, called and in a CUDA graph."""
    for path in RESULTS.glob("gpu-*.json"):
        contents = report.load(path)
        if not contents["columns"]:
            text = tables.markdown(contents)
            for row in contents["rows"]:
                if "time" in row:
                    cell = f"{tables.number(row['time']['median'])} ({tables.number(row['time']['p10'])} - "
                    assert cell in text, (path.name, row)


@pytest.mark.parametrize("name", ["gpu-training-curves", "gpu-training-curves-float8"])
def test_loss_curves_have_the_same_form(name: str) -> None:
    """The benchmark keeps a file of its own, from which it resumes."""
    there = report.load(RESULTS / f"{name}.json")
    assert training_curves.results(there["details"] | {"runs": there["rows"]}) | {"name": name} == there


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 2}, "expected schema 1, got 2"),
        ({"rows": {}}, "expected 'rows' to be list, got {}"),
        ({"title": None}, "expected 'title' to be str, got None"),
        ({"name": "gpu-y"}, "expected the name to be the file's"),
        ({"losses": [1.0]}, "unknown fields losses; what is no row belongs in 'details'"),
    ],
)
def test_a_file_of_another_form_is_named(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = report.save(tmp_path, report.document("gpu-x", "A title", [{"ms": 1.0}], details={"seed": 0}))
    assert report.load(path)["details"] == {"seed": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(problem)) as found:
        report.load(path)
    assert str(path) in str(found.value)


@pytest.mark.parametrize("name", ["operator", "gpu_operator", "gpu-Operator", "gpu-", "h200-operator"])
def test_names_of_results_follow_the_rule(name: str) -> None:
    with pytest.raises(ValueError, match="expected cpu- or gpu-, then words joined by hyphens"):
        report.document(name, "A title", [])


@pytest.mark.parametrize("module", ["lm", "decode_lengths", "state_dtypes"])
def test_names_are_refused_before_anything_is_measured(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{module}").main(["--name", "gpu_operator"])
    assert "--name: expected cpu- or gpu-, then words joined by hyphens, got 'gpu_operator'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [
        ([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], 1024.0),  # always faster
        ([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], None),  # never
        ([2.0, 2.0, 2.0], [1.0, 4.0, 16.0], 1024 * math.sqrt(2)),  # ratios 2 and 1/2: half way on the logarithm
        ([1.0, 8.0, 8.0], [2.0, 4.0, 32.0], 2048 * 2 ** (1 / 3)),  # a detour: only the last crossing counts
    ],
)
def test_crossover(ours: list[float], other: list[float], expected: float | None) -> None:
    got = tables.crossover([1024, 2048, 4096], ours, other)
    assert got == (expected if expected is None else pytest.approx(expected))


def test_crossover_needs_a_time_for_each_T() -> None:
    with pytest.raises(ValueError, match=r"T = \[1, 2\], 1 and 2 times"):
        tables.crossover([1, 2], [1.0], [1.0, 2.0])


TINY = Sizes(
    forward=(Case(1, 66, 2), Case(1, 66, 1, "fast", group=2, lengths=(30, 36), checkpoints=True)),
    packed=(Case(1, 66, 1, lengths=(60, 1, 1, 4), states=True),),
    segments=(Case(1, 130, 1),),
    cudnn_shapes=(Case(1, 66, 1, states=True),),
    training=(Case(1, 66, 2), Case(1, 64, 1, given=True)),
    backward=(Case(1, 64, 1, given=True),),
    gdn_forward=(GDN, dataclasses.replace(GDN, lengths=(30, 36))),
    gdn_training=(GDN,),
    gdn_decode=(dataclasses.replace(GDN, B=2, T=1),),
    decode=(2,),
    decode_heads=2,
    hard=(24, 1),
    context=(64, 128),
    context_heads=1,
    host=Case(1, 64, 1),
    overhead=(Case(1, 66, 1), Case(1, 64, 1)),
    layer=(32, 1, 66),
    vocab_size=32,
    decode_batches=(2,),
    contexts=(16, 10**7),
    model_T=66,
)


def run(folder: Path, sections: str, *options: str, sizes: Sizes = TINY) -> int:
    return gpu.main(["--backends", "eager", "--only", sections, "--output", str(folder), *options], WallClock(), sizes)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())["rows"]


def test_a_commit_can_be_given(tmp_path: Path) -> None:
    assert run(tmp_path, "hard", "--commit", "abc1234") == 0
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["stamp"]["commit"] == "abc1234"


def test_sections_of_the_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {"fla", "cudnn"}
    for name in peers | {name for name in sys.modules if name.split(".")[0] in peers}:
        monkeypatch.setitem(sys.modules, name, None)  # as where they are not installed
    sections = ("forward", "training", "backward", "decode", "hard", "hard_gradients", "context")
    assert run(tmp_path, ",".join(sections)) == 0
    rows = rows_of(tmp_path)
    ours = [r for r in rows if r["contender"] in ("eager", "softmax attention")]
    assert {(r["section"], r["status"]) for r in ours} == {
        (s, "right" if s.startswith("hard") else "timed") for s in sections
    }  # fmt: skip
    assert {r["contender"] for r in rows if r["section"] == "training"} == {"eager", "FLA", "FLA saving more", "cuDNN"}
    assert all("reason" in r for r in rows if r["status"] not in ("timed", "right"))
    text = capsys.readouterr().out
    for line in ("## forward", "faster than softmax attention", "FLA, refused in all", "CUDA graph", "entered twice"):
        assert line in text
    names = [p.name for p in tmp_path.iterdir()]
    assert names == ["gpu-forward-training-backward-decode-hard-hard-gradients-context.json"]


def test_segments(tmp_path: Path) -> None:
    """Every row names its mode; a backend without segments refuses to cut."""
    assert run(tmp_path, "segments") == 0
    found = {r["contender"]: r for r in rows_of(tmp_path)}
    assert {name: r["status"] for name, r in found.items()} == {
        "eager": "timed", "eager, segments": "refused", "cuDNN": "refused"
    }  # fmt: skip
    assert "segments is 'always'" in found["eager, segments"]["reason"]


def test_cudnn_shapes(tmp_path: Path) -> None:
    """With an initial state: what is compared has a final one."""
    assert run(tmp_path, "cudnn_shapes") == 0
    found = {r["contender"]: r for r in rows_of(tmp_path)}
    assert {name: r["status"] for name, r in found.items()} == {"eager": "timed", "cuDNN": "refused"}
    assert set(found["eager"]["errors"]) == {"o", "final_state"}


def test_overhead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the eager backend in the place of both sides: the difference is between the two medians."""
    monkeypatch.setattr(operator, "BASELINE", "eager")
    other = lambda f: lambda x, *a: dataclasses.replace(f("eager", x, *a), name="FLA", ours=False)  # noqa: E731
    monkeypatch.setattr(operator, "fla_forward", other(operator.ours_forward))
    monkeypatch.setattr(operator, "fla_training", other(operator.ours_training))
    assert run(tmp_path, "overhead") == 0
    rows = rows_of(tmp_path)
    assert [r["contender"] for r in rows] == ["eager", "FLA", "difference"] * 4
    for ours, theirs, difference in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        a, b = ours["time"]["median"], theirs["time"]["median"]
        assert difference["more percent"] == pytest.approx((a / b - 1) * 100)
        assert difference["more us"] == pytest.approx((a - b) * (1e3 if ours["measure"] == "GPU ms" else 1))


def test_layer_and_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)  # a minute of compilation shows nothing here
    found = {"GPU ms": 1.0, "KDA operator %": 30.0, "projections %": 50.0, "rest %": 20.0, "unknown %": 0.0}
    monkeypatch.setattr(layer, "profile", lambda *arguments: found)
    config = json.loads(TINY.config.read_text())
    small = dict(num_hidden_layers=2, hidden_size=32, linear_num_heads=1, linear_head_dim=128, num_attention_heads=2)
    path = tmp_path / "config" / "small.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config | small))
    assert run(tmp_path, "layer,model", sizes=dataclasses.replace(TINY, config=path)) == 0
    rows = rows_of(tmp_path)
    assert {(r["section"], r["status"]) for r in rows if r["contender"] == "eager"} == {
        ("layer", "timed"), ("model", "timed")
    }  # fmt: skip
    assert {r["goal"] for r in rows if r["section"] == "layer"} == {"missed"}
    assert "| GPU ms | KDA operator % | projections % | rest % |" in tables.markdown(
        report.load(tmp_path / "gpu-layer-model.json")
    )
    softmax = {r["context"]: r for r in rows if r["contender"] == "softmax attention" and r["mode"] == "CUDA graph"}
    assert softmax[16]["status"] == "timed"
    assert softmax[16]["tokens/s"] == pytest.approx(2e3 / softmax[16]["time"]["median"])
    assert softmax[16]["cache MiB"] == 2 * 2 * 2 * 17 * 32 * 2 / 2**20
    assert softmax[10**7]["reason"].startswith("its cache needs")
    assert {r["what"] for r in rows if r["section"] == "model"} == {"decode", "prefill", "training step"}


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--output", str(tmp_path / "new")]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_unknown_sections_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "forward,backwards"])
    assert "unknown backwards; known: forward, packed, segments, cudnn_shapes, training" in capsys.readouterr().err


def test_a_part_does_not_replace_the_results_of_the_whole() -> None:
    some = ([], ["--quick"], ["--only", "decode,hard"], ["--only", "forward", "--heads", "8,16"])
    names = [gpu.file_name(gpu.parse(options)) for options in some]
    assert names == ["gpu", "gpu-quick", "gpu-decode-hard", "gpu-forward-h8-h16"]


def test_cases_of_some_heads(tmp_path: Path) -> None:
    assert run(tmp_path, "forward", "--heads", "1") == 0
    assert {r["H"] for r in rows_of(tmp_path)} == {1}


def test_less_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's autotuners look their benchmark up at each tuning."""
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(testing, "do_bench", lambda f, warmup=25, rep=100: (f, warmup, rep))
    assert gpu.parse(["--tuning-ms", "20"]).tuning_ms == 20
    assert testing.do_bench("kernel") == ("kernel", 5, 20)


def test_shares_of_autotuners_are_compiled_and_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes compile what an autotuner would time: each configuration once for each key."""
    jit, autotuner = pytest.importorskip("triton.runtime.jit"), pytest.importorskip("triton.runtime.autotuner")
    compiled: list[tuple[int, int]] = []
    launches: list[bool] = []

    class Kernel:
        @staticmethod
        def fn(x: Tensor, T: int, n: int) -> None:
            """Stand-in for a function that Triton compiles."""

        def run(self, x: Tensor, T: int, n: int, num_warps: int, **_: Any) -> None:
            compiled.append((n, num_warps))

    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *, grid, warmup: launches.append(not warmup))
    # All of them: on a GPU the tests' autotuners otherwise keep the first (tests/conftest.py).
    monkeypatch.setattr(autotuner.Autotuner, "prune_configs", lambda self, kwargs: self.configs)
    before = jit.JITFunction.run, autotuner.Autotuner.run
    for share in range(2):
        configs = [autotuner.Config({}, num_warps=w) for w in (1, 2, 4)]
        tuned = autotuner.Autotuner(Kernel(), ["x", "T", "n"], configs, ["n"], None, None)
        with precompile.compiling(share, 2) as names:
            for n, T in ((16, 7), (16, 9), (32, 7)):
                tuned[(1,)](torch.zeros(1), T=T, n=n)
            jit.JITFunction.run(None, grid=(1,), warmup=False)
        assert names == ["fn"] * 3
    assert sorted(compiled) == [(n, w) for n in (16, 32) for w in (1, 2, 4)]
    assert launches == [False, False]
    assert (jit.JITFunction.run, autotuner.Autotuner.run) == before


def test_what_is_compiled_first_is_what_sections_call(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every number of rows of q, and every kind of case; a process that fails is named, and the run goes on."""
    called: list[tuple[str, tuple[int, ...]]] = []

    def l2norm_fwd(x: Tensor) -> tuple[Tensor, Tensor]:
        called.append(("forward", tuple(x.shape)))
        return x, x[:, 0]

    l2norm = SimpleNamespace(l2norm_fwd=l2norm_fwd, l2norm_bwd=lambda y, r, d: called.append(("backward", d.shape)))
    for name in ("fla.modules", "fla.modules.norm", "fla.modules.norm.l2norm"):
        monkeypatch.setitem(sys.modules, name, l2norm)
    sizes = dataclasses.replace(TINY, context=(64, 256), context_heads=2)
    precompile.compile_fla(precompile.cases_of(["context", "hard"], sizes), "cpu")
    assert called == [(pass_, (2 * T, 128)) for T in (64, 256) for pass_ in ("forward", "backward")]
    called.clear()

    def compiled(name: str) -> Callable[[Inputs], Contender]:
        def peer(x: Inputs, *_: Any) -> Contender:
            called.append((name, (tuple(x.g.shape), x.cu_seqlens is not None)))
            return fake("FLA", TRUTH["o"])

        return peer

    for name in ("fla_forward", "fla_training"):
        monkeypatch.setattr(precompile, name, compiled(name))
    listed = precompile.cases_of(["gdn_training", "gdn_forward"], TINY)
    fast = {pass_: [dataclasses.replace(c, gates="fast", T=2 * c.T) for c in of] for pass_, of in listed.items()}
    precompile.compile_fla({pass_: of + fast[pass_] for pass_, of in listed.items()}, "cpu")
    assert called == [
        ("forward", (66, 128)), ("forward", (132, 128)),
        ("fla_forward", ((1, 256, 2), False)), ("fla_forward", ((1, 256, 2), True)),
        ("forward", (66, 128)), ("backward", (66, 128)), ("forward", (132, 128)), ("backward", (132, 128)),
        ("fla_training", ((1, 256, 2), False)),
    ]  # fmt: skip
    monkeypatch.setattr(precompile.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text('#!/bin/sh\necho "$*" >> "$0.log"; echo "no GPU" >&2; exit 3\n')
    (tmp_path / "python").chmod(0o755)
    assert run(tmp_path / "out", "gdn_training", "--precompile", "2") == 0
    shares = sorted(s for s in (tmp_path / "python.log").read_text().splitlines() if s.startswith("-m"))
    listed = json.dumps({"forward": [], "training": [dataclasses.asdict(GDN)]})
    common = f"-m benchmarks.gpu.precompile --cases {listed} --of 2 --share"
    assert shares == [f"{common} 0", f"{common} 1"]
    monkeypatch.setattr(precompile, "compile_fla", lambda cases: called.append(cases))
    assert precompile.main(["--cases", listed, "--of", "2", "--share", "1"]) == 0
    assert called[-1] == {"forward": [], "training": [GDN]}
    assert "s; 2 failed\nno GPU\nno GPU\n" in capsys.readouterr().out


@pytest.mark.usefixtures("stand_ins")
def test_a_figure_of_one_run(tmp_path: Path) -> None:
    """Every contender at every length and pass; what a run had when it was cut makes a figure, too."""
    assert run(tmp_path, "context") == 0
    contents = report.load(tmp_path / "gpu-context.json")
    assert {(r["pass"], r["T"], r["contender"]) for r in contents["rows"] if r["status"] == "timed"} == {
        (pass_, T, who)
        for pass_ in ("forward", "forward + backward")
        for T in TINY.context
        for who in ("eager", "FLA", "cuDNN", "softmax attention")
    }
    contents["stamp"]["gpu"] = "NVIDIA H200"
    for row in contents["rows"]:
        row["contender"] = row["contender"].replace("eager", "sm90")
    whole = docs_figures.time_against_length({"gpu-context": contents})
    for name in ("kda_layers", "flash-linear-attention", "cuDNN", "softmax attention"):
        assert f">{name}<" in whole
    cut = {"gpu-context": contents | {"rows": contents["rows"][:12]}}  # the last case was not reached
    assert whole.count("<circle") - docs_figures.time_against_length(cut).count("<circle") == 4
    caption = docs_tables.caption({"gpu-context": contents})
    assert caption.startswith("One run on one NVIDIA H200, `gpu-context` (")
    assert "Python" not in caption
    contents["rows"][2]["mode"] = "call"
    assert ", except cuDNN (forward at 64), launched from Python" in docs_tables.caption({"gpu-context": contents})
    assert "Not shown" not in docs_tables.caption({"gpu-context": contents})
    contents["rows"][-1]["status"] = "failed"
    less = docs_figures.time_against_length({"gpu-context": contents})
    assert whole.count("<circle") - less.count("<circle") == 4
    assert "Not shown: forward + backward at 128, where" in docs_tables.caption({"gpu-context": contents})


# ---------------------------------------------------------------- comparison


def summary(median: float, spread: float, deciles: bool = True) -> dict[str, float]:
    lo, hi = median - spread / 2, median + spread / 2
    wide = {"median": median, "min": lo - 10, "max": hi + 10, "calls": 20}
    return wide | ({"p10": lo, "p90": hi} if deciles else {"min": lo, "max": hi})


def write(path: Path, **medians: dict[str, float]) -> Path:
    rows = [
        {"section": "forward", "T": 8192, "contender": who, "status": "timed", "errors": {"o": 0.1}, "time": s}
        for who, s in medians.items()
    ]
    rows.append({"section": "forward", "T": 8192, "contender": "peer", "status": "refused", "reason": "no"})
    path.write_text(json.dumps({"stamp": {"gpu": path.stem}, "rows": rows}))
    return path


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(
        tmp_path / "a.json", up=summary(1.0, 0.1), down=summary(1.0, 0.1), same=summary(1.0, 0.3), gone=summary(1, 0)
    )
    b = write(
        tmp_path / "b.json", up=summary(1.2, 0.1), down=summary(0.5, 0.2), same=summary(1.2, 0.1), new=summary(1, 0)
    )
    assert compare.main([str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert f"{a}: gpu a" in out
    what = "| section forward, T 8192, contender "
    for line in ("up | 1 | 1.2 | 1.200 | slower |", "down | 1 | 0.5 | 0.500 | faster |", "same | 1 | 1.2 | 1.200 |  |"):
        assert what + line in out
    assert "Timed only in a.json:\n\n- section forward, T 8192, contender gone\n" in out
    assert "Timed only in b.json:\n\n- section forward, T 8192, contender new\n" in out
    assert "peer" not in out


def test_compare_without_deciles_takes_the_whole_range() -> None:
    a, b = summary(1.0, 0.1, deciles=False), summary(1.05, 0.2, deciles=False)
    assert compare.moved(a, b) == ""
    assert compare.moved(a, summary(1.5, 0.2, deciles=False)) == "slower"


def test_compare_reads_the_results_of_the_other_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(report.__file__).parent / "results" / "cpu-operator.json")
    assert compare.main([path, path]) == 0
    out = capsys.readouterr().out
    assert "case forward, B 1, T 1024, H 4, gates slow, time kda_layers times" in out
    assert "Timed only" not in out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file"),
        ("{", "expected JSON that a benchmark wrote"),
        ("[]", "expected an object with a list 'rows', got list"),
        ('{"stamp": {}}', "expected an object with a list 'rows', got an object with stamp"),
        ('{"rows": [3]}', "expected row 0 to be an object, got int"),
        ('{"rows": [{"time": {"median": "fast"}}]}', "expected numbers median, min, max in the times of row 0"),
    ],
)
def test_compare_names_a_bad_file(
    content: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "good.json"), tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    assert compare.main([str(good), str(bad)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{bad}: ")
    assert expected in err


def test_biased_attention_is_compared_before_it_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the eager backend in the place of Triton's; FlexAttention has no backward on a CPU and says so."""
    shape = biased_attention.Shape(1, 32, 2, 16)
    arguments = ["--output", str(tmp_path), "--causal", "yes"]
    assert biased_attention.main(arguments, WallClock(), shape, "eager") == 0
    rows = json.loads((tmp_path / "gpu-biased-attention.json").read_text())["rows"]
    mine = [row for row in rows if row["contender"] == "eager"]
    assert [(row["what"], row["bias"], row["status"]) for row in mine] == [
        ("forward", "given", "timed"),
        ("forward", "none", "timed"),
        ("forward + backward", "given", "timed"),
        ("forward + backward", "with its gradient", "timed"),
        ("forward + backward", "none", "timed"),
    ]
    assert {n.split()[0] for n in mine[3]["errors"].split(", ")} == {"o", "d_q", "d_k", "d_v", "d_bias"}
    assert {row["status"] for row in rows if row["contender"] == "SDPA"} == {"timed"}
    (reason,) = {row["reason"] for row in rows if row["contender"] == "SDPA, expanded bias"}
    assert "T x T" in reason

    monkeypatch.setattr(biased_attention, "ours", lambda backend: lambda x: torch.zeros_like(x.v))
    assert biased_attention.main(arguments, WallClock(), shape, "eager") == 1


def test_parts_of_a_language_models_step() -> None:
    from benchmarks import lm

    kernels = {
        "kda_layer_step": "operator",
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT": "GEMM",
        "causal_conv1d_bwd_kernel": "convolution",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "softmax attention",
        "triton_red_fused__fused_rms_norm__unsafe_view_add_7": "norm",
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>": "rest",
    }
    assert {name: lm.part_of(name) for name in kernels} == kernels


@pytest.mark.parametrize(("size", "millions"), [("0.7b", 700), ("120m", 120)])
def test_sizes_of_language_models(size: str, millions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared models have the size that they are named after."""
    from benchmarks import lm

    monkeypatch.setattr(lm, "DEVICE", "meta")
    found = {who: sum(p.numel() for p in lm.build(who, size).parameters()) / 1e6 for who in ("ours", "softmax")}
    assert all(abs(n - millions) < 0.12 * millions for n in found.values()), found


def test_tensors_that_a_graph_of_a_decode_step_reads() -> None:
    """Every tensor of a stock cache is found, since a step puts new ones in the place of some."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    from benchmarks import lm

    config = KimiLinearConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, linear_num_heads=1, linear_head_dim=128, pad_token_id=0,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense"] * 2,
    )  # fmt: skip
    model = KimiLinearForCausalLM(config)
    tokens = torch.randint(50, (2, 5))
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    found = {t.data_ptr() for t in lm.tensors_of(cache)}
    linear, softmax = cache.layers
    held = [linear.conv_states[0], linear.recurrent_states[0], softmax.keys, softmax.values]
    assert {t.data_ptr() for t in held} <= found


def test_contenders_of_language_models(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import lm

    with pytest.raises(SystemExit):
        lm.main(["--contenders", "ours,kda"])
    assert (
        "--contenders: expected some of ours, hybrid, softmax, fla, kimi, kimi-swapped, ours-float8, got kda"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("contender", ["ours", "hybrid", "kimi", "kimi-swapped"])
def test_tasks_of_language_models(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task runs in every mode but those that need a GPU or a compiler, on a CPU with small sizes."""
    from benchmarks import lm

    monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
    for name, value in {"DEVICE": "cpu", "T": 24, "PROMPT": 8, "TOKENS": 3}.items():
        monkeypatch.setattr(lm, name, value)
    sizes = dict(hidden_size=64, num_hidden_layers=2, heads=1, intermediate_size=64, vocab_size=50)
    monkeypatch.setitem(lm.SIZES, "tiny", sizes)
    for task in lm.TASKS:
        for run in {lm.TASKS[task], *(f for (of, _), f in lm.SPECIAL.items() if of == task)}:
            function = getattr(run, "func", run)
            if function is lm.compiled_decode or run is lm.SPECIAL.get((task, "captured with compiled AdamW")):
                continue  # which need a compiler
            if function is lm.captured_optimizer_step and contender != "ours":
                continue
            result = run(lm.build(contender, "tiny"), 2)()
            if task == "generate":
                assert result.shape == (2, lm.PROMPT + 3)


def test_float8_without_wide_projections() -> None:
    """A run that converts nothing is not called one in float8."""
    from benchmarks import lm

    with pytest.raises(ValueError, match="at least 512 inputs and outputs, got none"):
        lm.in_float8(torch.nn.Sequential(torch.nn.Linear(512, 511)), "cpu")


def test_training_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torchao's emulation, captured on a tape: the wide projections are converted, and the losses are near."""
    from benchmarks import lm

    monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
    for name, value in {"DEVICE": "cpu", "T": 24, "NARROW": 64}.items():
        monkeypatch.setattr(lm, name, value)
    sizes = dict(hidden_size=64, num_hidden_layers=2, heads=1, intermediate_size=64, vocab_size=50)
    monkeypatch.setitem(lm.SIZES, "tiny", sizes)
    losses = []
    for contender in ("ours", "ours-float8"):
        model = lm.build(contender, "tiny")
        kinds = {name: type(layer).__name__ for name, layer in model.named_modules()}
        converted = [name for name, kind in kinds.items() if kind == "Float8Linear"]
        assert len(converted) == (2 * (8 + 3) if contender == "ours-float8" else 0), "all but b_proj"
        torch.manual_seed(1)
        losses.append(float(lm.captured_optimizer_step(model, 1)()))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.slow
def test_trainers_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with a tape for the graph: each contender trains, and the two captured ones replay."""
    from benchmarks import lm
    from benchmarks import trainer as trainers
    from kda_layers.modeling.cuda_graphs import trainer as captured_trainer

    replays: list[str] = []
    replay = training_step.CapturedStep.__call__

    def counted(self: Any, *batches: Any) -> Any:
        replays.append("captured" if self.captured else "eager")
        return replay(self, *batches)

    monkeypatch.setattr(training_step.CapturedStep, "__call__", counted)
    monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
    monkeypatch.setattr(captured_trainer, "DEVICES", ("cpu",))
    monkeypatch.setattr(trainers, "STEPS", 2)
    monkeypatch.setattr(trainers, "ROUNDS", 1)
    for name, value in {"DEVICE": "cpu", "T": 24}.items():
        monkeypatch.setattr(lm, name, value)
    sizes = dict(hidden_size=64, num_hidden_layers=2, heads=1, intermediate_size=64, vocab_size=50)
    monkeypatch.setitem(lm.SIZES, "0.7b", sizes)
    trainers.main(["--output", str(tmp_path)])
    rows = report.load(tmp_path / "gpu-trainer-07b.json")["rows"]
    assert [row["contender"] for row in rows] == list(trainers.CONTENDERS)
    assert all(row["wall ms"] > 0 and row["tokens/s"] > 0 for row in rows)
    assert replays.count("eager") == 8 * 4  # turns of the two, and three steps that warm up and one that captures
    assert replays.count("captured") == 8 * 4


# ---------------------------------------------------------------- serving


@pytest.mark.slow
def test_prefixes_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    monkeypatch.setattr(prefixes, "DEVICE", "cpu")
    monkeypatch.setattr(prefixes, "CLIENTS", 3)
    monkeypatch.setattr(prefixes, "TURNS", 2)
    monkeypatch.setattr(sys, "argv", ["prefixes", "--sizes=tiny", "--prefix=700", f"--output={tmp_path}"])
    prefixes.main()
    rows = {(row["sharing"], row["prompt"]): row for row in report.load(tmp_path / "cpu-prefixes.json")["rows"]}
    assert len(rows) == 2 * 5
    assert all(row["ms"] > 0 and (row["MiB"] > 0) is sharing for (sharing, _), row in rows.items())


@pytest.mark.slow
def test_serving_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    monkeypatch.setattr(serving, "DEVICE", "cpu")
    numbers = {"steps": 1, "prompts": 3, "longest": 9, "new": 2, "seq-len": 32}
    options = ["--contenders=ours", f"--output={tmp_path}", *(f"--{name}={n}" for name, n in numbers.items())]
    monkeypatch.setattr(sys, "argv", ["serving", *options])
    serving.main()
    rows = report.load(tmp_path / "cpu-serving.json")["rows"]
    assert [(row["way"], row["differ"], row["gap"]) for row in rows] == [("static", 0, 0), ("continuous", 0, 0)]
    assert all(0 < row["noise"] < 1e-4 and row["tokens/s"] > 0 for row in rows)
    monkeypatch.setitem(serving.WAYS, "continuous", lambda model, prompts, new: [[0] * new] * 3)
    with pytest.raises(
        RuntimeError, match=r"continuous, ours: of 3 prompts \d have another token whose logit is lower"
    ):
        serving.main()


def test_other_tokens_are_judged_by_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "last_logits", lambda model, tokens: torch.tensor([1.0, 0.99, 0.0]) * len(tokens))
    prompts = [[7], [7, 7], [7]]
    truth = [serving.Alone([0, 0], noise=0.0)] * 3
    found = [[0, 1], [0, 2], [0, 0]]  # after 2 tokens 0.02 apart, after 3 tokens 3.0 apart, the same
    assert serving.judge(None, prompts, found, truth) == pytest.approx([0.02, 3.0])
    assert serving.judge(None, prompts, [[0]] * 3, truth) == [math.inf] * 3, "tokens are missing"
