"""flash-linear-attention's argument names against the recurrence, each argument by its documented meaning there."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from kda_layers.kernels.fla_api import chunk_kda, fused_kda_gate, fused_recurrent_kda
from kda_layers.kernels.kda.contract import KDA, Inputs
from kda_layers.kernels.kda.reference import log_decay, recurrence
from tests.kernels.cases import BF16, FP32, FP64, FP64_LIMIT, budget, error

H, HV, K, V = 2, 4, 6, 10
LENGTHS = (0, 1, 64, 3, 0, 65)  # of packed sequences
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

every_function = pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda], ids=["chunk", "recurrent"])
both_layouts = pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
packed_or_not = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])

# The arguments of each case, on top of the tensors; "state" and "bias" say whether initial_state, dt_bias are given.
CASES: dict[str, dict[str, Any]] = {
    "nothing": dict(),
    "scale": dict(scale=0.3),
    "negative scale": dict(scale=-1),
    "norm": dict(use_qk_l2norm_in_kernel=True),
    "bounded decay": dict(lower_bound=-5.0),  # which then only describes g
    "softplus": dict(use_gate_in_kernel=True, rate=True),
    "softplus, bias": dict(use_gate_in_kernel=True, rate=True, bias=True),
    "bound": dict(use_gate_in_kernel=True, lower_bound=-3.0),
    "bound, bias": dict(use_gate_in_kernel=True, lower_bound=-5, bias=True),
    "bound, rate": dict(use_gate_in_kernel=True, lower_bound=-1.5, rate=True),
    "bound, rate, bias": dict(use_gate_in_kernel=True, lower_bound=-5.0, rate=True, bias=True),
    "beta": dict(use_beta_sigmoid_in_kernel=True),
    "negative eigenvalues": dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    "state": dict(state=True),
    "all": dict(
        scale=2.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, lower_bound=-5.0, rate=True, bias=True, state=True,
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)


def make(case: str, packed: bool = False, T: int = 70, dtype: torch.dtype = FP64) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a call, states as [N, HV, V, K] and the bias as [HV * K], and its other arguments."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    options = dict(CASES[case])
    B, T = (1, sum(LENGTHS)) if packed else (2, T)
    N, wide = len(LENGTHS) if packed else B, FP64 if dtype == FP64 else FP32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    gate, beta = normal(B, T, HV, K), normal(B, T, HV)
    tensors = dict(
        q=normal(B, T, H, K), k=0.3 * normal(B, T, H, K), v=normal(B, T, HV, V),  # |k| < 1, as there is no norm
        g=gate if options.get("use_gate_in_kernel") else -5 * torch.sigmoid(gate),
        beta=beta if options.get("use_beta_sigmoid_in_kernel") else torch.sigmoid(beta),
    )  # fmt: skip
    tensors = {n: t.to(dtype) for n, t in tensors.items()}
    for flag, name, t in (
        ("rate", "A_log", 0.5 * normal(HV)),
        ("bias", "dt_bias", normal(HV * K)),
        ("state", "initial_state", normal(N, HV, V, K)),
    ):
        if options.pop(flag, False):
            tensors[name] = t.to(wide)
    return tensors, options


def offsets(lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=dtype)


def truth(tensors: dict[str, Tensor], options: dict[str, Any], cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
    """o and the final state [N, HV, V, K] by the recurrence, after applying every activation here."""
    q, k, v, g, beta, A_log, dt_bias, state = (tensors.get(n) for n in NAMES)
    if options.get("use_gate_in_kernel"):
        x = g if dt_bias is None else g + dt_bias.view(HV, K)
        rate = 1.0 if A_log is None else A_log.exp()[:, None]
        bound = options.get("lower_bound")
        g = -rate * softplus(x) if bound is None else bound * torch.sigmoid(rate * x)
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta) * (2 if options.get("allow_neg_eigval") else 1)
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    scale = options.get("scale")
    scale = K**-0.5 if scale is None else scale
    o, final, _ = recurrence(
        Inputs(q, k, v, g, beta, None, None, state, cu_seqlens, "log_decay", 0.0, "given", False, float(scale), True, 0)
    )
    return o, final


def laid_out(state: Tensor, v_first: bool) -> Tensor:
    """[.., V, K] in the layout of a call, contiguous; also the way back."""
    return state if v_first else state.mT.contiguous()


def call(function: Callable, tensors: dict[str, Tensor], options: dict, v_first: bool, **more: Any) -> tuple:
    tensors = dict(tensors)
    if "initial_state" in tensors:
        tensors["initial_state"] = laid_out(tensors["initial_state"], v_first)
    return function(**tensors, **options, state_v_first=v_first, **more)


def same(got: Any, want: Any, limit: float = FP64_LIMIT) -> None:
    errors = [error(g.detach(), w.detach()) for g, w in zip(got, want, strict=True)]
    assert all(e <= limit for e in errors), f"relative errors {errors}, limit {limit}"


# ---------------------------------------------------------------- what both compute


@every_function
@both_layouts
@packed_or_not
@every_case
def test_every_argument(case: str, packed: bool, v_first: bool, function: Callable) -> None:
    tensors, options = make(case, packed)
    before = {n: t.clone() for n, t in tensors.items()}
    more = dict(cu_seqlens=offsets()) if packed else {}
    want_o, want_state = truth(tensors, options, more.get("cu_seqlens"))
    o, state = call(function, tensors, options, v_first, output_final_state=True, **more)
    assert tuple(state.shape) == (len(LENGTHS) if packed else 2, HV, *((V, K) if v_first else (K, V)))
    assert state.is_contiguous()
    same((o, laid_out(state, v_first)), (want_o, want_state))
    o, state = call(function, tensors, options, v_first, **more)
    assert state is None
    same((o,), (want_o,))
    assert all(torch.equal(t, before[n]) for n, t in tensors.items()), "an input was written to"


@every_function
@both_layouts
@packed_or_not
@pytest.mark.parametrize("case", ["softplus, bias", "bound", "all"])
def test_gradients(case: str, packed: bool, v_first: bool, function: Callable) -> None:
    """Compare gradients of o and of the final state with respect to every tensor."""
    tensors, options = make(case, packed)
    for t in tensors.values():
        t.requires_grad_()
    cu_seqlens = offsets() if packed else None
    generator = torch.Generator().manual_seed(1)
    got = call(function, tensors, options, v_first, output_final_state=True, cu_seqlens=cu_seqlens)
    want = truth(tensors, options, cu_seqlens)
    weights = [torch.randn(t.shape, generator=generator, dtype=FP64) for t in want]
    grads = []
    for o, state in ((got[0], laid_out(got[1], v_first)), want):
        loss = (o * weights[0]).sum() + (state * weights[1]).sum()
        grads.append(torch.autograd.grad(loss, tuple(tensors.values())))
    same(*grads)


@every_function
@pytest.mark.parametrize("case", ["nothing", "all"])
def test_bf16(case: str, function: Callable) -> None:
    """bf16 inputs with states, A_log and dt_bias in fp32 are as wrong as the recurrence; 16-bit parameters are cast."""
    tensors, options = make(case, dtype=BF16)
    exact = {n: t.double() for n, t in tensors.items()}
    (want_o, want_state), (o, state) = truth(exact, options), truth({n: t.float() for n, t in tensors.items()}, options)
    limit = budget(error(o.to(BF16), want_o), BF16), budget(error(state, want_state), FP32)
    got_o, got_state = call(function, tensors, options, True, output_final_state=True)
    assert (got_o.dtype, got_state.dtype) == (BF16, FP32)
    same((got_o,), (want_o,), limit[0])
    same((got_state,), (want_state,), limit[1])
    rounded = {n: t.to(BF16) if n in ("A_log", "dt_bias") else t for n, t in tensors.items()}
    wide = {n: t.float() if n in ("A_log", "dt_bias") else t for n, t in rounded.items()}
    assert torch.equal(call(function, rounded, options, True)[0], call(function, wide, options, True)[0])


@every_function
def test_positions_are_those_of_fla(function: Callable) -> None:
    """Positional calls mean what they mean there."""
    tensors, options = make("all")
    q, k, v, g, beta, A_log, dt_bias, state = (tensors[n] for n in NAMES)
    want_o, want_state = truth(tensors, options)
    if function is chunk_kda:
        o, final, before = function(
            q, k, v, g, beta, 2.0, state, True, True, True, True, True, True, -5.0, False, True, True, None, None,
            None, False, None, A_log=A_log, dt_bias=dt_bias,
        )  # fmt: skip
        same((before[:, 0],), (state,))
    else:
        o, final = function(
            q, k, v, g, beta, A_log, dt_bias, 2.0, state, True, True, True, True, True, -5.0, True, None
        )
    same((o, final), (want_o, want_state))


@every_function
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets(dtype: torch.dtype, function: Callable) -> None:
    tensors, options = make("all", packed=True)
    want = truth(tensors, options, offsets())
    cpu = offsets(dtype=dtype)
    calls = [dict(cu_seqlens=cpu)]
    if function is chunk_kda:
        calls += [dict(cu_seqlens_cpu=cpu), dict(cu_seqlens=cpu, cu_seqlens_cpu=cpu)]
    for each in calls:
        same(call(function, tensors, options, True, output_final_state=True, **each), want)


COMMON = (
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
)  # fmt: skip
POSITIONAL = {  # of flash-linear-attention 0.6.0, in its order
    chunk_kda: (
        *NAMES[:5], *COMMON, "safe_gate", "lower_bound", "disable_recompute", "return_intermediate_states",
        "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "cp_context", "use_graph", "max_num_seqs",
    ),
    fused_recurrent_kda: (*NAMES[:7], *COMMON, "lower_bound", "state_v_first", "cu_seqlens"),
    fused_kda_gate: ("g", "A_log", "dt_bias", "lower_bound", "output_dtype"),
}  # fmt: skip


@pytest.mark.parametrize("function", POSITIONAL, ids=lambda f: f.__name__)
def test_signature_is_that_of_fla(function: Callable) -> None:
    """The same positional arguments and defaults; whatever is ours is a keyword."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(p.name for p in positional) == POSITIONAL[function]
    given = {p.name: p.default for p in positional if p.default is not p.empty}
    wanted = {name: given[name] for name in given if given[name] is not None and given[name] is not False}
    assert wanted == ({"output_dtype": FP32} if function is fused_kda_gate else {})
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@every_function
@pytest.mark.parametrize(
    ("rate", "bias"),
    [((1, 1, HV, 1), (HV * K,)), ((HV, 1), (HV, K)), ((2, HV // 2), (1, 1, HV, K)), ((HV,), (1, HV * K))],
    ids=str,
)
def test_gate_parameters_of_any_shape(rate: tuple[int, ...], bias: tuple[int, ...], function: Callable) -> None:
    """A_log with HV elements, dt_bias with HV * K; their gradients have the shapes given."""
    tensors, options = make("softplus, bias")
    results = []
    for shapes in (((HV,), (HV * K,)), (rate, bias)):
        A_log, dt_bias = (
            tensors[n].reshape(s).requires_grad_() for n, s in zip(("A_log", "dt_bias"), shapes, strict=True)
        )
        o, _ = call(function, tensors | {"A_log": A_log, "dt_bias": dt_bias}, options, True)
        grads = torch.autograd.grad(o.square().sum(), (A_log, dt_bias))
        assert tuple(tuple(d.shape) for d in grads) == shapes
        results.append((o, *(d.flatten() for d in grads)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@every_function
def test_deprecated_name_of_the_layout(function: Callable) -> None:
    """`transpose_state_layout` means `state_v_first`, with a warning that names the caller's line."""
    tensors, options = make("all")
    want = call(function, tensors, options, True, output_final_state=True)
    with pytest.warns(DeprecationWarning, match="state_v_first") as warned:
        got = function(**tensors, **options, output_final_state=True, transpose_state_layout=True)
    assert [w.filename for w in warned] == [__file__]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="transpose_state_layout is the deprecated name of state_v_first"):
        function(**tensors, **options, state_v_first=True, transpose_state_layout=True)


@every_function
def test_final_state_is_fp32(function: Callable) -> None:
    """Also where the initial one is bf16, which is then used as it is and left as it was."""
    tensors, options = make("all", dtype=BF16)
    wide = {n: t.to(BF16).to(FP32) if n == "initial_state" else t for n, t in tensors.items()}
    want = call(function, wide, options, True, output_final_state=True)
    tensors["initial_state"] = tensors["initial_state"].to(BF16)
    before = tensors["initial_state"].clone()
    for v_first in (True, False):
        o, state = call(function, tensors, options, v_first, output_final_state=True)
        assert state.dtype == FP32
        assert torch.equal(o, want[0])
        assert torch.equal(laid_out(state, v_first), want[1])
    assert torch.equal(tensors["initial_state"], before)


@every_function
@pytest.mark.parametrize("width", ["K", "V"])
def test_initial_state_of_width_one_is_left_as_it_was(width: str, function: Callable) -> None:
    """The initial state is unchanged even if both layouts are the same memory."""
    tensors, _ = make("state")
    narrow = ("q", "k", "g") if width == "K" else ("v",)
    tensors |= {n: tensors[n][..., :1].contiguous() for n in narrow}
    state = tensors.pop("initial_state").mT
    state = (state[:, :, :1] if width == "K" else state[..., :1]).contiguous()
    before = state.clone()
    _, final = function(**tensors, initial_state=state, output_final_state=True)
    assert torch.equal(state, before)
    assert not torch.equal(final, before)


@every_function
def test_strided_initial_state(function: Callable) -> None:
    tensors, options = make("state")
    want = call(function, tensors, options, True, output_final_state=True)
    strided = tensors["initial_state"].mT.contiguous().mT
    got = function(**(tensors | {"initial_state": strided}), state_v_first=True, output_final_state=True)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.compiles
@every_function
def test_compiled(function: Callable) -> None:
    """One graph, with the deprecated name of the layout as well."""
    tensors, options = make("all", T=3)
    tensors["A_log"] = tensors["A_log"].view(1, 1, HV, 1)
    want = call(function, tensors, options, True, output_final_state=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for more in (dict(state_v_first=True), dict(transpose_state_layout=True)):
        same(compiled(**tensors, **options, output_final_state=True, **more), want)


# ---------------------------------------------------------------- chunk_kda


@every_function
@pytest.mark.parametrize("name", ["cp_context", "max_num_seqs", "chunk_indices", "use_graph"])
def test_accepted_at_their_defaults(name: str, function: Callable) -> None:
    tensors, options = make("all", T=3)
    more = {name: False if name == "use_graph" else None}
    want = call(function, tensors, options, False)
    assert torch.equal(call(function, tensors, options, False, **more)[0], want[0])


@pytest.mark.parametrize(
    "hint",
    [
        dict(safe_gate=True),
        dict(disable_recompute=True),
        dict(chunk_size=32),
        dict(chunk_size=64),
        dict(backend="eager"),
    ],
    ids=str,
)
def test_hints_change_nothing(hint: dict[str, Any]) -> None:
    tensors, options = make("all")
    want = call(chunk_kda, tensors, options, False, output_final_state=True)
    got = call(chunk_kda, tensors, options, False, output_final_state=True, **hint)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@both_layouts
@pytest.mark.parametrize("case", ["norm", "all"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 128, 130])
def test_states_before_chunks(T: int, case: str, v_first: bool) -> None:
    """ceil(T / 64) states, of which the first is the initial one; with or without the final state."""
    tensors, options = make(case, T=T)
    want_o, want_final = truth(tensors, options)
    for final in (True, False):
        o, state, before = call(
            chunk_kda, tensors, options, v_first, output_final_state=final, return_intermediate_states=True
        )
        same((o,), (want_o,))
        same((laid_out(before, v_first),), (states_before(tensors, options),))
        if final:
            same((laid_out(state, v_first),), (want_final,))
        else:
            assert state is None


@both_layouts
@packed_or_not
@pytest.mark.parametrize("state", [None, FP32, BF16], ids=str)
def test_dtype_of_states_before_chunks(state: torch.dtype | None, packed: bool, v_first: bool) -> None:
    """q's dtype by default, fp32 on request; the default rounds the fp32 values."""
    tensors, options = make("all", packed, T=130, dtype=BF16)
    initial = tensors.pop("initial_state")
    if state is not None:
        tensors["initial_state"] = initial.to(state)
    kinds: dict[torch.dtype, dict[str, Any]] = {
        BF16: dict(),
        FP32: dict(intermediate_states_dtype=FP32),
    }
    before = {}
    for dtype, kind in kinds.items():
        *_, before[dtype] = call(
            chunk_kda, tensors, options, v_first, return_intermediate_states=True,
            cu_seqlens=offsets() if packed else None, **kind,
        )  # fmt: skip
        assert before[dtype].dtype == dtype
    assert torch.equal(before[FP32].to(BF16), before[BF16])
    assert not torch.equal(before[FP32], before[BF16].float())


@pytest.mark.parametrize(("disable_recompute", "above"), [(False, 0.0), (True, 1.0), (None, 0.0)])
def test_disable_recompute(disable_recompute: bool | None, above: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """False, the default, keeps nothing but the inputs."""
    tensors, options = make("all")
    tensors["v"].requires_grad_()
    eager, seen = KDA.backends()["eager"], []
    forward = eager.forward
    monkeypatch.setattr(eager, "forward", lambda x, save: (seen.append(x.recompute_above), forward(x, save))[1])
    more = {} if disable_recompute is None else dict(disable_recompute=disable_recompute)
    call(chunk_kda, tensors, options, True, backend="eager", **more)
    assert seen == [above]


def states_before(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """[B, ceil(T / 64), HV, V, K] of a batch, by the recurrence over every shorter prefix."""
    B, T = tensors["q"].shape[:2]
    states = [tensors.get("initial_state", torch.zeros(B, HV, V, K, dtype=FP64))]
    for end in range(64, T, 64):
        part = {n: t[:, :end] if n in ("q", "k", "v", "g", "beta") else t for n, t in tensors.items()}
        states.append(truth(part, options)[1])
    return torch.stack(states, 1)


@both_layouts
@pytest.mark.parametrize("given", [("cu_seqlens",), ("cu_seqlens", "cu_seqlens_cpu")], ids=",".join)
@pytest.mark.parametrize("case", ["norm", "all"])
def test_states_before_chunks_of_packed_sequences(case: str, given: tuple[str, ...], v_first: bool) -> None:
    """One sequence's after the other's; an empty sequence has none."""
    tensors, options = make(case, packed=True)
    more: dict[str, Any] = dict.fromkeys(given, offsets())
    *_, before = call(chunk_kda, tensors, options, v_first, return_intermediate_states=True, **more)
    rows = []
    for n, (a, b) in enumerate(itertools.pairwise(offsets().tolist())):
        part = {name: t[:, a:b] for name, t in tensors.items() if name in ("q", "k", "v", "g", "beta")}
        part |= {name: tensors[name] for name in ("A_log", "dt_bias") if name in tensors}
        if "initial_state" in tensors:
            part["initial_state"] = tensors["initial_state"][n : n + 1]
        rows += [states_before(part, options)] if b > a else []
    want = torch.cat(rows, 1)
    assert want.shape[1] == sum(-(-n // 64) for n in LENGTHS)
    same((laid_out(before, v_first),), (want,))


# ---------------------------------------------------------------- decoding


@both_layouts
@packed_or_not
@pytest.mark.parametrize("T", [1, 3])
def test_state_in_place(T: int, packed: bool, v_first: bool) -> None:
    tensors, options = make("all", packed, T)
    cu_seqlens = offsets() if packed else None
    want_o, want_state = truth(tensors, options, cu_seqlens)
    state = laid_out(tensors.pop("initial_state").clone(), v_first)
    for returned in (False, True):  # the state is returned whether or not it was asked for
        mine = state.clone()
        o, final = fused_recurrent_kda(
            **tensors, **options, initial_state=mine, state_v_first=v_first, cu_seqlens=cu_seqlens,
            inplace_final_state=True, output_final_state=returned,
        )  # fmt: skip
        assert final is mine
        same((o, laid_out(mine, v_first)), (want_o, want_state))


def decode(lengths: tuple[int, ...], seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, packed along T, of one decoding call of sequences with these numbers of tokens."""
    tensors, options = make("all", T=sum(lengths) + seed)
    tensors = {n: t[:1, seed:] if n in ("q", "k", "v", "g", "beta") else t for n, t in tensors.items()}
    tensors.pop("initial_state")
    return tensors, options


def pool_after(
    pool: Tensor, tensors: dict[str, Tensor], options: dict, lengths: tuple[int, ...], slots: Tensor, start: list[int]
) -> tuple[Tensor, Tensor]:
    """o and the pool [slots, HV, V, K] after sequence n starts from slot start[n] and writes slots[n, t] after its
    token t."""
    outputs, new = [], pool.clone()
    for n, (a, b) in enumerate(itertools.pairwise(offsets(lengths).tolist())):
        state = pool[start[n]][None]
        for t in range(a, b):
            token = {name: x[:, t : t + 1] if name not in ("A_log", "dt_bias") else x for name, x in tensors.items()}
            o, state = truth(token | {"initial_state": state}, options)
            outputs.append(o)
            new[slots[n, t - a]] = state[0]
    return torch.cat(outputs, 1), new


@both_layouts
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_one_slot_for_each_sequence(index_dtype: torch.dtype, v_first: bool) -> None:
    """[N] slots of a pool, also with several tokens each; other slots stay as they are."""
    lengths, slots = (3, 1, 2), torch.tensor([4, 0, 2], dtype=index_dtype)
    pool = torch.randn(6, HV, V, K, generator=torch.Generator().manual_seed(0), dtype=FP64)
    tensors, options = decode(lengths, seed=1)
    want = pool_after(pool, tensors, options, lengths, slots.long()[:, None].expand(-1, 3), slots.tolist())
    mine = laid_out(pool.clone(), v_first)
    o, final = fused_recurrent_kda(
        **tensors, **options, initial_state=mine, state_v_first=v_first, cu_seqlens=offsets(lengths),
        inplace_final_state=True, ssm_state_indices=slots,
    )  # fmt: skip
    assert final is mine
    same((o, laid_out(mine, v_first)), want)
    assert torch.equal(laid_out(mine, v_first)[[1, 3, 5]], pool[[1, 3, 5]])


@both_layouts
@packed_or_not
def test_drafted_tokens_are_taken_back(packed: bool, v_first: bool) -> None:
    """[N, T] slots keep the state after each token; the next call goes on from the last accepted one."""
    lengths = (3, 1, 2) if packed else (3, 3, 3)
    slots = torch.tensor([[5, 6, 7], [0, 1, 2], [8, 3, 4]])
    pool = torch.randn(10, HV, V, K, generator=torch.Generator().manual_seed(0), dtype=FP64)
    mine, start = laid_out(pool.clone(), v_first), [5, 0, 8]
    accepted = torch.tensor([2, 1, 2] if packed else [2, 1, 3])
    for turn, num_accepted in enumerate((None, accepted)):
        tensors, options = decode(lengths, seed=turn)
        want_o, pool = pool_after(pool, tensors, options, lengths, slots, start)
        start = slots.gather(1, accepted[:, None] - 1)[:, 0].tolist()
        if not packed:
            tensors = {
                n: t.view(3, 3, *t.shape[2:]) if n not in ("A_log", "dt_bias") else t for n, t in tensors.items()
            }
        o, _ = fused_recurrent_kda(
            **tensors, **options, initial_state=mine, state_v_first=v_first, inplace_final_state=True,
            cu_seqlens=offsets(lengths) if packed else None, ssm_state_indices=slots, num_accepted_tokens=num_accepted,
        )  # fmt: skip
        same((o.flatten(0, 1), laid_out(mine, v_first)), (want_o.flatten(0, 1), pool))


# ---------------------------------------------------------------- the gate alone


def exact_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The formula in fp64, for g [..., HV, K]."""
    x = g.double() if dt_bias is None else g.double() + dt_bias.double().reshape(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.double().reshape(-1, 1).exp()
    return -rate * softplus(x) if lower_bound is None else lower_bound / (1 + torch.exp(-rate * x))


gates = pytest.mark.parametrize(
    ("rate", "bias", "lower_bound"),
    [
        ((HV,), None, None), ((1, 1, HV, 1), (HV * K,), None), ((HV, 1), (1, 1, HV, K), -1.5),
        (None, (HV, K), -5), (None, None, -5.0),
    ],
    ids=str,
)  # fmt: skip


def gate_tensors(rate: Any, bias: Any, dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor | None]:
    """g [2, 5, HV, K] with logits from -40 to 40, A_log and dt_bias of the shapes given."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    g = (10 * normal(2, 5, HV, K)).to(dtype)
    return [
        g.requires_grad_(),
        None if rate is None else normal(*rate).to(parameters).requires_grad_(),
        None if bias is None else normal(*bias).to(parameters).requires_grad_(),
    ]


@gates
@pytest.mark.parametrize(
    ("dtype", "parameters"), [(FP64, FP64), (FP32, FP32), (BF16, FP32), (torch.float16, BF16)], ids=str
)
def test_gate(dtype: torch.dtype, parameters: torch.dtype, rate: Any, bias: Any, lower_bound: float | None) -> None:
    """The formula, and the oracle's; gradients have the shapes and dtypes of their tensors. Exact in fp32."""
    tensors = gate_tensors(rate, bias, dtype, parameters)
    g, A_log, dt_bias = tensors
    wide = FP64 if dtype == FP64 else FP32
    got = fused_kda_gate(g, A_log, dt_bias, lower_bound=lower_bound, output_dtype=wide)
    want = exact_gate(*tensors, lower_bound)
    limit = FP64_LIMIT if wide == FP64 else 1e-6  # of a value; 4e-6 of a sum of 60, which may cancel
    same((got,), (want,), limit)
    oracle = log_decay(
        g.to(wide), None if A_log is None else A_log.reshape(HV).to(wide),
        None if dt_bias is None else dt_bias.reshape(HV, K).to(wide),
        "softplus" if lower_bound is None else "lower_bound", lower_bound or 0.0,
    )  # fmt: skip
    assert torch.equal(got, oracle)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=FP64)
    leaves = [t for t in tensors if t is not None]
    grads = torch.autograd.grad((got * weight.to(wide)).sum(), leaves)
    exact = torch.autograd.grad((want * weight.to(wide).double()).sum(), leaves)
    for t, d, e in zip(leaves, grads, exact, strict=True):
        assert (d.shape, d.dtype) == (t.shape, t.dtype)
        same((d,), (e,), 4 * limit if t.dtype == wide else 2 * torch.finfo(t.dtype).eps)


@gates
def test_gate_of_the_operator(rate: Any, bias: Any, lower_bound: float | None) -> None:
    """`use_gate_in_kernel` computes the same."""
    g, A_log, dt_bias = gate_tensors(rate, bias, FP64, FP64)
    tensors, _ = make("nothing", T=5)
    fused = chunk_kda(
        **(tensors | {"g": g}), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound
    )
    gate = fused_kda_gate(g, A_log, dt_bias, lower_bound, FP64)
    same((chunk_kda(**(tensors | {"g": gate}))[0],), (fused[0],))


@pytest.mark.parametrize(
    ("asked", "returned"), [({}, FP32), (dict(output_dtype=BF16), BF16), (dict(output_dtype=None), torch.float16)]
)
def test_dtype_of_the_gate(asked: dict[str, Any], returned: torch.dtype) -> None:
    g, A_log, _ = gate_tensors((HV,), None, torch.float16, FP32)
    got = fused_kda_gate(g, A_log, **asked)
    assert got.dtype == returned
    assert torch.equal(got, fused_kda_gate(g, A_log).to(returned))


def test_gate_as_called_by_kimi_linear() -> None:
    """Moonshot's published code: heads not split off, their width as third argument, the bias as `g_bias`."""
    g, A_log, dt_bias = gate_tensors((1, 1, HV, 1), (HV * K,), BF16, FP32)
    want = fused_kda_gate(g, A_log, dt_bias)
    assert torch.equal(fused_kda_gate(g.flatten(-2), A_log, K, g_bias=dt_bias), want)
    assert torch.equal(fused_kda_gate(g.flatten(-2), A_log, K), fused_kda_gate(g, A_log))


@pytest.mark.compiles
def test_compiled_gate() -> None:
    g, A_log, dt_bias = gate_tensors((1, 1, HV, 1), (HV * K,), FP32, FP32)
    compiled = torch.compile(fused_kda_gate, fullgraph=True, backend="aot_eager")
    same((compiled(g, A_log, dt_bias),), (fused_kda_gate(g, A_log, dt_bias),), 1e-6)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(g=[1.0]), TypeError, "g must be a torch.Tensor, got list"),
        (dict(g=torch.zeros(HV * K)), ValueError, r"g must have shape \[..., HV, K\], got \[24\]"),
        (dict(g=torch.zeros(2, HV, K, dtype=torch.int64)), ValueError, "g must be of a float dtype, got int64"),
        (dict(A_log=None), ValueError, "A_log must be given for a gate without lower_bound"),
        (dict(A_log=torch.zeros(H)), ValueError, r"A_log must have 4 elements, .*got shape \[2\]"),
        (dict(A_log=0.5), TypeError, "A_log must be a torch.Tensor"),
        (dict(dt_bias=torch.zeros(K, HV)), ValueError, r"dt_bias must have shape \[24\] or \[4, 6\], got \[6, 4\]"),
        (dict(dt_bias=torch.zeros(HV)), ValueError, r"dt_bias must have shape .*got \[4\]"),
        (dict(lower_bound=-6.0), ValueError, r"lower_bound must be in .*-6"),
        (dict(lower_bound=1), ValueError, "lower_bound must be in"),
        (dict(g_bias=torch.zeros(HV * K)), ValueError, "g_bias needs head_k_dim as the third argument"),
        (dict(dt_bias=5), ValueError, r"g must have shape \[..., HV \* 5\] with head_k_dim=5, got \[2, 4, 6\]"),
        (dict(dt_bias=0), ValueError, "head_k_dim=0"),
        (dict(beta=torch.zeros(HV)), TypeError, "beta"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_refused_arguments_of_the_gate(arguments: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fused_kda_gate(**(dict(g=torch.zeros(2, HV, K), A_log=torch.zeros(HV)) | arguments))


# ---------------------------------------------------------------- errors

STATE = torch.zeros(2, HV, K, V, dtype=FP64)
BOTH_REFUSE = {
    "rate without a gate": (dict(A_log=torch.zeros(HV)), ValueError, "A_log must be None with use_gate"),
    "bias without a gate": (dict(dt_bias=torch.zeros(HV * K)), ValueError, "dt_bias must be None with"),
    "gate without a rate": (dict(use_gate_in_kernel=True), ValueError, "A_log must be given"),
    "bound out of range": (dict(use_gate_in_kernel=True, lower_bound=-6.0), ValueError, r"lower_bound must be in .*-6"),
    "bound of zero": (dict(use_gate_in_kernel=True, lower_bound=0.0), ValueError, "lower_bound must be in"),
    "doubled beta, given": (dict(allow_neg_eigval=True), ValueError, "use_beta_sigmoid_in_kernel must be True"),
    "bias of a head": (
        dict(use_gate_in_kernel=True, A_log=torch.zeros(HV), dt_bias=torch.zeros(HV)),
        ValueError,
        r"dt_bias must have shape \[24\] or \[4, 6\], got \[4\]",
    ),
    "rate of a q/k head": (dict(use_gate_in_kernel=True, A_log=torch.zeros(H)), ValueError, r"A_log must .* 4 .*\[2\]"),
    "state of the other layout": (dict(initial_state=STATE.mT), ValueError, r"initial_state .*\[2, 4, 10, 6\]"),
    "state of the other layout, v first": (
        dict(initial_state=STATE, state_v_first=True),
        ValueError,
        r"state.* must have shape .*\[2, 4, 10, 6\], got \[2, 4, 6, 10\]",
    ),
    "state of other sequences": (dict(initial_state=STATE[:1]), ValueError, r"state.* must have shape .*\[2, .*\[1, "),
    "state in fp32": (dict(initial_state=STATE.float()), TypeError, "state.* must be .*float64, got .*float32"),
    "batch of packed sequences": (dict(cu_seqlens=torch.tensor([0, 1, 3])), ValueError, "cu_seqlens .*B = 2"),
    "offsets of floats": (dict(cu_seqlens=torch.tensor([0.0, 3.0])), TypeError, "cu_seqlens must be int32 or int64"),
    "list": (dict(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    "logits of no heads": (dict(use_gate_in_kernel=True, g=torch.zeros(3)), ValueError, r"g must have shape .*\[3\]"),
    "transposed bias": (
        dict(use_gate_in_kernel=True, A_log=torch.zeros(HV), dt_bias=torch.zeros(K, HV)),
        ValueError,
        r"dt_bias must have shape \[24\] or \[4, 6\], got \[6, 4\]",
    ),
    "context parallel": (dict(cp_context=object()), ValueError, "cp_context must be None, .*every rank full"),
    "graph": (dict(use_graph=True), ValueError, "use_graph must be False, got True: a CUDA graph captures the call"),
    "number of sequences": (dict(max_num_seqs=4), ValueError, "max_num_seqs must be None, got 4: .*cu_seqlens"),
    "chunk indices": (dict(chunk_indices=torch.zeros(1, 2)), ValueError, "chunk_indices must be None, .*cu_seqlens"),
    "unknown argument": (dict(head_first=True), TypeError, "head_first"),
    "unknown backend": (dict(backend="abacus"), ValueError, "'abacus'"),
}  # fmt: skip
CHUNK_REFUSES = {
    "chunk size": (dict(chunk_size=16), ValueError, "`chunk_size` must be either 32 or 64, got 16"),
    "safe gate": (
        dict(use_gate_in_kernel=True, safe_gate=True, A_log=torch.zeros(HV)),
        ValueError,
        "lower_bound must be",
    ),
    "states of short chunks": (
        dict(return_intermediate_states=True, chunk_size=32),
        ValueError,
        "chunk_size must be 64 with return_intermediate_states=True, got 32",
    ),
    "offsets in a list": (dict(cu_seqlens_cpu=[0, 3]), TypeError, "cu_seqlens_cpu must be a torch.Tensor, got list"),
    "two kinds of offsets": (
        dict(cu_seqlens=torch.tensor([0, 3]), cu_seqlens_cpu=torch.tensor([0, 1, 3])),
        ValueError,
        r"cu_seqlens_cpu must have the shape of cu_seqlens \[2\], got \[3\]",
    ),
    "unknown dtype of states": (
        dict(intermediate_states_dtype=BF16),
        ValueError,
        "intermediate_states_dtype must be float64, got .*bfloat16",
    ),
}
RECURRENT_REFUSES = {
    "nothing in place": (dict(inplace_final_state=True), ValueError, "initial_state must be given"),
    "slots, not in place": (
        dict(initial_state=STATE, ssm_state_indices=torch.tensor([0, 1])),
        ValueError,
        "inplace_final_state must be True with ssm_state_indices",
    ),
    "accepted without slots": (
        dict(initial_state=STATE.clone(), inplace_final_state=True, num_accepted_tokens=torch.tensor([1, 1])),
        ValueError,
        "num_accepted needs state_indices",
    ),
    "slots outside": (
        dict(initial_state=STATE.clone(), inplace_final_state=True, ssm_state_indices=torch.tensor([0, 2])),
        ValueError,
        r"state_indices must be in \[0, 1\], got 0 to 2",
    ),
    "gradient in place": (
        dict(initial_state=STATE.clone().requires_grad_(), inplace_final_state=True),
        ValueError,
        "has no gradient",
    ),
    "chunk size": (dict(chunk_size=64), TypeError, "chunk_size"),
}


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "message"),
    [
        pytest.param(function, *refusal, id=f"{function.__name__}-{name}")
        for function, own in ((chunk_kda, CHUNK_REFUSES), (fused_recurrent_kda, RECURRENT_REFUSES))
        for name, refusal in (BOTH_REFUSE | own).items()
    ],
)
def test_refused_arguments(function: Callable, arguments: dict, kind: type[Exception], message: str) -> None:
    tensors, _ = make("nothing", T=3)
    state = arguments.get("initial_state")
    before = None if state is None else state.detach().clone()
    with pytest.raises(kind, match=message):
        function(**(tensors | arguments))
    assert before is None or torch.equal(state.detach(), before), "a refused call wrote the state"


def test_intermediate_states_are_for_inference() -> None:
    tensors, options = make("norm")
    tensors["v"].requires_grad_()
    with pytest.raises(ValueError, match="return_intermediate_states=True is for inference"):
        chunk_kda(**tensors, **options, return_intermediate_states=True)
    with torch.no_grad():
        assert len(chunk_kda(**tensors, **options, return_intermediate_states=True)) == 3
