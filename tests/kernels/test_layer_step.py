"""A layer's decode step between its projections: the emulated kernel and plain PyTorch, within budgets against fp64."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kda_layers import KDAConfig, KimiDeltaAttention, swap_attention, use_backend
from kda_layers.kernels.kda.activations import GATES
from kda_layers.kernels.kda.contract import KDA
from kda_layers.kernels.kda.cuda.layer_step import layer_step as launcher
from kda_layers.kernels.kda.cuda.layer_step.contract import LAYER_STEP, Inputs, Problem
from kda_layers.kernels.kda.cuda.layer_step.op import has_kernel, layer_step
from kda_layers.modeling.layer import forward
from kda_layers.modeling.layer.cache import with_kda_layers
from tests.kernels import emulated as emulated_kernels
from tests.kernels import emulated_layer_step as emulated
from tests.kernels.cases import BF16, FP16, FP32, FP64, budget, check, error, limits_of, map_tensors, to_fp64
from tests.kernels.emulated_layer_step import end_of_memory
from tests.modeling import stock_models
from tests.modeling.stock_models import GATED_DELTA_FAMILIES, cast, every_family, swapped_layers_of

WRITTEN = ("conv_state", "state")
EAGER = LAYER_STEP.backends()["eager"]


@dataclass(frozen=True)
class Step:
    """A call of the operator."""

    B: int = 2
    H: int = 1
    group: int = 1
    K: int = 64
    rank: int = 64  # 0: logits are given
    gate_rank: int | None = None  # of the output gate; None: rank
    taps: int = 4
    dtype: torch.dtype = BF16
    state_dtype: torch.dtype = FP32
    gate: str = "lower_bound"
    beta: str = "sigmoid"
    slots: str = "own"  # or pool
    index_dtype: torch.dtype = torch.int32
    bias: bool = True  # of the output gate
    parameters: bool = True  # A_log where the gate does not need it, and dt_bias
    merged: bool = True  # projections are views of one tensor
    channels_last: bool = False  # layout of the convolution's state
    heads: bool = False  # one decay of a head
    output: str = "sigmoid"
    engine: bool = False  # one input less in it, fp32 taps, slot 0 for padding, an output that is given

    def __str__(self) -> str:
        default = Step()
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        changed = [f"{n}={str(v).removeprefix('torch.')}" for n, v in fields.items() if v != getattr(default, n)]
        return "-".join(changed) or "default"


def inputs_of(case: Step, seed: int = 0) -> Inputs:
    """Random inputs of a case. The first sequence of a pool is padding; other slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B, H, K, R, dtype = case.B, case.H, case.K, case.rank, case.dtype
    gate_R = R if case.gate_rank is None else case.gate_rank
    HV, V = H * case.group, K
    D = 2 * H * K + HV * V
    gates = (HV,) if case.heads else (HV, K)
    widths = H * K, H * K, HV * V, R or math.prod(gates), gate_R or HV * V, HV
    tokens = random(B, 1, sum(widths)).to(dtype).split(widths, -1)
    q, k, v, f, gate, beta = tokens if case.merged else (t.contiguous() for t in tokens)
    if case.gate == "log_decay":
        f = (-f.abs()).to(dtype) if not R else f
    states, indices = slots_of(case, generator)
    kept = case.taps - case.engine
    conv_state, state = random(states, D, kept).to(dtype), (random(states, HV, V, K) / 10).to(case.state_dtype)
    if indices is not None:
        used = indices[indices >= int(case.engine)].long()
        unused = torch.ones(states, dtype=torch.bool)
        unused[used] = False
        conv_state[unused] = torch.nan
        state[unused] = torch.nan
    if case.channels_last:
        conv_state = conv_state.mT.contiguous().mT
    given, needs_rate = case.gate == "log_decay", GATES[case.gate].needs_rate if case.gate in GATES else False
    A_log, dt_bias = random(HV) * 0.3, random(*gates)
    return Inputs(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), f, gate, beta,
        (random(D, case.taps) / 2).to(FP32 if case.engine else dtype), conv_state, state,
        f_weight=-(random(HV * K, R).abs() / R).to(dtype) if R and given else
        (random(HV * K, R) * R**-0.5).to(dtype) if R else None,
        gate_weight=(random(HV * V, gate_R) * gate_R**-0.5).to(dtype) if gate_R else None,
        gate_bias=(random(HV * V) / 3).to(dtype) if gate_R and case.bias else None,
        norm_weight=(1 + random(V) / 10).to(dtype),
        A_log=A_log if not given and (case.parameters or needs_rate) else None,
        dt_bias=dt_bias if not given and case.parameters else None,
        state_indices=indices,
        out=torch.full((B, 1, HV, V), torch.nan, dtype=dtype) if case.engine else None, gate_activation=case.gate,
        lower_bound=-5.0 if case.gate == "lower_bound" else 0.0, beta_activation=case.beta, scale=K**-0.5,
        norm_eps=1e-6, first_slot=int(case.engine), output_activation=case.output,
    )  # fmt: skip


