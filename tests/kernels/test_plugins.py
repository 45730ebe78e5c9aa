"""Backends of other distributions: by `register_backend`, and by an entry point of one that is installed."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_layers import explain, kda, kda_prefill, kda_step, use_backend
from kda_layers.kernels import register_backend
from kda_layers.kernels.kda.contract import KDA, Backend, problem_of
from tests.kernels.cases import FP32, Case, call, make_inputs, options

TOY = """
    from kda_layers.kernels.kda.backends.eager import EagerBackend

    class Toy(EagerBackend):
        name, priority, features = "toy", 50, frozenset({"has_state", "decode", "needs_grad"})
        calls = []

        def forward(self, x, save):
            self.calls.append("forward")
            return super().forward(x, save)

        def decode(self, x):
            self.calls.append("decode")
            return super().decode(x)

    BACKEND = Toy()
"""
CASE = Case(T=70, H=1, K=16, V=16, dtype=FP32, state=True)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs a distribution with a module and an entry point, for one test."""

    def put(name: str, source: str, target: str = "BACKEND") -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kda_layers.backends]\n{name} = {name}_kda:{target}\n")
        monkeypatch.delitem(sys.modules, f"{name}_kda", raising=False)
        (tmp_path / f"{name}_kda.py").write_text(textwrap.dedent(source))

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(KDA, "_found", None)
    monkeypatch.setattr(KDA, "broken", {})
    KDA.clear_caches()
    yield put
    KDA.clear_caches()


def test_an_installed_distribution(install: Callable[..., None]) -> None:
    """Its backend serves forward, backward and step by its priority, and refuses prefill with the reason."""
    install("toy", TOY)
    x = make_inputs(CASE)._replace(checkpoint_every=0)
    assert torch.equal(call(x).o, call(x, "eager").o)
    toy = KDA.backends()["toy"]
    assert toy.calls == ["forward"]
    kda(x.q.clone().requires_grad_(), *x[1:5], **options(x)).o.sum().backward()
    assert toy.calls == ["forward"] * 2
    state = x.initial_state.clone()
    token = [t[:, :1] for t in x[:5]]
    kda_step(*token, state, **options(x))
    assert toy.calls[2:] == ["decode"]
    with torch.no_grad():
        kda_prefill(*x[:5], x.initial_state.clone(), **options(x))  # by another backend
        assert toy.calls[3:] == []
        with pytest.raises(ValueError, match=r"backend 'toy' cannot serve .*: prefills states in place, needs kda"):
            kda_prefill(*x[:5], x.initial_state.clone(), **options(x), backend="toy")
    assert "toy      can serve it" in explain(problem_of(x))
    with use_backend("eager"):
        call(x)
    assert len(toy.calls) == 3


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("import a_module_that_is_not_there", "BACKEND", "ModuleNotFoundError: No module named 'a_module_that"),
        ("", "BACKEND", "AttributeError"),
        ("BACKEND = 'toy'", "BACKEND", r"TypeError: backend must be an instance of .*contract.Backend, got 'toy'"),
        (TOY, "Toy", "TypeError: backend must be an instance of .* got <class"),
        (TOY.replace('"toy"', '"eager"'), "BACKEND", "ValueError: backend must have a new name, got 'eager', known"),
    ],
    ids=["no module", "no attribute", "no backend", "class", "name"],
)
def test_one_that_is_broken(install: Callable[..., None], source: str, target: str, reason: str) -> None:
    """The others serve; a warning, `explain` and the error of its name say why it does not."""
    install("toy", source, target)
    with pytest.warns(UserWarning, match=rf"entry point toy = toy_kda:{target} of toy gives no backend: {reason}"):
        assert "toy" not in KDA.backends()
    x = make_inputs(CASE)._replace(checkpoint_every=0)
    call(x)
    assert "of toy gives no backend: " in explain(problem_of(x))
    with pytest.raises(ValueError, match=rf"unknown backend 'toy', known: .*eager.*gives no backend: {reason}"):
        call(x, "toy")


class Own(Backend):
    name = "own"
    features = frozenset({"has_state"})

    def forward(self, x: Any, save: bool) -> Any:
        return KDA.backends()["eager"].forward(x, save)


@pytest.mark.usefixtures("install")
def test_register_backend() -> None:
    x = make_inputs(CASE)._replace(checkpoint_every=0)
    call(x)  # a choice that is cached
    register_backend(type("First", (Own,), {"priority": 99})())
    assert KDA.select(problem_of(x)).name == "own"
    with pytest.raises(ValueError, match=r"cannot serve .*: gradients are needed"):
        kda(x.q.clone().requires_grad_(), *x[1:5], **options(x), backend="own")
    with pytest.raises(ValueError, match="backend must have a new name, got 'own'"):
        register_backend(Own())


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(features=frozenset({"prefill"})), "backend 'own' must define prefill, with the feature 'prefill'"),
        (dict(features=frozenset({"decode"})), "backend 'own' must define decode, with the feature 'decode'"),
        (
            dict(features=frozenset({"needs_grad"})),
            "backend 'own' must define saved_like, with the feature 'needs_grad'",
        ),
        (dict(forward=Backend.forward), "backend 'own' must define forward, always"),
        (dict(features=frozenset({"speed"})), "features of 'own' must be of Problem, got speed"),
        (dict(serves={"colour": None}), "serves of 'own' must be of Problem, got colour"),
        (dict(name=""), "name must be a string, got ''"),
    ],
)
def test_a_declaration_that_cannot_be_kept(fields: dict[str, Any], message: str) -> None:
    before = list(KDA.backends())
    with pytest.raises(ValueError, match=message):
        register_backend(type("Wrong", (Own,), fields)())
    assert list(KDA.backends()) == before


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize("given", [Own, "eager", None])
def test_what_is_no_backend(given: Any) -> None:
    with pytest.raises(TypeError, match=r"backend must be an instance of kda_layers.kernels.kda.contract.Backend, got"):
        register_backend(given)
