"""An operator around a layer's core: a plain function that torch.compile fuses, and fused forms of it.

One file is one operator: a `Fused`, which declares the forms, and the plain function, which it decorates. The forms are
backends: `explain` lists them, and `use_backend` and the environment variable choose among them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .. import torch_private
from ..declarations import Backend, OneOf
from ..declarations import Problem as AnyProblem
from ..kda.fla import package
from ..registry import Registry
from ..tracing import is_plain
from ..triton_package import FLOATS, OnTriton

MIN_TOKENS = 128  # with fewer, launching takes longer than computing

_for_graph: ContextVar[bool] = ContextVar("kda_layers_for_graph", default=False)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Problem(AnyProblem):
    """The facts of a call on which a form may decide."""

    few_tokens: bool = False

    LABEL: ClassVar[str]
    LACKS = {"few_tokens": f"there are too few tokens, needs B * T of at least {MIN_TOKENS}"}  # noqa: RUF012

    def __str__(self) -> str:
        return f"{self.LABEL}, {super().__str__()}"


class Form(Backend):
    """A backend that is a function with the arguments of the operator, or the `forward` and `backward` of its op."""

    def __init__(self, run: Any = None, few_tokens: bool = False) -> None:
        """Declare a form; `few_tokens` is True if it also serves fewer than `MIN_TOKENS` tokens."""
        self.run = run
        if few_tokens:
            self.features = frozenset(("few_tokens",))


class Plain(Form):
    """Plain PyTorch for any device, dtype and number of tokens."""

    name = "eager"

    def unsupported(self, problem: Any) -> list[str]:
        return []


class Triton(OnTriton, Form):
    """Triton kernels of this package."""


class FLA(Form):
    """flash-linear-attention's kernels: CUDA, 16 bits and fp32."""

    name = "fla"
    priority = 10
    serves = {"device": OneOf("cuda"), "dtype": FLOATS}  # noqa: RUF012

    def problems(self) -> list[str]:
        return package.problems()


class Forms(Registry[Any, Any]):
    """The forms of an operator, which its module lists."""

    def __init__(self, name: str, problem: type[AnyProblem], *forms: Form) -> None:
        super().__init__(name, None, problem, advisory=True)
        self.forms = forms

    def discover(self) -> dict[str, Any]:
        """Return the forms by name, highest priority first."""
        return {form.name: form for form in sorted(self.forms, key=lambda form: -form.priority)}


class Fused(Forms):
    """An operator whose forms are differentiable by themselves, for example by a torch.autograd.Function."""

    def __init__(self, name: str, label: str, *forms: Form, tensors: int, fits: Callable[..., bool]) -> None:
        """Register the operator; `plain` completes it.

        Args:
            label: the operator in the text of a problem.
            tensors: number of leading arguments that are tensors or None.
            fits: returns True for the arguments of a call that the forms take; the first one is [B, T, ...].
        """
        super().__init__(name, type("Problem", (Problem,), {"LABEL": label}), *forms)
        self.tensors, self.fits = tensors, fits

    def plain(self, function: F) -> F:
        """Make the plain function the backend `eager`, and return the operator, with the keyword `backend`.

        The plain function runs under torch.compile, which fuses it, under torch.func transforms, forward-mode AD and
        dispatch modes, for Tensor subclasses, and for arguments that do not fit. Arguments are passed by position.
        """
        self.forms = (*self.forms, Plain(function))

        @functools.wraps(function)
        def call(*args: Any, backend: str | None = None) -> Any:
            return self.chosen(backend, *args).run(*args)

        return call  # type: ignore[return-value]

    def chosen(self, backend: str | None, *args: Any) -> Form:
        """Return the form that serves a call: the one named `backend` if it can; None chooses."""
        if (
            not is_plain(args[: self.tensors])
            or torch_private.transforms_active()
            or torch_private.forward_ad_active()
            or not self.fits(*args)
        ):
            return self.backend("eager")
        x = args[0]
        return self.backend(self.choose(backend, x.device, x.dtype, few_tokens(x)))


@contextlib.contextmanager
def for_graph() -> Iterator[None]:
    """Within it calls warm up or capture a CUDA graph, whose launches cost little: a few tokens are fused, too."""
    token = _for_graph.set(True)
    try:
        yield
    finally:
        _for_graph.reset(token)


def few_tokens(x: Tensor) -> bool:
    """True if x [B, T, ...] has so few tokens that launching takes longer than computing."""
    # While compiling, a bound on B * T would split the graph's range of sizes. The `if` makes the result a constant.
    if torch.compiler.is_compiling():
        few = x.shape[1] == 1
    else:
        few = x.shape[0] * x.shape[1] < MIN_TOKENS and not _for_graph.get()
    return True if few else False  # noqa: SIM210
