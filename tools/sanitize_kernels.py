"""Every CUDA kernel on small ragged inputs, for compute-sanitizer: `make sanitize`.

The tool makes each launch many times slower, so the GPU runs our kernels and copies, nothing else: inputs and what
should come out of them are computed on the CPU, before. Prints a line for each case, and fails where an output is far
from the truth: a tool that reports nothing about kernels that did nothing would be worth nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_layers import kda_step, kda_verify
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.states import dequantize_state, quantize_state
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    call,
    error,
    make_inputs,
    options,
    oracle,
    output_gradients,
    outputs,
    to_device,
    to_fp64,
)
from tests.kernels.cases import run as run_training

GROSS = 0.03
WIDTHS, DTYPES, STATES = (128, 64), (BF16, FP16), (FP32, BF16, torch.int8)
SHARED = Case(group=2, state=True)  # two value heads to a key head
PACKED = replace(SHARED, lengths=(65, 0, 1, 64))
FEW, MANY = 1, 10  # heads of q: with 4 sequences less and more than fill a GPU, which other kernels serve

CHUNKS = [
    *(replace(PACKED, K=K, V=K, dtype=d, H=H) for K, d, H in itertools.product(WIDTHS, DTYPES, (FEW, MANY))),
    *(
        replace(case, gate=gate, g_wide=gate == "log_decay" and case.dtype == BF16)
        for gate in ("softplus", "log_decay")
        for case in (Case(T=130, group=2), replace(PACKED, K=64, V=64, dtype=FP16, H=MANY))
    ),
]

TRAININGS = [
    *(replace(PACKED, K=K, V=K, dtype=d) for K, d in itertools.product(WIDTHS, DTYPES)),
    Case(T=130, gate="softplus"),
    Case(T=70, group=2, gate="log_decay", g_wide=True, beta="given"),
]

# Slots of a pool of states, of which 4 sequences read and write some; the last column is that of the last token.
SLOTS = {"pool": [[5], [1], [0], [4]], "drafts": [[0, 1, 2], [9, 10, 11], [3, 4, 5], [8, 7, 6]]}
ACCEPTED = [3, 1, 2, 1]
STEPS = {
    "one token": replace(SHARED, T=1, B=4, H=FEW),
    "pool": replace(SHARED, lengths=(3, 0, 1, 9), H=FEW),
    "drafts": replace(SHARED, T=3, B=4, H=FEW),
    "many heads": replace(SHARED, T=9, B=4, H=16),
}


class Check(NamedTuple):
    """A call, to be made on a device by a backend, and what should come out, by name, on the CPU."""

    name: str
    truth: dict[str, Tensor]
    run: Callable[[str, str], dict[str, Tensor]]


def chunk_check(case: Case) -> Check:
    """A call of `kda`."""
    x = make_inputs(case)
    run = lambda device, backend: outputs(call(to_device(x, device), backend))  # noqa: E731
    return Check(f"kda {case}", outputs(oracle(x)), run)


def training_check(case: Case) -> Check:
    """A call of `kda` and every gradient."""
    x = make_inputs(case)
    d_out = output_gradients(x)

    def run(device: str, backend: str) -> dict[str, Tensor]:
        with torch.enable_grad():
            y, d = to_device(x, device), {n: t.to(device) for n, t in d_out.items()}
            return run_training(lambda z: call(z, backend), y, d)

    with torch.enable_grad():
        truth = run_training(oracle, to_fp64(x), d_out)
    return Check(f"gradients {case}", truth, run)


def step_check(kind: str, K: int, dtype: torch.dtype, state_dtype: torch.dtype) -> Check:
    """A call of `kda_step` of one of `STEPS`."""
    x = make_inputs(replace(STEPS[kind], K=K, V=K, dtype=dtype))
    assert x.initial_state is not None
    narrow: Tensor = x.initial_state.to(state_dtype)
    scale: Tensor | None = None
    if state_dtype == torch.int8:
        narrow, scale = quantize_state(x.initial_state)
    o, final, _ = oracle(x._replace(initial_state=_wide(narrow, scale)))
    assert final is not None
    slots = torch.tensor(SLOTS[kind]) if kind in SLOTS else torch.arange(4)[:, None]
    accepted = torch.tensor(ACCEPTED) if kind == "drafts" else torch.ones(4, dtype=torch.int64)
    read, count = slots.gather(1, accepted[:, None] - 1)[:, 0], 12 if kind in SLOTS else 4
    pool = narrow.new_full((count, *narrow.shape[1:]), torch.nan if scale is None else 7)
    pool[read] = narrow
    pool_scale = None
    if scale is not None:
        pool_scale = scale.new_full((count, *scale.shape[1:]), torch.nan)
        pool_scale[read] = scale
    given = {"pool": {"state_indices": slots[:, 0]}, "drafts": {"state_indices": slots, "num_accepted": accepted}}

    def run(device: str, backend: str) -> dict[str, Tensor]:
        y: Inputs = to_device(x, device)
        state = pool.to(device, copy=True)
        state_scale = None if pool_scale is None else pool_scale.to(device, copy=True)
        more: dict[str, Any] = options(y) | {n: t.to(device) for n, t in given.get(kind, {}).items()}
        o = kda_step(*y[:5], state, state_scale=state_scale, **more, backend=backend)
        return {"o": o, "state": _wide(state, state_scale).cpu()[slots[:, -1]]}

    name = f"kda_step {kind}, K={K}, {dtype}, state {state_dtype}"
    return Check(name.replace("torch.", ""), {"o": o, "state": final}, run)


def verify_check(K: int, dtype: torch.dtype, state_dtype: torch.dtype) -> Check:
    """Two calls of `kda_verify` on packed drafts in a pool; the second commits the tokens of the first."""
    lengths = (3, 0, 1, 9)
    x = make_inputs(replace(SHARED, lengths=lengths, H=FEW, K=K, V=K, dtype=dtype))
    assert x.initial_state is not None
    assert x.cu_seqlens is not None
    slots, count = torch.tensor([5, -1, 0, 3]), torch.tensor(lengths)
    o, final, _ = oracle(x._replace(initial_state=x.initial_state.to(state_dtype).float()))
    assert final is not None
    pool = x.initial_state.new_full((6, *x.initial_state.shape[1:]), torch.nan, dtype=state_dtype)
    pool[slots[[0, 2, 3]]] = x.initial_state[[0, 2, 3]].to(state_dtype)
    updates = x.initial_state.new_full((6, 9, x.v.shape[2], 3 * K), torch.nan)

    def run(device: str, backend: str) -> dict[str, Tensor]:
        y: Inputs = to_device(x, device)
        state, kept = pool.to(device, copy=True), updates.to(device, copy=True)
        more: dict[str, Any] = options(y) | dict(state_indices=slots.to(device), backend=backend)
        o = kda_verify(*y[:5], state, kept, **more)
        kda_verify(*y[:5], state, kept, num_accepted=count.to(device), **more)
        return {"o": o, "state": state.float().cpu()[[5, 0, 3]]}

    name = f"kda_verify K={K}, {dtype}, state {state_dtype}"
    return Check(name.replace("torch.", ""), {"o": o, "state": final[[0, 2, 3]]}, run)


def _wide(state: Tensor, scale: Tensor | None) -> Tensor:
    return state.float() if scale is None else dequantize_state(state, scale)


def main(device: str = "cuda", backend: str = "sm90") -> None:
    """Raise a RuntimeError at the first output that is grossly wrong."""
    checks = [chunk_check(case) for case in CHUNKS] + [training_check(case) for case in TRAININGS]
    floats = [dtype for dtype in STATES if dtype.is_floating_point]
    checks += [verify_check(*kind) for kind in itertools.product(WIDTHS, DTYPES, floats)]
    checks += [step_check(*kind) for kind in itertools.product(STEPS, WIDTHS, DTYPES, STATES)]
    for name, truth, run in checks:
        got = run(device, backend)
        errors = {n: error(got[n], t) for n, t in truth.items()}
        print(f"{name}: " + ", ".join(f"{n} {e:.2g}" for n, e in errors.items()), flush=True)
        if not all(e < GROSS for e in errors.values()):
            raise RuntimeError(f"errors of {name} must be below {GROSS}, got {errors}")
    print(f"all {len(checks)} cases")


if __name__ == "__main__":
    with torch.no_grad():
        main()