def slots_of(case: Step, generator: torch.Generator) -> tuple[int, Tensor | None]:
    """The number of slots, and state_indices."""
    B, states, first = case.B, case.B + 2, int(case.engine)
    if case.slots == "own":
        return B, None
    indices = (first + torch.randperm(states - first, generator=generator))[:B].to(case.index_dtype)
    if B > 1:
        indices[0] = first - 1
    return states, indices


def eager(x: Inputs) -> dict[str, Tensor]:
    """Results of plain PyTorch, from copies of the states; a bf16 state is rounded at the end."""
    wide = x.state if x.state.dtype == FP64 else x.state.float()
    out = None if x.out is None else x.out.clone()
    x = x._replace(conv_state=x.conv_state.clone(), state=wide.clone(), out=out)
    return {"o": EAGER.step(x), "conv_state": x.conv_state, "state": x.state}


def emulate(x: Inputs, seed: int = 0, arch: int = 90) -> dict[str, Tensor]:
    """Results of the emulated kernel, from copies of the states."""
    x = x._replace(**{n: copy_of(getattr(x, n)) for n in (*WRITTEN, "out") if getattr(x, n) is not None})
    return {"o": emulated.step(x, seed=seed, arch=arch), "conv_state": x.conv_state, "state": x.state}


def copy_of(t: Tensor) -> Tensor:
    """A copy in the same layout that ends where memory ends."""
    return end_of_memory(t.clone()) if t.is_contiguous() else end_of_memory(t.mT.contiguous()).mT


def check_in_budget(x: Inputs, got: dict[str, Tensor]) -> None:
    """Unused slots keep their NaN; all else is within its budget, and the convolution's state is exact."""
    truth, yardstick = eager(to_fp64(x)), eager(x)
    for name in WRITTEN:
        used = ~x._asdict()[name].isnan().flatten(1).any(1)
        assert got[name][~used].isnan().all()
        for results in (got, truth, yardstick):
            results[name] = results[name][used]
    assert torch.equal(got["conv_state"], yardstick["conv_state"])
    limits = limits_of(yardstick, truth, x.q.dtype)
    if x.state.dtype == BF16:  # fp32 in the yardstick
        limits["state"] = budget(error(yardstick["state"], truth["state"]), BF16)
    check(got, truth, limits)


CASES = [
    Step(),
    Step(K=128, B=1, rank=128),
    Step(K=128, B=1, rank=64, group=2, bias=False),
    Step(K=128, B=2, rank=0, gate="softplus"),
    Step(K=128, B=1, rank=128, gate_rank=0),
    Step(B=3, group=2, gate_rank=0, slots="pool", channels_last=True),
    Step(rank=0, gate_rank=64, gate="softplus", dtype=FP16, merged=False),
    Step(rank=64, gate_rank=128),
    Step(K=128, B=2, rank=128, gate_rank=64, bias=False),
    Step(H=2, group=2, gate="softplus", channels_last=True),
    Step(group=4, rank=0, taps=3, dtype=FP16, slots="pool"),
    Step(group=8, B=2, rank=128, slots="pool", index_dtype=torch.int64),
    Step(group=3, merged=False, channels_last=True),
    Step(taps=2, beta="2sigmoid"),
    Step(B=3, slots="pool", state_dtype=BF16, channels_last=True),
    Step(state_dtype=BF16, dtype=FP16, rank=0),
    Step(gate="log_decay", rank=0),
    Step(gate="log_decay", rank=64),
    Step(gate="softplus", parameters=False),
    Step(rank=0, group=2, gate="softplus", heads=True, output="silu"),
    Step(K=128, H=2, rank=0, group=2, gate="softplus", heads=True, output="silu", slots="pool", merged=False),
    Step(rank=0, gate_rank=64, heads=True, state_dtype=BF16, dtype=FP16, beta="2sigmoid"),
    Step(K=128, rank=0, gate="log_decay", heads=True, parameters=False),
    Step(K=128, B=3, rank=128, gate_rank=0, output="silu", slots="pool", channels_last=True, engine=True),
    Step(parameters=False, merged=False),
    Step(K=128, group=2, B=2, rank=0, slots="pool", state_dtype=BF16, dtype=FP16),
    Step(K=128, B=3, H=2, rank=0, gate="softplus", slots="pool", channels_last=True, engine=True),
    Step(K=128, B=2, rank=128, slots="pool", channels_last=True, state_dtype=BF16, bias=False, engine=True),
    Step(B=3, H=2, rank=64, gate_rank=0, taps=2, slots="pool", dtype=FP16, engine=True),
    *(
        Step(group=1 + taps % 2, rank=rank, taps=taps, channels_last=rank == 64, beta="2sigmoid" if rank else "sigmoid")
        for rank, taps in itertools.product((0, 64, 128), (2, 3, 4))
    ),
]
on_every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.emulated
@on_every_case
@pytest.mark.parametrize("backend", ["sm90@emulator"])
def test_against_fp64(case: Step, backend: str) -> None:
    """The same bits whatever the order of concurrent operations."""
    x = inputs_of(case)
    got = emulate(x)
    again = emulate(x, seed=5)
    assert all(torch.equal(got[n].nan_to_num(7.0), again[n].nan_to_num(7.0)) for n in got)
    check_in_budget(x, got)


