"""Who is timed: the shape that all contenders share, and our own backends. The others are in peers.py.

A contender is prepared from a case's inputs: what converts them to its layout and types happens there, untimed, so
that each gets what it likes best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.machine import CaptureError, Machine
from benchmarks.gpu.truth import Results, differentiable, outputs
from kda_layers import kda_prefill, kda_step
from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import KDA, DecodeInputs, Inputs, Problem, problem_of
from kda_layers.kernels.kda.cuda import forms
from kda_layers.kernels.kda.cuda.forward import two_roles
from kda_layers.kernels.kda.cuda.spec import Signature
from kda_layers.kernels.kda.reference import activate
from kda_layers.states import dequantize_state, quantize_state
from kda_layers.testing.oracle import call, options


class Refusal(Exception):
    """A contender does not serve a case; the text is why."""


class Prepared(NamedTuple):
    """A contender ready to run a case."""

    run: Callable[[], Any]
    results: Callable[[Any], Results]  # what `run` returned, by the truth's names and in its layout; untimed
    restore: Callable[[], None] | None = None  # puts back what `run` changed
    restore_each: bool = False  # before each call, not only before the one that is judged
    call: Callable[[], Any] | None = None  # the work called from Python, where `run` replays a CUDA graph
    fields: dict[str, Any] | None = None  # what is known of it once it is prepared

    @property
    def before(self) -> Callable[[], None] | None:
        return self.restore if self.restore_each else None


@dataclass(frozen=True)
class Contender:
    """Someone who may run a case. `prepare` raises where it does not serve it."""

    name: str
    prepare: Callable[[], Prepared]
    ours: bool = False
    fields: dict[str, Any] = field(default_factory=dict)  # how, where the same contender runs in several ways
    truth: Results | None = None  # of what it computes, where that is not what the others do
    floor_ms: float | None = None  # of the bytes that it moves, where these are not what the others do


GRAPH, CALL = "CUDA graph", "call"


def graphed(c: Contender, machine: Machine) -> Contender:
    """The contender replayed from a CUDA graph; called from Python, and marked so, where it cannot be captured."""

    def prepare() -> Prepared:
        p = c.prepare()
        try:
            return p._replace(run=machine.graph(p.run, p.before), call=p.run)
        except CaptureError as problem:
            text = " ".join(str(problem).split())[:200]
            return p._replace(fields={"mode": CALL, "note": f"timed without a CUDA graph: {text}"})

    return replace(c, prepare=prepare, fields=c.fields | {"mode": GRAPH})


# ---------------------------------------------------------------- ours


def require(backend: str, problem: Problem) -> None:
    """Raises a Refusal with every reason unless our backend of that name serves the problem."""
    if backend not in KDA.backends():
        raise Refusal(f"there is no backend {backend!r}, there are: {', '.join(KDA.backends())}")
    reasons = KDA.backends()[backend].unsupported(problem)
    if reasons:
        raise Refusal(f"cannot serve [{problem}]: " + "; ".join(reasons))


def _name(backend: str, x: Inputs) -> str:
    return backend if x.segments == "never" else f"{backend}, segments"


def ours_forward(backend: str, x: Inputs) -> Contender:
    def prepare() -> Prepared:
        require(backend, problem_of(x))
        return Prepared(torch.no_grad()(lambda: call(x, backend)), outputs)

    return Contender(_name(backend, x), prepare, ours=True)


def ours_prefill(backend: str, x: Inputs) -> Contender:
    """Our `kda_prefill` from and into the slots of a pool, in another order than the sequences."""
    HV, V, K = x.v.shape[2], x.v.shape[3], x.q.shape[3]
    N = x.v.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1

    def prepare() -> Prepared:
        require(backend, problem_of(x))
        pool, out = x.v.new_zeros(N + 1, HV, V, K, dtype=torch.float32), torch.empty_like(x.v)
        slots = torch.arange(N, 0, -1, dtype=torch.int32, device=x.v.device)
        given = options(x) | dict(state_indices=slots, out=out, backend=backend)
        run = torch.no_grad()(lambda: kda_prefill(*x[:5], pool, **given))
        return Prepared(run, lambda found: {"o": found.o, "state": pool})

    return Contender(_name(backend, x), prepare, ours=True)


def forwards(backends: Iterable[str], x: Inputs) -> list[Contender]:
    """Our backends, and beside each that would run specialised CTAs, what it would run without them."""
    return _with_one_role([(b, ours_forward(b, x)) for b in backends], x)


def _with_one_role(plain: Iterable[tuple[str, Contender]], x: Inputs, saves: bool = False) -> list[Contender]:
    """These contenders, each of a backend's, and beside each that runs specialised CTAs, the same without them."""
    return [c for b, ours in plain for c in (ours, *([in_one_role(ours)] if _has_roles(b, x, saves) else []))]


