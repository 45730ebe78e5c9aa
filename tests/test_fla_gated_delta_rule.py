"""flash-linear-attention's functions for gated delta nets against the recurrence, by the meaning of each argument."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from kda_layers.kernels.fla_api import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.reference import recurrence
from tests.kernels.cases import BF16, FP32, FP64, FP64_LIMIT, error

H, HV, K, V = 2, 4, 6, 10
LENGTHS = (0, 1, 64, 3, 0, 65)  # of packed sequences

FUNCTIONS = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=["chunk", "recurrent"])
both_layouts = pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
packed_or_not = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])

# The arguments of each case, on top of the tensors; "rate", "bias" and "state" say which further tensors are given.
CASES: dict[str, dict[str, Any]] = {
    "nothing": dict(),
    "scale": dict(scale=0.3),
    "norm": dict(use_qk_l2norm_in_kernel=True),
    "gate": dict(use_gate_in_kernel=True, rate=True),
    "gate, bias": dict(use_gate_in_kernel=True, rate=True, bias=True),
    "beta": dict(use_beta_sigmoid_in_kernel=True),
    "negative eigenvalues": dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    "state": dict(state=True),
    "all": dict(
        scale=2.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, rate=True, bias=True, state=True,
    ),
}  # fmt: skip


def make(case: str, packed: bool = False, T: int = 70, dtype: torch.dtype = FP64) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a call, states as [N, HV, V, K], and its other arguments."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    options = dict(CASES[case])
    B, T = (1, sum(LENGTHS)) if packed else (2, T)
    N, wide = len(LENGTHS) if packed else B, FP64 if dtype == FP64 else FP32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    gate, beta = normal(B, T, HV), normal(B, T, HV)
    tensors = dict(
        q=normal(B, T, H, K), k=0.3 * normal(B, T, H, K), v=normal(B, T, HV, V),  # |k| < 1, as there is no norm
        g=gate if options.get("use_gate_in_kernel") else -softplus(gate),
        beta=beta if options.get("use_beta_sigmoid_in_kernel") else torch.sigmoid(beta),
    )  # fmt: skip
    tensors = {n: t.to(dtype) for n, t in tensors.items()}
    for flag, name, t in (
        ("rate", "A_log", 0.5 * normal(HV)),
        ("bias", "dt_bias", normal(HV)),
        ("state", "initial_state", normal(N, HV, V, K)),
    ):
        if options.pop(flag, False):
            tensors[name] = t.to(wide)
    return tensors, options


def truth(tensors: dict[str, Tensor], options: dict, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """o and the final state [N, HV, V, K] by the recurrence, from the documented meaning of each argument."""
    q, k, v, g, beta = (tensors[n] for n in ("q", "k", "v", "g", "beta"))
    if options.get("use_gate_in_kernel"):
        g = -tensors["A_log"].exp() * softplus(g + tensors.get("dt_bias", 0.0))
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta) * (2 if options.get("allow_neg_eigval") else 1)
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    g, state, scale = g[..., None].expand(*g.shape, K), tensors.get("initial_state"), options.get("scale", K**-0.5)
    x = Inputs(q, k, v, g, beta, None, None, state, cu_seqlens, "log_decay", 0.0, "given", False, scale, True, 0)
    return recurrence(x)[:2]


def call(function: Callable, tensors: dict[str, Tensor], options: dict, v_first: bool, **more: Any) -> tuple:
    """o and the state as [N, HV, V, K]."""
    tensors = dict(tensors)
    if "initial_state" in tensors and not v_first:
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    o, state = function(**tensors, **options, state_v_first=v_first, **more)
    return o, state if v_first or state is None else state.mT


def same(got: Any, want: Any) -> None:
    errors = [error(g.detach(), w.detach()) for g, w in zip(got, want, strict=True)]
    assert all(e <= FP64_LIMIT for e in errors), f"relative errors {errors}"


def offsets() -> Tensor:
    return torch.tensor((0, *itertools.accumulate(LENGTHS)))


@every_function
@both_layouts
@packed_or_not
@pytest.mark.parametrize("case", CASES)
def test_every_argument(case: str, packed: bool, v_first: bool, function: Callable) -> None:
    """Outputs, the final state and gradients of every tensor."""
    tensors, options = make(case, packed)
    more = dict(cu_seqlens=offsets()) if packed else {}
    with torch.no_grad():
        want = truth(tensors, options, more.get("cu_seqlens"))
        same(call(function, tensors, options, v_first, output_final_state=True, **more), want)
        o, state = call(function, tensors, options, v_first, **more)
    assert state is None
    same((o,), want[:1])
    for t in tensors.values():
        t.requires_grad_()
    got = call(function, tensors, options, v_first, output_final_state=True, **more)
    want = truth(tensors, options, more.get("cu_seqlens"))
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1), dtype=FP64) for t in want]
    grads = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(each, weights, strict=True)), tuple(tensors.values()))
        for each in (got, want)
    ]
    same(*grads)


@every_function
def test_dtypes(function: Callable) -> None:
    tensors, options = make("all", dtype=BF16)
    o, state = call(function, tensors, options, True, output_final_state=True)
    assert (o.dtype, state.dtype) == (BF16, FP32)
    o, state = call(function, tensors | {"initial_state": tensors["initial_state"].to(BF16)}, options, True)
    assert (o.dtype, state) == (BF16, None)


POSITIONAL = {  # of flash-linear-attention 0.6.0, in its order
    chunk_gated_delta_rule: (
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens", "cu_seqlens_cpu",
        "chunk_indices", "cp_context",
    ),
    fused_recurrent_gated_delta_rule: (
        "q", "k", "v", "g", "gk", "gv", "beta", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval", "state_v_first", "cu_seqlens",
    ),
}  # fmt: skip


@every_function
def test_signature_is_that_of_fla(function: Callable) -> None:
    """The same positional arguments, all others None or False by default; whatever is ours is a keyword."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(p.name for p in positional) == POSITIONAL[function]
    assert {p.default for p in positional} == {inspect.Parameter.empty, None, False}
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_offsets_on_the_cpu_and_chunk_sizes() -> None:
    tensors, options = make("all", packed=True)
    want = truth(tensors, options, offsets())
    for more in (dict(cu_seqlens_cpu=offsets()), dict(cu_seqlens=offsets(), chunk_size=16)):
        same(call(chunk_gated_delta_rule, tensors, options, True, output_final_state=True, **more), want)


