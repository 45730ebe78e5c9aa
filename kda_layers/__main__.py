"""`python -m kda_layers`: this machine, and for each backend whether it can serve the default problem or why not."""

from __future__ import annotations

import platform

import torch
import transformers

import kda_layers
from kda_layers.kernels import layer_kernels


def main() -> None:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}"
    else:
        device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    print(f"kda_layers {kda_layers.__version__}, Python {platform.python_version()}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"device: {device}")
    print(kda_layers.explain())
    where = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"short convolution and gated norm: {layer_kernels.explain(where)}")


if __name__ == "__main__":
    main()
