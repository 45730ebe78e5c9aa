"""A differentiable operator: torch ops, fakes and autograd, derived from its contract.

An operator is the boundary of autograd and of torch.compile. Its contract is three NamedTuples: `Inputs`, whose leading
fields have gradients; `Outputs`; and `Gradients`, of those leading fields. Op schemas are generated from their
annotations. As an op cannot return None, an absent output or gradient is an empty 1-D tensor inside the ops.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from . import torch_private
from .call_cache import leading_tensors
from .declarations import Backend
from .namespace import NAMESPACE
from .tracing import is_plain, refuse_transforms, without_autocast

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", float: "float", bool: "bool", int: "int"}
_library = torch.library.Library(NAMESPACE, "DEF")


class Differentiable(Backend):
    """A backend of an `Operator`."""

    def forward(self, x: Any, save: bool) -> tuple[Any, list[Tensor]]:
        """Return (outputs, saved); `saved`, for this backend's `backward` alone, is empty unless `save`."""
        raise NotImplementedError

    # backward(x, saved, *d_outputs): gradients of every tensor input, from what the same backend's `forward` saved (see
    # `replaces`). Gradients of outputs other than the first may be None.
    backward: Callable[..., Any]

    def saved_like(self, x: Any) -> list[Tensor]:
        """Empty tensors with the shapes and dtypes of what `forward(x, save=True)` saves; must not read any value."""
        raise NotImplementedError

    def replaces(self, x: Any) -> tuple[str, ...]:
        """Names of inputs that are not kept for `backward`, which gets in their place the first tensors that `forward`
        saves, of the same shapes and dtypes; `saved` is then without them."""
        return ()


class Backends(Protocol):
    """The backends of an operator, as a `Registry`."""

    def backend(self, name: str) -> Any: ...


X = TypeVar("X", bound=Any)  # NamedTuples
Out = TypeVar("Out", bound=Any)


class Operator(Generic[X, Out]):
    """`Operator(...)(x, needs_grad, backend)` calls the operator on inputs that its validator has accepted."""

    def __init__(
        self,
        name: str,
        inputs: type[X],
        outputs: type[Out],
        gradients: type[Any],
        registry: Backends,
        outputs_like: Callable[[Any], Any],
        reads: Iterable[str] = (),
    ):
        """Define torch.ops.<NAMESPACE>.<name> and .<name>_grad.

        Args:
            name: name of the op, also in errors
            inputs, outputs, gradients: the NamedTuple classes of the contract; the first output is never None
            registry: the backends, each a `Differentiable`
            outputs_like: returns unwritten outputs for inputs; must not read any value
            reads: outputs that the backward reads; they follow what is saved
        """
        self.name, self.inputs, self.outputs, self.registry = name, inputs, outputs, registry
        self.outputs_like, self.reads = outputs_like, tuple(outputs._fields.index(n) for n in reads)
        self.fields, self.with_gradient = len(inputs._fields), len(gradients._fields)
        self.tensors = leading_tensors(inputs)
        args, results = schema(inputs), ", ".join(f"Tensor {n}" for n in outputs._fields)
        d_outputs = ", ".join(f"Tensor? d_{n}" for n in outputs._fields)
        signature = f"({args}, bool save, str backend) -> ({results}, Tensor[] saved)"
        self.op = define(name, signature, self._run, self._run_fake, self._run_recording)
        gradients_out = ", ".join(["Tensor"] * self.with_gradient)
        signature = f"({args}, str backend, Tensor[] saved, {d_outputs}) -> ({gradients_out})"
        self.grad_op = define(f"{name}_grad", signature, self._grad, self._grad_fake, self._grad_recording)

    def __call__(self, x: X, needs_grad: bool, backend: str, plain: bool = False) -> Out:
        """Return the outputs of a backend's `forward`, differentiable; None for those that `x` does not ask for.

        Args:
            plain: True if the caller has checked that `x` is plain and under no transform
        """
        if not (plain or torch.compiler.is_compiling()):  # while compiling, the op refuses them
            refuse_transforms(self.name, x)
        if plain or is_plain(x):
            if not needs_grad:
                return without_autocast(self.registry.backend(backend).forward, x, False)[0]
            return self.outputs(*_Forward.apply(self, *x, True, backend))
        *outputs, _ = self.op(*x, needs_grad, backend)
        return self.outputs(*map(_or_none, outputs))

    def _run(self, *args: Any) -> Any:
        x, (save, backend) = self.inputs(*args[:-2]), args[-2:]
        outputs, saved = without_autocast(self.registry.backend(backend).forward, x, save)
        return *(_or_empty(t, x) for t in outputs), saved

    def _run_fake(self, *args: Any) -> Any:
        x, (save, backend) = self.inputs(*args[:-2]), args[-2:]
        saved = self.registry.backend(backend).saved_like(x) if save else []
        return *(_or_empty(t, x) for t in self.outputs_like(x)), saved

    def _run_recording(self, *args: Any) -> Any:
        refuse_transforms(self.name, args)
        if args[-2] and torch.is_grad_enabled():
            x = self.inputs(*args[:-2])
            return *(_or_empty(t, x) for t in _Forward.apply(self, *args)), []  # the graph keeps what is saved
        with torch_private.below_autograd():
            return self.op(*args)

    def _grad(self, *args: Any) -> Any:
        x, (backend, *rest) = self.inputs(*args[: self.fields]), args[self.fields :]
        grads = without_autocast(self.registry.backend(backend).backward, x, *rest)
        return _returned(_or_empty(t, x) for t in grads)

    def _grad_fake(self, *args: Any) -> Any:
        x = self.inputs(*args[: self.fields])
        return _returned(_or_empty(None if t is None else t.new_empty(t.shape), x) for t in x[: self.with_gradient])

    def _grad_recording(self, *args: Any) -> Any:
        if torch.is_grad_enabled():
            return _Backward.apply(self, *args)
        with torch_private.below_autograd():
            return self.grad_op(*args)