@pytest.mark.emulated
@pytest.mark.parametrize("arch", [80, 100], ids=["sm80@emulator", "sm100@emulator"])
def test_on_other_archs(arch: int) -> None:
    x = inputs_of(Step(slots="pool", group=1 if arch == 80 else 2))
    check_in_budget(x, emulate(x, arch=arch))


# ---------------------------------------------------------------- one kernel, many ways to call it


@pytest.mark.emulated
@pytest.mark.parametrize("backend", ["eager", "sm90@emulator"])
def test_padding(backend: str) -> None:
    """Slot -1: zeros, and nothing is written; the other sequences have the bits that they have alone."""
    run = {"eager": eager, "sm90@emulator": emulate}[backend]
    # PyTorch's products of one row with the factors have other bits than those of several.
    x = inputs_of(Step(B=3, group=2, rank=0 if backend == "eager" else 64))
    got = run(x._replace(state_indices=torch.tensor([2, -1, 0])))
    assert not got["o"][1].any()
    for name in WRITTEN:
        assert torch.equal(got[name][1], getattr(x, name)[1])
    for n, slot in ((0, 2), (2, 0)):
        tokens = {name: getattr(x, name)[n : n + 1] for name in ("q", "k", "v", "f", "gate", "beta")}
        alone = run(x._replace(**tokens, **{name: getattr(x, name)[slot : slot + 1] for name in WRITTEN}))
        assert torch.equal(got["o"][n : n + 1], alone["o"])
        assert all(torch.equal(got[name][slot], alone[name][0]) for name in WRITTEN)


@pytest.mark.emulated
def test_slots_out_of_range_change_nothing() -> None:
    x = inputs_of(Step(B=4))
    got = emulate(x._replace(state_indices=torch.tensor([4, -5, 2**31 - 1, -(2**31)], dtype=torch.int32)))
    assert not got["o"].any()
    assert all(torch.equal(got[name], getattr(x, name)) for name in WRITTEN)


def moved(t: Tensor) -> Tensor:
    """The same values, not aligned to 16 bytes."""
    new = torch.cat((t.new_full((1,), 7.0), t.flatten()))[1:].view(t.shape)
    assert new.data_ptr() % 16
    return new


def spread(t: Tensor) -> Tensor:
    """The same values, no two of them side by side."""
    return torch.stack((t, torch.full_like(t, torch.nan)), -1)[..., 0]


@pytest.mark.emulated
@pytest.mark.parametrize("change", [moved, spread], ids=["misaligned", "strided"])
@pytest.mark.parametrize("name", ["conv_weight", "f_weight", "gate_weight", "gate_bias", "norm_weight", "dt_bias"])
def test_parameters_in_any_layout(name: str, change: Any) -> None:
    x = inputs_of(Step(B=1))  # its strides need no copies
    want, got = emulate(x), x._replace(**{n: getattr(x, n).clone() for n in WRITTEN})
    with emulated.GuardedMemory():
        o = launcher.layer_step(got._replace(**{name: change(getattr(x, name))}), emulated.Emulator())
    assert torch.equal(o, want["o"])
    assert all(torch.equal(getattr(got, n), want[n]) for n in WRITTEN)


