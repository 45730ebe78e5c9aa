"""The timed cases: sizes of every section, inputs in both gate regimes, hard inputs, byte floors.

Shapes and recipes are those of the project's record of earlier measurements, so that numbers can be compared.
The two gate regimes:

    fast   gate logits N(0, 1), A_log and dt_bias U(0, 1): the state forgets within some ten tokens
    slow   A_log 0, dt_bias the inverse softplus of dt log-uniform in [1e-3, 1e-1], gate logits 0.3 N(0, 1): a fresh or
           long-memory model; log-decay about -5 dt, the state lives for hundreds to thousands of tokens
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import CHUNK, Inputs
from kda_layers.kernels.kda.reference import activate

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
    given: bool = False  # gate, beta and norm applied beforehand
    states: bool = False  # initial and final ones
    kept: bool = False  # what the backward reads is kept, however much

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.B

    @property
    def HV(self) -> int:
        return self.H * self.group

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
        if self.gate == "softplus":
            what.append("softplus gates")
        if self.checkpoints:
            what.append("states every 64")
        if self.given:
            what.append("activations given")
        if self.kept:
            what.append("kept")
        if self.states:
            what.append("states")
        return {"B": self.B, "T": self.T, "H": self.H, "what": ", ".join(what), "gates": self.gates}


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
        # 32 heads first: Triton compiles and tunes anew for every number of heads, which a budget may cut short
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
)
QUICK = Sizes(
    forward=_both(Case(1, 8192, 32)),
    segments=_both(Case(1, 131072, 4)),
    packed=(Case(1, 8192, 32, lengths=(7680, *(1,) * 512)),),
    cudnn_shapes=(Case(1, 4096, 8, states=True),),
    training=(Case(1, 8192, 32),),
    backward=(Case(1, 8192, 32, given=True),),
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
    if case.given:
        x = activate(x)
        x = x._replace(q=x.q.bfloat16(), k=x.k.bfloat16())
    return x


def decode_inputs(sequences: int, heads: int, device: str) -> Inputs:
    """One token for each sequence, and the states before it."""
    x = make_inputs(Case(sequences, 1, heads), device)
    state = 0.1 * Random(f"state {sequences}", device).normal(sequences, heads, D, D)
    return x._replace(initial_state=state, final_state=True)


# ---------------------------------------------------------------- hard inputs: where fast kernels have been wrong

NEVER, ALWAYS = -30.0, 30.0  # gate logits: no decay, and decay at the lower bound


def _hard_base(T: int, H: int, device: str, name: str) -> tuple[Random, dict[str, Tensor]]:
    """Random q, k, v, beta logits, slow gates and an initial state of 0.1 N(0, 1)."""
    draw = Random(f"{name} {T} {H}", device)
    A_log, dt_bias = gate_parameters(draw, H, "slow")
    q, k, v, g = (draw.normal(1, T, H, D) for _ in range(4))
    state = 0.1 * draw.normal(1, H, D, D)
    return draw, dict(
        q=q, k=k, v=v, g=0.3 * g, beta=draw.normal(1, T, H), A_log=A_log, dt_bias=dt_bias, initial_state=state
    )


def random_keys(T: int, H: int, device: str) -> dict[str, Tensor]:
    return _hard_base(T, H, device, "random keys")[1]


def correlated_keys(T: int, H: int, device: str) -> dict[str, Tensor]:
    """Keys around one direction for each head (cosine about 0.7), beta 0.9."""
    draw, x = _hard_base(T, H, device, "correlated keys")
    return x | {"k": 1.5 * draw.normal(1, 1, H, D) + x["k"], "beta": torch.full_like(x["beta"], 2.2)}


def repeated_token(T: int, H: int, device: str) -> dict[str, Tensor]:
    """Identical keys, beta about 0.98, no decay."""
    draw, x = _hard_base(T, H, device, "repeated token")
    return x | {
        "k": x["k"][:, :1].expand_as(x["k"]).contiguous(),
        "beta": 4 + 0.3 * draw.normal(1, T, H),
        "g": torch.full_like(x["g"], NEVER),
        "dt_bias": torch.zeros_like(x["dt_bias"]),
    }


def turning_keys(T: int, H: int, device: str) -> dict[str, Tensor]:
    """Keys that turn by a quarter in four tokens, rest for four, turn back, rest; channels decay at the bound but for
    the first two where the key turns, and for one of them where it rests. beta about 1."""
    _, x = _hard_base(T, H, device, "turning keys")
    token = torch.arange(T, device=device)
    phase, j = token % 16 // 4, token % 4 + 1
    quarter = torch.stack((j / 4, torch.ones_like(j / 4), 1 - j / 4, torch.zeros_like(j / 4)))[phase, token]
    k = torch.zeros_like(x["k"])
    k[..., 0], k[..., 1] = -(math.pi / 2 * quarter).sin()[:, None], (math.pi / 2 * quarter).cos()[:, None]
    g = torch.full_like(x["g"], ALWAYS)
    turning = (phase == 0) | (phase == 2)
    g[:, turning | (phase == 3), :, 0] = NEVER
    g[:, turning | (phase == 1), :, 1] = NEVER
    return x | {"k": k, "g": g, "beta": torch.full_like(x["beta"], 15.0), "dt_bias": torch.zeros_like(x["dt_bias"])}


def reflections(T: int, H: int, device: str) -> dict[str, Tensor]:
    """Keys around one direction for each head, beta 2 x sigmoid of 1 + N(0, 1): most writes turn a key around."""
    draw, x = _hard_base(T, H, device, "reflections")
    k = 1.5 * draw.normal(1, 1, H, D) + x["k"]
    return x | {"k": k, "given_beta": 2 * torch.sigmoid(1 + x["beta"])}


def at_the_bound(T: int, H: int, device: str) -> dict[str, Tensor]:
    """Every channel decays by more than e^-4.95 at every token."""
    draw, x = _hard_base(T, H, device, "at the bound")
    return x | {"g": 5 + draw.uniform(*x["g"].shape), "dt_bias": torch.zeros_like(x["dt_bias"])}


def resets(T: int, H: int, device: str) -> dict[str, Tensor]:
    """Hardly any decay, but for one token in twenty, at which every channel decays by more than e^-4.95."""
    draw, x = _hard_base(T, H, device, "resets")
    g = torch.where(draw.uniform(1, T, H, 1) < 0.05, 5.0, -9.0) + draw.uniform(*x["g"].shape)
    return x | {"g": g, "dt_bias": torch.zeros_like(x["dt_bias"])}


HARD: dict[str, Callable[[int, int, str], dict[str, Tensor]]] = {
    "random keys, slow gates": random_keys,
    "correlated keys, beta 0.9, slow gates": correlated_keys,
    "one token repeated, beta 0.98, no decay": repeated_token,
    "keys turning, the rest decays": turning_keys,
    "correlated keys, beta 2 x sigmoid": reflections,
    "gates at the bound": at_the_bound,
    "no decay but for resets": resets,
}


def hard_inputs(name: str, T: int, H: int, device: str) -> Inputs:
    """The hard inputs of that name in bf16, asking for the final state."""
    x = HARD[name](T, H, device)
    given = "given_beta" in x
    q, k, v, g, beta = (x[n].bfloat16() for n in ("q", "k", "v", "g", "given_beta" if given else "beta"))
    return Inputs(
        q, k, v, g, beta, x["A_log"], x["dt_bias"], x["initial_state"], None,
        "lower_bound", float(LOWER_BOUND), "given" if given else "sigmoid", True, D**-0.5, True, 0,
    )  # fmt: skip


# ---------------------------------------------------------------- byte floors, in milliseconds


def _ms(tensor_bytes: float) -> float:
    return tensor_bytes / (COPY_TB_PER_S * 1e12) * 1e3


def forward_floor_ms(case: Case) -> float:
    """Reading q, k, v, g and writing o once, in bf16; writing boundary states, reading and writing others in fp32."""
    states = case.B * (case.T // CHUNK) * case.checkpoints + 2 * case.sequences * case.states
    return _ms(case.B * case.T * (2 * case.H + 3 * case.HV) * D * 2 + states * case.HV * D * D * 4)


def training_floor_ms(case: Case) -> float:
    """The forward's 5 tensors; then reading q, k, v, g and o's gradient, and writing the gradients of the four."""
    return _ms(case.B * case.T * (6 * case.H + 8 * case.HV) * D * 2)


def decode_floor_ms(sequences: int, heads: int, kept: str = "fp32") -> float:
    """Reading and writing every state of fp32, bf16 or int8, which has an fp32 scale for each row."""
    row = {"fp32": 4 * D, "bf16": 2 * D, "int8": D + 4}[kept]
    return _ms(2 * sequences * heads * D * row)
