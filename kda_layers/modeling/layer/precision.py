"""Parameters that stay in fp32 when their module is cast to a narrower dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn


class KeepsFP32(nn.Module):
    """A module that keeps some parameters and their gradients in fp32 under `to(torch.bfloat16)`, `half()` etc.

    The counterpart of transformers' `_keep_in_fp32_modules_strict`, which only from_pretrained reads.
    """

    kept_in_fp32: ClassVar[tuple[str, ...]]  # last part of the parameters' names

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        kept = [p for name, p in self.named_parameters() if name.rpartition(".")[2] in self.kept_in_fp32]
        ids = {id(t) for p in kept for t in (p, p.grad)}

        def converted(t: Tensor) -> Tensor:
            new = fn(t)
            # A parameter that is 16-bit already, as in a checkpoint that rounded it, follows the cast.
            rounded = new.is_floating_point() and new.dtype.itemsize < 4 <= t.dtype.itemsize
            return t.to(new.device, torch.float32) if rounded and id(t) in ids else new

        return super()._apply(converted, recurse)