def _has_roles(backend: str, x: Inputs, saves: bool) -> bool:
    ours = KDA.backends().get(backend)
    if not isinstance(ours, CudaBackend) or not x.v.is_cuda:
        return False
    s = Signature.of(activate(x, tuple(ours.fused)), saves)
    return forms.choose(s, ours.machine.properties(x.v.device)) is forms.TWO_ROLES


def in_one_role(plain: Contender) -> Contender:
    """A contender of ours without specialised CTAs."""

    def prepare() -> Prepared:
        p = plain.prepare()

        def run() -> Any:
            before, two_roles.declined = two_roles.declined, "is switched off"
            try:
                return p.run()
            finally:
                two_roles.declined = before

        return p._replace(run=run)

    return replace(plain, name=f"{plain.name}, one role", prepare=prepare)


def ours_training(backend: str, x: Inputs, d_o: Tensor, backward_alone: bool = False) -> Contender:
    """Forward, and the gradients of every tensor."""

    def prepare() -> Prepared:
        require(backend, problem_of(x, needs_grad=True))
        names, leaves = differentiable(x)
        return training(lambda: call(leaves, backend).o, names, leaves, d_o, backward_alone)

    return Contender(_name(backend, x), prepare, ours=True)


def trainings(backends: Iterable[str], x: Inputs, d_o: Tensor) -> list[Contender]:
    """Like `forwards`, of a forward and its gradients."""
    return _with_one_role([(b, ours_training(b, x, d_o)) for b in backends], x, saves=True)


def ours_step(backend: str, x: Inputs, kept: str = "fp32", floor_ms: float | None = None) -> Contender:
    """One token for each sequence, whose states are kept in `kept`: fp32, bf16 or int8."""

    def prepare() -> Prepared:
        assert x.initial_state is not None
        before = _kept(x.initial_state, kept)
        held = [t.clone() for t in before]
        state, scale = held[0], held[1] if kept == "int8" else None
        step = DecodeInputs(
            *x[:5], state, x.A_log, x.dt_bias, None, None, None, scale, None, None, None, None, None,
            x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale,
        )  # fmt: skip
        require(backend, problem_of(step))
        given = {n: t for n, t in step._asdict().items() if n not in ("updates", "update_indices")}
        given |= options(x)  # lower_bound is None without a bounded gate
        run = torch.no_grad()(lambda: kda_step(**given, backend=backend))

        def results(o: Tensor) -> Results:
            return {"o": o, "final_state": dequantize_state(*held) if kept == "int8" else state.float()}

        def restore() -> None:
            for now, then in zip(held, before, strict=True):
                now.copy_(then)

        return Prepared(run, results, restore)

    name = backend if kept == "fp32" else f"{backend}, {kept} states"
    return Contender(name, prepare, ours=True, floor_ms=floor_ms)


def _kept(state: Tensor, kept: str) -> tuple[Tensor, ...]:
    """fp32 states as `kda_step` keeps them, with the scales of int8."""
    if kept == "int8":
        return quantize_state(state)
    return (state.to({"fp32": torch.float32, "bf16": torch.bfloat16}[kept]),)


def training(
    forward: Callable[[], Tensor], names: list[str], leaves: Inputs, d_o: Tensor, backward_alone: bool = False
) -> Prepared:
    """Return a training call of a contender that computes o from these leaves by `forward`: that and every gradient, or
    every gradient of one forward that is not timed."""
    tensors = [getattr(leaves, n) for n in names]

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        o = forward()
        return o, torch.autograd.grad(o, tensors, d_o)

    def results(out: tuple[Tensor, tuple[Tensor, ...]]) -> Results:
        o, grads = out
        return {"o": o.detach()} | {f"d_{n}": t for n, t in zip(names, grads, strict=True)}

    if not backward_alone:
        return Prepared(both, results)
    o = forward()
    return Prepared(lambda: (o, torch.autograd.grad(o, tensors, d_o, retain_graph=True)), results)
