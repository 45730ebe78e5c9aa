"""int8 states of `kda_step`: outputs are those of the same state in fp32, rounding is unbiased and loses no update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import kda_step
from kda_layers.kernels.kda.contract import KDA, DecodeInputs, Inputs, problem_of
from kda_layers.states import dequantize_state, quantize_state
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    ids,
    make_inputs,
    on_every_backend,
    on_every_device,
    options,
    poisoned_memory,
    sequences,
    serve,
    step_inputs,
)

STEP = ("q", "k", "v", "g", "beta")
UNWRITTEN = 77  # in slots that nothing may write
WITHIN = 1.001  # scales between an element and the fp32 result, whose sums differ by far less


def step(x: Inputs, state: Tensor, scale: Tensor | None, backend: str | None, **indices: Tensor) -> Tensor:
    with poisoned_memory():
        return kda_step(*x[:5], state, state_scale=scale, **options(x), **indices, backend=backend)


def tokens_of(x: Inputs, part: slice) -> Inputs:
    return x._replace(**{n: getattr(x, n)[:, part] for n in STEP})


def inputs(case: Case, device: str, backend: str, required: frozenset[str]) -> Inputs:
    """Inputs of a case that the backend serves with an int8 state; skips if it does not."""
    x = make_inputs(case, device)
    # flash-linear-attention has no such state, so that its refusal is no failure where it is required.
    serve(backend, problem_of(step_inputs(x, state=x.initial_state.to(torch.int8))), required - {"fla"})
    return x


def check_outputs(o: Tensor, want: Tensor) -> None:
    """`o` is that of the kernel for fp32 states, up to how compilers contract products and sums."""
    torch.testing.assert_close(o, want, rtol=torch.finfo(o.dtype).eps, atol=float(want.abs().max()) * 1e-6)


def check_rounded(state: Tensor, scale: Tensor, wide: Tensor) -> None:
    """`state` is `wide`, each element rounded up or down, and nothing else."""
    assert ((dequantize_state(state, scale) - wide).abs() <= WITHIN * scale[..., None]).all()
    assert (scale <= wide.abs().amax(-1) * (1.001 / 127)).all()


CASES = [
    Case(T=1, B=2, state=True),
    Case(T=8, H=2, group=4, slow=True, state=True),
    Case(T=3, B=3, H=1, K=64, V=64, dtype=FP16, gate="softplus", beta_wide=True, state=True),
    Case(T=2, H=1, gate="log_decay", beta="given", g_wide=True, state=True),
    Case(T=3, B=2, H=1, group=2, K=60, V=100, dtype=FP32, state=True),
    Case(lengths=(3, 0, 1, 5), H=1, group=2, state=True),
]


@on_every_backend
@on_every_device
@pytest.mark.parametrize("case", **ids(CASES))
def test_outputs_and_states(case: Case, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Each token's output is that of the rounded state before it, and its state is rounded."""
    x = inputs(case, device, backend, required_backends)
    state, scale = quantize_state(x.initial_state)
    for s, n in zip(sequences(x), range(len(state)), strict=False) if case.lengths else [(x, slice(None))]:
        for t in range(s.q.shape[1]):
            part = slice(n, n + 1) if isinstance(n, int) else n
            token, wide = tokens_of(s, slice(t, t + 1)), dequantize_state(state[part], scale[part])
            o = step(token, state[part], scale[part], backend)
            check_outputs(o, step(token, wide, None, backend))
            check_rounded(state[part], scale[part], wide)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-12, 1e-5, 1e-4, 1e-3, 1e-2, 1e5])
