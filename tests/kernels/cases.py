"""What the kernel tests share: cases and their inputs, the truth, and how far from it a result may be.

The truth is `reference.recurrence` in fp64 on exactly the values that the backend gets (16-bit inputs are rounded
first). The yardstick is the same recurrence in the working dtype, on the device of the backend, whose exp and sums it
shares. No backend may be more than twice as wrong as that plus one rounding of the dtype.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput, kda
from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import Backend, DecodeInputs, Gradients, Inputs, Problem, state_dtype
from kda_layers.kernels.kda.dispatch import KDA, problem_of
from kda_layers.kernels.kda.reference import recurrence

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
FP64_LIMIT = 1e-12  # no wider dtype is at hand to measure the fp64 oracle itself

BEST_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = sorted({"cpu", BEST_DEVICE})


def _backends_here() -> list[str]:
    """Every backend, but of those over our CUDA kernels only the one for this machine's GPU, sm90 where there is none:
    the others would refuse every case for the same reason."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = 10 * major + minor
    return [n for n, b in KDA.backends().items() if not isinstance(b, CudaBackend) or arch in b.archs]


on_every_backend = pytest.mark.parametrize("backend", _backends_here())
on_every_device = pytest.mark.parametrize("device", DEVICES)
# for tests of one feature: what shows the smallest mistake, and what every fast backend serves
on_typical_shapes = pytest.mark.parametrize(
    "shape", [{"K": 16, "V": 32, "dtype": FP64}, {"K": 128, "V": 128, "dtype": BF16}], ids=["fp64", "bf16"]
)


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One call of `kda`; its text, which is the test's name, says what differs from the defaults."""

    T: int = 130
    B: int = 1
    H: int = 2
    group: int = 1
    K: int = 128
    V: int = 128
    dtype: torch.dtype = BF16
    gate: str = "lower_bound"
    lower_bound: float = -5.0
    A_log: bool = True
    dt_bias: bool = True
    g_wide: bool = False  # gate logits in fp32 (fp64 for fp64), not in q's dtype
    slow: bool = False  # gates of a fresh or long-memory model, not ones that forget everything in 16 tokens
    beta: str = "sigmoid"
    beta_wide: bool = False
    l2norm: bool = True
    scale: float | None = None
    state: bool = False
    final: bool = True
    checkpoints: bool = True
    lengths: tuple[int, ...] | None = None  # of packed sequences; T is then their sum
    offsets_dtype: torch.dtype = torch.int32
    layout: str = "contiguous"  # or "fused" (slices of one tensor), "heads_first" ([B, H, T, .] transposed)
    poison: bool = False  # fresh memory holds NaN

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        text = {torch.dtype: lambda v: str(v).removeprefix("torch."), tuple: lambda v: "+".join(map(str, v))}
        return ",".join(f"{n}={text.get(type(v), str)(v)}" for n, v in changed) or "default"

    @property
    def draws(self) -> int:
        """How often the inputs are drawn. A tensor of a few elements has an error of known size only over several
        draws: A_log's gradient has one element for each head, a sum over all tokens that may happen to be small."""
        return {FP64: 1, FP32: 8}.get(self.dtype, 16)

    @property
    def tokens(self) -> int:
        return self.T if self.lengths is None else sum(self.lengths)


def ids(cases: list[Case]) -> dict:
    """Keyword arguments of `parametrize` that name the cases by what they are."""
    return {"argvalues": cases, "ids": str}


