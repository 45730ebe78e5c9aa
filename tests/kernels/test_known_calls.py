"""A call like an earlier one is known; one that differs in anything that matters is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kda_layers import use_backend
from kda_layers.kernels import known_calls
from kda_layers.kernels.kda import op
from kda_layers.kernels.kda.dispatch import KDA
from kda_layers.kernels.known_calls import KnownCalls
from kda_layers.testing.cases import Case, make_inputs
from tests.kernels.cases import BF16, FP32


class Call(NamedTuple):
    x: Any
    y: Any
    z: Any
    option: Any


def call() -> Call:
    return Call(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), None, "a")


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


CHANGES: dict[str, Callable[[Call], Call]] = {
    "shape": lambda c: c._replace(x=torch.zeros(2, 4)),
    "shape of the second": lambda c: c._replace(y=torch.zeros(4, dtype=torch.int64)),
    "strides": lambda c: c._replace(x=torch.zeros(3, 2).mT),
    "dtype": lambda c: c._replace(x=c.x.double()),
    "device": lambda c: c._replace(x=c.x.to("meta")),
    "requires_grad": lambda c: c._replace(x=c.x.requires_grad_()),
    "parameter": lambda c: c._replace(x=torch.nn.Parameter(c.x, requires_grad=False)),
    "another None": lambda c: c._replace(y=None, z=c.y),
    "one tensor twice": lambda c: c._replace(z=c.x),
    "not a tensor": lambda c: c._replace(y=c.y.numpy()),
    "the first not a tensor": lambda c: c._replace(x=[1.0]),
    "option": lambda c: c._replace(option="b"),
    "unhashable option": lambda c: c._replace(option=["a"]),
    "negative view": lambda c: c._replace(x=torch._neg_view(c.x)),
    "nested": lambda c: c._replace(x=torch.nested.nested_tensor([c.x])),
}
STATES: dict[str, Callable[[], Any]] = {
    "grad mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", BF16),
    "dispatch mode": Other,
    "forward AD": forward_ad.dual_level,
}
OF_NO_KIND = ("dispatch mode", "forward AD")


@pytest.mark.parametrize("more", [(), ("b", None)], ids=str)
def test_a_call_of_the_same_kind_is_known(more: tuple[Any, ...]) -> None:
    calls: KnownCalls[str] = KnownCalls(3)
    assert calls.find(call(), *more) is None
    assert calls.remember(call(), "value", *more) == "value"
    assert calls.find(call(), *more) == "value"
    assert calls.find(call(), "other") is None
    calls.forget()
    assert calls.find(call(), *more) is None


@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_is_not_known(change: str) -> None:
    calls: KnownCalls[str] = KnownCalls(3)
    calls.remember(call(), "value")
    assert calls.find(CHANGES[change](call())) is None
    assert calls.find(call()) == "value"


@pytest.mark.parametrize("state", STATES)
def test_another_state_of_torch_is_not_known(state: str) -> None:
    calls: KnownCalls[str] = KnownCalls(3)
    calls.remember(call(), "value")
    x = call()
    with STATES[state]():
        assert calls.find(x) is None
        calls.remember(x, "within")
        assert calls.find(x) == (None if state in OF_NO_KIND else "within")
    assert calls.find(x) == "value"


def test_a_tensor_under_a_transform_is_not_known() -> None:
    calls: KnownCalls[str] = KnownCalls(3)
    calls.remember(call(), "value")
    found = []

    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            found.append(calls.find(call()._replace(x=x)))
            calls.remember(call()._replace(x=x), "within")
        return x.sum()

    torch.func.grad(f)(torch.zeros(2, 3))
    torch.func.vmap(f)(torch.zeros(5, 2, 3))
    assert found == [None] * 4


@pytest.mark.parametrize("change", ["one tensor twice", "not a tensor"])
def test_what_is_of_no_kind_is_not_remembered(change: str) -> None:
    calls: KnownCalls[str] = KnownCalls(3)
    assert calls.remember(CHANGES[change](call()), "value") == "value"
    assert not calls._known


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MOST", 4)
    calls: KnownCalls[int] = KnownCalls(3)
    for n in range(1, 30):
        calls.remember(call()._replace(x=torch.zeros(n)), n)
        calls.remember(call()._replace(y=torch.zeros(n)), n)
        assert len(calls._known) <= 4
        assert all(len(alike) <= known_calls.MOST_ALIKE for alike in calls._known.values())
    assert calls.find(call()._replace(y=torch.zeros(29))) == 29


# ---------------------------------------------------------------- the operator


def run(**changes: Any) -> Any:
    x = make_inputs(Case(B=1, T=5, H=2, K=16, V=16, dtype=FP32))._asdict()
    x |= {"beta": torch.full((1, 5, 2), 0.5), "beta_activation": "given"} | changes
    positional = [x[name] for name in ("q", "k", "v", "g", "beta")]
    keywords = {name: x[name] for name in ("A_log", "dt_bias", "gate_activation", "lower_bound", "beta_activation")}
    return op.kda(*positional, **keywords, **{name: x[name] for name in ("backend",) if name in x})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were checked."""
    found: list[Any] = []
    check = op.check_whole
    monkeypatch.setattr(op, "check_whole", lambda x: (found.append(x), check(x)))
    KDA.forget()
    return found


def test_a_known_call_is_not_checked_again(checked: list[Any]) -> None:
    first, second = run(), run()
    assert len(checked) == 1
    assert torch.equal(first.o, second.o)


def test_values_are_always_checked(checked: list[Any]) -> None:
    run()
    with pytest.raises(ValueError, match=r"beta must be in \[0, 2\]"):
        run(beta=torch.full((1, 5, 2), 3.0))


def test_what_is_wrong_stays_wrong(checked: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="k must have shape"):
            run(k=torch.zeros(1, 5, 2, 8))
    assert len(checked) == 2


@pytest.mark.parametrize("how", ["argument", "context", "environment"])
def test_the_backend_that_is_asked_for(how: str, checked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a call like this one that another backend served."""
    run()
    asked: Any = contextlib.nullcontext()
    if how == "environment":
        monkeypatch.setenv("KDA_LAYERS_BACKEND", "sm90")
    elif how == "context":
        asked = use_backend("sm90")
    with asked, pytest.raises(ValueError, match="backend 'sm90' cannot serve"):
        run(**{"backend": "sm90"} if how == "argument" else {})
    monkeypatch.delenv("KDA_LAYERS_BACKEND", raising=False)
    run()
    assert len(checked) == 2