@pytest.mark.emulated
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("change", [{}, {"overlap": False}, {"f_weight": moved}], ids=["", "not asked", "copied"])
def test_overlap(change: dict[str, Any], arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel starts early where that is asked for and possible, never behind the copy of a parameter."""
    asked, launch = [], emulated_kernels.Kernel.launch

    def launched(self: Any, *args: Any, **options: Any) -> None:
        asked.append(options["overlap"])
        launch(self, *args, **options)

    monkeypatch.setattr(emulated_kernels.Kernel, "launch", launched)
    x = inputs_of(Step(B=1))._replace(overlap=True)
    x = x._replace(**{name: new(getattr(x, name)) if callable(new) else new for name, new in change.items()})
    with emulated.GuardedMemory():
        launcher.layer_step(x, emulated.Emulator(arch))
    assert asked == [not change and arch >= 90]


@pytest.mark.emulated
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_projections_and_states_in_any_layout(state_dtype: torch.dtype) -> None:
    """Odd strides of sequences; states that are part of a larger tensor, whose other elements stay as they are."""
    x = inputs_of(Step(B=3, H=3, state_dtype=state_dtype))
    want = emulate(x)
    assert x.f.stride(0) % 8
    for offset, width in ((1, 0), (0, 3), (8, 8)):
        stores, views = {}, {}
        for name in WRITTEN:
            t = getattr(x, name)
            stores[name] = torch.full((t.shape[0], offset + t[0].numel() + width), 7.0, dtype=t.dtype)
            views[name] = stores[name][:, offset : offset + t[0].numel()].unflatten(1, t.shape[1:])
            views[name].copy_(t)
        y = x._replace(**views)
        with emulated.GuardedMemory():
            assert torch.equal(launcher.layer_step(y, emulated.Emulator()), want["o"])
        for name in WRITTEN:
            assert torch.equal(views[name], want[name])
            views[name].fill_(7.0)
            assert (stores[name] == 7.0).all()


@pytest.mark.emulated
def test_one_sequence_is_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strides of dimensions of size 1 do not matter: no copy of a merged projection with an odd width."""
    x = inputs_of(Step(B=1, H=3))
    assert x.f.stride(0) % 8
    monkeypatch.setattr(launcher, "_copies", lambda x: pytest.fail("copied"))
    check_in_budget(x, emulate_where_it_is(x))


def emulate_where_it_is(x: Inputs) -> dict[str, Tensor]:
    base = end_of_memory(torch.zeros(4096, dtype=x.q.dtype))  # at a multiple of 16 bytes, as memory of a GPU is
    at = 0
    tokens = {}
    for name in ("q", "k", "v", "f", "gate", "beta"):
        t = getattr(x, name)
        tokens[name] = base[at : at + t.numel()].view(t.shape)
        tokens[name].copy_(t)
        tokens[name] = tokens[name].as_strided(t.shape, t.stride())
        at += t.numel()
    x = x._replace(**tokens, **{n: getattr(x, n).clone() for n in WRITTEN})
    return {"o": launcher.layer_step(x, emulated.Emulator()), "conv_state": x.conv_state, "state": x.state}


# ---------------------------------------------------------------- the operator


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `layer_step`."""
    keywords = x._asdict()
    keywords["lower_bound"] = x.lower_bound if x.gate_activation == "lower_bound" else None
    return tuple(keywords.pop(name) for name in Inputs._fields[:9]), keywords


def call(x: Inputs, **more: Any) -> Tensor:
    positional, keywords = arguments(x)
    return layer_step(*positional, **keywords | more)


@pytest.mark.parametrize(
    "case",
    [Step(), Step(rank=0, slots="pool"), Step(gate_rank=0), Step(dtype=FP64, state_dtype=FP64)],
    ids=str,
)
def test_the_torch_op(case: Step) -> None:
    """Schema, fake and mutations; the same bits with the dispatcher and without."""
    x = inputs_of(case)
    x = map_tensors(x, lambda t: t.double() if t.is_floating_point() else t) if case.dtype == FP64 else x
    x = x._replace(conv_state=x.conv_state.nan_to_num(0.5), state=x.state.nan_to_num(0.5))
    torch.library.opcheck(torch.ops.kda_layers.layer_step.default, (*x, "eager"))
    plain, dispatched = (x._replace(**{n: getattr(x, n).clone() for n in WRITTEN}) for _ in range(2))
    version = plain.state._version, plain.conv_state._version
    o = call(plain)
    assert (plain.state._version, plain.conv_state._version) > version
    assert o.dtype == x.v.dtype
    assert torch.equal(o, torch.ops.kda_layers.layer_step(*dispatched, "eager"))
    assert all(torch.equal(getattr(plain, n), getattr(dispatched, n)) for n in WRITTEN)
    assert all(not torch.equal(getattr(plain, n), getattr(x, n)) for n in WRITTEN)


def test_the_torch_op_that_writes_an_output() -> None:
    x = inputs_of(Step(rank=0, slots="pool", engine=True))
    x = x._replace(**{n: getattr(x, n).nan_to_num(0.5) for n in (*WRITTEN, "out")})
    torch.library.opcheck(torch.ops.kda_layers.layer_step_into.default, (*x, "eager"))
    want = eager(x)
    assert call(x) is x.out
    assert torch.equal(x.out, want["o"])
    assert not x.out[0].any()  # slot 0, for padding
    assert x.out[1].any()


@pytest.mark.compiles
def test_compiled() -> None:
    x = inputs_of(Step())
    want, got = (x._replace(**{n: getattr(x, n).clone() for n in WRITTEN}) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(got), call(want))
    assert all(torch.equal(getattr(got, n), getattr(want, n)) for n in WRITTEN)


def test_under_inference_mode() -> None:
    """States made inside can be updated there, and outside are refused before anything has changed."""
    x = inputs_of(Step())
    want = eager(x)
    with torch.inference_mode():
        inside = x._replace(**{n: getattr(x, n).clone() for n in WRITTEN})
        assert torch.equal(call(inside), want["o"])
        inside = x._replace(**{n: getattr(x, n).clone() for n in WRITTEN})
    for name in WRITTEN:
        y = x._replace(**{name: getattr(inside, name)})
        with pytest.raises(ValueError, match=rf"^{name} must not be an inference tensor"):
            call(y)
    assert all(torch.equal(getattr(inside, n), getattr(x, n)) for n in WRITTEN)


def changes() -> Iterator[tuple[dict[str, Any], str]]:
    """Arguments that break the contract, and the beginning of the error."""
    x = inputs_of(Step())
    yield {"q": x.q[0]}, "q must have 4 dimensions"
    yield {"v": [1.0]}, "v must be a torch.Tensor, got list"
    yield {"q": x.q[:, :0]}, "q and v must have no dimension of size 0"
    yield {"q": x.q.int()}, "q must be one of"
    yield {"q": x.q.repeat(1, 3, 1, 1)}, r"q must have one token of each sequence, \[B, 1, H, K\], got 3"
    yield {"q": x.q.repeat(1, 1, 2, 1)}, "v's 1 heads must be a multiple of q's 2 heads"
    yield {"k": x.k[..., :32]}, r"k must have shape \[2, 1, 1, 64\]"
    yield {"k": x.k.float()}, "k must be bfloat16"
    yield {"v": x.v[:1]}, "k must have shape|v must have shape"
    yield {"beta": x.beta.repeat(1, 1, 2)}, "beta must have shape"
    yield {"f": x.f[..., :32]}, "f must have shape"
    yield {"gate": x.gate.repeat(1, 1, 2)}, "gate must have shape"
    yield {"q": x.q.repeat(1, 1, 1, 2)[..., ::2]}, "q must have the channels of a token side by side"
    yield {"f": x.f.repeat(1, 1, 2)[..., ::2]}, "f must have the channels of a token side by side"
    yield {"f_weight": x.f_weight.repeat(1, 2)}, r"f must have shape \[2, 1, 128\]"
    yield {"f_weight": x.f_weight[:, :0]}, "f_weight must have a rank of at least 1"
    yield {"gate_weight": None, "gate_bias": None, "gate": x.gate[..., :32]}, r"gate must have shape \[2, 1, 64\]"
    yield {"gate_weight": None}, "gate_bias must be None without gate_weight"
    yield {"f_weight": [1.0]}, "f_weight must be a torch.Tensor"
    yield {"f_weight": x.f_weight[0]}, "f_weight must have 2 dimensions"
    yield {"f_weight": x.f_weight[:32]}, "f_weight must have shape"
    yield {"gate_weight": x.gate_weight[:32]}, "gate_weight must have shape"
    yield {"gate_weight": x.gate_weight[:, :32]}, "gate must have shape"
    yield {"gate_bias": x.gate_bias[:5]}, "gate_bias must have shape"
    yield {"gate_bias": x.gate_bias.float()}, "gate_bias must be bfloat16"
    yield {"conv_weight": x.conv_weight[:, None]}, "conv_weight must have 2 dimensions"
    yield {"conv_weight": x.conv_weight[1:]}, "conv_weight must have shape"
    yield {"conv_state": None}, "conv_state must be a torch.Tensor"
    yield {"conv_state": x.conv_state[..., :2]}, "conv_state must have shape"
    yield {"conv_state": x.conv_state[:1]}, "conv_state must have the 2 slots of state, got 1"
    yield {"conv_state": x.conv_state[:1].expand(2, -1, -1)}, "conv_state must not be expanded"
    yield {"conv_state": x.conv_state.float()}, "conv_state must be bfloat16"
    yield {"state": x.state[:1]}, "state must have shape"
    yield {"state": x.state[:1].expand(2, -1, -1, -1)}, "state must not be expanded"
    yield {"state": x.state.mT}, r"state must have contiguous \[V, K\] matrices"
    yield {"state": x.state.half()}, "state must be float32"
    yield {"norm_weight": x.norm_weight[:5]}, "norm_weight must have shape"
    yield {"norm_weight": x.norm_weight.float()}, "norm_weight must be bfloat16"
    yield {"A_log": x.A_log.bfloat16()}, "A_log must be float32"
    yield {"dt_bias": x.dt_bias.flatten()}, "dt_bias must have shape"
    yield {"gate_activation": "softplus", "lower_bound": None, "A_log": None}, "A_log must be given"
    yield {"gate_activation": "relu"}, "gate_activation must be one of"
    yield {"lower_bound": None}, "lower_bound must be given"
    yield {"beta_activation": "tanh"}, "beta_activation must be one of"
    yield {"scale": float("inf")}, "scale must be finite"
    yield {"state_indices": torch.zeros(3, dtype=torch.int32)}, "state_indices must have shape"
    yield {"state_indices": torch.zeros(2, 1, dtype=torch.int32)}, r"state_indices must have shape \[2\]"
    yield {"state_indices": torch.zeros(2)}, "state_indices must be int32 or int64"
    yield {"first_slot": 1}, "first_slot must be 0 without state_indices, got 1"
    yield {"first_slot": -1}, "first_slot must be an integer of at least 0, got -1"
    yield {"out": torch.empty(2, 1, 64, dtype=BF16)}, "out must have shape"
    yield {"conv_weight": x.conv_weight.double()}, "conv_weight must be bfloat16 or float32"


CHANGES = list(changes())


@pytest.mark.parametrize(
    ("change", "message"), CHANGES, ids=[f"{i}-{next(iter(c))}" for i, (c, _) in enumerate(CHANGES)]
)
def test_errors(change: dict[str, Any], message: str) -> None:
    x = inputs_of(Step())
    before = {n: getattr(x, n).clone() for n in WRITTEN}
    positional, keywords = arguments(x)
    keywords |= dict(zip(Inputs._fields, positional, strict=False)) | change
    with pytest.raises((TypeError, ValueError), match=rf"^({message})"):
        layer_step(**keywords)
    assert all(torch.equal(getattr(x, n), before[n]) for n in WRITTEN)


def test_a_bias_without_its_weight_is_refused() -> None:
    x = inputs_of(Step(rank=0))
    with pytest.raises(ValueError, match="gate_bias must be None without gate_weight"):
        call(x._replace(gate_bias=torch.zeros(64, dtype=BF16)))


# ---------------------------------------------------------------- the choice of a backend

PROBLEM = Problem("cuda", 90, BF16, FP32, 128, 128, 1, 4, 128, 128, "lower_bound", "sigmoid")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=FP32), "dtype is float32"), (dict(state_dtype=FP64), "state_dtype is float64"),
        (dict(V=64), "128"), (dict(K=96, V=96), "96"), (dict(taps=5), "taps is 5"),
        (dict(decay_rank=32), "decay_rank is 32"),
        (dict(gate_rank=32), "gate_rank is 32"), (dict(group=9), "HV/H is 9, needs at most 8"),
        (dict(beta_activation="given"), "beta_activation"), (dict(arch=100), "arch is sm_100, needs sm_90"),
        (dict(device="cpu", arch=0), "device is cpu"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_kernel_refuses(change: dict[str, Any], reason: str) -> None:
    backend = LAYER_STEP.backends()["sm90"]
    assert not backend.refusals(PROBLEM)
    reasons = backend.refusals(replace(PROBLEM, **change))
    assert any(reason in r for r in reasons), reasons


def test_a_group_needs_clusters() -> None:
    (reason,) = LAYER_STEP.backends()["sm80"].refusals(replace(PROBLEM, arch=80, group=2))
    assert reason == "HV/H is 2, needs at most 1: a cluster of CTAs"


FIELDS = BF16, FP32, 64, 64, 1, 4, 64, 64, "lower_bound", "sigmoid"


def serves(backend: str | None = None, *fields: Any) -> bool:
    return has_kernel(backend, torch.device("cpu"), *(fields or FIELDS))


@pytest.mark.emulated
def test_a_layer_uses_the_kernel_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where argument, context or environment ask for a backend of `kda` without such a kernel."""
    assert not serves()
    with emulated.registered(emulated.EmulatedLayerStep(90, priority=99)):
        assert serves()
        assert serves("sm90@emulator")
        assert not serves(None, FP32, *FIELDS[1:])
        assert not serves("sm90@emulator", FP32, *FIELDS[1:])
        for name in ("eager", "fla", "sm90"):
            assert not serves(name)
            with use_backend(name):
                assert not serves()
            monkeypatch.setenv("KDA_LAYERS_BACKEND", name)
            assert not serves()
            monkeypatch.delenv("KDA_LAYERS_BACKEND")
        with use_backend("triton"):  # of another operator
            assert serves()
    with emulated.registered(emulated.EmulatedLayerStep(90)):  # below eager
        assert not serves()
        assert serves("sm90@emulator")


# ---------------------------------------------------------------- the layer


def layer_and_cache(**options: Any) -> tuple[KimiDeltaAttention, DynamicCache]:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, 2, 64, layer_idx=0, **options).to(BF16).eval()
    with torch.no_grad():
        layer.o_norm.weight.uniform_(0.5, 1.5)
        if layer.A_log is not None:
            layer.A_log.uniform_(-0.5, 0.5)
    return layer, new_cache()