def make_inputs(case: Case, device: str = "cpu", draw: int = 0) -> Inputs:
    """The inputs of a case, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case}/{draw}".encode()))
    B, T, H, K, V = case.B, case.tokens, case.H, case.K, case.V
    HV, wide = H * case.group, state_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=FP64)

    small = 1.0 if case.l2norm else 0.7 * K**-0.5  # without a norm |k| must stay below 1
    q, k, v = normal(B, T, H, K) * small, normal(B, T, H, K) * small, normal(B, T, HV, V)
    g, A_log, dt_bias = normal(B, T, HV, K), uniform(HV), uniform(HV, K)
    if case.slow:
        dt = torch.exp(math.log(1e-3) + uniform(HV, K) * math.log(100))
        g, A_log, dt_bias = 0.3 * g, 0.1 * A_log, dt.expm1().log()
    if case.gate == "log_decay":
        g, A_log, dt_bias = -5.0 * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias)), None, None
    beta = normal(B, T, HV)
    if case.beta == "given":
        beta = 2 * torch.sigmoid(beta)
    q, k, v, g, beta = (
        t.to(device, wide if is_wide else case.dtype)  # before the layout, which moving a slice would lose
        for t, is_wide in zip((q, k, v, g, beta), (False, False, False, case.g_wide, case.beta_wide), strict=True)
    )
    if case.layout == "fused":
        q, k, v, g = _slices_of_one(q, k, v, g)
        beta = torch.stack((beta, beta), -1)[..., 0]
    elif case.layout == "heads_first":
        q, k, v, g, beta = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, g, beta))
    N = B if case.lengths is None else len(case.lengths)
    offsets = None if case.lengths is None else torch.tensor((0, *case.lengths)).cumsum(0).to(case.offsets_dtype)
    x = Inputs(
        q, k, v, g, beta,
        A_log.to(wide) if case.A_log and A_log is not None else None,
        dt_bias.to(wide) if case.dt_bias and dt_bias is not None else None,
        normal(N, HV, V, K).mul(0.5).to(wide) if case.state else None,
        offsets, case.gate, case.lower_bound if case.gate == "lower_bound" else 0.0, case.beta, case.l2norm,
        K**-0.5 if case.scale is None else case.scale, case.final, 64 if case.checkpoints else 0,
    )  # fmt: skip
    return to_device(x, device)


def _slices_of_one(*tensors: Tensor) -> list[Tensor]:
    """The same values as slices of one [B, T, sum of widths] tensor, as a fused projection makes them."""
    assert len({t.dtype for t in tensors}) == 1, "slices of one tensor have one dtype"
    fused = torch.cat([t.flatten(2) for t in tensors], -1)
    parts = fused.split([t.shape[2] * t.shape[3] for t in tensors], -1)
    return [part.unflatten(2, t.shape[2:]) for part, t in zip(parts, tensors, strict=True)]


def map_tensors(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    return Inputs(*(change(t) if isinstance(t, Tensor) else t for t in x))


def to_device(x: Inputs, device: str) -> Inputs:
    return map_tensors(x, lambda t: t.to(device))


def to_fp64(x: Inputs) -> Inputs:
    """The same values on the CPU in fp64."""
    return map_tensors(x, lambda t: t.cpu().double() if t.is_floating_point() else t.cpu())


def sequences(x: Inputs) -> list[Inputs]:
    """Each packed sequence as inputs of its own (empty ones too)."""
    offsets = x.cu_seqlens.tolist()
    return [
        x._replace(
            **{n: getattr(x, n)[:, a:b] for n in ("q", "k", "v", "g", "beta")},
            initial_state=None if x.initial_state is None else x.initial_state[n : n + 1],
            cu_seqlens=None,
        )
        for n, (a, b) in enumerate(itertools.pairwise(offsets))
    ]


def step_inputs(x: Inputs, **more: Tensor) -> DecodeInputs:
    """The inputs of `kda_step` for all tokens of `x`: its initial state is the state."""
    fields = {n: getattr(x, n) if n in Inputs._fields else None for n in DecodeInputs._fields}
    return DecodeInputs(**fields | {"state": x.initial_state} | more)


# ---------------------------------------------------------------- running


def options(x: Inputs) -> dict:
    """The keyword arguments that `kda` and `kda_step` share."""
    return {
        "A_log": x.A_log, "dt_bias": x.dt_bias, "cu_seqlens": x.cu_seqlens, "gate_activation": x.gate_activation,
        "lower_bound": x.lower_bound if x.gate_activation == "lower_bound" else None,
        "beta_activation": x.beta_activation, "qk_l2norm": x.qk_l2norm, "scale": x.scale,
    }  # fmt: skip


def call(x: Inputs, backend: str | None = None) -> KDAOutput:
    """`kda` on the fields of Inputs."""
    return kda(
        *x[:5], **options(x), initial_state=x.initial_state, final_state=x.final_state,
        checkpoint_every=x.checkpoint_every, backend=backend,
    )  # fmt: skip


def oracle(x: Inputs) -> KDAOutput:
    o, final, checkpoints = recurrence(x)
    return KDAOutput(o, final if x.final_state else None, checkpoints if x.checkpoint_every else None)


def outputs(out: KDAOutput) -> dict[str, Tensor]:
    """What was asked for, by name."""
    return {n: t.detach() for n, t in out._asdict().items() if t is not None and t.numel()}


def output_gradients(x: Inputs) -> dict[str, Tensor]:
    """A random gradient of each output, rounded to the output's dtype."""
    generator = torch.Generator().manual_seed(1)
    B, T, HV, V = x.v.shape
    N, K = B if x.cu_seqlens is None else len(x.cu_seqlens) - 1, x.q.shape[3]
    shapes = {"o": x.v.shape, "final_state": (N, HV, V, K), "checkpoints": (B, T // 64, HV, V, K)}
    dtypes = {"o": x.v.dtype}
    return {
        n: torch.randn(shape, generator=generator).to(dtypes.get(n, state_dtype(x.v.dtype)))
        for n, shape in shapes.items()
    }


def run(fn: Callable[[Inputs], KDAOutput], x: Inputs, d_out: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of `fn` on `x`, by name, and where gradients are enabled those of every tensor for `d_out`.

    `d_out` holds the gradients of some or all outputs.
    """
    names = [n for n in Gradients._fields if getattr(x, n) is not None]
    x = x._replace(**{n: getattr(x, n).detach().requires_grad_() for n in names})
    out = fn(x)
    if not torch.is_grad_enabled():
        return outputs(out)
    used = {n: t for n, t in out._asdict().items() if n in d_out and t is not None and t.requires_grad}
    grads = torch.autograd.grad(
        list(used.values()),
        [getattr(x, n) for n in names],
        [d_out[n].to(t) for n, t in used.items()],
        materialize_grads=True,  # for the recurrence, where nothing leads from the state to q
    )
    return outputs(out) | {f"d_{n}": d for n, d in zip(names, grads, strict=True)}


def run_draws(
    fn: Callable[[Inputs], KDAOutput],
    draws: list[Inputs],
    d_out: Callable[[Inputs], dict[str, Tensor]] = output_gradients,
) -> dict[str, Tensor]:
    """`run` for gradients of the outputs (random by default), every draw stacked into one tensor [draws, ...]."""
    results = [run(fn, x, d_out(x)) for x in draws]
    return {n: torch.stack([r[n].cpu() for r in results]) for n in results[0]}


# ---------------------------------------------------------------- judging


def error(got: Tensor, truth: Tensor) -> float:
    """Relative L2 error; absolute where the truth is zero; NaN anywhere gives NaN, which no limit admits."""
    assert got.shape == truth.shape, f"shape {list(got.shape)}, expected {list(truth.shape)}"
    truth = truth.cpu().double()
    return float((got.cpu().double() - truth).norm() / (truth.norm() or 1.0))


def budget(yardstick_error: float, dtype: torch.dtype) -> float:
    """The error that a backend may have: twice what the recurrence in the working dtype has plus one rounding."""
    return FP64_LIMIT if dtype == FP64 else 2 * (yardstick_error + ROUNDOFF[dtype])


def check(got: dict[str, Tensor], truth: dict[str, Tensor], limits: dict[str, float]) -> None:
    """Fails with every tensor that is further from the truth than its limit."""
    assert got.keys() == truth.keys()
    errors = {n: error(got[n], truth[n]) for n in got}
    wrong = [f"{n}: error {e:.3g}, limit {limits[n]:.3g}" for n, e in errors.items() if not e <= limits[n]]
    assert not wrong, "; ".join(wrong)


def limits_of(yardstick: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    return {n: budget(error(yardstick[n], t), dtype) for n, t in truth.items()}


def check_near(got: Tensor, compute: Callable[[Callable[[Inputs], Inputs]], Tensor], dtype: torch.dtype) -> None:
    """Fails unless `got` is within budget of what `compute` makes of the inputs that it casts."""
    truth, yardstick = compute(to_fp64), compute(lambda x: x)
    assert error(got, truth) <= budget(error(yardstick, truth), dtype)


def trains_only_without_checkpoints(x: Inputs, backend: str) -> bool:
    """Whether the backend has gradients for `x` without the states at boundaries, but not with them."""
    problems = [problem_of(y, needs_grad=True) for y in (x, x._replace(checkpoint_every=0))]
    with_reasons, reasons = (KDA.backends()[backend].unsupported(p) for p in problems)
    return bool(with_reasons) and not reasons


def for_training(case: Case, backend: str, device: str) -> Case:
    """`case`, without the states at boundaries if only with them the backend has no gradients."""
    drop = case.checkpoints and trains_only_without_checkpoints(make_inputs(case, device), backend)
    return replace(case, checkpoints=False) if drop else case


def for_device(case: Case, device: str) -> Case:
    """`case`, on a CPU with 64 channels for 128, where no kernel is made for one width: in a third of the time."""
    return replace(case, K=64, V=64) if device == "cpu" and case.K == case.V == 128 else case


def serve(backend: str, problem: Problem, required: frozenset[str]) -> Backend:
    """The backend, or a skip with its reasons for refusing; a failure instead if it is required and the problem is
    what fast backends exist for (bf16, K = V = 128, on the best device of this machine; boundary states, which serve
    prefix caches, without gradients)."""
    chosen = KDA.backends()[backend]
    reasons = chosen.unsupported(problem)
    if reasons:
        text = f"{backend} cannot serve [{problem}]: " + "; ".join(reasons)
        typical = problem.dtype == BF16 and problem.K == problem.V == 128 and problem.device == BEST_DEVICE
        typical = typical and not (problem.needs_grad and problem.checkpoints)
        if backend in required and typical:
            pytest.fail("KDA_LAYERS_REQUIRE: " + text)
        pytest.skip(text)
    return chosen


@contextlib.contextmanager
def poisoned_memory(active: bool = True) -> Iterator[None]:
    """torch.empty and its kin return NaN (integers: the largest), so that reading what nobody wrote shows."""
    if not active:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