def test_decays_of_channels_and_none_at_all() -> None:
    tensors, options = make("state")
    g, gk = tensors.pop("g"), -torch.rand(2, 70, HV, K, dtype=FP64)
    for given, decay in (
        (dict(), torch.zeros(2, 70, HV, K, dtype=FP64)),
        (dict(gk=gk), gk),
        (dict(g=g, gk=gk), gk + g[..., None]),
    ):
        q, k, v, beta, state = (tensors[n] for n in ("q", "k", "v", "beta", "initial_state"))
        x = Inputs(q, k, v, decay, beta, None, None, state, None, "log_decay", 0.0, "given", False, K**-0.5, True, 0)
        got = call(fused_recurrent_gated_delta_rule, tensors | given, options, False, output_final_state=True)
        same(got, recurrence(x)[:2])
    without_beta = {n: t for n, t in tensors.items() if n != "beta"} | {"g": g}
    got = call(fused_recurrent_gated_delta_rule, without_beta, options, False, output_final_state=True)
    same(got, truth(tensors | {"g": g, "beta": torch.ones_like(g)}, options))


@every_function
def test_deprecated_name_of_the_layout(function: Callable) -> None:
    tensors, options = make("all")
    want = call(function, tensors, options, True)
    with pytest.warns(DeprecationWarning, match="use state_v_first") as warned:
        got = function(**tensors, **options, transpose_state_layout=True)
    assert warned[0].filename == __file__
    assert torch.equal(got[0], want[0])


BOTH_REFUSE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads first": (dict(head_first=True), ValueError, "head_first must be False, got True: tokens come before heads"),
    "gates of channels": (
        dict(g=torch.zeros(2, 3, HV, K, dtype=FP64)), ValueError,
        r"g must have shape \[B, T, HV\], got \[2, 3, 4, 6\]: chunk_kda takes",
    ),
    "gates of other heads": (dict(g=torch.zeros(2, 3, H, dtype=FP64)), ValueError, r"g must .*\[2, 3, 4\], got"),
    "rate without a gate": (dict(A_log=torch.zeros(HV)), ValueError, "A_log must be None with use_gate"),
    "gate without a rate": (dict(use_gate_in_kernel=True), ValueError, "A_log must be given"),
    "bias of channels": (
        dict(use_gate_in_kernel=True, A_log=torch.zeros(HV), dt_bias=torch.zeros(HV, K)), ValueError,
        r"dt_bias must have shape \[4\] or \[4, 1\], got \[4, 6\]",
    ),
    "doubled beta, given": (dict(allow_neg_eigval=True), ValueError, "use_beta_sigmoid_in_kernel must be True"),
    "state of the other layout": (
        dict(initial_state=torch.zeros(2, HV, V, K, dtype=FP64)), ValueError, r"initial_state .*\[2, 4, 10, 6\]"
    ),
    "list": (dict(g=[1.0]), TypeError, "g must be a torch.Tensor, got list"),
    "beta of channels": (dict(beta=torch.zeros(2, 3, HV, V, dtype=FP64)), ValueError, r"beta must have shape"),
    "unknown argument": (dict(lower_bound=-5.0), TypeError, "lower_bound"),
}  # fmt: skip
CHUNK_REFUSES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "chunk size": (dict(chunk_size=128), ValueError, "chunk_size must be 16, 32 or 64, got 128"),
    "context parallel": (dict(cp_context=object()), ValueError, "cp_context must be None"),
    "chunk indices": (dict(chunk_indices=torch.zeros(1, 2)), ValueError, "chunk_indices must be None"),
}
RECURRENT_REFUSES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "decay of values": (dict(gv=torch.zeros(2, 3, HV, V)), ValueError, "gv must be None, got a tensor"),
    "gate without logits": (dict(g=None, use_gate_in_kernel=True), ValueError, "g must hold logits.*got None"),
    "gate and channels": (
        dict(gk=torch.zeros(2, 3, HV, K), use_gate_in_kernel=True), ValueError, "gk be None, .*got a tensor and gk"
    ),
    "beta without logits": (dict(beta=None, use_beta_sigmoid_in_kernel=True), ValueError, "beta must be given"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "message"),
    [
        pytest.param(function, *refusal, id=f"{function.__name__}-{name}")
        for function, own in zip(FUNCTIONS, (CHUNK_REFUSES, RECURRENT_REFUSES), strict=True)
        for name, refusal in (BOTH_REFUSE | own).items()
    ],
)
def test_refused_arguments(function: Callable, arguments: dict, kind: type[Exception], message: str) -> None:
    tensors, _ = make("nothing", T=3)
    with pytest.raises(kind, match=message):
        function(**(tensors | arguments))


@pytest.mark.compiles
@every_function
def test_compiled(function: Callable) -> None:
    tensors, options = make("all", T=3)
    want = call(function, tensors, options, True, output_final_state=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    same(compiled(**tensors, **options, output_final_state=True, state_v_first=True), want)
