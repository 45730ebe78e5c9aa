"""The gradient of a weight from the parts of it that the programs of a backward leave."""

from __future__ import annotations

from torch import Tensor

from .triton_package import on_device_of

# A program sums so many columns, a line of the L2, so many rows at a time: torch's own sums have few blocks here, each
# with a long chain of loads.
COLUMNS, ROWS, WARPS = 32, 128, 8


def column_sums(parts: Tensor, weight: Tensor) -> Tensor:
    """Sum fp32 `parts` over their first dimension, in a fixed order.

    Args:
        parts: [P, D], or [P, W, D]
        weight: [D], or [D, W]

    Returns:
        The sums in the shape and dtype of `weight`.
    """
    from .triton.column_sums import column_sums_kernel

    total, (D, W) = weight.new_empty(weight.shape), (*weight.shape, 1)[:2]
    if D * W:
        with on_device_of(parts):
            column_sums_kernel[(-(-D * W // COLUMNS),)](
                parts, total, parts.shape[0], D, W, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
            )
    return total
