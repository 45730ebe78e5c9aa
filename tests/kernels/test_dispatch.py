"""Choice of a call's backend: reasons, precedence, what is logged, and what a backend that fuses nothing gets."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_layers import KDAConfig, KDAForCausalLM, KDAOutput, explain, kda_step, use_backend
from kda_layers.kernels import biased_attention, registry, torch_private
from kda_layers.kernels.attention_bias.contract import ATTENTION
from kda_layers.kernels.attention_bias.contract import default_problem as attention_problem
from kda_layers.kernels.cuda.arch import ARCHS
from kda_layers.kernels.kda import backends as folder
from kda_layers.kernels.kda.contract import (
    KDA,
    Backend,
    DecodeInputs,
    Gradients,
    Inputs,
    Problem,
    default_problem,
    problem_of,
)
from kda_layers.kernels.kda.cuda.layer_step.contract import LAYER_STEP
from kda_layers.kernels.registry import ENVIRONMENT_VARIABLE, keep_backend
from kda_layers.kernels.tracing import may_run_again
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    budget,
    call,
    check,
    error,
    ids,
    limits_of,
    make_inputs,
    options,
    oracle,
    output_gradients,
    run,
    to_fp64,
)

EAGER = KDA.backends()["eager"]


class Toy(Backend):
    """The recurrence as a backend of high priority that is choosy and fuses nothing."""

    name = "toy"
    priority = 100
    fused: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.got: list[Inputs | DecodeInputs] = []

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.K > 8:
            reasons.append(f"K={problem.K}, needs at most 8")
        if problem.dtype == FP16:
            reasons.append("float16, needs another dtype")
        return reasons

    def saved_like(self, x: Inputs) -> list[Tensor]:
        return []

    def forward(self, x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        self.got.append(x)
        return KDAOutput(*oracle(x)), []

    def backward(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        return EAGER.backward(x, EAGER.forward(x, save=True)[1], d_o, d_final, d_checkpoints)

    def decode(self, x: DecodeInputs) -> Tensor:
        self.got.append(x)
        return EAGER.decode(x)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    """Registered before eager, for one test, with no choice remembered from before or after."""
    toy = Toy()
    known = {"toy": toy, "eager": EAGER}
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(KDA, "_found", known)
    KDA.clear_caches()
    yield toy
    KDA.clear_caches()


SMALL = Case(T=5, H=1, K=4, V=6, dtype=FP32, state=True)
WIDE = dataclasses.replace(SMALL, K=16)


def problem(case: Case) -> Problem:
    return problem_of(make_inputs(case))


def test_backends_are_found_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, one backend class; the highest priority comes first."""
    for name, priority in (("aaa", -(10**9)), ("zzz", 10**9)):
        (tmp_path / f"{name}.py").write_text(
            "from kda_layers.kernels.kda.backends.eager import EagerBackend\n"
            f"BACKEND = type('Found', (EagerBackend,), {{'name': '{name}', 'priority': {priority}}})()\n"
        )
    known = list(KDA.backends())
    files = {p.stem for p in Path(folder.__path__[0]).glob("*.py")} - {"__init__"}
    ours = {arch.backend for arch in ARCHS.values()}  # one class, a backend for each family of GPUs
    assert sorted(known) == sorted(files - {"cuda"} | ours)
    assert [b.name for b in KDA.backends().values()] == known
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    assert list(KDA.discover()) == ["zzz", *known, "aaa"]


def test_automatic_choice_is_the_first_that_can_serve(toy: Toy) -> None:
    assert KDA.select(problem(SMALL)) is toy
    assert KDA.select(problem(WIDE)) is EAGER
    call(make_inputs(SMALL))
    call(make_inputs(WIDE))
    assert len(toy.got) == 1


def test_a_named_backend_that_refuses_gives_every_reason(toy: Toy) -> None:
    x = make_inputs(dataclasses.replace(WIDE, dtype=FP16))
    text = r"'toy' cannot serve \[cpu, float16, K=16, .*\]: K=16, needs at most 8; float16, needs another dtype"
    with pytest.raises(ValueError, match=text):
        call(x, "toy")
    with use_backend("toy"), pytest.raises(ValueError, match=text):
        call(x)
    with pytest.raises(ValueError, match=text):
        call(x, "toy")  # also the second time: a refusal is not remembered as a choice
    assert toy.got == []


