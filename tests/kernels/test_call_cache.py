"""A cached value is returned for calls with the same signature and for no other."""

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
from kda_layers.kernels import call_cache
from kda_layers.kernels.call_cache import CallCache
from kda_layers.kernels.kda import checks, op
from kda_layers.kernels.kda.contract import KDA
from kda_layers.testing.cases import Case, make_inputs
from tests.kernels.cases import BF16, FP32


class Call(NamedTuple):
    x: Tensor
    y: Tensor | None
    z: Tensor | None
    option: Any


def call() -> Call:
    return Call(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), None, 1)


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
    "option of another type": lambda c: c._replace(option=True),
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
NOT_CACHED = ("dispatch mode", "forward AD")


@pytest.mark.parametrize("more", [(), ("b", None)], ids=str)
def test_the_same_signature(more: tuple[Any, ...]) -> None:
    cache: CallCache[str] = CallCache(3)
    assert cache.get(call(), *more) is None
    assert cache.put(call(), "value", *more) == "value"
    assert cache.get(call(), *more) == "value"
    assert cache.get(call(), "other") is None
    cache.clear()
    assert cache.get(call(), *more) is None


@pytest.mark.parametrize("change", CHANGES)
def test_another_signature(change: str) -> None:
    cache: CallCache[str] = CallCache(3)
    cache.put(call(), "value")
    assert cache.get(CHANGES[change](call())) is None
    assert cache.get(call()) == "value"


@pytest.mark.parametrize("state", STATES)
def test_another_state_of_torch(state: str) -> None:
    cache: CallCache[str] = CallCache(3)
    cache.put(call(), "value")
    x = call()
    with STATES[state]():
        assert cache.get(x) is None
        cache.put(x, "within")
        assert cache.get(x) == (None if state in NOT_CACHED else "within")
    assert cache.get(x) == "value"


def test_nothing_is_cached_under_a_transform() -> None:
    cache: CallCache[str] = CallCache(3)
    cache.put(call(), "value")
    found = []

    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            found.append(cache.get(call()._replace(x=x)))
            cache.put(call()._replace(x=x), "within")
        return x.sum()

    torch.func.grad(f)(torch.zeros(2, 3))
    torch.func.vmap(f)(torch.zeros(5, 2, 3))
    assert found == [None] * 4


@pytest.mark.parametrize("change", ["one tensor twice", "not a tensor"])
def test_calls_that_are_not_cached(change: str) -> None:
    cache: CallCache[str] = CallCache(3)
    assert cache.put(CHANGES[change](call()), "value") == "value"
    assert not cache._values


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST", 4)
    cache: CallCache[int] = CallCache(3)
    for n in range(1, 30):
        cache.put(call()._replace(x=torch.zeros(n)), n)
        cache.put(call()._replace(y=torch.zeros(n)), n)
        assert len(cache._values) <= 4
        assert all(len(alike) <= call_cache.MOST_ALIKE for alike in cache._values.values())
    assert cache.get(call()._replace(y=torch.zeros(29))) == 29


# ---------------------------------------------------------------- the operator


def run(**changes: Any) -> Any:
    x = make_inputs(Case(B=1, T=5, H=2, K=16, V=16, dtype=FP32))._asdict()
    x |= {"beta": torch.full((1, 5, 2), 0.5), "beta_activation": "given"} | changes
    positional = [x[name] for name in ("q", "k", "v", "g", "beta")]
    keywords = {name: x[name] for name in ("A_log", "dt_bias", "gate_activation", "lower_bound", "beta_activation")}
    return op.kda(*positional, **keywords, **{name: x[name] for name in ("backend", "checkpoint_every") if name in x})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were checked."""
    found: list[Any] = []
    check = checks.check_whole
    monkeypatch.setattr(checks, "check_whole", lambda x: (found.append(x), check(x)))
    KDA.clear_caches()
    return found


def test_a_cached_call_is_not_checked_again(checked: list[Any]) -> None:
    first, second = run(), run()
    assert len(checked) == 1
    assert torch.equal(first.o, second.o)


def test_values_are_always_checked(checked: list[Any]) -> None:
    run()
    with pytest.raises(ValueError, match=r"beta must be in \[0, 2\]"):
        run(beta=torch.full((1, 5, 2), 3.0))


def test_an_equal_option_of_another_type_is_checked(checked: list[Any]) -> None:
    run(checkpoint_every=64)
    with pytest.raises(ValueError, match=r"checkpoint_every must be 0 or 64, got 64\.0"):
        run(checkpoint_every=64.0)


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
