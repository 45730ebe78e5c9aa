"""One call of the operator for a profiler: `make profile CASE=1,8192,32` (B, T, H; bf16, K = V = 128).

The first of two runs compiles and warms up; `make profile` tells ncu to skip its kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.cases import Case, make_inputs
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.testing.oracle import call


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("case", type=_sizes, help="B,T,H")
    parser.add_argument("--gates", choices=["fast", "slow"], default="slow", help="decay of the gates (%(default)s)")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    x = make_inputs(replace(Case(*args.case), gates=args.gates), args.device)
    for _ in range(2):
        print(f"o {tuple(run(x).shape)}")


def run(x: Inputs) -> torch.Tensor:
    """Run forward and backward once."""
    leaves = {n: t.detach().requires_grad_() for n, t in x._asdict().items() if n in ("q", "k", "v", "g", "beta")}
    o = call(x._replace(**leaves)).o
    torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
    return o


def _sizes(text: str) -> tuple[int, int, int]:
    B, T, H = (int(n) for n in text.split(","))
    return B, T, H


if __name__ == "__main__":
    main()
