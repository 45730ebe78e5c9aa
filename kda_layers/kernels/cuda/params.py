"""The struct that a kernel takes by value: one description packs its bytes and gives its C++ definition.

A source includes the definition as "<name>.h" ("ForwardParams.h"), which is no file: NVRTC gets every header as a text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

CODES = {"int": "i", "u32": "I", "u64": "Q", "float": "f"}

_headers: dict[str, str] = {}


class Params:
    """A struct of pointers, which change from launch to launch, followed by values, which rarely change."""

    def __init__(self, name: str, fields: str, structs: str = ""):
        """Describe the struct `name`.

        Args:
            fields: its members in C++: pointers, then values of the types `CODES` or of `structs`
            structs: C++ definitions of structs whose members are all u32
        """
        members = {kind: len(_declared(body)) for kind, body in re.findall(r"struct (\w+) \{(.*?)\};", structs, re.S)}
        declared = _declared(fields)
        pointers = [name for kind, name in declared if kind == "*"]
        values = declared[len(pointers) :]
        codes = [CODES.get(kind) or f"{members[kind]}I" for kind, _ in values]
        zeros = {name: (0,) * members[kind] if kind in members else 0 for kind, name in values}
        packed_pointers = struct.Struct(f"@{len(pointers)}Q")
        packed_values = struct.Struct("@" + "".join(codes) + "0Q")  # padded to a multiple of 8 bytes
        # point(q=tensor, ...) and set(T=9, ...) return the bytes of the pointers and of the values by the names of the
        # members, a tuple for a struct; what is left out is 0, and an unknown name a TypeError.
        self.point: Callable[..., bytes] = _by_name(
            dict.fromkeys(pointers), "0 if {0} is None else {0}.data_ptr()", packed_pointers.pack
        )
        self.set: Callable[..., bytes] = _by_name(zeros, "{0}", packed_values.pack)
        self.nbytes = packed_pointers.size + packed_values.size
        _headers[f"{name}.h"] = (
            f'#pragma once\n#include "ptx.cuh"\n{structs}struct {name} {{{fields}}};\n'
            f'static_assert(sizeof({name}) == {self.nbytes}, "as it is packed");\n'
        )


def _by_name(defaults: Mapping[str, Any], argument: str, pack: Callable[..., bytes]) -> Callable[..., bytes]:
    """Return `pack` with keywords. The function is written out, as a dict of them would cost as much as a launch."""
    parameters = ", ".join(f"{name}={value}" for name, value in defaults.items())
    arguments = ", ".join(
        ("*" if isinstance(value, tuple) else "") + argument.format(n) for n, value in defaults.items()
    )
    function: Callable[..., bytes] = eval(f"lambda *, {parameters}: pack({arguments})", {"pack": pack})
    return function


def header(name: str) -> str | None:
    """Return the definition of a struct by the name that sources include, or None for another name."""
    return _headers.get(name)


def _declared(fields: str) -> list[tuple[str, str]]:
    """(type, name) of each member; the type of a pointer is *."""
    found = []
    for declaration in re.sub(r"//[^\n]*", "", fields).split(";"):
        kind = "*" if "*" in declaration else (declaration.split() or [""])[0]
        found += [(kind, name) for name in re.findall(r"(\w+)\s*(?:,|$)", declaration)]
    return found
