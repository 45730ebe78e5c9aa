"""Every CUDA kernel once on small ragged inputs, for compute-sanitizer: `make sanitize`.

Fails where an output differs from the oracle's by more than a gross error: a tool that reports nothing about kernels
that did nothing would be worth nothing.
"""

from __future__ import annotations

import itertools

import torch

from kda_layers import kda, kda_step
from kda_layers.kernels.contract import Inputs
from kda_layers.kernels.reference import recurrence

GROSS = 0.03


def inputs(K: int, dtype: torch.dtype, gate: str, lengths: list[int] | None, device: str) -> Inputs:
    """130 tokens of 2 value heads that share a key head, with a state."""
    T = sum(lengths) if lengths else 130
    generator = torch.Generator().manual_seed(K + T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, g, beta = (t.to(device, dtype) for t in (
        normal(1, T, 1, K), normal(1, T, 1, K), normal(1, T, 2, K), normal(1, T, 2, K), normal(1, T, 2)
    ))  # fmt: skip
    N = len(lengths) if lengths else 1
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device) if lengths else None
    return Inputs(
        q, k, v, g, beta, normal(2).to(device), normal(2, K).to(device), normal(N, 2, K, K).to(device), offsets, gate,
        -5.0 if gate == "lower_bound" else 0.0, "sigmoid", True, K**-0.5, True, 64,
    )  # fmt: skip


def options(x: Inputs) -> dict:
    """The keyword arguments of both operators."""
    bound = x.lower_bound if x.gate_activation == "lower_bound" else None
    return dict(
        A_log=x.A_log, dt_bias=x.dt_bias, cu_seqlens=x.cu_seqlens, gate_activation=x.gate_activation, lower_bound=bound
    )


def check(name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
    """Raise where `got` is far from the truth."""
    error = float((got.double() - truth.double()).norm() / truth.double().norm())
    if not error < GROSS:
        raise RuntimeError(f"{name} has an error of {error}, must be below {GROSS}")


def main() -> None:
    cases = itertools.product(
        (128, 64), (torch.bfloat16, torch.float16), ("lower_bound", "softplus"), (None, [65, 0, 1, 64])
    )
    for K, dtype, gate, lengths in cases:
        x = inputs(K, dtype, gate, lengths, "cuda")
        o, final, _ = recurrence(x)
        got = kda(
            *x[:5], initial_state=x.initial_state, final_state=True, checkpoint_every=64, backend="sm90", **options(x)
        )
        assert got.final_state is not None
        check("o", got.o, o)
        check("final_state", got.final_state, final)
        if lengths is None:
            x = x._replace(**{n: getattr(x, n)[:, :3].contiguous() for n in ("q", "k", "v", "g", "beta")})
            o, final, _ = recurrence(x)
            assert x.initial_state is not None
            state = x.initial_state.clone()
            check("o of a step", kda_step(*x[:5], state, backend="sm90", **options(x)), o)
            check("state", state, final)
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    with torch.no_grad():
        main()
