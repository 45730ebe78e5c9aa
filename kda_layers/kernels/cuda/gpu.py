"""The GPU as a machine: loading and launching compiled kernels, through the driver.

cuda-bindings calls the driver as ctypes would, at the same cost (1.2 us of Python a launch), and knows its structures.
cuda-core's launch takes no struct by value, and its versions up to 0.6 cannot compile without a driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .. import torch_private
from . import build
from .arch import arch_for
from .build import dotted
from .machine import Dim, Properties

OLDEST_DRIVER = (12, 4)  # the first that tells the sizes of a kernel's parameters
CONFIGS = 1024  # of launches, remembered

_loading = threading.Lock()
_thread = threading.local()  # has_context, once a thread has launched something


@functools.cache
def problems() -> list[str]:
    """Why no kernel can be compiled, loaded or launched here, each 'what it is, what it needs'; empty means fine."""
    if build.problems():
        return build.problems()
    from cuda.bindings import driver

    try:
        number = _check("cuDriverGetVersion", driver.cuDriverGetVersion())
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return [f"the NVIDIA driver cannot be loaded ({reason}), needs one"]
    version, compiler = (number // 1000, number % 1000 // 10), build.nvrtc_version()
    # Within a major version, older drivers load what newer compilers make for an arch that both know.
    needed = max(OLDEST_DRIVER, (compiler[0], 0))
    if version < needed:
        return [
            f"the NVIDIA driver is of CUDA {dotted(version)}, needs {dotted(needed)} or newer "
            f"for the cubins of NVRTC {dotted(compiler)}"
        ]
    return []


class Kernel:
    """One kernel in the memory of one GPU; `GPU.load` makes it."""

    def __init__(self, name: str, function: Any, params_bytes: int, device: int) -> None:
        from cuda.bindings import driver

        self.name = name
        self.params_bytes = params_bytes  # size of the struct that it takes
        self.device = device
        self._function = function
        self._driver = driver  # importing at each launch would cost as much as the rest

    def launch(self, grid: int | Dim, threads: int, cluster: int, shared_bytes: int, params: bytes) -> None:
        """Launch on the current stream; see `machine.Launchable`.

        Raises:
            ValueError: params has not the size of the struct
            RuntimeError: the driver refuses
        """
        device = self.device
        if torch_private.current_device() != device:
            with torch.cuda.device(device):
                return self.launch(grid, threads, cluster, shared_bytes, params)
        if len(params) != self.params_bytes:
            raise ValueError(f"params of {self.name} must have {self.params_bytes} bytes, got {len(params)}")
        if not hasattr(_thread, "has_context"):
            _ensure_context(device)
        config = _config(grid, threads, cluster, shared_bytes, torch_private.current_stream(device))
        pointer = ctypes.c_char_p(params)  # this call's own: threads may launch the same kernel at the same time
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
        """A kernel that is `extern "C"` and takes one struct by value; a CUDA graph may be capturing.

        Raises:
            ValueError: no cubins are made for the device's compute capability, or the kernel does not take one struct
            RuntimeError: the compiler or the driver refuses
        """
        with _loading:  # each is compiled and loaded once, also when threads begin together
            return _load(source, entry, frozenset(defines.items()), device.index)


@functools.cache
def _properties(device: int) -> Properties:
    found = torch.cuda.get_device_properties(device)
    return Properties(found.multi_processor_count, 10 * found.major + found.minor, found.total_memory)


@functools.cache
def _load(source: str, entry: str, defines: frozenset[tuple[str, str | int]], device: int) -> Kernel:
    from cuda.bindings import driver

    module = _module(source, defines, device)
    with _context(device):
        function = _check("cuModuleGetFunction", driver.cuModuleGetFunction(module, entry.encode()), entry)
        status, _, params_bytes = driver.cuFuncGetParamInfo(function, 0)
        if status.value != 0 or driver.cuFuncGetParamInfo(function, 1)[0].value == 0:
            raise ValueError(f"kernel {entry} of {source} must take exactly one parameter, a struct")
        # Above 48 KiB it has to be allowed. All that the GPU has, at once: no state to keep in step between launches.
        of_function, of_device = driver.CUfunction_attribute, driver.CUdevice_attribute
        most = of_device.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        static = of_function.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        dynamic = of_function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        available = _check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(most, _device(device)))
        available -= _check("cuFuncGetAttribute", driver.cuFuncGetAttribute(static, function))
        _check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, dynamic, available))
    return Kernel(entry, function, params_bytes, device)


@functools.cache
def _module(source: str, defines: frozenset[tuple[str, str | int]], device: int) -> Any:
    from cuda.bindings import driver

    code = build.compile(source, dict(defines), arch_for(_properties(device).capability).target).code
    with _context(device):
        return _check("cuModuleLoadData", driver.cuModuleLoadData(code), source)


@contextlib.contextmanager
def _context(device: int) -> Iterator[None]:
    """For loading: the device's context is current, and allocating is allowed while a CUDA graph is captured."""
    from cuda.bindings import driver

    _check("cuCtxPushCurrent", driver.cuCtxPushCurrent(_primary_context(device)))
    try:
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = _check("cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            yield
        finally:
            driver.cuThreadExchangeStreamCaptureMode(mode)
    finally:
        driver.cuCtxPopCurrent()


def _ensure_context(device: int) -> None:
    """Make the device's context current in a thread that has none: PyTorch may have served it from its caches only."""
    from cuda.bindings import driver

    if int(_check("cuCtxGetCurrent", driver.cuCtxGetCurrent())) == 0:
        _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(_primary_context(device)))
    _thread.has_context = True


@functools.cache
def _primary_context(device: int) -> Any:
    """The one that PyTorch uses; like the modules in it, it stays until the process ends."""
    from cuda.bindings import driver

    return _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(_device(device)))


def _device(index: int) -> Any:
    from cuda.bindings import driver

    return _check("cuDeviceGet", driver.cuDeviceGet(index))


@functools.lru_cache(CONFIGS)
def _config(grid: int | Dim, threads: int, cluster: int, shared_bytes: int, stream: int) -> Any:
    """What the driver only reads, so that threads may share it; making it costs as much as the launch."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (grid, 1, 1) if isinstance(grid, int) else grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    if cluster > 1:
        config.attrs = [_cluster_attribute(cluster)]
        config.numAttrs = 1
    return config


@functools.cache
def _cluster_attribute(cluster: int) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dim = attribute.value.clusterDim
    dim.x, dim.y, dim.z = cluster, 1, 1
    return attribute


def _check(function: str, answer: tuple[Any, ...], subject: str = "") -> Any:
    """The value that a function of the driver returns beside its status, which must be success."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"{function}({subject}) failed: {status.name}")
    return values[0] if values else None