def test_nobody_can_serve(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KDA, "_found", {"toy": toy})
    with pytest.raises(ValueError, match=r"no backend can serve \[.*\]: toy: K=16, needs at most 8"):
        KDA.select(problem(WIDE))
    assert "chosen: none" in explain(problem(WIDE))


@pytest.mark.parametrize("how", ["argument", "context", "environment"])
def test_an_unknown_name_lists_the_known_ones(how: str, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(SMALL)
    text = "unknown backend 'abacus', known: toy, eager"
    if how == "environment":
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "abacus")
    if how == "context":
        everywhere = "unknown backend 'abacus', known: .*toy, eager of kda"
        with pytest.raises(ValueError, match=everywhere), use_backend("abacus"):
            pass
    else:
        with pytest.raises(ValueError, match=text):
            call(x, "abacus" if how == "argument" else None)
    with pytest.raises(ValueError, match=text):
        kda_step(*x[:5], x.initial_state, **options(x), backend="abacus")


def test_precedence(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument, then the context, then the environment variable, then the automatic choice."""
    at = problem(SMALL)
    assert KDA.select(at) is toy
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "eager")
    assert KDA.select(at) is EAGER
    with use_backend("toy"):
        assert KDA.select(at) is toy
        assert KDA.select(at, "eager") is EAGER
        with use_backend("eager"):
            assert KDA.select(at) is EAGER
            assert KDA.select(at, "toy") is toy
        assert KDA.select(at) is toy
    with pytest.raises(RuntimeError, match="from inside"), use_backend("toy"):
        raise RuntimeError("from inside")
    assert KDA.select(at) is EAGER
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert KDA.select(at) is toy


def test_precedence_in_calls(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(SMALL)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "eager")
    for call_it in (
        lambda backend=None: call(x, backend),
        lambda backend=None: kda_step(*x[:5], x.initial_state.clone(), **options(x), backend=backend),
    ):
        toy.got.clear()
        call_it()
        assert toy.got == []
        call_it(backend="toy")
        assert len(toy.got) == 1
        with use_backend("toy"):
            call_it()
            assert len(toy.got) == 2
            call_it(backend="eager")
            assert len(toy.got) == 2


@pytest.mark.parametrize("how", ["context", "environment"])
def test_a_name_of_another_operator_leaves_the_choice_open(how: str, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """use_backend("sm90") must not stop a model that has softmax layers as well; as an argument it is an error."""
    q = torch.randn(1, 3, 1, 4)
    with contextlib.ExitStack() as stack:
        if how == "context":
            stack.enter_context(use_backend("toy"))
        else:
            monkeypatch.setenv(ENVIRONMENT_VARIABLE, "toy")
        assert ATTENTION.select(attention_problem("cpu")).name == "eager"
        assert torch.equal(biased_attention(q, q, q), biased_attention(q, q, q, backend="eager"))
        assert KDA.select(problem(SMALL)) is toy
        with pytest.raises(ValueError, match=r"unknown backend 'toy', known: .*eager"):
            biased_attention(q, q, q, backend="toy")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "abacus")
    with pytest.raises(ValueError, match=r"unknown backend 'abacus', known: .*eager"):
        biased_attention(q, q, q)


NEVER_RUN = sorted(capability for capability, arch in ARCHS.items() if not arch.run)


@pytest.mark.parametrize("arch", NEVER_RUN)
def test_kernels_that_have_never_run_displace_none_that_have(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They rank between flash-linear-attention and plain PyTorch; the latter choice and `explain` say what they are."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    name = ARCHS[arch].backend
    posed = dataclasses.replace(default_problem("cpu"), device="cuda", arch=arch, decode=True)
    for backend in KDA.backends().values():  # as if drivers and packages were here
        monkeypatch.setattr(backend, "problems", list)
    why = rf"its kernels are compiled for .*{ARCHS[arch].gpus}.* and have never run there, so it ranks below 'fla'"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KDA.select(posed).name == "fla"
        assert KDA.select(posed, name).name == name
    text = explain(posed)
    assert re.search(rf"\n  {name} +can serve it, but {why}; backend='{name}' chooses it\n", text)
    assert text.endswith("chosen: fla")
    monkeypatch.setattr(KDA.backends()["fla"], "problems", lambda: ["fla-core is not installed"])
    with pytest.warns(UserWarning, match=rf"^{name} serves .*, but {why}; .*others refused: .*fla-core is not inst"):
        assert KDA.select(posed).name == name


def test_every_backend_that_has_run_outranks_those_that_have_not() -> None:
    for operator in (KDA, LAYER_STEP):
        priorities = {name: operator.backends()[name].priority for name in {a.backend for a in ARCHS.values()}}
        fla = KDA.backends()["fla"].priority
        assert [n for n, p in priorities.items() if p > fla] == [a.backend for a in ARCHS.values() if a.run]


def test_explain_knows_both_operators() -> None:
    lines = explain(attention_problem("cpu")).splitlines()
    assert lines[0] == (
        "problem: attention, cpu, bfloat16, D=128, H/H_kv=1, bias=per key (bfloat16), causal, needs_grad, bias_grad"
    )
    assert [line.split()[0] for line in lines[1:-1]] == list(ATTENTION.backends())
    assert lines[-1] == "chosen: eager"


def test_a_choice_is_logged_once_with_its_refusals(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kda_layers")
    for _ in range(3):
        call(make_inputs(WIDE))
        call(make_inputs(dataclasses.replace(WIDE, T=7, B=2)))  # another length is no other problem
    (record,) = caplog.records
    assert "eager serves [cpu, float32, K=16, V=6, HV/H=1, gate=lower_bound, beta=sigmoid" in record.getMessage()
    assert "not toy: K=16, needs at most 8" in record.getMessage()
    call(make_inputs(dataclasses.replace(WIDE, gate="softplus")))
    call(make_inputs(SMALL))
    assert len(caplog.records) == 3
    assert "not " not in caplog.records[2].getMessage()


def test_explain(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = dataclasses.replace(default_problem("cpu"), dtype=FP16)
    lines = explain(refused).splitlines()
    assert lines[0] == f"problem: {refused}"
    assert lines[1].split(maxsplit=1) == ["toy", "cannot: K=128, needs at most 8; float16, needs another dtype"]
    assert lines[2].split(maxsplit=1) == ["eager", "can serve it"]
    assert lines[3:] == ["chosen: eager"]
    served = dataclasses.replace(refused, K=8, dtype=BF16)
    assert explain(served).endswith("chosen: toy")
    with use_backend("eager"):
        assert explain(served).endswith("chosen: eager")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "toy")
    assert "chosen: none (backend 'toy' cannot serve" in explain(refused)
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert explain().startswith(f"problem: {default_problem()}")


def test_a_problem_knows_no_length_and_no_batch() -> None:
    few, many = (make_inputs(Case(T=T, B=B, K=16, V=32, group=2, state=True)) for T, B in ((1, 1), (70, 3)))
    assert problem_of(few) == problem_of(many)
    assert hash(problem_of(few)) == hash(problem_of(many))
    assert problem_of(few) != problem_of(few, needs_grad=True)
    got = problem_of(make_inputs(Case(lengths=(3, 2), K=16, V=32, group=2, beta_wide=True)), needs_grad=True)
    assert got == Problem(
        "cpu", 0, BF16, FP32, 16, 32, 2, "lower_bound", "sigmoid", True,
        packed=True, needs_grad=True, has_state=False, checkpoints=True,
    )  # fmt: skip


def test_eager_on_another_device_is_a_warning(toy: Toy) -> None:
    on_gpu = dataclasses.replace(default_problem("cpu"), device="cuda", arch=90)
    with pytest.warns(UserWarning, match=r"slow on cuda; faster backends refused: toy: K=128, needs at most 8"):
        assert KDA.select(on_gpu) is EAGER


@pytest.mark.filterwarnings("error")
def test_eager_is_no_warning_on_a_cpu_or_where_it_was_asked_for(toy: Toy) -> None:
    """Nor on meta tensors, with which nothing is computed."""
    assert KDA.select(problem(WIDE)) is EAGER
    assert call(make_inputs(WIDE, "meta")).o.is_meta
    assert KDA.select(dataclasses.replace(default_problem("cpu"), device="cuda", arch=90), "eager") is EAGER


UNFUSED = [
    dataclasses.replace(SMALL, dtype=BF16),
    dataclasses.replace(SMALL, dtype=BF16, T=70, B=2, group=2, gate="softplus", beta="2sigmoid"),
    dataclasses.replace(SMALL, dtype=BF16, lengths=(3, 0, 65)),
    dataclasses.replace(SMALL, dtype=BF16, gate="log_decay", beta="given"),
    dataclasses.replace(SMALL, dtype=FP64, A_log=False, l2norm=False),
]


@pytest.mark.parametrize("fused", [(), ("gate",), ("beta", "qk_l2norm"), ("gate", "beta", "qk_l2norm")], ids=str)
@pytest.mark.parametrize("case", **ids(UNFUSED))
def test_what_a_backend_does_not_fuse_is_applied_before(
    case: Case, fused: tuple[str, ...], toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 or wider, and with gradients to the logits, A_log and dt_bias."""
    monkeypatch.setattr(toy, "fused", frozenset(fused))
    x = make_inputs(case)
    wide = FP64 if case.dtype == FP64 else FP32
    d_out = output_gradients(x)
    truth = run(oracle, to_fp64(x), d_out)
    got = run(call, x, d_out)
    (seen,) = toy.got
    if "gate" not in fused and case.gate != "log_decay":
        assert (seen.gate_activation, seen.A_log, seen.dt_bias) == ("log_decay", None, None)
        assert seen.g.dtype == wide
        assert (seen.g <= 0).all()
    else:
        assert seen.gate_activation == case.gate
        assert torch.equal(seen.g, x.g)
    if "beta" not in fused and case.beta != "given":
        assert seen.beta_activation == "given"
        assert seen.beta.dtype == wide
        assert ((seen.beta > 0) & (seen.beta < 2)).all()
    else:
        assert seen.beta_activation == case.beta
        assert torch.equal(seen.beta, x.beta)
    if "qk_l2norm" not in fused and case.l2norm:
        assert not seen.qk_l2norm
        assert seen.k.dtype == wide
        assert not torch.equal(seen.k, x.k)
    else:
        assert seen.qk_l2norm == case.l2norm
        assert torch.equal(seen.k, x.k)
    check(got, truth, limits_of(run(oracle, x, d_out), truth, case.dtype))


def test_unfused_activations_in_a_step(toy: Toy) -> None:
    x = make_inputs(Case(T=3, B=2, group=2, K=4, V=6, dtype=FP64, state=True))
    state = x.initial_state.clone()
    o = kda_step(*x[:5], state, **options(x))
    (seen,) = toy.got
    assert (seen.gate_activation, seen.beta_activation, seen.qk_l2norm) == ("log_decay", "given", False)
    assert seen.state.data_ptr() == state.data_ptr()
    want = oracle(x)
    assert error(o, want.o) <= budget(0.0, FP64)
    assert error(state, want.final_state) <= budget(0.0, FP64)


@pytest.mark.compiles
def test_unfused_activations_are_compiled_too(toy: Toy) -> None:
    x = make_inputs(dataclasses.replace(SMALL, dtype=FP64))
    torch.compiler.reset()

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        return call(x._replace(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)).o

    grads = []
    for function in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in x[:7]]
        grads.append(torch.autograd.grad(function(*leaves).sum(), leaves))
    assert len(toy.got) >= 2
    assert all(error(a, b) <= budget(0.0, FP64) for a, b in zip(*grads, strict=True))


