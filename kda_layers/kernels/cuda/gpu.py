"""The GPU as a machine: load and launch compiled kernels through the driver.

A launch through cuda-bindings costs 1.2 us of Python, as much as through ctypes, and cuda-bindings defines the driver's
structs. cuda-core cannot pass a struct by value, and its versions up to 0.6 cannot compile without a driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch

from .. import torch_private
from ..declarations import Backend, OneOf
from . import build
from .arch import ARCHS, Arch, arch_for
from .build import call, dotted
from .machine import Dim, Machine, Properties

OLDEST_DRIVER = (12, 4)  # the first that reports the sizes of a kernel's parameters
CONFIGS = 1024  # launch configurations that are cached
# Priorities: what has never run on a GPU does not displace what has. flash-linear-attention's is 10, plain PyTorch's 0.
HAS_RUN, NEVER_RUN = 20, 5

_loading = threading.Lock()
_thread = threading.local()  # has_context is set once a thread has launched a kernel


@functools.cache
def problems() -> list[str]:
    """Reasons why no kernel can be compiled, loaded or launched here, each 'what it is, what it needs'."""
    if build.problems():
        return build.problems()
    try:
        number = call("cuDriverGetVersion")
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return [f"the NVIDIA driver cannot be loaded ({reason}), needs one"]
    version, compiler = (number // 1000, number % 1000 // 10), build.nvrtc_version()
    # A driver loads the cubins of newer compilers of its major version, for an arch that both know.
    needed = max(OLDEST_DRIVER, (compiler[0], 0))
    if version < needed:
        return [
            f"the NVIDIA driver is of CUDA {dotted(version)}, needs {dotted(needed)} or newer "
            f"for the cubins of NVRTC {dotted(compiler)}"
        ]
    return []


class Kernel:
    """One kernel loaded on one GPU, by `GPU.load`."""

    def __init__(self, name: str, function: Any, params_bytes: int, device: int) -> None:
        from cuda.bindings import driver

        self.name, self._function, self.device = name, function, device
        self.params_bytes = params_bytes  # size of the struct that it takes
        self._driver = driver  # an import at each launch would cost as much as the rest

    def launch(
        self, grid: int | Dim, threads: int, cluster: int, shared_bytes: int, params: bytes, overlap: bool = False,
        cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Launch on the current stream; see `machine.Launchable`."""
        device = self.device
        if torch_private.current_device() != device:
            with torch.cuda.device(device):
                return self.launch(grid, threads, cluster, shared_bytes, params, overlap, cooperative)
        if len(params) != self.params_bytes:
            raise ValueError(f"params of {self.name} must have {self.params_bytes} bytes, got {len(params)}")
        if not hasattr(_thread, "has_context"):
            _ensure_context(device)
        stream = torch_private.current_stream(device)
        config = _config(grid, threads, cluster, shared_bytes, overlap, cooperative, stream)
        pointer = ctypes.c_char_p(params)  # not shared: threads may launch the same kernel at the same time
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointer), 0)
        if status.value != 0:
            raise RuntimeError(
                f"launching {self.name} failed: {status.name} with grid {grid}, {threads} threads, cluster {cluster}, "
                f"{shared_bytes} bytes of dynamic shared memory"
            )


class GPU:
    """Every GPU of this machine; see `machine.Machine`."""

    def problems(self) -> list[str]:
        return problems()

    def properties(self, device: torch.device) -> Properties:
        return _properties(device.index)

    def load(self, source: str, entry: str, defines: Mapping[str, str | int], device: torch.device) -> Kernel:
        """Load a kernel that is `extern "C"` and takes one struct by value; a CUDA graph may be capturing.

        Raises:
            ValueError: the device's compute capability is unknown, or the kernel does not take exactly one struct
            RuntimeError: the compiler or the driver refuses
        """
        with _loading:  # threads that start together compile and load a kernel once
            return _load(source, entry, frozenset(defines.items()), device.index)


