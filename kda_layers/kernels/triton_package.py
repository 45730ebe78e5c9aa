"""Find Triton, which runs on CUDA or, for tests, in its interpreter on a CPU. Backends import it where they launch."""

from __future__ import annotations

import importlib.util


def is_installed() -> bool:
    """True if triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interprets() -> bool:
    """True if Triton's interpreter runs kernels on a CPU (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)
