"""What the torch ops of every operator share: schemas from argument lists, autocast left outside, calls without ado."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = {Tensor, Parameter, type(None), str, float, bool, int}  # what fields are where no subclass of Tensor looks on

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", float: "float", bool: "bool", int: "int"}


def schema(fields: Any, mutable: str = "") -> str:
    """The arguments of an op that takes the fields of a NamedTuple, of which it writes `mutable`."""
    hints = typing.get_type_hints(fields)
    return ", ".join(
        ("Tensor(a!)" if name == mutable else _SCHEMA_TYPES[hints[name]]) + f" {name}" for name in fields._fields
    )


def is_plain(x: Any) -> bool:
    """Whether nothing looks on at inputs `x`, q first: no tracing, no mode, no subclass of Tensor that reacts to
    operators.

    The ops are then called as the functions that they are: the dispatcher, which would box some 20 arguments for each
    of its layers, costs as much as all the rest of a call.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not x.q.is_meta
        and PLAIN.issuperset(map(type, x))
    )


def without_autocast(f: Callable[..., Any], x: Any, *args: Any) -> Any:
    """f(x, *args), which says itself what it rounds: under autocast its products would run in 16 bits."""
    device = x.q.device.type
    if not torch.is_autocast_enabled(device):
        return f(x, *args)
    with torch.autocast(device, enabled=False):
        return f(x, *args)


def below_autograd(op: str, *args: Any) -> Any:
    """torch.ops.kda_layers.<op>(*args), whose gradient the caller records."""
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.kda_layers, op).default(*args)
