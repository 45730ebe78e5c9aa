"""Every kernel of a backend once, on shapes that fill no block, in few launches: for `make memcheck`, which makes each
launch and each allocation a hundred times slower. How right the results are, the other tests say."""

from __future__ import annotations

import pytest
import torch

from kda_layers.kernels.kda.contract import problem_of
from tests.kernels.cases import (
    Case,
    call,
    for_training,
    ids,
    make_inputs,
    on_every_backend,
    on_every_device,
    output_gradients,
    poisoned_memory,
    run,
    serve,
)

CASES = [
    Case(T=1, B=3, H=1, state=True),
    Case(T=65, B=3, H=1, state=True),
    Case(T=79, K=60, V=100, slow=True, state=True),
    Case(T=130, K=16, V=16, gate="softplus", beta="2sigmoid"),
    Case(T=70, gate="log_decay", beta="given", l2norm=False),
    Case(T=81, B=2, H=1, group=4, layout="fused", state=True),
    Case(lengths=(0, 1, 64, 0, 65, 1, 0), state=True),
    Case(lengths=(65, 0, 1, 30, 64), H=1, group=2, slow=True, offsets_dtype=torch.int64),
]


@on_every_backend
@on_every_device
@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", **ids(CASES))
def test_ragged(case: Case, needs_grad: bool, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Nothing that comes out is NaN where all memory was."""
    x = make_inputs(for_training(case, backend, device) if needs_grad else case, device)
    serve(backend, problem_of(x, needs_grad), required_backends)
    with poisoned_memory(), torch.set_grad_enabled(needs_grad):
        got = run(lambda x: call(x, backend), x, output_gradients(x))
    assert {n for n, t in got.items() if not t.isfinite().all()} == set()
