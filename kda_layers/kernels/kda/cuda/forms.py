"""The forms of the forward over whole sequences, and the choice among them.

A form says which calls it serves, or why not, and the time that it expects to take. A form whose results differ by
rounding (segments) takes every call that it serves, so that a sequence has the same bits in any batch; of the others,
which have the same bits, the fastest is chosen.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...cuda.machine import Machine, Properties
from ..contract import Inputs, KDAOutput, outputs_like
from . import spec
from .forward import costs, last_tokens, one_role, segments, two_roles
from .spec import ALL_IN_CHUNKS, PARAMS, LastTokens, Plan, Saved, Signature, chunk_rows, stage_bytes

R = TypeVar("R")
MARGIN = 0.97  # of one role's time: what is nearer is within the error of expected times


class Form(NamedTuple):
    """One way to compute the forward."""

    name: str
    serves: Callable[[Signature, Properties], list[str]]  # every reason why not, each 'what it is, what it needs'
    expected_us: Callable[[Signature, Properties], float]
    plan_of: Callable[[Machine, Signature], Plan]
    rounds_otherwise: bool = False


ONE_ROLE = Form("one_role", lambda *_: [], costs.one_role_us, one_role.plan_of)  # serves every call
TWO_ROLES = Form("two_roles", two_roles.serves, costs.two_roles_us, two_roles.plan_of)
SEGMENTS = Form("segments", segments.serves, segments.expected_us, segments.plan_of, True)
FORMS = (SEGMENTS, TWO_ROLES, ONE_ROLE)


def choose(s: Signature, properties: Properties) -> Form:
    """Return the form of a call."""
    serving = [form for form in FORMS if not form.serves(s, properties)]
    if serving[0].rounds_otherwise:
        return serving[0]
    *others, plain = serving
    limit = MARGIN * plain.expected_us(s, properties) if others else 0.0
    faster = [(us, form) for form in others if (us := form.expected_us(s, properties)) < limit]
    return min(faster, key=lambda pair: pair[0])[1] if faster else plain


def planned(machine: Machine, s: Signature) -> tuple[Form, Plan]:
    """Return the form of a call and its plan."""
    return _planned(machine, s, two_roles.declined)


@functools.lru_cache(spec.PLANS)
def _planned(machine: Machine, s: Signature, declined: str | None) -> tuple[Form, Plan]:
    form = choose(s, machine.properties(s.device))
    return form, plan_of(form, machine, s)


def plan_of(form: Form, machine: Machine, s: Signature) -> Plan:
    """Return the plan of a call by a form."""
    plan = form.plan_of(machine, s)
    if form is not SEGMENTS or not s.packed:
        return plan
    assert s.cut is not None  # as `serves` has found
    s = s._replace(cut=None, cut_from=s.cut.longer)
    return plan._replace(whole=choose(s, machine.properties(s.device)).plan_of(machine, s))


def is_cut(x: Inputs, machine: Machine) -> bool:
    """Return True if a call with gradients has sequences that may be cut; while compiling, sizes may be symbols."""
    if x.segments == "never":
        return False
    return not segments.serves(Signature.of(x, saves=True), machine.properties(x.q.device))


def form_that_saves(x: Inputs, machine: Machine) -> Form:
    """Return the form of a call with gradients, whether it saves tensors or its backward runs the forward again."""
    return choose(Signature.of(x, saves=True), machine.properties(x.q.device))


def forward_whole_chunks(x: Inputs, machine: Machine) -> KDAOutput:
    """Return the outputs of a call whose backward runs the forward again: with the bits of one that saves."""
    x = spec.aligned_inputs(x)
    return launch(x, machine, Signature.of(x), form=form_that_saves(x, machine))[0]


def recompute(x: Inputs, machine: Machine) -> Saved:
    """Run the forward again for the tensors that it saves."""
    form = form_that_saves(x, machine)  # of the whole call: "auto" cuts none that returns states
    x = spec.aligned_inputs(x)._replace(final_state=False, checkpoint_every=0)
    _, saved = launch(x, machine, Signature.of(x, True), form=form)
    assert saved is not None
    return saved


def forward(x: Inputs, machine: Machine, save: bool) -> tuple[KDAOutput, list[Tensor]]:
    """Return the outputs and, with `save`, the tensors for the backward.

    Raises:
        ValueError: there are too many tokens, or the GPU (or its partition) is too small
        RuntimeError: a launch failed
    """
    x = spec.aligned_inputs(x)
    T, packed = x.v.shape[1], x.cu_seqlens is not None
    finishes = not save and last_tokens.possible(T, packed)
    s = Signature.of(x, save, finishes)
    if not finishes:
        out, saved = launch(x, machine, s)
        return out, [] if saved is None else saved.tensors()
    order = before = None
    if packed or last_tokens.has_chunks(T):
        cut = planned(machine, s)[0] is SEGMENTS
        order = None if cut else last_tokens.order_of(x, None, machine)
        before = None if x.final_state else last_tokens.states_before(x, order)
        out, _ = launch(x, machine, s, LastTokens(None if order is None else order.order, before))
    else:
        out = outputs_like(x)
    after = out.final_state if before is None else before
    last_tokens.finish(x, s, out.o, x.initial_state, after, out.final_state, machine, order)
    return out, []


def attempt(run: Callable[[Plan], R], machine: Machine, s: Signature, form: Form | None = None) -> R:
    """Run the plan of a call by `form`, or by the one that is chosen.

    A process or stream that has a part of a GPU (MPS, green contexts) learns so from the launch alone: if specialised
    CTAs cannot all run at once, those of one role serve from then on, with a warning.
    """
    plan = planned(machine, s)[1] if form is None else plan_of(form, machine, s)
    try:
        return run(plan)
    except RuntimeError as error:
        if "COOPERATIVE_LAUNCH_TOO_LARGE" not in str(error):
            raise
        warnings.warn(
            f"specialised CTAs are off from now on, for the same bits in more time: they must all run at once, and "
            f"{s.device} could not run them ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
    two_roles.declined = f"{s.device} could not run all of its blocks at once"
    return attempt(run, machine, s, ONE_ROLE if form is TWO_ROLES else form)


def launch(
    x: Inputs,
    machine: Machine,
    s: Signature,
    last: LastTokens = ALL_IN_CHUNKS,
    form: Form | None = None,
) -> tuple[KDAOutput, Saved | None]:
    """Launch a call of aligned inputs by `form`, or by the one that is chosen."""
    return attempt(lambda plan: run(x, plan, last), machine, s, form)


def run(x: Inputs, plan: Plan, last: LastTokens) -> tuple[KDAOutput, Saved | None]:
    """Launch a plan on aligned inputs; return the outputs, without those of last tokens, and the saved tensors.

    Raises:
        RuntimeError: specialised CTAs cannot run at once
    """
    HV, V, K, prepared, transitions, starts = *x.v.shape[2:], x.q.shape[3], None, None, None
    out = outputs_like(x)
    if out.checkpoints is not None and x.cu_seqlens is not None:
        # Offsets end at T, so N sequences leave at most 63 N tokens after their full chunks: fewer than N rows unused
        out.checkpoints[:, max(x.checkpoint_count - (x.cu_seqlens.shape[0] - 2), 0) :].zero_()
    saved = Saved.like(x, plan.cut) if plan.saves else None
    if plan.cut is not None:
        rows = plan.cut.rows(x, plan.last_tokens)
        starts = x.q.new_empty(rows, V, K, dtype=torch.float32)
        if saved is None:
            prepared = x.q.new_empty(chunk_rows(x), HV, stage_bytes(K), dtype=torch.uint8)
            transitions = x.q.new_empty(rows, V + K, K, dtype=torch.float32)
    prepared, states, errors, T_fp16, transitions = saved or (prepared, None, None, None, transitions)
    for each in (plan,) if plan.whole is None else (plan, plan.whole):
        ring, progress = each.scratch(x.q.device)
        each.run(PARAMS.point(
            q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias, initial_state=x.initial_state,
            cu_seqlens=x.cu_seqlens, o=out.o, final_state=out.final_state, checkpoints=out.checkpoints, ring=ring,
            progress=progress, prepared=prepared, states=states, errors=errors, T_fp16=T_fp16, transitions=transitions,
            starts=starts, order=last.order, before_last=last.before,
        ))  # fmt: skip
    return out, saved


def explain(s: Signature, properties: Properties) -> list[str]:
    """Return a line for each form: its expected time, or every reason against it."""
    chosen, lines = choose(s, properties), []
    for form in FORMS:
        reasons = form.serves(s, properties)
        what = f"cannot: {'; '.join(reasons)}" if reasons else f"{form.expected_us(s, properties):.0f} us expected"
        lines.append(f"{form.name:10}{what}{', chosen' if form is chosen else ''}")
    return lines
