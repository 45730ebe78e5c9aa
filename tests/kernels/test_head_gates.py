"""One gate a head, g [B, T, HV]: `kda` with that gate for every channel, and transformers' gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import explain, kda, kda_prefill, kda_step
from kda_layers.kernels.kda.contract import HEAD_GATES, KDA, Gradients, Inputs, problem_of
from kda_layers.kernels.kda.eager.chunks import load
from kda_layers.kernels.kda.eager.schedule import Plan
from kda_layers.kernels.kda.reference import activate, recurrence
from tests.kernels.cases import (
    BF16,
    FP32,
    FP64,
    Case,
    budget,
    call,
    check,
    error,
    ids,
    limits_of,
    make_inputs,
    on_every_backend,
    on_every_device,
    options,
    oracle,
    output_gradients,
    run,
    serve,
    to_fp64,
)

CASES = [
    Case(T=130, B=2, H=1, group=2, K=16, V=24, dtype=FP64, head_gates=True, slow=True, state=True),
    Case(T=70, H=2, K=16, V=24, dtype=FP64, head_gates=True, gate="softplus", g_wide=True),
    Case(lengths=(65, 0, 1, 70), K=8, V=8, dtype=FP64, head_gates=True, gate="log_decay", state=True),
]


def for_each_channel(x: Inputs) -> Inputs:
    """The same gates, given for every channel."""
    (_, _, HV), K = x.g.shape, x.q.shape[3]
    bias = None if x.dt_bias is None else x.dt_bias[:, None].expand(HV, K).contiguous()
    return x._replace(g=x.g[..., None].expand(*x.g.shape, K).contiguous(), dt_bias=bias)


def summed(result: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results with the gradients of gates summed over channels."""
    return {n: t.sum(-1) if n in ("d_g", "d_dt_bias") else t for n, t in result.items()}


@pytest.mark.parametrize("case", **ids(CASES))
def test_equals_the_gate_of_every_channel(case: Case) -> None:
    x = make_inputs(case)
    d_out = output_gradients(x)
    got, want = run(call, x, d_out), summed(run(call, for_each_channel(x), d_out))
    assert got["d_g"].shape == x.g.shape
    check(got, want, {n: budget(0.0, FP64) for n in want})


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`eager` takes gates of channels only, as our CUDA kernels."""
    monkeypatch.setattr(KDA.backend("eager"), "fused", KDA.backend("eager").fused - {HEAD_GATES})
    KDA.clear_caches()
    yield
    KDA.clear_caches()


@pytest.mark.parametrize("case", **ids(CASES))
def test_a_backend_of_channels_gets_the_gate_repeated(case: Case, repeating: None) -> None:
    """Bit for bit the call with repeated gates, and the sums of its gradients."""
    x = make_inputs(case)
    d_out = output_gradients(x)
    got, want = run(call, x, d_out), summed(run(call, for_each_channel(x), d_out))
    different = [n for n in want if not torch.equal(got[n], want[n])]
    assert not different


def test_sums_of_gradients_in_bf16_lose_nothing(repeating: None) -> None:
    """Each channel's gradient is rounded before the sum over channels."""
    x = make_inputs(Case(T=70, H=1, K=64, V=64, dtype=BF16, head_gates=True, slow=True))
    d_out = output_gradients(x)
    got, truth = run(call, x, d_out), run(oracle, to_fp64(x), d_out)
    assert got["d_g"].dtype == BF16
    assert error(got["d_g"], truth["d_g"]) <= budget(0.0, BF16)


def test_explanations_say_where_gates_are_repeated(repeating: None) -> None:
    x = make_inputs(Case(head_gates=True))
    text = explain(problem_of(x))
    assert "gate=lower_bound of a head" in text
    assert "eager    can serve it; the gate of a head is repeated for every key channel first" in text
    assert "repeated" not in explain(problem_of(for_each_channel(x)))


def test_eager_repeats_nothing() -> None:
    x = make_inputs(Case(head_gates=True, K=16, V=24))
    assert "repeated" not in explain(problem_of(x))
    x = activate(x, KDA.backend("eager").fused)
    chunks = load(x, next(Plan.of(x).segments()))
    assert {t.shape[-1] for t in (x.g, chunks.token_decay, chunks.p, chunks.s, chunks.decay)} == {1}