class _Forward(torch.autograd.Function):
    """An operator with its gradient.

    torch.library.register_autograd would add 200 us to a training step: it flattens all arguments and residuals.
    """

    @staticmethod
    def forward(ctx: Any, op: Operator[Any, Any], *args: Any) -> Any:
        x, backend = op.inputs(*args[:-2]), args[-1]
        if is_plain(x):
            outputs, saved = without_autocast(op.registry.backend(backend).forward, x, True)
        else:
            with torch_private.below_autograd():
                *outputs, saved = op.op(*args)
            outputs = [_or_none(t) for t in outputs]
        replaced = op.registry.backend(backend).replaces(x)
        x = x._replace(**dict(zip(replaced, saved, strict=False)))
        ctx.op, ctx.options, ctx.backend = op, x[op.tensors :], backend
        ctx.save_for_backward(*x[: op.tensors], *saved[len(replaced) :], *(outputs[i] for i in op.reads))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
        op = ctx.op
        refuse_transforms(f"the gradient of {op.name}", d_outputs)
        tensors = ctx.saved_tensors
        x = op.inputs(*tensors[: op.tensors], *ctx.options)
        if d_outputs[0] is None:
            d_outputs = torch.zeros_like(op.outputs_like(x)[0]), *d_outputs[1:]
        args = *x, ctx.backend, list(tensors[op.tensors :]), *d_outputs
        direct = is_plain(x) and not torch.is_grad_enabled()
        grads = op._grad(*args) if direct else op.grad_op(*args)
        grads = (grads,) if isinstance(grads, Tensor) else grads
        needed = [None if t is None else _or_none(d) for t, d in zip(x, grads, strict=False)]
        return None, *needed, *[None] * (op.fields - len(needed) + 2)  # of op, inputs, save and backend