# ---------------------------------------------------------------- gradient checkpointing


def in_another_thread(f: Callable[[], None]) -> None:
    """Call `f` in a thread that has none of this one's context variables, as a backward on a GPU has none."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(f).result()


def small_model(reentrant: bool) -> KDAForCausalLM:
    config = KDAConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, linear_num_heads=1, linear_head_dim=8,
        num_attention_heads=1, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model = KDAForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_models_recompute_with_the_backend_of_their_forward(reentrant: bool, toy: Toy) -> None:
    """The choice of the forward's context, or that there was none, wherever backward() is called."""
    model, tokens = small_model(reentrant), torch.ones(1, 5, dtype=torch.long)
    with use_backend("eager"):
        loss = model(tokens, labels=tokens).loss
    in_another_thread(loss.backward)
    assert toy.got == []
    loss = model(tokens, labels=tokens).loss
    assert len(toy.got) == 2
    with use_backend("eager"):
        loss.backward()
    assert len(toy.got) == 4


def test_a_checkpoint_of_ones_own_keeps_the_backend(toy: Toy) -> None:
    x = make_inputs(SMALL)
    q = x.q.clone().requires_grad_()
    with use_backend("eager"):
        o = checkpoint(keep_backend(lambda q: call(x._replace(q=q)).o), q, use_reentrant=False)
        in_another_thread(o.sum().backward)
    assert toy.got == []
    assert q.grad is not None


