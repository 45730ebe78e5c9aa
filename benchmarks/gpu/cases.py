"""The timed cases: sizes of every section, inputs in both gate regimes, hard inputs, byte floors.

Shapes and recipes are those of the project's record of earlier measurements, so that numbers can be compared.
The two gate regimes:

    fast   gate logits N(0, 1), A_log and dt_bias U(0, 1): the state forgets within some ten tokens
    slow   A_log 0, dt_bias the inverse softplus of dt log-uniform in [1e-3, 1e-1], gate logits 0.3 N(0, 1): a fresh or
           long-memory model; log-decay about -5 dt, the state lives for hundreds to thousands of tokens. That of
           softplus gates is about -dt
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import CHUNK, HEAD_GATES, Inputs
from kda_layers.kernels.kda.reference import activate
from kda_layers.testing import hard_inputs as hard
from kda_layers.testing.cases import to_device
from kda_layers.testing.hard_inputs import Kind

D = 128  # key and value width of every case
LOWER_BOUND = -5
COPY_TB_PER_S = 4.25  # read + write, measured on an H200: the byte floors are for that
# B, T, H of the shapes that cuDNN's front end publishes times of
CUDNN_SHAPES = (
    (1, 2048, 12), (1, 2048, 16), (1, 4096, 8), (1, 4096, 12), (4, 8192, 12),
    (1, 8192, 16), (1, 1024, 4), (1, 3072, 10), (1, 8192, 24), (8, 16384, 16),
)  # fmt: skip
# Packed sequences: of 8192 tokens in all, 8192 with random lengths, 16384 with a few long ones
UNEVEN = (1300, 547, 2048, 963, 271, 3063)
DRAWN = (573, 506, 280, 172, 341, 270, 523, 202, 318, 389, 606, 336, 188, 504, 412, 167, 607, 656, 540, 602)
SKEWED = (8192, 4096, 2048, 512, *(96,) * 16)


@dataclass(frozen=True)
class Case:
    """One call of the operator in bf16 with raw gate and beta logits and K = V = 128."""

    B: int
    T: int
    H: int
    gates: str = "slow"
    group: int = 1  # value heads for each q/k head
    gate: str = "lower_bound"
    lengths: tuple[int, ...] = ()  # of packed sequences; their sum is T
    checkpoints: bool = False
    given: bool = False  # gate, beta and norm are applied already
    states: bool = False  # initial and final ones
    kept: bool = False  # what the backward reads is kept, however much
    # One gate a head, as in gated delta nets. Not in the text, which seeds the inputs: q, k and v are the same.
    head_gates: bool = field(default=False, repr=False)

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.B

    @property
    def HV(self) -> int:
        return self.H * self.group

    @property
    def G(self) -> int:
        """Gates of a value head."""
        return 1 if self.head_gates else D

    @property
    def long(self) -> bool:
        """True if it is also timed in segments: so few heads leave most of a GPU idle in one piece."""
        return self.T >= 2**16 and self.HV <= 8

    def fields(self) -> dict[str, Any]:
        """Return the fields that identify the case in a report."""
        what = []
        if self.lengths:
            counts = [(n, len(list(equal))) for n, equal in groupby(self.lengths)]
            parts = " + ".join(f"{many} x {n}" if many > 1 else f"{n}" for n, many in counts)
            what.append(f"packed {parts}" if len(counts) <= 2 else "packed uneven")
        if self.group > 1:
            what.append(f"{self.HV} value heads")
        gates = "softplus gates" if self.gate == "softplus" else "gates"
        if self.head_gates or self.gate == "softplus":
            what.append(f"{gates} of heads" if self.head_gates else gates)
        if self.checkpoints:
            what.append("states every 64")
        if self.given:
            what.append("activations given")
        if self.kept:
            what.append("kept")
        if self.states:
            what.append("states")
        return {"B": self.B, "T": self.T, "H": self.H, "what": ", ".join(what), "gates": self.gates}


def _gdn(B: int, T: int, H: int = 16, group: int = 2, **more: Any) -> Case:
    """A case of gated delta nets, by default with the heads of Qwen3-Next."""
    return Case(B, T, H, group=group, gate="softplus", head_gates=True, **more)


def _both(*cases: Case) -> tuple[Case, ...]:
    return tuple(replace(c, gates=gates) for c in cases for gates in ("fast", "slow"))


@dataclass(frozen=True)
class Sizes:
    """The sizes of every section."""

    forward: tuple[Case, ...]
    segments: tuple[Case, ...]
    packed: tuple[Case, ...]
    cudnn_shapes: tuple[Case, ...]
    training: tuple[Case, ...]
    backward: tuple[Case, ...]
    gdn_forward: tuple[Case, ...]
    gdn_training: tuple[Case, ...]
    gdn_decode: tuple[Case, ...]
    decode: tuple[int, ...] = (1, 8, 32, 128, 256)  # sequences
    decode_heads: int = 32
    hard: tuple[int, int] = (2048, 8)  # T, H
    context: tuple[int, ...] = (8192, 2048, 32768, 131072)  # T; Triton's autotuners decide at the first
    context_heads: int = 32
    host: Case = Case(1, 64, 32)  # so short that no queue fills
    overhead: tuple[Case, Case] = (Case(1, 8192, 32), Case(1, 64, 32))  # for GPU time; so short that no queue fills
    layer: tuple[int, int, int] = (4096, 32, 8192)  # hidden size, heads, T
    config: Path = Path(__file__).parents[2] / "kda_layers" / "configs" / "120m.json"
    vocab_size: int | None = None  # None for that of the configuration
    decode_batches: tuple[int, ...] = (1, 64)
    contexts: tuple[int, ...] = (1024, 16384, 131072)
    model_T: int = 8192


FULL = Sizes(
    forward=_both(
        # 32 heads first: Triton compiles and tunes for every number of heads, which a budget may cut short
        Case(1, 8192, 32),
        Case(1, 1024, 32),
        Case(1, 32768, 32),
        Case(4, 8192, 32),
        Case(8, 2048, 32),
        Case(1, 8192, 32, checkpoints=True),
        Case(1, 8192, 32, gate="softplus"),
        Case(1, 8192, 96),
        Case(1, 8192, 96, lengths=(1024,) * 8),
        Case(1, 8192, 96, lengths=UNEVEN),
        Case(1, 8192, 8),
        Case(1, 65536, 8),
        Case(1, 8192, 16),
        Case(1, 8192, 64),
        Case(1, 8192, 16, group=2),
    ),
    segments=_both(
        Case(1, 131072, 4),
        Case(1, 65536, 8),
        Case(1, 8192, 8),
        Case(2, 16384, 12),
        Case(1, 8192, 16),
        Case(1, 1048576, 1),
    ),
    packed=(
        Case(1, 8192, 32, lengths=(7680, *(1,) * 512)),
        Case(1, 8192, 32, lengths=(7680, *(1,) * 512), states=True),
        Case(1, 8192, 32, lengths=(128,) * 64),
        Case(1, 8192, 96, lengths=(1024,) * 8),
        Case(1, 8192, 32, lengths=UNEVEN),
        Case(1, 8192, 32, lengths=(6912, *(64,) * 20)),
        Case(1, 8192, 32, lengths=(65,) * 126 + (2,)),
        Case(4, 4, 32, states=True),
    ),
    cudnn_shapes=_both(*(Case(*shape, states=True) for shape in CUDNN_SHAPES)),
    training=(
        *_both(Case(1, 8192, 32), Case(8, 2048, 32)),
        Case(1, 8192, 32, given=True),
        *_both(Case(1, 8192, 96), Case(1, 32768, 32, kept=True), Case(1, 32768, 32)),
        *_both(Case(1, 65536, 8), Case(1, 131072, 4)),
        Case(1, 8192, 16, group=2),
        Case(2, 512, 32),
        Case(1, 5120, 32, lengths=(512,) * 10),
        Case(1, sum(DRAWN), 32, lengths=DRAWN),
        Case(1, sum(SKEWED), 32, lengths=SKEWED),
    ),
    backward=(Case(1, 8192, 32, "fast", given=True), Case(1, 8192, 32, given=True)),
    gdn_forward=(
        *_both(_gdn(1, 8192)),
        _gdn(1, 8192, given=True),
        _gdn(1, 8192, 32, group=1),
        _gdn(1, 8192, 4, group=1),
        _gdn(1, 8192, lengths=UNEVEN),
    ),
    gdn_training=_both(_gdn(1, 8192)),
    gdn_decode=(_gdn(1, 1), _gdn(64, 1), _gdn(256, 1)),
)
QUICK = Sizes(
    forward=_both(Case(1, 8192, 32)),
    segments=_both(Case(1, 131072, 4)),
    packed=(Case(1, 8192, 32, lengths=(7680, *(1,) * 512)),),
    cudnn_shapes=(Case(1, 4096, 8, states=True),),
    training=(Case(1, 8192, 32),),
    backward=(Case(1, 8192, 32, given=True),),
    gdn_forward=(_gdn(1, 8192),),
    gdn_training=(_gdn(1, 8192),),
    gdn_decode=(_gdn(64, 1),),
    decode=(1, 32),
    context=(8192, 2048),
    decode_batches=(1,),
    contexts=(1024, 16384),
)


# ---------------------------------------------------------------- inputs


class Random:
    """Draws on a device, the same in every run."""

    def __init__(self, seed: str, device: str):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(zlib.crc32(seed.encode()))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)


def gate_parameters(draw: Random, HV: int, gates: str) -> tuple[Tensor, Tensor]:
    """A_log [HV] and dt_bias [HV, 128] of a regime, fp32."""
    if gates == "fast":
        return draw.uniform(HV), draw.uniform(HV, D)
    dt = torch.exp(math.log(1e-3) + draw.uniform(HV, D) * math.log(100))
    return torch.zeros(HV, device=draw.device), dt.expm1().log()  # the inverse of softplus


def make_inputs(case: Case, device: str) -> Inputs:
    """The inputs of a case."""
    draw = Random(str(replace(case, states=False, kept=False)), device)
    B, T, H, HV = case.B, case.T, case.H, case.HV
    A_log, dt_bias = gate_parameters(draw, HV, case.gates)
    q, k, v = draw.normal(B, T, H, D), draw.normal(B, T, H, D), draw.normal(B, T, HV, D)
    g = draw.normal(B, T, HV, D) * (1.0 if case.gates == "fast" else 0.3)
    if case.head_gates:  # those of the first channel
        g, dt_bias = g[..., 0].contiguous(), dt_bias[:, 0].contiguous()
    q, k, v, g, beta = (t.bfloat16() for t in (q, k, v, g, draw.normal(B, T, HV)))
    offsets = None
    if case.lengths:
        offsets = torch.tensor((0, *case.lengths), device=device).cumsum(0).int()
    initial = 0.1 * draw.normal(case.sequences, HV, D, D) if case.states else None
    x = Inputs(
        q, k, v, g, beta, A_log, dt_bias, initial, offsets,
        case.gate, float(LOWER_BOUND) if case.gate == "lower_bound" else 0.0, "sigmoid", True, D**-0.5,
        case.states, CHUNK if case.checkpoints else 0,
    )  # fmt: skip
    if case.kept:
        x = x._replace(recompute_above=1.0)
    return activated(x) if case.given else x


def activated(x: Inputs, norm: bool = True) -> Inputs:
    """Apply gates and beta in fp32 and, unless `norm` is False, normalise q and k, which stay bf16."""
    heads = x.g.ndim == 3
    x = activate(x, (HEAD_GATES,) if norm else (HEAD_GATES, "qk_l2norm"))
    return x._replace(q=x.q.bfloat16(), k=x.k.bfloat16(), g=x.g[..., 0] if heads else x.g)


def decode_inputs(case: Case, device: str) -> Inputs:
    """One token for each sequence, and the states before it."""
    x = make_inputs(case, device)
    state = 0.1 * Random(f"state {case.B}", device).normal(case.B, case.HV, D, D)
    return x._replace(initial_state=state, final_state=True)


# ---------------------------------------------------------------- hard inputs: where fast kernels have been wrong

HARD: dict[str, Kind] = {
    "random keys, slow gates": hard.slow_gates,
    "correlated keys, beta 0.9, slow gates": hard.correlated_keys,
    "one token repeated, beta 0.98, no decay": hard.repeated_token,
    "keys turning, the rest decays": hard.turning_keys,
    "correlated keys, beta 2 x sigmoid": hard.reflections,
    "gates at the bound": hard.lower_bound_everywhere,
    "no decay but for resets": hard.resets_at_the_bound,
}


def hard_inputs(name: str, T: int, H: int, device: str) -> Inputs:
    """The hard inputs of that name in bf16, asking for the final state."""
    x = hard.hard_inputs(HARD[name], T, D, H, torch.bfloat16)._replace(checkpoint_every=0)
    return to_device(x if x.dt_bias is not None else x._replace(dt_bias=torch.zeros(H, D)), device)


# ---------------------------------------------------------------- byte floors, in milliseconds


def _ms(tensor_bytes: float) -> float:
    return tensor_bytes / (COPY_TB_PER_S * 1e12) * 1e3


def forward_floor_ms(case: Case) -> float:
    """Reading q, k, v, g and writing o once, in bf16; writing boundary states, reading and writing others in fp32."""
    states = case.B * (case.T // CHUNK) * case.checkpoints + 2 * case.sequences * case.states
    elements = 2 * case.H * D + case.HV * (2 * D + case.G)
    return _ms(case.B * case.T * elements * 2 + states * case.HV * D * D * 4)


def training_floor_ms(case: Case) -> float:
    """The forward's 5 tensors; then reading q, k, v, g and o's gradient, and writing the gradients of the four."""
    return _ms(case.B * case.T * (6 * case.H * D + case.HV * (5 * D + 3 * case.G)) * 2)


def decode_floor_ms(sequences: int, heads: int, kept: str = "fp32") -> float:
    """Reading and writing every state of fp32, bf16 or int8, which has an fp32 scale for each row."""
    row = {"fp32": 4 * D, "bf16": 2 * D, "int8": D + 4}[kept]
    return _ms(2 * sequences * heads * D * row)
