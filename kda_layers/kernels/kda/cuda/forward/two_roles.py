"""Launcher of two_roles.cu: the forward by blocks of two roles, faster with few heads and for packed sequences.

All its blocks wait for each other, so it is launched cooperatively: a GPU starts it when all of them can run. With
KDA_LAYERS_TWO_ROLES=0 in the environment it is not used.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ....cuda.arch import ARCHS
from ....cuda.machine import Launchable, Machine
from ....cuda.params import addresses
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput
from . import forward as whole
from .shares import BV, MOST_GROUPS_PACKED, WIDTH, Shares, shares_of

SOURCE, ENTRY = str(Path(__file__).with_suffix(".cu")), "kda_forward_two_roles"
ENVIRONMENT_VARIABLE = "KDA_LAYERS_TWO_ROLES"
THREADS = 384
SCAN_STAGES = 3


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    K: int
    dtype: torch.dtype
    gate_activation: str
    g_wide: bool  # g is fp32
    wgmma: bool
    setmaxnreg: bool
    packed: bool  # sequences of any lengths
    checkpoints: bool

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": BV, "CLUSTER": self.slices, "IO": whole.TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma),
            "HAS_SETMAXNREG": int(self.setmaxnreg), "SAVES": 0, "POOLED": 0, "BLOCK_ROLES": 1, "TAILS": whole.TAIL,
            "SHARED_BYTES": self.shared_bytes, "PACKED": int(self.packed),
            "CHECKPOINTS": int(self.checkpoints),
        }  # fmt: skip

    @property
    def slices(self) -> int:
        return self.K // BV

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct ScanShared in scan_columns.cuh; struct Shared in shared.cuh is smaller."""
        return SCAN_STAGES * whole.stage_bytes(self.K) + 4 * 2 * CHUNK * BV + 8 * (4 * SCAN_STAGES + 2)


def variant_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, packed: bool = False,
    checkpoints: bool = False,
) -> Variant:  # fmt: skip
    """The variant for an arch with bulk copies."""
    has = ARCHS[arch]
    return Variant(K, dtype, gate_activation, g_wide, has.wgmma, has.setmaxnreg, packed, checkpoints)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that may be chosen for `arch`."""
    if ARCHS[arch].wgmma:
        flags = (False, True)
        for dtype, gate, g_wide, *rest in itertools.product(whole.TYPES, GATE_CODES, flags, flags, flags):
            yield variant_for(WIDTH, dtype, gate, g_wide, arch, *rest)


def is_enabled() -> bool:
    """Return False if the environment turns this kernel off.

    Raises:
        ValueError: the variable is neither 0 nor 1
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def serves(x: Inputs, machine: Machine) -> bool:
    """Return True if this kernel computes a call without gradients, is faster by its measured times, and enabled."""
    if (x.q.shape[3], x.v.shape[3]) != (WIDTH, WIDTH) or not is_enabled():
        return False
    processors, arch, _ = machine.properties(x.q.device)
    return ARCHS[arch].wgmma and shares_of(x, processors) is not None


class Plan(NamedTuple):
    """Everything that a launch needs except pointers."""

    kernel: Launchable
    variant: Variant
    shares: Shares
    state_shape: tuple[int, int, int, int]
    rest: bytes  # of the parameters, after the pointers


@functools.lru_cache(whole.PLANS)
def plan_of(
    machine: Machine, device: torch.device, dtype: torch.dtype, g_dtype: torch.dtype, beta_dtype: torch.dtype,
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], offsets: tuple[int, torch.dtype] | None,
    gate_activation: str, lower_bound: float, beta_activation: str, qk_l2norm: bool, scale: float, tails: bool,
    shares: Shares, checkpoints: bool,
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and dtypes; `offsets` are the length and dtype of cu_seqlens."""
    B, T, H, K = q_shape
    HV, V = v_shape[2:]
    assert shares.groups <= (B * v_shape[2] if offsets is None else MOST_GROUPS_PACKED)
    assert shares.places > SCAN_STAGES, "a place is free when its chunk has landed, which is told SCAN_STAGES later"
    if B * T > whole.MOST_TOKENS:
        raise ValueError(f"B * T must be at most {whole.MOST_TOKENS}, got {B * T}: split the batch")
    N, arch = B if offsets is None else offsets[0] - 1, machine.properties(device).capability
    wide, packed = g_dtype == torch.float32, offsets is not None
    variant = variant_for(K, dtype, gate_activation, wide, arch, packed, checkpoints)
    rest = whole.PARAMS.pack_values(
        T, H, HV, HV // H, N * HV, offsets is not None and offsets[1] == torch.int64, BETA_CODES[beta_activation],
        beta_dtype == torch.float32, qk_l2norm, lower_bound, scale, *(0,) * 9, tails, shares.groups, shares.places,
    )  # fmt: skip
    kernel = machine.load(SOURCE, ENTRY, variant.defines, device)
    return Plan(kernel, variant, shares, (N, HV, V, K), rest)


def forward(x: Inputs, machine: Machine, tails: whole.Tails | None = None) -> tuple[KDAOutput, None]:
    """Return the outputs of a call that `serves`, and None; with `tails`, last tokens stay unwritten.

    Raises:
        ValueError: there are more than `forward.MOST_TOKENS` tokens
        RuntimeError: the blocks cannot run at once
    """
    x = whole.aligned_inputs(x)
    device, offsets = x.v.device, x.cu_seqlens
    shares = shares_of(x, machine.properties(device).processors)
    assert shares is not None  # as `serves` has found
    plan = plan_of(
        machine, device, x.q.dtype, x.g.dtype, x.beta.dtype, x.q.shape, x.v.shape,
        None if offsets is None else (offsets.shape[0], offsets.dtype),
        x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale, tails is not None, shares,
        x.checkpoint_every > 0,
    )  # fmt: skip
    o = torch.empty_like(x.v)
    final = torch.empty(plan.state_shape, dtype=torch.float32, device=device) if x.final_state else None
    checkpoints = whole.new_checkpoints(x) if x.checkpoint_every else None
    slices, K, V = plan.variant.slices, x.q.shape[3], x.v.shape[3]
    # a ring and, unless the sequences are packed, a state that is handed over
    ring_bytes = shares.groups * (shares.places * whole.stage_bytes(K) + (0 if offsets is not None else 4 * V * K))
    ring = torch.empty(ring_bytes, dtype=torch.uint8, device=device)
    progress = torch.zeros(shares.counters, dtype=torch.int32, device=device)
    tensors = (
        x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, offsets, o, final, checkpoints, ring, progress,
        *(None,) * 8, *(tails or whole.Tails()),
    )  # fmt: skip
    params = whole.PARAMS.pack_pointers(*addresses(tensors)) + plan.rest
    blocks = shares.groups * slices + shares.preparers
    launch(plan.kernel, blocks, THREADS, slices, plan.variant.shared_bytes, params)
    return KDAOutput(o, final, checkpoints), None


def launch(kernel: Launchable, blocks: int, threads: int, cluster: int, shared_bytes: int, params: bytes) -> None:
    """Launch blocks of two roles, which wait for each other.

    Raises:
        RuntimeError: they cannot run at once
    """
    try:
        kernel.launch(blocks, threads, cluster, shared_bytes, params, cooperative=True)
    except RuntimeError as error:
        if "COOPERATIVE_LAUNCH_TOO_LARGE" not in str(error):
            raise
        raise RuntimeError(  # the process or the stream has a part of the GPU alone
            f"{error}; all blocks must run at once: give it {blocks} multiprocessors, or set {ENVIRONMENT_VARIABLE}=0"
        ) from error