@pytest.mark.gpu  # autograd has threads of its own there
def test_the_context_around_a_backward_reaches_autograds_threads(toy: Toy) -> None:
    x = make_inputs(SMALL, "cuda")
    q = x.q.clone().requires_grad_()
    with use_backend("eager"):
        checkpoint(lambda q: call(x._replace(q=q)).o, q, use_reentrant=False).sum().backward()
    assert toy.got == []
    assert q.grad is not None


def test_the_first_pass_of_reentrant_checkpointing_is_told_from_inference() -> None:
    """The first pass is the forward of an autograd.Function; a backward is not."""
    seen: list[bool] = []

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return squared(x)

        @staticmethod
        def backward(ctx: Any, d_y: Tensor) -> Tensor:
            return squared(d_y)

    def squared(x: Tensor) -> Tensor:
        seen.append(may_run_again())
        return x.square()

    x = torch.ones(3, requires_grad=True)
    squared(x).sum().backward()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            squared(x)
    checkpoint(squared, x, use_reentrant=False).sum().backward()
    assert seen == [False] * 5
    seen.clear()
    checkpoint(squared, x, use_reentrant=True).sum().backward()
    Squared.apply(x).sum().backward()
    assert seen == [True, False] * 2


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_both_passes_of_a_checkpoint_pose_the_same_problem(
    reentrant: bool, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that has no gradients serves neither."""
    x = make_inputs(SMALL)
    monkeypatch.setattr(toy, "unsupported", lambda problem: ["has no gradients"] if problem.needs_grad else [])
    q = x.q.clone().requires_grad_()
    checkpoint(lambda q: call(x._replace(q=q)).o, q, use_reentrant=reentrant).sum().backward()
    assert toy.got == []
    with torch.no_grad():
        call(x)
    assert len(toy.got) == 1


def run_pytest(required: str) -> subprocess.CompletedProcess[str]:
    small = str(Path(__file__).parents[1] / "test_sanitize_kernels.py")  # imports little
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", small]
    environment = os.environ | {"KDA_LAYERS_REQUIRE": required}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


@pytest.mark.slow
def test_requiring_an_unknown_backend_fails_the_run() -> None:
    result = run_pytest("eager,abacus")
    assert result.returncode != 0
    assert "KDA_LAYERS_REQUIRE names unknown backends abacus" in result.stdout + result.stderr


@pytest.mark.slow
def test_requiring_known_backends_does_not() -> None:
    result = run_pytest(" eager ,")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_context_inside_an_autograd_thread_keeps_what_was_handed_over() -> None:
    """Such a thread has no context variables, only torch's thread-local storage."""
    seen: list[object] = []

    def thread() -> None:
        torch_private.store_thread_object(registry.AUTOGRAD_KEY, "eager")
        with use_backend("sm90"):
            seen.append(torch_private.thread_object(registry.AUTOGRAD_KEY))
        seen.append(torch_private.thread_object(registry.AUTOGRAD_KEY))

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    assert seen == ["sm90", "eager"]


def test_contexts_give_back_the_references_that_they_take() -> None:
    """torch 2.11 gives back one that it never took: the name would be freed while it is in use."""
    name = "".join(("ea", "ger"))  # no constant
    before = sys.getrefcount(name)
    for _ in range(10):
        with use_backend(name), use_backend("sm90"):
            pass
    assert sys.getrefcount(name) == before
    with use_backend(name):
        assert sys.getrefcount(name) > before