@on_every_backend
@on_every_device
@pytest.mark.parametrize("dtype", [FP64, BF16], ids=["fp64", "bf16"])
def test_steps_after_a_prefill(
    dtype: torch.dtype, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    width = 64 if dtype == BF16 else 16
    x = make_inputs(Case(T=70, B=2, H=1, group=2, K=width, V=width, dtype=dtype, head_gates=True, state=True), device)
    serve(backend, problem_of(x), required_backends)
    truth, yardstick = oracle(to_fp64(x)), oracle(x)
    state, parts = x.initial_state.clone(), []
    with torch.no_grad():
        for start, end in ((0, 66), (66, 67), (67, 70)):
            tokens = [t[:, start:end] for t in x[:5]]
            arguments: dict[str, Any] = options(x) | dict(backend=backend)
            if start:
                parts.append(kda_step(*tokens, state, **arguments))
            else:
                parts.append(kda_prefill(*tokens, state, **arguments).o)
    for got, name in ((torch.cat(parts, 1), "o"), (state, "final_state")):
        want, single = getattr(truth, name), getattr(yardstick, name)
        assert error(got, want) <= budget(error(single, want), dtype), name


@pytest.mark.parametrize("T", [1, 64, 150])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_equals_transformers(T: int, norm: bool) -> None:
    """Both torch functions of Qwen3-Next, in outputs, final state and gradients."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    generator = torch.Generator().manual_seed(T)
    B, H, HV, K, V = 2, 2, 4, 16, 24

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    small = 1.0 if norm else 0.7 * K**-0.5
    tensors = dict(
        q=normal(B, T, H, K), k=small * normal(B, T, H, K), v=normal(B, T, HV, V),
        g=-torch.nn.functional.softplus(normal(B, T, HV) - 2), beta=torch.sigmoid(normal(B, T, HV)),
        initial_state=normal(B, HV, K, V),
    )  # fmt: skip
    d_o, d_final = normal(B, T, HV, V), normal(B, HV, K, V)

    def ours(initial_state: Tensor, **t: Tensor) -> tuple[Tensor, Tensor]:
        kept = dict(gate_activation="log_decay", beta_activation="given", qk_l2norm=norm, state_layout="kv")
        out = kda(**t, initial_state=initial_state, **kept, return_final_state=True)
        return out.o, out.final_state

    def ours_by_token(initial_state: Tensor, **t: Tensor) -> tuple[Tensor, Tensor]:
        more = None, None, initial_state.mT, None, "log_decay", 0.0, "given", norm, K**-0.5, True, 0
        o, final, _ = recurrence(Inputs(**t, **dict(zip(Inputs._fields[5:], more, strict=False))))
        return o, final.mT

    def theirs(function: Any) -> Any:
        def f(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor) -> Any:
            q, k = (t.repeat_interleave(HV // H, 2) for t in (q, k))  # in transformers 5.17 by its caller
            return function(
                q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
                use_qk_l2norm_in_kernel=norm,
            )  # fmt: skip

        return f

    def results(f: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {n: t.to(dtype, copy=True).requires_grad_() for n, t in tensors.items()}
        o, final = f(**leaves)
        loss = (o * d_o.to(o)).sum() + (final * d_final.to(final)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, grads, strict=True))}

    truth, yardstick = (results(ours_by_token, dtype) for dtype in (FP64, FP32))
    limits = limits_of(yardstick, truth, FP32)
    check(results(ours, FP32), truth, limits)
    check(results(theirs(qwen.torch_recurrent_gated_delta_rule), FP32), truth, limits)
    # Its decays between tokens are differences of cumulative sums, which cost it about a bit.
    check(results(theirs(qwen.torch_chunk_gated_delta_rule), FP32), truth, {n: 2 * e for n, e in limits.items()})


@pytest.mark.compiles
@pytest.mark.parametrize("repeats", [False, True], ids=["native", "repeated"])
def test_compiled(repeats: bool, request: pytest.FixtureRequest) -> None:
    """In one graph, with gradients; and torch's own checks of the op."""
    if repeats:
        request.getfixturevalue("repeating")
    torch.compiler.reset()
    x = make_inputs(replace(CASES[0], T=70))
    d_out = output_gradients(x)
    names = [n for n in Gradients._fields if getattr(x, n) is not None]

    def forward(*tensors: Tensor) -> Any:
        return call(x._replace(**dict(zip(names, tensors, strict=True))))

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    got = run(lambda y: compiled(*(getattr(y, n) for n in names)), x, d_out)
    check(got, run(oracle, x, d_out), {n: budget(0.0, FP64) for n in got})
    inner = activate(x, KDA.backend("eager").fused)
    leaves = {n: getattr(inner, n).detach().requires_grad_() for n in ("q", "k", "v", "g", "beta")}
    torch.library.opcheck(torch.ops.kda_layers.kda.default, (*inner._replace(**leaves), True, "eager"))
