"""A Hugging Face kernel of this package: its functions, and the layers that transformers' models find in it.

`tools/kernel_package.py` copies this folder, `kernels` and the files of `modeling` that a layer's forward needs. What
it copies imports the standard library, torch, einops and itself, and itself relatively.
"""

from ..kernels.fla_api import chunk_kda, fused_kda_gate, fused_recurrent_kda
from ..kernels.kda.contract import KDAOutput
from ..kernels.kda.op import kda, kda_step
from ..kernels.registry import explain, keep_backend, use_backend
from . import layers

__all__ = [
    "KDAOutput", "chunk_kda", "explain", "fused_kda_gate", "fused_recurrent_kda", "kda", "kda_step", "keep_backend",
    "layers", "use_backend",
]  # fmt: skip