def test_faint_and_strong_states(factor: float, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Nothing is lost whose size is not a rounding, whatever a token's update is beside the state."""
    x = inputs(Case(T=1, B=2, H=2, state=True), device, backend, required_backends)
    state, scale = quantize_state(x.initial_state * factor)
    wide = dequantize_state(state, scale)
    step(x, state, scale, backend)
    step(x, wide, None, backend)
    check_rounded(state, scale, wide)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_not_finite(name: str, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Neither an infinite nor a NaN input leaves a sequence finite; the other one keeps its bits."""
    x = inputs(Case(T=1, B=2, H=1, state=True), device, backend, required_backends)
    clean, clean_scale = quantize_state(x.initial_state)
    step(x, clean, clean_scale, backend)
    for value in (torch.inf, torch.nan) if name != "g" and name != "beta" else (torch.nan,):
        t = getattr(x, name).clone()
        t[1].view(-1)[3 % t[1].numel()] = value
        state, scale = quantize_state(x.initial_state)
        o = step(x._replace(**{name: t}), state, scale, backend)
        bad = dequantize_state(state[1], scale[1])
        assert not (o[1].isfinite().all() and bad.isfinite().all())
        assert torch.equal(state[0], clean[0])
        assert torch.equal(scale[0], clean_scale[0])


@on_every_backend
@on_every_device
def test_the_mean_error_is_0(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Over all elements; and the errors of a row's elements do not add up."""
    x = inputs(Case(T=1, B=2, H=4, group=2, state=True), device, backend, required_backends)
    state, scale = quantize_state(x.initial_state)
    wide = dequantize_state(state, scale)
    step(x, wide, None, backend)
    step(x, state, scale, backend)
    error = (dequantize_state(state, scale) - wide) / scale[..., None]
    assert abs(error.mean()) < 5 * error.std() / error.numel() ** 0.5
    assert error.sum(-1).square().mean() < 1.3 * error.shape[-1] * error.square().mean()


@on_every_backend
@on_every_device
def test_equal_inputs_give_equal_bits(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """In a batch, alone, and in another slot of a pool.

    Each sequence has 32 values of beta: on a CPU, torch's sigmoid rounds what is left of blocks of 32 otherwise.
    """
    x = inputs(Case(T=4, B=3, H=4, group=2, state=True), device, backend, required_backends)
    state, scale = quantize_state(x.initial_state)
    pool, pool_scale = torch.full_like(state, UNWRITTEN).repeat(2, 1, 1, 1), scale.new_full((6, *scale.shape[1:]), 9.0)
    slots = torch.tensor([5, 0, 3], device=device)
    pool[slots], pool_scale[slots] = state, scale
    alone = [t[1:2].clone() for t in (state, scale)]
    o = step(x, state, scale, backend)
    one = x._replace(**{n: getattr(x, n)[1:2] for n in STEP})
    assert torch.equal(step(one, *alone, backend), o[1:2])
    assert torch.equal(alone[0], state[1:2])
    assert torch.equal(alone[1], scale[1:2])
    assert torch.equal(step(x, pool, pool_scale, backend, state_indices=slots), o)
    assert torch.equal(pool[slots], state)
    assert torch.equal(pool_scale[slots], scale)
    assert (pool[[1, 2, 4]] == UNWRITTEN).all()
    assert (pool_scale[[1, 2, 4]] == 9).all()


@on_every_backend
@on_every_device
def test_drafts_and_padding(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """A state after each token, that of a call without drafts; a sequence that reads slot -1 touches nothing."""
    x = inputs(Case(T=3, B=3, H=1, state=True), device, backend, required_backends)
    state, scale = quantize_state(x.initial_state)
    slots = torch.tensor([[3, -1, 5], [-1, 1, 8], [7, 4, 2]], device=device)
    accepted = torch.tensor([1, 1, 2], device=device)
    pool = torch.full((9, *state.shape[1:]), UNWRITTEN, dtype=torch.int8, device=device)
    pool_scale = scale.new_full((9, *scale.shape[1:]), 9.0)
    pool[[3, 4]], pool_scale[[3, 4]] = state[[0, 2]], scale[[0, 2]]
    o = step(x, pool, pool_scale, backend, state_indices=slots, num_accepted=accepted)
    assert not o[1].any()
    exact = backend != "eager"  # whose sums depend on the number of sequences
    for t in range(3):
        o_want = step(tokens_of(x, slice(t, t + 1)), state, scale, backend)
        wide = dequantize_state(state, scale)
        for n in (0, 2):
            assert not exact or torch.equal(o[n, t], o_want[n, 0])
            if slots[n, t] >= 0:
                got = dequantize_state(pool[slots[n, t]], pool_scale[slots[n, t]])
                assert ((got - wide[n]).abs() <= (0 if exact else 2 * (t + 1)) * scale[n, ..., None]).all()
    assert (pool[[0, 1, 6, 8]] == UNWRITTEN).all()
    assert (pool_scale[[0, 1, 6, 8]] == 9).all()


@on_every_backend
@on_every_device
def test_views_of_a_pool(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """State and scale may be strided over slots and heads."""
    x = inputs(Case(T=1, B=2, H=2, state=True), device, backend, required_backends)
    state, scale = quantize_state(x.initial_state)
    wide_state, wide_scale = state.repeat(2, 2, 1, 1), scale.repeat(2, 2, 1)
    views = wide_state[::2, 1:3], wide_scale[::2, 1:3]
    for view, t in zip(views, (state, scale), strict=True):
        view.copy_(t)
    o = step(x, state, scale, backend)
    assert torch.equal(step(x, *views, backend), o)
    assert torch.equal(views[0], state)
    assert torch.equal(views[1], scale)


@on_every_backend
@on_every_device
def test_faint_updates_are_not_lost(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Updates of about a fortieth of a step arrive on average; rounded to the nearest, none of them would."""
    T = 10
    x = inputs(Case(T=T, H=2, gate="log_decay", beta="given", state=True), device, backend, required_backends)
    x = x._replace(g=torch.zeros_like(x.g), beta=torch.full_like(x.beta, 1e-2))
    state, scale = quantize_state(x.initial_state)
    start = dequantize_state(state, scale)
    wide = start.clone()
    for t in range(T):
        token = tokens_of(x, slice(t, t + 1))
        step(token, wide, None, backend)
        step(token, state, scale, backend)
    steps = scale[..., None]
    moved, want = (dequantize_state(state, scale) - start) / steps, (wide - start) / steps
    assert (want / T).square().mean().sqrt() < 0.1
    share, noise = (moved * want).sum() / want.square().sum(), 5 * (T**0.5 / 2) / want.square().sum().sqrt()
    assert noise < 0.5
    assert abs(share - 1) < noise


@on_every_backend
@on_every_device
def test_a_token_without_effect(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """It changes no bit: neither a scale nor, with the same scale, an element is rounded once more."""
    x = inputs(Case(T=1, H=4, gate="log_decay", beta="given", state=True), device, backend, required_backends)
    x = x._replace(g=torch.zeros_like(x.g), beta=torch.zeros_like(x.beta))
    state, scale = quantize_state(x.initial_state)
    before, scale_before = state.clone(), scale.clone()
    step(x, state, scale, backend)
    stays = before.abs().amax(-1) == 127
    assert torch.equal(state[stays], before[stays])
    assert torch.equal(scale[stays], scale_before[stays])


@on_every_backend
@on_every_device
def test_a_nan_stays_visible(device: str, backend: str, required_backends: frozenset[str]) -> None:
    x = inputs(Case(T=1, H=2, state=True), device, backend, required_backends)
    state, scale = quantize_state(x.initial_state)
    x.v[0, 0, 1, 5] = torch.nan
    step(x, state, scale, backend)
    assert not step(x, state, scale, backend)[0, 0, 1, 5].isfinite()
    bad = ~dequantize_state(state, scale).isfinite()
    assert bad[0, 1, 5].all()
    assert not bad[0, 0].any()


def test_rounding() -> None:
    """The mean error is 0, zeros stay zeros, rows that are tiny become 0, NaN and inf stay visible."""
    torch.manual_seed(0)
    x = torch.randn(400, 64, 128)
    state, scale = quantize_state(x)
    steps = (dequantize_state(state, scale) - x) / scale[..., None]
    assert steps.abs().max() <= WITHIN
    assert abs(steps.mean()) < 5 * steps.std() / steps.numel() ** 0.5
    assert state.max() <= 127
    assert state.min() >= -127

    x = torch.zeros(5, 8)
    x[1], x[2, 3], x[3, 3], x[4, 0] = 1e-38, torch.nan, torch.inf, -3.0
    state, scale = quantize_state(x)
    back = dequantize_state(state, scale)
    assert not back[0].any()
    assert not back[1].any()
    assert not back[2:4].isfinite().any(-1).any()
    assert torch.equal(back[4, 1:], torch.zeros(7))
    assert abs(back[4, 0] + 3) <= 0.03
    assert torch.equal(quantize_state(x[4].bfloat16())[0], state[4])


def test_rounding_again_changes_nothing() -> None:
    """As in rows that a token neither decays nor writes; a few, whose peak was rounded to 126, get another scale."""
    torch.manual_seed(0)
    x = torch.randn(400, 64, 128) * torch.logspace(-20, 20, 64)[:, None]
    state, scale = quantize_state(x)
    again, scale_again = quantize_state(dequantize_state(state, scale))
    stays = state.abs().amax(-1) == 127
    assert stays.float().mean() > 0.99
    assert torch.equal(again[stays], state[stays])
    assert torch.equal(scale_again[stays], scale[stays])


@pytest.mark.compiles
def test_a_compiled_step() -> None:
    x = make_inputs(Case(T=1, B=2, H=1, K=8, V=8, dtype=FP32, state=True))
    state, scale = quantize_state(x.initial_state)
    compiled_state, compiled_scale = state.clone(), scale.clone()
    o = step(x, state, scale, "eager")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(state: Tensor, scale: Tensor) -> Tensor:
        return kda_step(*x[:5], state, state_scale=scale, **options(x), backend="eager")

    assert torch.equal(compiled(compiled_state, compiled_scale), o)
    assert torch.equal(compiled_state, state)
    assert torch.equal(compiled_scale, scale)


def test_who_refuses() -> None:
    x = make_inputs(Case(T=1, B=2, H=1, state=True))
    problem = problem_of(step_inputs(x, state=x.initial_state.to(torch.int8)))
    assert problem.int8_state
    assert "state is int8, needs float32" in KDA.backend("fla").refusals(problem)


def arguments(dtype: torch.dtype = BF16) -> dict[str, Any]:
    x = make_inputs(Case(T=1, B=2, H=1, K=8, V=8, dtype=dtype, state=True))
    state, scale = quantize_state(x.initial_state.float())
    return dict(zip(STEP, x[:5], strict=True)) | {"state": state, "state_scale": scale} | options(x)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a: {"state_scale": None}, ValueError, r"state_scale must be given with an int8 state.*quantize_state"),
        (lambda a: {"state": a["state"].float()}, ValueError, r"state_scale must be None with a state of float32"),
        (lambda a: {"state_scale": a["state_scale"][:1]}, ValueError, r"state_scale must have shape \[2, 1, 8\], got"),
        (lambda a: {"state_scale": a["state_scale"].bfloat16()}, TypeError, r"state_scale must be float32 with state"),
        (lambda a: {"state_scale": 1.0}, TypeError, r"state_scale must be a torch.Tensor, got float"),
        (lambda a: {"state_scale": a["state_scale"][:1].expand(2, -1, -1)}, ValueError, "must not be expanded"),
        (lambda a: {"state_scale": a["state_scale"].repeat(1, 1, 2)[..., ::2]}, ValueError, "have contiguous rows"),
    ],
)  # fmt: skip
def test_errors(change: Any, error: type, text: str) -> None:
    good = arguments()
    kda_step(**good)
    with pytest.raises(error, match=text):
        kda_step(**good | change(good))


def test_errors_of_dtypes() -> None:
    with pytest.raises(TypeError, match=r"state must be float64 with q of float64, got \S*int8"):
        kda_step(**arguments(FP64))
    with pytest.raises(TypeError, match=r"state must be float32 or bfloat16, got \S*float64"):
        quantize_state(torch.zeros(1, 2, dtype=FP64))
    with pytest.raises(TypeError, match=r"state must be int8, got \S*float32"):
        dequantize_state(torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"state_scale must have shape \[1\], got \[2\]"):
        dequantize_state(torch.zeros(1, 2, dtype=torch.int8), torch.zeros(2))


def test_the_inputs_of_the_op() -> None:
    """Tensors lead, which the caches of calls and plans count."""
    assert DecodeInputs._fields.index("state_scale") == 11