class OnArchs(Backend):
    """Base class of backends of our kernels, for GPUs of some compute capabilities; a subclass adds to `serves`."""

    def __init__(self, name: str, archs: tuple[Arch, ...], machine: Machine, device: str = "cuda") -> None:
        """Define the backend `name` of a machine whose tensors are on `device`."""
        self.name, self.archs, self.machine = name, archs, machine
        here = {"device": OneOf(device), "arch": OneOf(*(arch.capability for arch in archs), prefix="sm_")}
        self.serves = {**here, **self.serves}
        gpus = ", ".join(arch.gpus for arch in archs if not arch.run)
        self.priority = NEVER_RUN if gpus else HAS_RUN
        if gpus:
            self.caveat = f"its kernels are compiled for {gpus} and have never run there, so it ranks below 'fla'"

    @classmethod
    def every(cls) -> tuple[Self, ...]:
        """Return one backend for each family of GPUs."""
        families = dict.fromkeys(arch.backend for arch in ARCHS.values())
        return tuple(cls(name, tuple(a for a in ARCHS.values() if a.backend == name), GPU()) for name in families)

    def problems(self) -> list[str]:
        return self.machine.problems()


@functools.cache
def _properties(device: int) -> Properties:
    found = torch.cuda.get_device_properties(device)
    return Properties(found.multi_processor_count, 10 * found.major + found.minor, found.total_memory)


@functools.cache
def _load(source: str, entry: str, defines: frozenset[tuple[str, str | int]], device: int) -> Kernel:
    from cuda.bindings import driver

    module = _module(source, defines, device)
    with _context(device):
        function = call("cuModuleGetFunction", module, entry.encode(), subject=entry)
        status, _, params_bytes = driver.cuFuncGetParamInfo(function, 0)
        if status.value != 0 or driver.cuFuncGetParamInfo(function, 1)[0].value == 0:
            raise ValueError(f"kernel {entry} of {source} must take exactly one parameter, a struct")
        # Dynamic shared memory above 48 KiB must be allowed. Allow all that the GPU has once, not at each launch.
        of_function, of_device = driver.CUfunction_attribute, driver.CUdevice_attribute
        most = of_device.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        static = of_function.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        dynamic = of_function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        available = call("cuDeviceGetAttribute", most, call("cuDeviceGet", device))
        available -= call("cuFuncGetAttribute", static, function)
        call("cuFuncSetAttribute", function, dynamic, available)
    return Kernel(entry, function, params_bytes, device)


@functools.cache
def _module(source: str, defines: frozenset[tuple[str, str | int]], device: int) -> Any:
    code = build.compile(source, dict(defines), arch_for(_properties(device).capability).target).code
    with _context(device):
        return call("cuModuleLoadData", code, subject=source)


@contextlib.contextmanager
def _context(device: int) -> Iterator[None]:
    """Make the device's context current for loading, and allow allocations while a CUDA graph is captured."""
    from cuda.bindings import driver

    call("cuCtxPushCurrent", _primary_context(device))
    try:
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            driver.cuThreadExchangeStreamCaptureMode(mode)
    finally:
        driver.cuCtxPopCurrent()


def _ensure_context(device: int) -> None:
    """Make the device's context current in a thread that has none: PyTorch sets none to serve memory from its cache."""
    if int(call("cuCtxGetCurrent")) == 0:
        call("cuCtxSetCurrent", _primary_context(device))
    _thread.has_context = True


@functools.cache
def _primary_context(device: int) -> Any:
    """The context that PyTorch uses. It stays until the process ends, as do the modules in it."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


@functools.lru_cache(CONFIGS)
def _config(
    grid: int | Dim, threads: int, cluster: int, shared_bytes: int, overlap: bool, cooperative: bool, stream: int
) -> Any:
    """A launch configuration, cached as making one costs as much as a launch. Threads share it: the driver reads it."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (grid, 1, 1) if isinstance(grid, int) else grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    names, attributes = driver.CUlaunchAttributeID, []
    if cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = attributes[-1].value.clusterDim
        dim.x, dim.y, dim.z = cluster, 1, 1
    if overlap:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if cooperative:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[-1].value.cooperative = 1
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)  # copied
    return config
