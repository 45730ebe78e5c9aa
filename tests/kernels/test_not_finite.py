"""Reach of a NaN or inf in the inputs, and ways to find it: as the operator's documentation says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_layers import kda_step
from kda_layers.kernels.kda.contract import Inputs, problem_of
from kda_layers.kernels.kda.reference import recurrence
from tests.kernels.cases import (
    BF16,
    Case,
    call,
    make_inputs,
    on_every_backend,
    on_every_device,
    options,
    output_gradients,
    run,
    serve,
)

BAD = 100  # a token of the second chunk of 64, of the second sequence
every_input = pytest.mark.parametrize(
    ("name", "value"),
    [(name, torch.nan) for name in ("k", "v", "g", "beta")] + [(name, torch.inf) for name in ("k", "v")],
)


def good(o: Tensor) -> Tensor:
    """Return a mask of the tokens of o [..., HV, V] that are finite in every channel."""
    return o.isfinite().all(-1).all(-1)


@on_every_backend
@on_every_device
@every_input
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_bad_token_reaches_its_chunk_and_what_follows(
    packed: bool, name: str, value: float, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Not an earlier chunk, whose state is good as well, and not another sequence, whose results are the same bits."""
    shape = dict(lengths=(170,) * 3) if packed else dict(B=3, T=170)
    x = make_inputs(Case(**shape, H=1, K=64, V=64, dtype=BF16, slow=True), device)
    serve(backend, problem_of(x), required_backends)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        o, final, checkpoints = call(x, backend)
        if packed:  # 2 rows of checkpoints for each sequence, and one more that is unused
            return o.unflatten(1, (3, 170))[0], final, checkpoints[0, :6].unflatten(0, (3, 2))
        return o, final, checkpoints

    want = run()
    (getattr(x, name)[0, 170 + BAD] if packed else getattr(x, name)[1, BAD])[0] = value
    o, final, checkpoints = run()
    for got, before in zip((o, final, checkpoints), want, strict=True):
        assert torch.equal(got[[0, 2]], before[[0, 2]])
    assert torch.equal(o[1, :64], want[0][1, :64])
    assert torch.equal(checkpoints[1, 0], want[2][1, 0])
    assert not good(o)[1, BAD:].any()
    assert not final[1].isfinite().all()
    assert not checkpoints[1, 1].isfinite().all()


@on_every_backend
@on_every_device
@every_input
def test_a_bad_token_shows_in_gradients(
    name: str, value: float, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """The gradients of gate parameters, and of k from it on; not those of another sequence."""
    x = make_inputs(Case(B=2, T=170, H=1, K=64, V=64, dtype=BF16, slow=True, checkpoints=False), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    d_out = output_gradients(x)
    want = run(lambda x: call(x, backend), x, d_out)
    getattr(x, name)[1, BAD][0] = value
    got = run(lambda x: call(x, backend), x, d_out)
    for n in ("d_q", "d_k", "d_v", "d_g", "d_beta"):
        assert torch.equal(got[n][0], want[n][0])
    assert not good(got["d_k"])[1, BAD:].any()
    assert not got["d_A_log"].isfinite().any()
    assert not got["d_dt_bias"].isfinite().all()


@every_input
@pytest.mark.parametrize("how", ["recurrence", "kda_step"])
def test_token_by_token_shows_where_it_was(how: str, name: str, value: float) -> None:
    """The first bad output is at the token itself; `kda` on the CPU shows an earlier one."""
    x = make_inputs(Case(B=3, T=170, H=1, K=8, V=8, dtype=torch.float32, slow=True))
    getattr(x, name)[1, BAD, 0] = value
    o = recurrence(x)[0] if how == "recurrence" else kda_step(*x[:5], torch.zeros(3, 1, 8, 8), **options(x))
    assert good(o).tolist() == [[True] * 170, [True] * BAD + [False] * (170 - BAD), [True] * 170]
    first = int(good(call(x).o)[1].logical_not().nonzero()[0])
    assert 64 <= first < BAD


# ---------------------------------------------------------------- values outside of the domain


def precomputed(value: float, name: str) -> Inputs:
    """Inputs with a precomputed gate and beta, with one element set to `value`."""
    case = Case(B=2, T=5, H=1, K=4, V=4, dtype=torch.float32, gate="log_decay", beta="given", state=True)
    x = make_inputs(case)
    getattr(x, name)[1, 2, 0] = value
    return x


@pytest.mark.parametrize("step", [False, True], ids=["kda", "kda_step"])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("g", 1e-3, r"g must be at most 0 with gate_activation='log_decay' .*, got up to 0.001"),
        ("g", torch.inf, r"g must be at most 0 "),
        ("beta", 50.0, r"beta must be in \[0, 2\] with beta_activation='given', got .* to 50"),
        ("beta", -0.1, r"beta must be in \[0, 2\] with beta_activation='given', got -0.1 to "),
    ],
)
def test_precomputed_values_outside_of_their_domain(name: str, value: float, text: str, step: bool) -> None:
    x = precomputed(value, name)
    x.beta[0, 0] = torch.nan  # does not hide it
    x.g[0, 0] = torch.nan
    state = x.initial_state.clone()
    with pytest.raises(ValueError, match=text):
        kda_step(*x[:5], state, **options(x)) if step else call(x)
    assert torch.equal(state, x.initial_state)


@pytest.mark.parametrize("step", [False, True], ids=["kda", "kda_step"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("g", 0.0), ("g", -0.0), ("g", -torch.inf), ("g", torch.nan), ("beta", 0.0), ("beta", 2.0), ("beta", torch.nan)],
)
def test_the_bounds_and_nan_pass(name: str, value: float, step: bool) -> None:
    """A NaN stays in its sequence."""
    x = precomputed(value, name)
    o = kda_step(*x[:5], x.initial_state.clone(), **options(x)) if step else call(x).o
    assert good(o)[0].all()


def test_logits_have_no_bounds() -> None:
    x = make_inputs(Case(B=1, T=5, H=1, K=4, V=4, dtype=torch.float32))
    x.g[0, 2], x.beta[0, 3] = 1e4, 1e4
    assert good(call(x).o).all()
