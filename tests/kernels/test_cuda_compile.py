"""Every kernel compiles for every arch and fits into it without spills; its plan of shared memory is the launcher's.

NVRTC needs neither GPU nor driver. Of the kernels for an arch, those are compiled that need the most: they differ in
width, slices of V, dtype, gate and wide gates.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_layers.kernels.cuda import arch as archs
from kda_layers.kernels.cuda import build, cache
from kda_layers.kernels.kda.contract import MOST_DRAFTED
from kda_layers.kernels.kda.cuda.backward import gradients
from kda_layers.kernels.kda.cuda.backward import reverse_scan as reverse
from kda_layers.kernels.kda.cuda.decode import decode as step
from kda_layers.kernels.kda.cuda.forward import one_role as chunk
from kda_layers.kernels.kda.cuda.forward import segments, two_roles
from kda_layers.kernels.kda.cuda.layer_step import layer_step
from kda_layers.kernels.kda.cuda.spec import ALWAYS, Rows, Signature
from tests.kernels.cases import BF16, FP16, FP32

pytestmark = pytest.mark.compiles

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

ARCHS = {a.target: a.capability for a in reversed(archs.ARCHS.values())}  # the oldest that each is compiled for
SERVED = {"sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448}  # whatever the width; shared memory of a block
REGISTERS = 65536  # of a multiprocessor
MOST_SECONDS = 20  # of compiling one variant

on_every_arch = pytest.mark.parametrize("arch", ARCHS)

# What needs the most and the least of each width, and what is between.
WORST = (128, 16, FP16, "softplus", True)
FAMILIES = [
    WORST,
    (128, 32, BF16, "lower_bound", True),
    (128, 16, BF16, "log_decay", False),
    (64, 32, BF16, "softplus", True),
]
Family = tuple[int, int, torch.dtype, str, bool]


def rarely_on_sm_103a(cases: list[Any]) -> list[Any]:
    """Mark all cases for sm_103a but one as combinations: our sources use the same instructions there as on sm_100a."""
    of_sm_103a = [case for case in cases if "sm_103a" in case.values]
    more = {id(case) for case in of_sm_103a[1:]}
    return [pytest.param(*c.values, id=c.id, marks=[pytest.mark.combination] * (id(c) in more)) for c in cases]


def chunk_variant(arch: str, family: Family, form: str = "") -> chunk.Variant | None:
    """The one of the arch's variants, if it has it; `form` is "", "saves", "fine" or "pooled"."""
    fields = ("K", "BV", "dtype", "gate_activation", "g_wide", "saves", "T_fp16", "pooled")
    wanted = (*family, form in ("saves", "fine"), form == "fine", form == "pooled")
    found = [v for v in chunk.variants(ARCHS[arch]) if tuple(getattr(v, n) for n in fields) == wanted]
    return found[0] if found else None


def name_of(family: Family) -> str:
    return f"{family[0]}-{family[1]}-{str(family[2])[6:]}-{family[3]}{'-wide' * family[4]}"


CHUNKS = [
    pytest.param(variant, arch, id=f"{name_of(family)}{'-' * bool(form)}{form}-{arch}")
    for family in FAMILIES
    for form in ("", "saves", "fine", "pooled")
    for arch in ARCHS
    if (variant := chunk_variant(arch, family, form))
]
on_every_chunk = pytest.mark.parametrize(("variant", "arch"), rarely_on_sm_103a(CHUNKS))
REVERSES = [
    pytest.param(variant, arch, id=f"{variant.K}-{str(variant.dtype)[6:]}{'-fine' * variant.T_fp16}-{arch}")
    for arch in ARCHS
    for variant in reverse.variants(ARCHS[arch])
]
on_every_reverse = pytest.mark.parametrize(("variant", "arch"), rarely_on_sm_103a(REVERSES))
STEPS = [
    pytest.param(
        step.variant_for(K, K, dtype, state, busy), id=f"{K}-{str(dtype)[6:]}-{str(state)[6:]}{'-busy' * busy}"
    )
    for K, dtype in ((128, BF16), (64, FP16))
    for state in (FP32, BF16, torch.int8)
    for busy in (False, True)
]
STEPS += [
    pytest.param(step.variant_to_verify(K, K, dtype, state), id=f"verify-{K}-{str(dtype)[6:]}-{str(state)[6:]}")
    for K, dtype in ((128, BF16), (64, FP16))
    for state in step.STATES
]
STEPS += [
    pytest.param(variant._replace(head_gates=True), id=f"head-gates-{name}")
    for name, variant in (
        ("128-float32", step.variant_for(128, 128, BF16, FP32)),
        ("64-bfloat16-busy", step.variant_for(64, 64, FP16, BF16, busy=True)),
        ("128-int8-busy", step.variant_for(128, 128, BF16, torch.int8, busy=True)),
        ("verify-128-float32", step.variant_to_verify(128, 128, BF16, FP32)),
    )
]