class _Backward(torch.autograd.Function):
    """The gradient op under autograd, so that a second derivative raises."""

    @staticmethod
    def forward(ctx: Any, op: Operator[Any, Any], *args: Any) -> Any:
        ctx.name = op.name
        with torch_private.below_autograd():
            return op.grad_op(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _second_derivative(ctx.name)


def once_differentiable(name: str) -> Callable[[Any], Any]:
    """Decorator for the backward of a torch.autograd.Function, whose second derivative then raises.

    torch's own returns constants where the gradients of the outputs require no gradient: the derivative of a penalty on
    an input's gradient would be left out.
    """

    def decorate(backward: Any) -> Any:
        @functools.wraps(backward)
        def run(ctx: Any, *d_outputs: Any) -> Any:
            with torch.no_grad():
                grads = backward(ctx, *d_outputs)
            recorded = torch.is_grad_enabled()  # create_graph=True
            return _Final.apply(name, grads, torch.empty(0, requires_grad=True)) if recorded else grads

        return run

    return decorate


class _Final(torch.autograd.Function):
    """Gradients that depend on tensors, in a way that has no derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, grads: Any, recorded: Tensor) -> Any:
        ctx.name = name
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _second_derivative(ctx.name)


def _second_derivative(name: str) -> RuntimeError:
    return RuntimeError(f"{name} has no second derivative: its backward is hand-written and can be taken once")


class NoGradOperator(Generic[X]):
    """An operator without gradient, which may write some of its inputs."""

    def __init__(
        self,
        name: str,
        inputs: type[X],
        writes: tuple[str, ...],
        registry: Backends,
        method: str,
        output_like: Callable[[Any], Tensor | None],
    ):
        """Define torch.ops.<NAMESPACE>.<name>, which calls `method` of a backend and returns one tensor or None.

        Args:
            name, inputs, registry: as in `Operator`
            writes: the fields of `inputs` that are written
            method: name of the backends' method, which takes the inputs
            output_like: as `outputs_like` of `Operator`; `no_output` where only inputs are written
        """
        self.name, self.inputs, self.writes, self.registry, self.method = name, inputs, writes, registry, method
        self.returns = output_like is not no_output
        signature = f"({schema(inputs, writes)}, str backend) -> {'Tensor' if self.returns else '()'}"
        self.op = define(name, signature, self._run, lambda *args: output_like(inputs(*args[:-1])))

    def __call__(self, x: X, backend: str, plain: bool = False, run: Callable[[X], Any] | None = None) -> Any:
        """Return the output; the written inputs are updated.

        Args:
            plain: as for an `Operator`
            run: called in place of the backend's method, if the caller has looked it up
        """
        if not plain:
            if not torch.compiler.is_compiling():
                refuse_transforms(self.name, x)
            if not is_plain(x):
                return self.op(*x, backend)
        if self.writes:
            written = (getattr(x, name) for name in self.writes)
            torch.autograd.graph.increment_version([t for t in written if t is not None])
        return without_autocast(run or getattr(self.registry.backend(backend), self.method), x)

    @torch.no_grad()  # an exported program may run with gradients enabled
    def _run(self, *args: Any) -> Any:
        y = without_autocast(getattr(self.registry.backend(args[-1]), self.method), self.inputs(*args[:-1]))
        return y if self.returns else None


def no_output(_: Any) -> None:
    """Return None, the output of an operator that only writes inputs."""


def define(name: str, signature: str, run: Any, fake: Any, autograd: Any = None) -> Any:
    """Define torch.ops.<NAMESPACE>.<name>, arguments and results as in `signature`, and return it.

    Args:
        run, fake: the op and its version for fake tensors, which reads no value
        autograd: called in place of `run` where gradients may be recorded; None for an op without gradient
    """
    _library.define(name + signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if autograd is not None:
        _library.impl(name, autograd, "Autograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _returned(tensors: Iterable[Tensor]) -> Any:
    """Return the results of an op: a single tensor must not be in a tuple."""
    first, *others = tensors
    return (first, *others) if others else first


def _or_empty(t: Tensor | None, x: Any) -> Tensor:
    return x[0].new_empty(0) if t is None else t


def _or_none(t: Tensor) -> Tensor | None:
    return None if t.ndim == 1 and t.shape[0] == 0 else t


def schema(fields: Any, written: tuple[str, ...] = ()) -> str:
    """Schema of the arguments of an op that takes the fields of a NamedTuple and writes those of `written`."""
    hints = typing.get_type_hints(fields)
    types = {name: _SCHEMA_TYPES[hints[name]] for name in fields._fields}
    types |= {n: types[n].replace("Tensor", f"Tensor({alias}!)") for n, alias in zip(written, "abc", strict=False)}
    return ", ".join(f"{kind} {name}" for name, kind in types.items())
