"""Section layer: the KDA layer of a large model, uncompiled and compiled, and where its GPU time goes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.gpu.contenders import Contender, Prepared, require
from benchmarks.gpu.harness import Job, Row, Setup, compete, reason
from benchmarks.gpu.kernel_shares import REST, profile
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.truth import Results
from kda_layers import KimiDeltaAttention
from kda_layers.kernels.kda.contract import default_problem

GOAL_REST_PERCENT = 15.0  # of GPU time, that may go to what is neither a projection nor the operator
MODES = ("call", "compiled")
M = TypeVar("M", bound=nn.Module)
KEPT_WIDE = ("A_log", "dt_bias")  # parameters that models keep in fp32


def to_bf16(module: M) -> M:
    """The module in bf16, but for the gates' parameters, which models of transformers keep in fp32."""
    for name, p in module.named_parameters():
        if not name.endswith(KEPT_WIDE):
            p.data = p.data.bfloat16()
    return module


def to_fp32(module: M) -> M:
    """A copy with the same values in fp32."""
    return copy.deepcopy(module).float()


def layer(setup: Setup) -> list[Job]:
    """The layer's forward pass and training step."""
    return [
        Job(_fields(setup, pass_, mode), partial(_layer, setup, pass_, mode))
        for pass_ in ("forward", "forward + backward")
        for mode in MODES
    ]


def _fields(setup: Setup, pass_: str, mode: str) -> Row:
    width, heads, T = setup.sizes.layer
    return {"pass": pass_, "mode": mode, "B": 1, "T": T, "width": width, "H": heads}


def _layer(setup: Setup, pass_: str, mode: str) -> list[Row]:
    width, heads, T = setup.sizes.layer
    device = setup.machine.device
    torch.manual_seed(0)
    made = to_bf16(KimiDeltaAttention(width, heads).to(device))
    x = torch.randn(1, T, width, device=device).bfloat16()
    d_o = torch.randn(1, T, width, device=device).bfloat16() if pass_ != "forward" else None
    torch._dynamo.reset()
    contenders = [_contender(made, backend, x, d_o, mode) for backend in setup.backends]
    truth = _truth(made, x, d_o)

    def more(c: Contender, prepared: Prepared) -> Row:
        row = where_time_goes(setup.machine, c, prepared)
        goal = {} if "reason" in row else {"goal": "met" if row[f"{REST} %"] <= GOAL_REST_PERCENT else "missed"}
        return row | goal

    return compete(_fields(setup, pass_, mode), contenders, truth, setup.machine, memory=True, more=more)


def where_time_goes(machine: Machine, c: Contender, prepared: Prepared) -> Row:
    """GPU time of a call and the shares of it, or why they are not known."""
    try:
        return profile(machine, prepared.run, c.name)
    except Exception as problem:
        return {"reason": f"no shares of GPU time: {reason(problem)}"}


def _run(m: Any, x: Tensor, d_o: Tensor | None, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The output, and with d_o the gradients of x and of every parameter."""
    if d_o is None:
        with torch.no_grad():
            return (m(x),)
    o = m(x)
    return o, *torch.autograd.grad(o, [x, *parameters], d_o)


def _named(made: nn.Module, out: tuple[Tensor, ...]) -> Results:
    names = ("o", "d_x", *(f"d_{n}" for n, _ in made.named_parameters()))
    return {n: t.detach() for n, t in zip(names, out, strict=False)}


def _contender(made: KimiDeltaAttention, backend: str, x: Tensor, d_o: Tensor | None, mode: str) -> Contender:
    def prepare() -> Prepared:
        require(backend, replace(default_problem(x.device.type), needs_grad=d_o is not None))
        m = copy.deepcopy(made)
        m.kda_options["backend"] = backend
        called: Any = torch.compile(m, fullgraph=True) if mode == "compiled" else m
        leaf, parameters = x.clone().requires_grad_(d_o is not None), list(m.parameters())
        return Prepared(lambda: _run(called, leaf, d_o, parameters), lambda out: _named(m, out))

    return Contender(backend, prepare, ours=True)


def _truth(made: KimiDeltaAttention, x: Tensor, d_o: Tensor | None) -> Results:
    """The same layer with the same values in fp32, on the eager backend."""
    m = to_fp32(made)
    m.kda_options["backend"] = "eager"
    leaf = x.float().requires_grad_(d_o is not None)
    return _named(m, _run(m, leaf, None if d_o is None else d_o.float(), list(m.parameters())))