def check_resources(cubin: build.Cubin, entry: str, most_registers: int, shipped: bool = True) -> None:
    """Fails unless one kernel was compiled, without warnings, and if it is shipped for the arch, without spills."""
    warnings = [line for line in cubin.log.splitlines() if "warning" in line]
    # sm_120 has multicast copies, but is slow at them; chunk.cu asks more of its shared memory than it has.
    assert all("for 'sm_120a'" in cubin.log and "'.multicast::cluster' modifier" in line for line in warnings), warnings
    used = build.resources(cubin)
    most = min(255, most_registers // 8 * 8)
    assert used.keys() == {entry}
    assert used[entry].registers <= most
    if shipped:
        assert used[entry][1:] == (0, 0, 0, 0)


@pytest.mark.slow
@on_every_chunk
def test_chunk(variant: chunk.Variant, arch: str) -> None:
    most = max(a.shared_bytes for a in archs.ARCHS.values() if a.target == arch)
    shipped = variant.shared_bytes <= most  # else no GPU of the arch can run it, and none is asked to
    cubin = build.compile(chunk.SOURCE, variant.defines, arch)
    # One that saves loads q and k a chunk ahead as well: none of these reloads more than 8 bytes, of the fine ones 12.
    saves = variant.saves and variant.wgmma
    check_resources(cubin, "kda_forward", REGISTERS // variant.threads, shipped and not saves)
    assert not saves or build.resources(cubin)["kda_forward"].spill_loads <= (12 if variant.T_fp16 else 8)


@pytest.mark.slow
@on_every_reverse
def test_reverse(variant: reverse.Variant, arch: str) -> None:
    most = max(a.shared_bytes for a in archs.ARCHS.values() if a.target == arch)
    cubin = build.compile(reverse.SOURCE, variant.defines, arch)
    shares = variant.setmaxnreg or variant.K == 64  # else the scanning warps have 168 registers, and need a few more
    check_resources(cubin, "kda_reverse_scan", REGISTERS // reverse.THREADS, shares and variant.shared_bytes <= most)
    assert shares or build.resources(cubin)["kda_reverse_scan"].spill_loads <= 32
    assert "serialized" not in cubin.log  # as ptxas makes products that it takes for ones in need of each other


TWO_ROLES = [
    pytest.param(variant, arch, id=f"{K}-{str(dtype)[6:]}-{gate}-{arch}")
    for K, dtype, gate, g_wide in (
        (128, BF16, "lower_bound", False),
        (128, FP16, "softplus", True),
        (64, BF16, "log_decay", True),
    )
    for arch in SERVED
    if archs.ARCHS[ARCHS[arch]].wgmma  # else it serves no call
    for variant in [two_roles.variant_for(K, dtype, gate, g_wide, ARCHS[arch])]
]
OTHER_TWO_ROLES = [
    pytest.param(p.values[0]._replace(**more), p.values[1], id="-".join((*more, p.id)))  # type: ignore[attr-defined]
    for more in (
        {"packed": True},
        {"checkpoints": True},
        {"packed": True, "checkpoints": True},
        {"pooled": True},
        {"packed": True, "pooled": True},
        {"followed": True},
        {"followed": True, "pooled": True},
    )
    for p in TWO_ROLES
]
# Of packed sequences, a preparing warp of some stores and reloads a word, which holds predicates.
SAVING_TWO_ROLES = [
    pytest.param(v, id=f"{p.id}-packed={v.packed}-checkpoints={v.checkpoints}-fine={v.T_fp16}")  # type: ignore[attr-defined]
    for p in TWO_ROLES
    if p.values[0].K == 128  # type: ignore[union-attr]
    for packed, checkpoints, fine in itertools.product((False, True), repeat=3)
    for v in [p.values[0]._replace(packed=packed, checkpoints=checkpoints, T_fp16=fine, saves=True)]  # type: ignore[union-attr]
    if v.dtype == BF16 or not fine
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), TWO_ROLES + OTHER_TWO_ROLES)
def test_two_roles(variant: two_roles.Variant, arch: str) -> None:
    cubin = build.compile(two_roles.SOURCE, variant.defines, arch)
    check_resources(cubin, "kda_forward_two_roles", REGISTERS // two_roles.THREADS)
    assert "serialized" not in cubin.log
    assert variant.shared_bytes <= SERVED[arch]


@pytest.mark.slow
@pytest.mark.parametrize("variant", SAVING_TWO_ROLES)
def test_saving_two_roles(variant: two_roles.Variant) -> None:
    cubin = build.compile(two_roles.SOURCE, variant.defines, "sm_90a")
    check_resources(cubin, "kda_forward_two_roles", REGISTERS // two_roles.THREADS, shipped=not variant.packed)
    assert build.resources(cubin)["kda_forward_two_roles"].spill_loads <= 4
    assert "serialized" not in cubin.log
    assert variant.shared_bytes <= SERVED["sm_90a"]


# Of gates of heads, those that are compiled ahead; the most bytes that one reloads, for each source.
OF_HEADS = [
    pytest.param(v, arch, most, id="-".join(f"{n}={x}" for n, x in zip(v._fields, v, strict=True)) + f"-{arch}")
    for arch in ("sm_90a", "sm_100a")
    for variants, most in ((chunk.variants, 8), (two_roles.variants, 24), (gradients.variants, 0))
    for v in variants(ARCHS[arch])
    if v.head_gates
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch", "most"), OF_HEADS)
def test_gates_of_heads(variant: chunk.Variant | two_roles.Variant | gradients.Variant, arch: str, most: int) -> None:
    cubin = build.compile(variant.source, variant.defines, arch)
    (used,) = build.resources(cubin).values()
    assert used.registers <= REGISTERS // variant.threads // 8 * 8
    assert used.spill_loads <= most
    assert variant.shared_bytes <= SERVED[arch]
    assert "serialized" not in cubin.log


SEGMENTS = [
    pytest.param(
        variant,
        arch,
        id=f"{K}-{('transitions', 'scan')[variant.part - 1]}{'-saves' * saves}{'-fine' * fine}-{arch}",
    )
    for K, dtype, gate, g_wide in (
        (128, BF16, "lower_bound", False),
        (128, FP16, "softplus", True),
        (64, BF16, "log_decay", True),
    )
    for saves, fine in ((False, False), (True, False), *(((False, True),) if dtype == BF16 else ()))
    for arch in SERVED
    for variant in segments.variants_for(K, dtype, gate, g_wide, ARCHS[arch], saves, T_fp16=fine)
    if saves <= (variant.part == chunk.LAST_SCAN) and fine <= (variant.part == chunk.TRANSITIONS)
]
REVERSE_SEGMENTS = [
    pytest.param(variant, arch, id=f"{variant.K}-{str(variant.dtype)[6:]}{'-fine' * variant.T_fp16}-{arch}")
    for arch in SERVED
    for variant in reverse.variants_in_segments(ARCHS[arch])
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), rarely_on_sm_103a(SEGMENTS))
def test_segments(variant: chunk.Variant, arch: str) -> None:
    cubin = build.compile(variant.source, variant.defines, arch)
    used = build.resources(cubin)
    assert used.keys() == (
        {"kda_forward"} if variant.part == chunk.TRANSITIONS else {"kda_scan_segments", "kda_join_segments"}
    )
    assert all(r[1:] == (0, 0, 0, 0) for r in used.values())
    assert variant.shared_bytes <= SERVED[arch]
    assert "serialized" not in cubin.log


@pytest.mark.slow
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize(("variant", "arch"), [p for p in TWO_ROLES if p.values[0].K == 128])
def test_transitions(variant: two_roles.Variant, arch: str, fine: bool) -> None:
    transitions = variant._replace(cut=ALWAYS, T_fp16=fine)
    cubin = build.compile(transitions.source, transitions.defines, arch)
    check_resources(cubin, "kda_forward_two_roles", REGISTERS // transitions.threads)
    assert "serialized" not in cubin.log
    assert transitions.shared_bytes <= SERVED[arch]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), rarely_on_sm_103a(REVERSE_SEGMENTS))
def test_reverse_segments(variant: reverse.Variant, arch: str) -> None:
    cubin = build.compile(variant.source, variant.defines, arch)
    used = build.resources(cubin)
    assert used.keys() == {"kda_reverse_scan", "kda_join_gradients"}
    assert all(r[1:] == (0, 0, 0, 0) for r in used.values())
    assert "serialized" not in cubin.log


GRADIENTS = [
    pytest.param(gradients.Variant(K, dtype, gate, g_wide, arch == "sm_90a"), arch, id=f"{K}-{gate}-{arch}")
    for K, dtype, gate, g_wide in (
        (128, FP16, "softplus", True),
        (128, BF16, "lower_bound", False),
        (64, BF16, "log_decay", True),
    )
    for arch in ARCHS
]
on_all_gradients = pytest.mark.parametrize(("variant", "arch"), rarely_on_sm_103a(GRADIENTS))


@pytest.mark.slow
@on_all_gradients
def test_gradients(variant: gradients.Variant, arch: str) -> None:
    cubin = build.compile(gradients.SOURCE, variant.defines, arch)
    check_resources(cubin, "kda_gradients", REGISTERS // variant.threads, shipped=False)
    # Every register is in use: with K = 128 none of these reloads more than 20 bytes, with K = 64 none more than 68.
    assert build.resources(cubin)["kda_gradients"].spill_loads <= (20 if variant.K == 128 else 68)
    assert "serialized" not in cubin.log  # as ptxas does with products of a warpgroup that it thinks divergent


@pytest.mark.parametrize("arch", SERVED)
def test_every_variant_of_gradients_fits(arch: str) -> None:
    assert max(v.shared_bytes for v in gradients.variants(ARCHS[arch])) <= SERVED[arch]


@pytest.mark.parametrize("arch", SERVED)
def test_every_variant_fits(arch: str) -> None:
    variants = (*chunk.variants(ARCHS[arch]), *reverse.variants(ARCHS[arch]))
    assert max(v.shared_bytes for v in variants) <= SERVED[arch]


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_every_choice_is_a_variant(arch: int) -> None:
    """`--precompile` compiles exactly what would be compiled at first use."""
    variants = set(chunk.variants(arch))
    chosen = {chunk.variant_for(signature_of(v, tiles), 132, arch) for v in variants for tiles in (1, 2**20)}
    assert chosen == variants


def signature_of(v: chunk.Variant, tiles: int) -> Signature:
    """The signature of a call with so many pairs of a sequence and a value head that the variant may serve."""
    g_dtype, shape = FP32 if v.g_wide else v.dtype, (1, 64, tiles, v.K)
    return Signature(
        torch.device("cuda"), v.dtype, g_dtype, v.dtype, shape, shape, None, v.gate_activation, 0.0, "sigmoid", True,
        1.0, False, False, False, saves=v.saves, T_fp16=v.T_fp16, rows=Rows(*(0,) * 8) if v.pooled else None,
        head_gates=v.head_gates,
    )  # fmt: skip


@pytest.mark.slow
@on_every_arch
@pytest.mark.parametrize("variant", STEPS)
def test_step(variant: step.Variant, arch: str) -> None:
    assert variant.shared_bytes(step.STAGE) <= SERVED.get(arch, 2**31)
    check_resources(build.compile(variant.source, variant.defines, arch), variant.entry, REGISTERS // variant.threads)
    # Drafts of any length fit into every GPU.
    fits = min(a.shared_bytes for a in archs.ARCHS.values() if a.target == arch)
    assert not variant.verify or variant.shared_bytes(MOST_DRAFTED) <= fits


LAYER_STEPS = [
    layer_step.Variant(128, BF16, FP32, 128, 128, 4, 1),
    layer_step.Variant(128, BF16, BF16, 0, 0, 4, 8),
    layer_step.Variant(128, FP16, FP32, 64, 64, 4, 2),
    layer_step.Variant(64, FP16, FP32, 128, 128, 4, 4),
    layer_step.Variant(64, BF16, BF16, 64, 64, 2, 1),
    layer_step.Variant(64, BF16, FP32, 0, 0, 3, 1),
    layer_step.Variant(64, BF16, FP32, 64, 128, 4, 1),
    layer_step.Variant(128, BF16, FP32, 128, 0, 4, 1),
    layer_step.Variant(128, BF16, FP32, 0, 0, 4, 1, 3, True),
    layer_step.Variant(128, BF16, FP32, 0, 0, 4, 2, head_gates=True),
    layer_step.Variant(128, BF16, BF16, 128, 128, 4, 1, 3, True),
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_80", "sm_120a"])
@pytest.mark.parametrize(
    "variant",
    LAYER_STEPS,
    ids=lambda v: f"{v.K}-{v.decay_rank}-{v.gate_rank}-{v.taps}-{v.group}-{str(v.state_dtype)[6:]}",
)
def test_layer_step(variant: layer_step.Variant, arch: str) -> None:
    if variant.group > 1 and arch == "sm_80":
        pytest.skip("sm_80 has no clusters")
    used = build.resources(build.compile(layer_step.SOURCE, variant.defines, arch))
    assert used.keys() == {"kda_layer_step"}
    assert used["kda_layer_step"].registers * 32 * variant.warps <= REGISTERS
    shared = min(a.shared_bytes for a in archs.ARCHS.values() if a.target == arch)
    assert variant.shared_bytes <= shared
    assert used["kda_layer_step"][2:] == (0, 0, 0)  # bytes of stack, spilled stores and loads


@pytest.mark.slow
@pytest.mark.parametrize("arch", SERVED)
def test_seconds(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of a variant."""
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path))
    started = time.process_time()
    variant = chunk_variant(arch, WORST)
    assert variant
    build.compile(chunk.SOURCE, variant.defines, arch)
    assert time.process_time() - started < MOST_SECONDS
