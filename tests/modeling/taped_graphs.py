"""A CUDA graph on the CPU: a tape of the operators that ran, with their tensors, which replays without Python.

As in a CUDA graph, numbers are constants, tensors are read and written where they were, and recording executes nothing
that lasts: what the recorded operators wrote is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Executes operators and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.own: set[int] = set()  # storages made while recording
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # storages of others -> a view of all of it, its contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the operators on the tensors that it wraps come here
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a tensor is read by the host while recording")
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in inputs:  # not only of schemas that say that they write: batch norm's does not
            self._keep(t)
        out = func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass(t) for t in tree_leaves(out)):
            return out  # it computes nothing
        known = {t.untyped_storage().data_ptr() for t in inputs}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.own.add(t.untyped_storage().data_ptr())
        self.calls.append((func, args, kwargs, out))
        return out

    def _keep(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.own | self.before.keys():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.before[storage.data_ptr()] = (whole, whole.clone())

    def undo(self) -> None:
        for whole, contents in self.before.values():
            whole.copy_(contents)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            aliases = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            again = finished(func, func(*args, **kwargs))
            for recorded, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(recorded, Tensor) and recorded.untyped_storage().data_ptr() not in aliases:
                    recorded.copy_(new)


def finished(func: Any, out: Any) -> Any:
    """The outputs of an operator; those of an exchange between ranks, for which the host waits on a CPU."""
    if func.namespace == "c10d":
        for work in tree_leaves(out):
            if isinstance(work, torch.ScriptObject):
                torch._C._distributed_c10d.Work.unbox(work).wait()
    if func.namespace == "_c10d_functional" and isinstance(out, Tensor):
        torch.ops._c10d_functional.wait_tensor(out)
    return out


class TapedGraphs:
    """Stand-in for `CudaGraphs`, for use without a GPU."""

    recording = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures = 0

    def run_aside(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        tape, random_state = Tape(), torch.get_rng_state()
        TapedGraphs.recording, make = True, torch.tensor

        def make_on_host(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is not None:
                raise RuntimeError("torch.tensor copies values of the host to a device while recording")
            return make(*args, **kwargs)

        torch.tensor = make_on_host  # type: ignore[assignment]
        try:
            with tape:
                work()
        finally:
            TapedGraphs.recording, torch.tensor = False, make
            tape.undo()
            torch.set_rng_state(random_state)
        self.captures += 1
        return tape.replay

    def recapture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self.capture(work)
