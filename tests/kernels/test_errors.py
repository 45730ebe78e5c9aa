"""Every way to call the operators wrongly: the message names the argument, what was expected and what came, and
nothing has been written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from kda_layers import KimiDeltaAttention, kda, kda_prefill, kda_step
from kda_layers.kernels import biased_attention
from kda_layers.kernels.fused import short_conv
from kda_layers.kernels.kda.reference import log_decay, write_strength
from tests.kernels.cases import BF16, FP16, FP32, FP64, Case, call, make_inputs, options
from tests.processes import one_process

Arguments = dict[str, Any]
Bad = tuple[str, Callable[[Arguments], Arguments], type[Exception], str]

# B = N = 2, T = 5, H = 2, HV = 4, K = 4, V = 6; packed: B = 1 and N = 3
FIXED = Case(B=2, T=5, H=2, group=2, K=4, V=6, dtype=FP32, state=True)
PACKED = Case(lengths=(2, 0, 3), H=2, group=2, K=4, V=6, dtype=FP32, state=True)


def arguments(case: Case, step: bool) -> Arguments:
    x = make_inputs(case)
    tensors = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta")}
    return tensors | options(x) | {"state" if step else "initial_state": x.initial_state}


def check_raises(
    function: Callable[..., Any], good: Arguments, change: Callable[[Arguments], Arguments], error: type, text: str
) -> None:
    given = good | change(good)
    tensors = [t for t in given.values() if type(t) is Tensor and t.device.type == "cpu" and not t.is_nested]
    before = [t.clone() for t in tensors]
    with pytest.raises(error, match=text):
        function(**given)
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(before, tensors, strict=True))


def cut(name: str, dim: int, size: int) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].narrow(dim, 0, size)}


def cast(name: str, dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].to(dtype)}


def to_meta(name: str) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].to("meta")}


def give(**values: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: values


def all_of(change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda a: {n: change(a[n]) for n in ("q", "k", "v", "g", "beta")}


def heads_first_with(parameter: str) -> Callable[[Arguments], Arguments]:
    """All tensors of tokens as [B, H, T, D], and of the gate's parameters only this one."""
    others = dict.fromkeys({"A_log", "dt_bias"} - {parameter})
    return lambda a: others | all_of(lambda t: t.transpose(1, 2))(a)


