"""Every private name of torch that the kernels use, and why. Checked with torch 2.11 and 2.13."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

F = TypeVar("F", bound=Callable[..., Any])

# Number of active dispatch modes; the public function creates objects at every call.
dispatch_modes = torch._C._len_torch_dispatch_stack
# Number of active function modes, such as that of `with torch.device(...)`.
function_modes = torch._C._len_torch_function_stack
# The order in which backends of scaled_dot_product_attention are tried.
attention_priority = torch._C._get_sdp_priority_order
# Context in which an op called by an autograd.Function records no gradient of its own.
below_autograd = torch._C._AutoDispatchBelowAutograd
# True under a torch.func transform (grad, vmap, ...), and for a tensor that one wrapped.
transforms_active = torch._C._are_functorch_transforms_active
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor

# False in the forward of an autograd.Function and in inference mode, but not under torch.no_grad().
forward_ad_enabled = torch._C._is_fwd_grad_enabled

# True if hooks of all modules are registered: they expect every module to be called.
has_global_hooks = torch.nn.modules.module._has_any_global_hook

# Multiplies tensors in place, by few kernels if they and the factor have one dtype; torch's optimizers use it.
foreach_mul_ = torch._foreach_mul_
# The norms of tensors, by few kernels if they have one dtype.
foreach_norm = torch._foreach_norm


def groups_of_dtypes(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device by their dtypes, in the order in which torch's clipping adds their norms."""
    nested: Any = [tensors]
    grouped: Any = _group_tensors_by_device_and_dtype(nested)
    return [group for (group,), _ in grouped.values()]


def process_group(name: str) -> Any:
    """The process group of a name. An op takes the name, as schemas have no groups."""
    from torch.distributed import distributed_c10d  # which takes a second

    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


def forward_ad_active() -> bool:
    """True inside torch.autograd.forward_ad.dual_level."""
    return forward_ad._current_level >= 0


def in_backward() -> bool:
    """True if the autograd engine is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def thread_object(key: str) -> Any:
    """The object stored under `key`, which autograd's threads inherit from the thread that calls backward()."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def store_thread_object(key: str, value: Any) -> None:
    """Store the object that `thread_object` returns."""
    if STORING_STEALS:
        _take_reference(value)
    torch._C._stash_obj_in_tls(key, value)


def _take_reference(value: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _storing_steals() -> bool:
    """True if torch gives back a reference that it never took, as 2.11 does: Python would free objects in use."""
    references = sys.getrefcount(_PROBE)
    torch._C._stash_obj_in_tls("kda_layers probe", _PROBE)
    steals = sys.getrefcount(_PROBE) == references
    if steals:
        _take_reference(_PROBE)
    return steals


_PROBE = object()
STORING_STEALS = _storing_steals()


def constant_to_compile(f: F) -> F:
    """Let torch.compile call `f`, whose arguments must be constants, while tracing, and guard on them.

    torch.compiler.assume_constant_result does the same but imports torch._dynamo, which takes a second.
    """
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def current_device() -> int:
    """Index of the current GPU. torch.cuda.current_device() also initialises CUDA, which costs as much as a launch."""
    return torch._C._cuda_getDevice()


def current_stream(device: int) -> int:
    """Handle of a GPU's current stream; torch.cuda.current_stream() would create a Stream object."""
    return torch._C._cuda_getCurrentRawStream(device)


def same_metadata_as(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """Return a predicate that is True for tensors like `tensors`, compared by TorchDynamo's guards in C++.

    They compare types, dtypes, devices, shapes, strides, requires_grad and dispatch keys, thread-local ones included.
    """
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def is_storage_shared(t: torch.Tensor) -> bool:
    """True if another tensor than `t` holds its storage. Torch tells Python no other way whether memory is aliased."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) > 2  # t, and the storage object of this call