def new_cache() -> DynamicCache:
    return with_kda_layers(DynamicCache(config=KDAConfig(num_hidden_layers=1)))


def decode(layer: KimiDeltaAttention, cache: DynamicCache, x: Tensor, prompt: int = 5) -> dict[str, Tensor]:
    """Results of a prompt and of the tokens after it, one by one."""
    with torch.no_grad():
        outputs = [layer(x[:, :prompt], past_key_values=cache)]
        outputs += [layer(x[:, t : t + 1], past_key_values=cache) for t in range(prompt, x.shape[1])]
    state = cache.layers[0]
    assert state.get_seq_length() == x.shape[1]
    return {
        "o": torch.cat(outputs, 1).clone(),
        "conv": state.conv_states[0].clone(),
        "state": state.recurrent_states[0].clone(),
    }


def tokens(B: int, T: int = 9) -> Tensor:
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(1)).to(BF16)


def check_layer(layer: KimiDeltaAttention, got: dict[str, Tensor], x: Tensor) -> None:
    """Within the budgets of the layer's own operations."""
    exact = copy.deepcopy(layer).double()
    exact.kda_options["backend"] = "eager"
    with use_backend("eager"):
        plain, truth = decode(layer, new_cache(), x), decode(exact, new_cache(), x.double())
    check(got, truth, limits_of(plain, truth, BF16))


