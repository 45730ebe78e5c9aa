"""flash-linear-attention's argument names against the recurrence, each argument by its documented meaning there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from kda_layers.kernels.contract import Inputs
from kda_layers.kernels.fla_api import chunk_kda, fused_recurrent_kda
from kda_layers.kernels.reference import recurrence
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
        q=normal(B, T, H, K), k=0.3 * normal(B, T, H, K), v=normal(B, T, HV, V),  # |k| < 1 as no norm sees to it
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
    """Of o and of the final state, with respect to every tensor."""
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
            A_log=A_log, dt_bias=dt_bias,
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


def test_dt_bias_by_head() -> None:
    """[HV, K] is accepted as well as [HV * K]."""
    tensors, options = make("all")
    by_head = tensors | {"dt_bias": tensors["dt_bias"].view(HV, K)}
    assert torch.equal(
        chunk_kda(**by_head, **options, state_v_first=True)[0], call(chunk_kda, tensors, options, True)[0]
    )


# ---------------------------------------------------------------- chunk_kda


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


def states_before(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """[B, ceil(T / 64), HV, V, K] of a batch, by the recurrence over every shorter prefix."""
    B, T = tensors["q"].shape[:2]
    states = [tensors.get("initial_state", torch.zeros(B, HV, V, K, dtype=FP64))]
    for end in range(64, T, 64):
        part = {n: t[:, :end] if n in ("q", "k", "v", "g", "beta") else t for n, t in tensors.items()}
        states.append(truth(part, options)[1])
    return torch.stack(states, 1)


@both_layouts
@pytest.mark.parametrize("case", ["norm", "all"])
def test_states_before_chunks_of_packed_sequences(case: str, v_first: bool) -> None:
    """One sequence's after the other's; an empty sequence has none."""
    tensors, options = make(case, packed=True)
    _, _, before = call(chunk_kda, tensors, options, v_first, cu_seqlens=offsets(), return_intermediate_states=True)
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
    "rate of a q/k head": (dict(use_gate_in_kernel=True, A_log=torch.zeros(H)), ValueError, r"A_log .*\[4\], .*\[2\]"),
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
    "unknown argument": (dict(head_first=True), TypeError, "head_first"),
    "unknown backend": (dict(backend="abacus"), ValueError, "'abacus'"),
}  # fmt: skip
CHUNK_REFUSES = {
    "chunk size": (dict(chunk_size=16), ValueError, "chunk_size must be 32 or 64, got 16"),
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
    "two kinds of offsets": (
        dict(cu_seqlens=torch.tensor([0, 3]), cu_seqlens_cpu=torch.tensor([0, 1, 3])),
        ValueError,
        r"cu_seqlens_cpu must have the shape of cu_seqlens \[2\], got \[3\]",
    ),
    "context parallel": (dict(cp_context=object()), TypeError, "cp_context"),
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
