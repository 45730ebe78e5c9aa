"""All kernels together: the variants for an arch, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .backward import gradients, reverse_scan
from .decode import decode
from .forward import forward

DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = forward.WIDTHS
WHOLE = (forward, reverse_scan, gradients)  # kernels over whole sequences


def shared_bytes(K: int, capability: int, needs_grad: bool) -> int:
    """Least shared memory in bytes with which a block of every kernel over whole sequences has a variant."""
    kernels = WHOLE if needs_grad else (forward,)
    return max(min(v.shared_bytes for v in kernel.variants(capability) if v.K == K) for kernel in kernels)


def variants(capability: int, most_shared_bytes: int) -> Iterator[tuple[str, Mapping[str, str | int]]]:
    """(source, macros) of every variant that fits in `most_shared_bytes`."""
    yield from ((decode.SOURCE, v.defines) for v in decode.variants(WIDTHS, DTYPES))
    for kernel in WHOLE:
        yield from (
            (kernel.SOURCE, v.defines) for v in kernel.variants(capability) if v.shared_bytes <= most_shared_bytes
        )