@pytest.fixture
def kernel() -> Iterator[emulated.EmulatedLayerStep]:
    with emulated.first_choice() as backend:
        yield backend


LAYERS = [
    {},
    dict(gate_rank=0, output_gate_bias=True),
    dict(gate_rank=32),
    dict(gate_rank=0, decay_rank=64),
    dict(gate_rank=0, decay_rank=32, learned_rate=False),
    dict(gate_rank=64, decay_rank=0, output_gate_bias=True),
    dict(gate_rank=64, decay_rank=128),
    dict(learned_rate=False),
    dict(output_gate_bias=True, gate_activation="softplus", lower_bound=None, num_value_heads=4),
    dict(allow_neg_eigval=True, conv_kernel_dim=2, lower_bound=-2.0),
    dict(decay="head", gate_rank=64, num_value_heads=4),
    dict(backend="sm90@emulator"),
]


@pytest.mark.emulated
@pytest.mark.parametrize("many", [False, True], ids=["factors", "logits"])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_a_layer_decodes(
    options: dict[str, Any], many: bool, kernel: emulated.EmulatedLayerStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its own operations do; by products with the factors apart where there are many sequences."""
    if many:
        monkeypatch.setattr(forward, "MOST_FACTORED", 1)
    layer, cache = layer_and_cache(**options | dict(backend=None))
    layer.kda_options["backend"] = options.get("backend")
    if options.get("backend"):
        monkeypatch.setitem(KDA.backends(), "sm90@emulator", KDA.backends()["eager"])
    x = tokens(2)
    got = decode(layer, cache, x)
    ranks = layer.decay_rank, layer.gate_rank
    assert len(kernel.calls) == 4
    given = many or 32 in ranks  # a rank that the kernel does not have
    for call in kernel.calls:
        weights = call.f_weight, call.gate_weight
        assert [0 if w is None else w.shape[1] for w in weights] == ([0, 0] if given else list(ranks))
    assert (layer.merged_weights.whole is not None) == (layer.gate_rank != 0 or not options.get("output_gate_bias"))
    assert (layer.factors.whole is not None) == (ranks[0] == ranks[1] != 0 and not options.get("output_gate_bias"))
    layer.kda_options["backend"] = None
    check_layer(layer, got, x)


@pytest.mark.emulated
def test_a_layer_whose_gate_was_rounded(kernel: emulated.EmulatedLayerStep) -> None:
    """A_log and dt_bias in bf16, as a checkpoint that rounded them."""
    layer, cache = layer_and_cache()
    for name in ("A_log", "dt_bias"):
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to(BF16)))
    x = tokens(1)
    got = decode(layer, cache, x)
    assert len(kernel.calls) == 4
    check_layer(layer, got, x)


@pytest.mark.emulated
def test_a_decode_step_in_training_mode(kernel: emulated.EmulatedLayerStep) -> None:
    x = tokens(2)
    layer, cache = layer_and_cache()
    want = decode(layer, cache, x)
    got = decode(layer.train(), new_cache(), x)
    assert len(kernel.calls) == 8
    assert all(torch.equal(got[n], want[n]) for n in got)


@pytest.mark.emulated
def test_calls_that_a_layer_computes_by_its_own_operations(kernel: emulated.EmulatedLayerStep) -> None:
    """Gradients, autocast, padding, packed sequences, several tokens, drafts that may be taken back."""
    layer, cache = layer_and_cache()
    x = tokens(2, 12)
    with torch.no_grad():
        layer(x[:, :5], past_key_values=cache)
        assert not kernel.calls
        layer(x[:, 5:7], past_key_values=cache)
        layer(x[:, 7:8], past_key_values=cache, attention_mask=torch.tensor([[1], [0]]))
        with torch.autocast("cpu", dtype=BF16):
            layer(x[:, 8:9], past_key_values=cache)
        row = torch.arange(3, dtype=torch.int32)
        layer(x[:, 9].reshape(1, 2, 32), past_key_values=cache, cu_seqlens=row)
    layer(x[:, 10:11], past_key_values=cache)
    assert not kernel.calls
    cache.layers[0].activate_past_recording()
    with torch.no_grad():
        layer(x[:, 11:12], past_key_values=cache)
    assert not kernel.calls
    seen = cache.layers[0].get_seq_length()
    cache.layers[0].crop(-1)
    assert cache.layers[0].get_seq_length() == seen - 1


@pytest.mark.emulated
def test_states_of_a_cache(kernel: emulated.EmulatedLayerStep) -> None:
    """In place, at fixed addresses; reordered beams; a prompt in parts; a cache made under inference mode."""
    layer, cache = layer_and_cache()
    x = tokens(3)
    want = decode(layer, cache, x)
    state = cache.layers[0]
    parts = new_cache()
    with torch.no_grad():
        layer(x[:, :2], past_key_values=parts)
        layer(x[:, 2:4], past_key_values=parts)
    before = [parts.layers[0].conv_states[0].data_ptr(), parts.layers[0].recurrent_states[0].data_ptr()]
    with torch.no_grad():
        for t in range(4, 9):
            layer(x[:, t : t + 1], past_key_values=parts)
    after = [parts.layers[0].conv_states[0].data_ptr(), parts.layers[0].recurrent_states[0].data_ptr()]
    assert before == after
    assert torch.equal(parts.layers[0].conv_states[0], want["conv"])
    assert error(parts.layers[0].recurrent_states[0], want["state"]) < 2**-7

    order = torch.tensor([2, 2, 0])
    rows = new_cache()
    decode(layer, rows, x[order])
    state.reorder_cache(order)
    token = tokens(3, 1)
    with torch.no_grad():
        assert torch.equal(layer(token, past_key_values=cache), layer(token, past_key_values=rows))

    with torch.inference_mode():
        made_inside = new_cache()
        layer(x[:, :5], past_key_values=made_inside)
        inside = layer(x[:, 5:6], past_key_values=made_inside)
    with torch.no_grad():
        outside = layer(x[:, 6:7], past_key_values=made_inside)
    assert torch.equal(inside, want["o"][:, 5:6])
    assert torch.equal(outside, want["o"][:, 6:7])


@pytest.mark.compiles
@pytest.mark.emulated
def test_a_compiled_layer_decodes(kernel: emulated.EmulatedLayerStep) -> None:
    """One graph, which uses the merged weights and follows what is written to them."""
    layer, cache = layer_and_cache()
    x = tokens(2)
    decode(layer, cache, x)
    with torch.no_grad():
        layer.q_proj.weight.mul_(2)
    want = decode(layer, new_cache(), x)
    torch._dynamo.reset()
    calls = len(kernel.calls)
    products: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        products.append([node.target for node in graph.graph.nodes].count(torch._C._nn.linear))
        return graph.forward

    got, compiled = new_cache(), torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        layer(x[:, :5], past_key_values=got)
        outputs = [compiled(x[:, t : t + 1], past_key_values=got) for t in range(5, 9)]
    assert torch.equal(torch.cat(outputs, 1), want["o"][:, 5:])
    assert len(kernel.calls) == calls + 4
    assert products == [2] * len(products)  # with the merged weights and with o_proj
    assert len(products) <= 2  # the count of tokens becomes dynamic


@pytest.mark.emulated
@every_family
def test_swapped_layers_decode(family: str, kernel: emulated.EmulatedLayerStep) -> None:
    """By the kernel as by the layers' own operations, which are used where the convolution is kept in fp32."""
    names = ["head_dim" if family == "bailing_hybrid" else "linear_head_dim"]
    if family in GATED_DELTA_FAMILIES:
        names = ["linear_key_head_dim", "linear_value_head_dim"]
    head = dict.fromkeys(names, 64)
    model = cast(stock_models.build(family, dense=True, **head), BF16)
    swap_attention(model)
    layers = swapped_layers_of(model)
    ids = torch.randint(3, 80, (2, 6), generator=torch.Generator().manual_seed(0))

    def logits() -> Tensor:
        kernel.calls = []
        with torch.no_grad():
            past = model(ids, use_cache=True).past_key_values
            return torch.cat([model(ids[:, t : t + 1], past_key_values=past).logits for t in range(3)], 1)

    in_one_dtype = family in ("kimi_linear", *GATED_DELTA_FAMILIES)
    assert {layer.conv1d.weight.dtype for layer in layers.values()} == {BF16 if in_one_dtype else FP32}
    if not in_one_dtype:
        logits()
        assert not kernel.calls
    for layer in layers.values():
        layer.conv1d.to(BF16)
    fused = logits()
    assert len(kernel.calls) == 3 * len(layers)
    with use_backend("eager"):
        plain = logits()
    assert not kernel.calls
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    model = exact
    with use_backend("eager"):
        truth = logits()
    assert error(fused, truth) <= budget(error(plain, truth), BF16)


@pytest.mark.compiles
def test_the_variants_of_a_layer_are_precompiled() -> None:
    listed = list(launcher.variants((64, 128), (BF16, FP16)))
    assert launcher.Variant(128, BF16, FP32, 128, 128, 4, 1) in listed
    assert launcher.Variant(128, BF16, FP32, 0, 0, 4, 1) in listed
    for name, target in (("sm90", "sm_90a"), ("sm80", "sm_80")):
        assert len(list(LAYER_STEP.backends()[name].variants(target))) == len(listed)
        assert not list(LAYER_STEP.backends()[name].variants("sm_100a"))