def parametrize(cases: list[Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("change", "error", "text"), [c[1:] for c in cases], ids=[c[0] for c in cases])


LOG_DECAY = {"gate_activation": "log_decay", "lower_bound": None, "A_log": None, "dt_bias": None}

INPUTS: list[Bad] = [
    ("q no tensor", give(q=[1.0]), TypeError, r"q must be a torch.Tensor, got list"),
    ("beta no tensor", give(beta=0.5), TypeError, r"beta must be a torch.Tensor, got float"),
    ("q rank", lambda a: {"q": a["q"][0]}, ValueError, r"q must have 4 dimensions, got shape \(5, 2, 4\)"),
    ("v rank", lambda a: {"v": a["v"][..., 0]}, ValueError, r"v must have 4 dimensions, got shape \(2, 5, 4\)"),
    ("beta rank", lambda a: {"beta": a["beta"][..., None]}, ValueError, r"beta must have shape \[2, 5, 4\], got"),
    ("k width", cut("k", 3, 3), ValueError, r"k must have shape \[2, 5, 2, 4\], got \[2, 5, 2, 3\]"),
    ("k tokens", cut("k", 1, 4), ValueError, r"k must have shape \[2, 5, 2, 4\], got \[2, 4, 2, 4\]"),
    ("k heads", cut("k", 2, 1), ValueError, r"k must have shape \[2, 5, 2, 4\], got \[2, 5, 1, 4\]"),
    ("v batch", cut("v", 0, 1), ValueError, r"v must have shape \[2, 5, 4, 6\], got \[1, 5, 4, 6\]"),
    ("v tokens", cut("v", 1, 4), ValueError, r"v must have shape \[2, 5, 4, 6\], got \[2, 4, 4, 6\]"),
    ("g heads", cut("g", 2, 2), ValueError, r"g must have shape \[2, 5, 4, 4\], got \[2, 5, 2, 4\]"),
    ("g width", cut("g", 3, 1), ValueError, r"g must have shape \[2, 5, 4, 4\], got \[2, 5, 4, 1\]"),
    ("beta heads", cut("beta", 2, 2), ValueError, r"beta must have shape \[2, 5, 4\], got \[2, 5, 2\]"),
    ("HV no multiple", cut("v", 2, 3), ValueError, r"v's 3 heads must be a multiple of q's 2 heads"),
    ("HV below H", cut("v", 2, 1), ValueError, r"v's 1 heads must be a multiple of q's 2 heads"),
    ("heads first", lambda a: {n: a[n].transpose(1, 2) for n in ("q", "k", "v", "g")}, ValueError,
     r"q looks like \[B, H, T, D\], got \[2, 2, 5, 4\] with beta .* \[2, 5, 4\].*q.transpose\(1, 2\)"),
    *((f"{n} heads first", lambda a, n=n: {n: a[n].transpose(1, 2)}, ValueError,
       rf"{n} looks like \[B, H, T, D\].* pass {n}.transpose\(1, 2\)") for n in ("q", "k", "v", "g")),
    ("no tokens", all_of(lambda t: t[:, :0]), ValueError, r"T must be at least 1, got"),
    ("no rows", all_of(lambda t: t[:0]), ValueError, r"B must be at least 1, got 0"),
    ("no width", lambda a: {n: a[n][..., :0] for n in ("q", "k", "g")}, ValueError, r"K must be at least 1, got 0"),
    ("no heads", lambda a: {n: a[n][:, :, :0] for n in ("q", "k")}, ValueError, r"H must be at least 1, got 0"),
]  # fmt: skip

DTYPES_AND_DEVICES: list[Bad] = [
    ("k dtype", cast("k", BF16), TypeError, r"k must be float32 with q of float32, got \S*bfloat16"),
    ("v dtype", cast("v", FP64), TypeError, r"v must be float32 with q of float32, got \S*float64"),
    ("q dtype", cast("q", FP16), TypeError, r"k must be float16 with q of float16, got \S*float32"),
    ("g flat", lambda a: {"g": a["g"].flatten(2)}, ValueError, r"g must have shape .* \[2, 5, 4, 4\], or \[2, 5, 4\] "
     r"for one gate a head, got \[2, 5, 16\]; pass g.unflatten\(-1, \(4, 4\)\)"),
    ("g of other heads", lambda a: {"g": a["g"][:, :, :2, 0]}, ValueError,
     r"g must have shape \[2, 5, 4\], got \[2, 5, 2\]"),
    ("g of heads, heads first", lambda a: {"g": a["g"][..., 0].transpose(1, 2)}, ValueError,
     r"g looks like \[B, H, T, D\].* pass g.transpose\(1, 2\)"),
    ("g of heads and dt_bias of channels", lambda a: {"g": a["g"][..., 0]}, ValueError,
     r"dt_bias must have shape \[4\], got \[4, 4\]"),
    ("dt_bias of heads and g of channels", lambda a: {"dt_bias": a["dt_bias"][:, 0]}, ValueError,
     r"dt_bias must have shape \[4, 4\], got \[4\]"),
    ("g dtype", cast("g", FP64), TypeError, r"g must be float32 with q of float32, got \S*float64"),
    ("beta dtype", cast("beta", FP16), TypeError, r"beta must be float32 with q of float32, got \S*float16"),
    *((f"all heads first, {n}", heads_first_with(n), ValueError,
       rf"v looks like \[B, H, T, D\], got \[2, 4, 5, 6\] with {n} .*pass \.transpose\(1, 2\) of each")
      for n in ("A_log", "dt_bias")),
    ("integers", all_of(lambda t: t.long()), TypeError, r"q must be one of bfloat16 or .*float64, got \S*int64"),
    ("k integer", cast("k", torch.int32), TypeError, r"k must be float32 with q of float32, got \S*int32"),
    ("beta boolean", cast("beta", torch.bool), TypeError, r"beta must be float32 with q of float32, got \S*bool"),
    ("complex", all_of(lambda t: t.to(torch.complex64)), TypeError, r"q must be one of .*, got \S*complex64"),
    *((f"{n} device", to_meta(n), ValueError, rf"{n} must be on q's device cpu, got meta")
      for n in ("k", "v", "g", "beta", "A_log", "dt_bias")),
    ("q device", to_meta("q"), ValueError, r"k must be on q's device meta, got cpu"),
]  # fmt: skip

LAYOUTS: list[Bad] = [
    *((f"{n} sparse", lambda a, n=n: {n: a[n].to_sparse()}, TypeError,
       rf"{n} must be a dense tensor, got layout torch.sparse_coo: pass {n}.to_dense\(\)")
      for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")),
    *((f"{n} {layout}", lambda a, n=n, layout=layout: {n: torch.nested.nested_tensor(list(a[n]), layout=layout)},
       TypeError, rf"{n} must be a dense tensor, got a nested .*{n}.values\(\)\[None\] and cu_seqlens={n}.offsets\(\)")
      for n in ("q", "k", "v", "g", "beta") for layout in (torch.jagged, torch.strided)),
]  # fmt: skip

GATES: list[Bad] = [
    *((f"bound {b}", give(lower_bound=b), ValueError, rf"lower_bound must be in \[-5, 0\), got {b}")
      for b in (0, 0.0, 1.5, -5.01, float("nan"), float("-inf"))),
    ("bound boolean", give(lower_bound=True), TypeError, r"lower_bound must be a number, got bool"),
    ("bound text", give(lower_bound="-5"), TypeError, r"lower_bound must be a number, got str"),
    ("bound and softplus", give(gate_activation="softplus"), ValueError, r"lower_bound must be None .*'softplus', got"),
    ("bound and log-decay", give(**LOG_DECAY | {"lower_bound": -5.0}), ValueError,
     r"lower_bound must be None .*'log_decay', got -5.0"),
    ("unknown gate", give(gate_activation="sigmoid", lower_bound=None), ValueError,
     r"gate_activation must be one of .*'lower_bound', 'softplus', 'log_decay'.*, got 'sigmoid'"),
    ("unknown gate with a bound", give(gate_activation="lowerbound"), ValueError,
     r"gate_activation must be one of .*'lower_bound', 'softplus', 'log_decay'.*, got 'lowerbound'"),
    ("no gate", give(gate_activation=None), ValueError, r"gate_activation must be one of .*, got None"),
    ("unknown beta", give(beta_activation="tanh"), ValueError,
     r"beta_activation must be one of .*'sigmoid', '2sigmoid', 'given'.*, got 'tanh'"),
    ("A_log size", cut("A_log", 0, 2), ValueError, r"A_log must have shape \[4\], got \[2\]"),
    ("A_log rank", lambda a: {"A_log": a["A_log"][None, :, None]}, ValueError,
     r"A_log must have shape \[4\], got \[1, 4, 1\]"),
    ("A_log dtype", cast("A_log", BF16), TypeError, r"A_log must be float32 with q of float32, got \S*bfloat16"),
    ("A_log no tensor", give(A_log=1.0), TypeError, r"A_log must be a torch.Tensor, got float"),
    ("dt_bias size", cut("dt_bias", 0, 2), ValueError, r"dt_bias must have shape \[4, 4\], got \[2, 4\]"),
    ("dt_bias rank", lambda a: {"dt_bias": a["dt_bias"].flatten()}, ValueError,
     r"dt_bias must have shape \[4, 4\], got \[16\]"),
    ("dt_bias dtype", cast("dt_bias", FP64), TypeError, r"dt_bias must be float32 with q of float32, got \S*float64"),
    ("A_log and log-decay", lambda a: LOG_DECAY | {"A_log": a["A_log"]}, ValueError,
     r"A_log must be None .*'log_decay'"),
    ("dt_bias and log-decay", lambda a: LOG_DECAY | {"dt_bias": a["dt_bias"]}, ValueError,
     r"dt_bias must be None .*'log_decay'"),
    ("softplus without A_log", give(gate_activation="softplus", lower_bound=None, A_log=None), ValueError,
     r"A_log must be given .*'softplus', got None"),
    ("scale no number", give(scale="big"), (TypeError, ValueError), r"scale must be .*, got"),
    ("unknown backend", give(backend="abacus"), ValueError, r"unknown backend 'abacus', known: .*eager"),
    ("unknown keyword", give(output_final_state=True), TypeError, r"unexpected keyword argument 'output_final_state'"),
]  # fmt: skip


@pytest.mark.parametrize("function", [kda, kda_step])
@parametrize(LAYOUTS)
def test_layouts_after_a_cached_call(
    function: Callable, change: Callable[[Arguments], Arguments], error: type, text: str
) -> None:
    good = arguments(FIXED, function is kda_step)
    with torch.no_grad():
        function(**good)
        with pytest.raises(error, match=text):
            function(**good | change(good))


@pytest.mark.parametrize("function", [kda, kda_step])
@parametrize(INPUTS + DTYPES_AND_DEVICES + LAYOUTS + GATES)
def test_both(function: Callable, change: Callable[[Arguments], Arguments], error: type, text: str) -> None:
    check_raises(function, arguments(FIXED, function is kda_step), change, error, text)


@pytest.mark.parametrize("function", [kda, kda_step])
def test_a_bounded_gate_has_a_default_bound(function: Callable) -> None:
    """With nothing but tensors it works, and is the gate of a layer without options."""
    good = arguments(FIXED, function is kda_step)
    plain = {name: good[name] for name in ("q", "k", "v", "g", "beta")}
    results = []
    for more in ({}, dict(lower_bound=None), dict(lower_bound=KimiDeltaAttention(8, 2, 4).kda_options["lower_bound"])):
        state = (good["state"].clone(),) if function is kda_step else ()
        out = function(*plain.values(), *state, **more)
        results.append(out if isinstance(out, Tensor) else out.o)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process that is a mesh."""
    with one_process():
        yield init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("function", [kda, kda_step, biased_attention])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "A_log"])
def test_tensors_of_several_processes(function: Callable, name: str, mesh: DeviceMesh) -> None:
    good = arguments(FIXED, function is kda_step)
    if function is biased_attention:
        good = dict.fromkeys(("q", "k", "v"), good["q"])
        name = name if name in good else "q"
    change = lambda a: {name: distribute_tensor(a[name], mesh)}  # noqa: E731
    check_raises(function, good, change, TypeError, rf"{name} must be a .*, got DTensor: pass {name}.to_local\(\)")


@pytest.mark.parametrize("activation", ["lower-bound", "sigmoid", "", None])
def test_unknown_activations_of_the_reference(activation: Any) -> None:
    with pytest.raises(ValueError, match=rf"activation must be one of .*'softplus'.*, got {activation!r}"):
        log_decay(TINY.g, TINY.A_log, TINY.dt_bias, activation, -5.0)
    with pytest.raises(ValueError, match=r"activation must be one of .*'2sigmoid'.*, got 'tanh'"):
        write_strength(TINY.beta, "tanh")


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> Callable[[Arguments], Arguments]:
    return give(cu_seqlens=torch.tensor(values, dtype=dtype))


OFFSETS: list[Bad] = [
    ("not from 0", offsets(1, 2, 2, 5), ValueError, r"cu_seqlens must start at 0, got 1"),
    ("decreasing", offsets(0, 3, 2, 5), ValueError, r"cu_seqlens must not decrease, got 3 then 2"),
    ("too short", offsets(0, 2, 2, 4), ValueError, r"cu_seqlens must end at T = 5, got 4"),
    ("too long", offsets(0, 2, 2, 6, dtype=torch.int64), ValueError, r"cu_seqlens must end at T = 5, got 6"),
    ("lengths", offsets(2, 0, 3, 5), ValueError, r"cu_seqlens must start at 0, got 2"),
    ("float", offsets(0, 2, 2, 5, dtype=FP32), TypeError, r"cu_seqlens must be int32 or int64, got \S*float32"),
    ("int16", offsets(0, 2, 2, 5, dtype=torch.int16), TypeError, r"cu_seqlens must be int32 or int64, got \S*int16"),
    ("rank", lambda a: {"cu_seqlens": a["cu_seqlens"][None]}, ValueError,
     r"cu_seqlens must have shape \[N \+ 1\] .*, got \(1, 4\): pass cu_seqlens\[0\]"),
    ("no sequence", offsets(0), ValueError, r"cu_seqlens must have shape \[N \+ 1\] with N >= 1, got \(1,\)"),
    ("list", give(cu_seqlens=[0, 2, 2, 5]), TypeError,
     r"cu_seqlens must be a torch.Tensor, got list: pass torch.tensor\(cu_seqlens, dtype=torch.int32, device='cpu'\)"),
    ("device", to_meta("cu_seqlens"), ValueError, r"cu_seqlens must be on q's device cpu, got meta"),
]  # fmt: skip


@pytest.mark.parametrize("function", [kda, kda_step])
@parametrize(OFFSETS)
def test_cu_seqlens(function: Callable, change: Callable[[Arguments], Arguments], error: type, text: str) -> None:
    check_raises(function, arguments(PACKED, function is kda_step), change, error, text)


@pytest.mark.parametrize("function", [kda, kda_step])
def test_cu_seqlens_need_one_row(function: Callable) -> None:
    good = arguments(FIXED, function is kda_step)
    check_raises(function, good, offsets(0, 2, 5), ValueError, r"cu_seqlens needs .*B = 1, got B = 2")


STATES: list[Bad] = [
    ("sequences", cut("state", 0, 1), ValueError, r"state must have shape .*\[2, 4, 6, 4\], got \[1, 4, 6, 4\]"),
    ("heads", cut("state", 1, 2), ValueError, r"state must have shape .*\[2, 4, 6, 4\], got \[2, 2, 6, 4\]"),
    ("rank", lambda a: {"state": a["state"][0]}, ValueError, r"state must have shape .*, got \[4, 6, 4\]"),
    ("dtype", cast("state", FP16), TypeError, r"state must be float32 or bfloat16 with q of float32, got \S*float16"),
    ("no tensor", give(state=0.0), TypeError, r"state must be a torch.Tensor, got float"),
    ("device", to_meta("state"), ValueError, r"state must be on q's device cpu, got meta"),
    ("[K, V] layout", lambda a: {"state": a["state"].mT.contiguous()}, ValueError,
     r"state must have shape .*\[2, 4, 6, 4\], got \[2, 4, 4, 6\]; this is the \[K, V\] layout"),
    ("view of [K, V]", lambda a: {"state": a["state"].mT.contiguous().mT}, ValueError,
     r"state must have contiguous \[V, K\] matrices \(strides 4, 1\), got strides \(1, 6\)"),
    ("view of wider", lambda a: {"state": torch.cat([a["state"]] * 2, 3)[..., ::2]}, ValueError,
     r"state must have contiguous \[V, K\] matrices \(strides 4, 1\), got strides \(8, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize("function", [kda, kda_step])
@parametrize(STATES)
def test_states(function: Callable, change: Callable[[Arguments], Arguments], error: type, text: str) -> None:
    step = function is kda_step
    good = arguments(FIXED, step)

    def change_the_one_there_is(a: Arguments) -> Arguments:
        (state,) = change({"state": a["state" if step else "initial_state"]}).values()
        return {"state" if step else "initial_state": state}

    check_raises(function, good, change_the_one_there_is, error, ("" if step else "initial_") + text)


@pytest.mark.parametrize("function", [kda, kda_step])
def test_transposed_square_state(function: Callable) -> None:
    """K = V: the shape cannot tell the layouts apart, the strides do."""
    name = "state" if function is kda_step else "initial_state"
    good = arguments(Case(B=2, T=5, K=4, V=4, dtype=FP32, state=True), function is kda_step)
    check_raises(
        function, good, lambda a: {name: a[name].mT}, ValueError,
        rf"{name} must have contiguous \[V, K\] matrices \(strides 4, 1\), got strides \(1, 4\)",
    )  # fmt: skip


@pytest.mark.parametrize("function", [kda, kda_step])
def test_one_state_for_each_packed_sequence(function: Callable) -> None:
    name = "state" if function is kda_step else "initial_state"
    good = arguments(PACKED, function is kda_step)
    check_raises(function, good, cut(name, 0, 2), ValueError, rf"{name} must have shape .*\[3, .*, got \[2, ")


STATE_DTYPES: list[Bad] = [
    (
        "fp16",
        give(state_dtype=FP16),
        TypeError,
        r"state_dtype must be float32 or bfloat16 with q of float32, got \S*float16",
    ),
    (
        "fp64",
        give(state_dtype=FP64),
        TypeError,
        r"state_dtype must be float32 or bfloat16 with q of float32, got \S*float64",
    ),
    (
        "text",
        give(state_dtype="bf16"),
        TypeError,
        r"state_dtype must be float32 or bfloat16 with q of float32, got bf16",
    ),
    (
        "initial",
        cast("initial_state", FP16),
        TypeError,
        r"initial_state must be float32 or bfloat16 with q.*got \S*float16",
    ),
]


@parametrize(STATE_DTYPES)
def test_state_dtype(change: Callable[[Arguments], Arguments], error: type, text: str) -> None:
    check_raises(kda, arguments(FIXED, False), change, error, text)


def test_state_dtype_of_16_bit_inputs() -> None:
    good = arguments(replace(FIXED, dtype=FP16), False)
    text = r"state_dtype must be float32 or bfloat16 with q of float16, got \S*float16"
    check_raises(kda, good, give(state_dtype=FP16), TypeError, text)
    text = r"initial_state must be float32 or bfloat16 with q of float16, got \S*float16"
    check_raises(kda, good, cast("initial_state", FP16), TypeError, text)


@pytest.mark.parametrize("value", [32, -64, 1, True, "64", 64.0, None], ids=str)
def test_checkpoint_every(value: Any) -> None:
    text = r"checkpoint_every must be 0 or 64, got"
    check_raises(kda, arguments(FIXED, False), give(checkpoint_every=value), (TypeError, ValueError), text)


# ---------------------------------------------------------------- decode


def slots(*values: Any, dtype: torch.dtype = torch.int64, **more: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: {
        "state": a["state"].new_ones(8, *a["state"].shape[1:]), "state_indices": torch.tensor(values, dtype=dtype)
    } | {n: torch.tensor(v) for n, v in more.items()}  # fmt: skip


ROWS = ([0, 1, 2, 3, 3], [7, 6, 5, 4, 4])  # for two sequences of five tokens
RANGE = r"state_indices must be in \[0, 7\], got"

INDICES: list[Bad] = [
    ("too large", slots(0, 8), ValueError, RANGE),
    ("negative", slots(-2, 3), ValueError, RANGE + " -2 to 3; -1 is no slot"),
    ("twice", slots(3, 3), ValueError, r"state_indices must give each slot to one sequence, got slot 3 twice"),
    ("twice in rows", slots([0, 1, 2, 3, 4], [7, 6, 5, 4, 0]), ValueError, r"state_indices .* one sequence, got slot"),
    ("too large in a row", slots([0, 1, 2, 3, 4], [0, 1, 2, 3, 9]), ValueError, RANGE),
    ("float", slots(0, 1, dtype=FP32), TypeError, r"state_indices must be int32 or int64, got \S*float32"),
    ("list", give(state_indices=[0, 1]), TypeError, r"state_indices must be a torch.Tensor, got list"),
    ("one of two", slots(0), ValueError, r"state_indices must have shape .*, got \[1\]"),
    ("four of five", slots([0, 1, 2, 3], [4, 5, 6, 7]), ValueError, r"state_indices must have shape .*, got \[2, 4\]"),
    ("rank", slots([[0]], [[1]]), ValueError, r"state_indices must have shape .*, got \[2, 1, 1\]"),
    ("device", lambda a: {"state_indices": torch.empty(2, dtype=torch.int64, device="meta")}, ValueError,
     r"state_indices must be on q's device cpu, got meta"),
    ("accepted without slots", give(num_accepted=torch.tensor([1, 1])), ValueError, r"num_accepted needs .*slot"),
    ("accepted with one slot", slots(0, 1, num_accepted=[1, 1]), ValueError, r"num_accepted needs state_indices"),
    ("accepted float", slots(*ROWS, num_accepted=[1.0, 1.0]), TypeError, r"num_accepted must be int32 or int64, got"),
    ("accepted rank", slots(*ROWS, num_accepted=[[1], [1]]), ValueError, r"num_accepted must have shape \[2\], .*got"),
    ("accepted one", slots(*ROWS, num_accepted=[1]), ValueError, r"num_accepted must have shape \[2\], .*got \[1\]"),
    ("accepted none", slots(*ROWS, num_accepted=[1, 0]), ValueError, r"num_accepted must be in \[1, 5\], got 0"),
    ("accepted too many", slots(*ROWS, num_accepted=[1, 6]), ValueError, r"num_accepted must be in \[1, 5\], got .*6"),
    ("accepted negative", slots(*ROWS, num_accepted=[-1, 1]), ValueError, r"num_accepted must be in \[1, 5\], got -1"),
]  # fmt: skip


@parametrize(INDICES)
def test_indices(change: Callable[[Arguments], Arguments], error: type, text: str) -> None:
    check_raises(kda_step, arguments(FIXED, True), change, error, text)


def test_packed_sequences_need_a_slot_for_each_token() -> None:
    few = slots([0, 1], [2, 3], [4, 5])
    text = r"state_indices must have at least 3 columns.*, got 2"
    check_raises(kda_step, arguments(PACKED, True), few, ValueError, text)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "state"])
def test_step_has_no_gradient(name: str) -> None:
    good = arguments(FIXED, True)
    wanted = {name: good[name].clone().requires_grad_()}
    check_raises(kda_step, good, give(**wanted), ValueError, "kda_step .*no gradient")
    with torch.no_grad():
        kda_step(**good | wanted)


# ---------------------------------------------------------------- the backward, and who differentiates


@pytest.mark.parametrize("final", [True, False])
def test_the_old_name_of_return_final_state(final: bool) -> None:
    given = arguments(FIXED, False)
    with pytest.warns(DeprecationWarning, match="^final_state of kda is deprecated: use return_final_state") as got:
        out = kda(**given, final_state=final)
    assert [warning.filename for warning in got] == [__file__]
    assert (out.final_state is not None) == final


@pytest.mark.parametrize("call", [kda, kda_prefill, kda_step])
def test_lower_bound_has_the_default_of_the_layer(call: Callable[..., Any]) -> None:
    (q, k, v, g), beta = torch.randn(4, 1, 1, 2, 16), torch.randn(1, 1, 2)

    def state_after(**bound: float) -> Tensor:
        state = torch.ones(1, 2, 16, 16)
        if call is kda:
            return kda(q, k, v, g, beta, initial_state=state, return_final_state=True, **bound).final_state
        call(q, k, v, g, beta, state, **bound)
        return state

    default = inspect.signature(KimiDeltaAttention).parameters["lower_bound"].default
    assert torch.equal(state_after(), state_after(lower_bound=default))
    assert not torch.equal(state_after(), state_after(lower_bound=-1.0))


@pytest.mark.parametrize("bad", ["yes", "", None, 0, 1, 2**30, [True], "auto "], ids=repr)
def test_recompute(bad: Any) -> None:
    message = r"recompute must be 'auto', 'always' or 'never', got"
    check_raises(kda, arguments(FIXED, False), give(recompute=bad), ValueError, message)


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 2.0], ids=repr)
def test_shares_of_version_0_1_out_of_range(bad: float) -> None:
    message = rf"recompute must be 'auto', 'always' or 'never', got {bad}"
    check_raises(kda, arguments(FIXED, False), give(recompute=bad), ValueError, message)


@pytest.mark.parametrize("bad", [0, 1, 0.0, 1.0, -0.1, "0.5", True], ids=repr)
def test_memory_share(bad: Any) -> None:
    message = "memory_share must be a float between 0 and 1, a share of the device's memory, got"
    check_raises(kda, arguments(FIXED, False), give(memory_share=bad), ValueError, message)
    message = "memory_share must be None with recompute='never', got"
    check_raises(kda, arguments(FIXED, False), give(memory_share=0.5, recompute="never"), ValueError, message)


ONES = torch.ones(4, 3)
TINY = make_inputs(Case(T=5, H=1, K=4, V=4, dtype=FP32, state=True, checkpoints=False))


def loss(q: Tensor) -> Tensor:
    return call(TINY._replace(q=q), "eager").o.square().sum()


def one_step(q: Tensor) -> Tensor:
    x = TINY._replace(q=q)
    return kda_step(*x[:5], torch.zeros_like(x.initial_state), **options(x), backend="eager")


def forward_mode(q: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return loss(torch.autograd.forward_ad.make_dual(q, q))


def batched_backward(q: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    o = call(TINY._replace(q=q), "eager").o
    return torch.vmap(lambda d: torch.autograd.grad(o, q, d, retain_graph=True)[0])(torch.ones(3, *o.shape))


def convolved(q: Tensor) -> Tensor:
    return short_conv._short_conv(short_conv.Inputs(q.flatten(2), None, None, ONES, None, None), True, "fla").y0.sum()


TRANSFORMED: dict[str, Callable[[Tensor], Any]] = {
    "grad": torch.func.grad(loss),
    "vmap": lambda q: torch.func.vmap(loss)(torch.stack((q, q))),
    "vmap of grad": lambda q: torch.func.vmap(torch.func.grad(loss))(torch.stack((q, q))),
    "jvp": lambda q: torch.func.jvp(loss, (q,), (q,)),
    "jacrev": torch.func.jacrev(loss),
    "linearize": lambda q: torch.func.linearize(loss, q),
    "forward mode": forward_mode,
    "vmap of a backward": batched_backward,
    "grad of a layer": torch.func.grad(convolved),
    "vmap of a step": lambda q: torch.func.vmap(one_step)(torch.stack((q, q))),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_transforms_are_refused(how: str) -> None:
    """By name, with what to use instead; two of them took the result for a constant."""
    with pytest.raises(RuntimeError, match=r"(kda|short_conv)\S* has no rules for torch.func.*use backward\(\)"):
        TRANSFORMED[how](TINY.q)
    assert loss(TINY.q).isfinite()


@pytest.mark.parametrize("how", ["grad", "jvp"])
def test_transforms_are_refused_while_compiling(how: str) -> None:
    """There the gradient was zero."""
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"kda has no rules for torch.func"):
        torch.compile(TRANSFORMED[how], backend="aot_eager")(TINY.q)


def test_a_transform_that_does_not_look_at_the_call_is_fine() -> None:
    want = loss(TINY.q)
    got = torch.func.vmap(lambda s: loss(TINY.q) * s)(torch.arange(3.0))
    torch.testing.assert_close(got, want * torch.arange(3.0))
