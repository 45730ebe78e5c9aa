"""Sections of the operator: forward, packed, segments, training, backward, decode, host, hard, context and so on.

Those of gated delta nets, which have one gate a head, run the same code over cases of their own.

What is timed is replayed from CUDA graphs; what the host does for a call has a section of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from torch import Tensor

from benchmarks.gpu.cases import (
    HARD,
    Case,
    activated,
    decode_floor_ms,
    decode_inputs,
    forward_floor_ms,
    hard_inputs,
    make_inputs,
    training_floor_ms,
)
from benchmarks.gpu.contenders import (
    CALL,
    Contender,
    Prepared,
    forwards,
    graphed,
    ours_forward,
    ours_step,
    ours_training,
    trainings,
)
from benchmarks.gpu.harness import Job, Pick, Row, Setup, admit, compete, reason, timed
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.peers import (
    ACTIVATED,
    cudnn_forward,
    cudnn_training,
    fla_forward,
    fla_step,
    fla_step_in_place,
    fla_training,
    flash_qla_training,
    forward_peers,
    softmax_forward,
    softmax_training,
    softmax_truth,
)
from benchmarks.gpu.truth import Heads, Results, forward_truth, oracle, oracle_gradients, training_truth, upstream
from benchmarks.timing import Times
from kda_layers.kernels.kda.contract import Inputs

BASELINE = "fla"  # our backend that runs flash-linear-attention's kernels: what lies between is our overhead


def _graphs(contenders: Iterable[Contender], machine: Machine) -> list[Contender]:
    return [graphed(c, machine) for c in contenders]


def forward(setup: Setup) -> list[Job]:
    """The operator's forward pass."""
    return [Job(case.fields(), partial(_forward, setup, case)) for case in setup.sizes.forward]


def _forward(setup: Setup, case: Case) -> list[Row]:
    x = make_inputs(case, setup.machine.device)
    heads = Heads.first_and_last(x)
    contenders = [*forwards(setup.backends, x), *forward_peers(x)]
    truth = forward_truth(heads.inputs(x))
    floor_ms = forward_floor_ms(case)
    contenders = _graphs(contenders, setup.machine)
    return compete(case.fields(), contenders, truth, setup.machine, pick=heads.results, floor_ms=floor_ms, memory=True)


def gdn_forward(setup: Setup) -> list[Job]:
    """The forward pass of gated delta nets."""
    return [Job(case.fields(), partial(_forward, setup, case)) for case in setup.sizes.gdn_forward]


def packed(setup: Setup) -> list[Job]:
    """The operator's forward pass over short and uneven sequences."""
    return [Job(case.fields(), partial(_forward, setup, case)) for case in setup.sizes.packed]


def cudnn_shapes(setup: Setup) -> list[Job]:
    """The forward pass, with an initial state, over the shapes that cuDNN's front end publishes times of."""
    return [Job(case.fields(), partial(_cudnn_shape, setup, case)) for case in setup.sizes.cudnn_shapes]


def _cudnn_shape(setup: Setup, case: Case) -> list[Row]:
    x = make_inputs(case, setup.machine.device)
    heads, floor_ms = Heads.first_and_last(x), forward_floor_ms(case)
    contenders = _graphs([*forwards(setup.backends, x), cudnn_forward(x)], setup.machine)
    truth = forward_truth(heads.inputs(x))
    return compete(case.fields(), contenders, truth, setup.machine, pick=heads.results, floor_ms=floor_ms)


def _modes(x: Inputs) -> tuple[Inputs, Inputs]:
    """In one piece and cut into segments."""
    return x, x._replace(segments="always")


def segments(setup: Setup) -> list[Job]:
    """The forward pass over long sequences of few heads, in one piece and cut into segments."""
    return [Job(case.fields(), partial(_segments, setup, case)) for case in setup.sizes.segments]


def _segments(setup: Setup, case: Case) -> list[Row]:
    x = make_inputs(case, setup.machine.device)
    heads = Heads.first_and_last(x)
    contenders = [*(c for mode in _modes(x) for c in forwards(setup.backends, mode)), cudnn_forward(x)]
    truth, floor_ms = forward_truth(heads.inputs(x)), forward_floor_ms(case)
    contenders = _graphs(contenders, setup.machine)
    return compete(case.fields(), contenders, truth, setup.machine, pick=heads.results, floor_ms=floor_ms, memory=True)


def training(setup: Setup) -> list[Job]:
    """Forward and every gradient."""
    return [Job(case.fields(), partial(_training, setup, case)) for case in setup.sizes.training]


def gdn_training(setup: Setup) -> list[Job]:
    """Forward and every gradient of gated delta nets."""
    return [Job(case.fields(), partial(_training, setup, case)) for case in setup.sizes.gdn_training]


def _training(setup: Setup, case: Case) -> list[Row]:
    x = make_inputs(case, setup.machine.device)
    heads, d_o = Heads.first_and_last(x), upstream(x)
    if case.head_gates:
        peers = _on_activated((flash_qla_training, cudnn_training), activated(x, norm=False), d_o, heads)
    else:
        peers = [fla_training(x, d_o, disable_recompute=True), cudnn_training(x, d_o)]
    contenders = [
        *(c for mode in _modes(x)[: 1 + case.long] for c in trainings(setup.backends, mode, d_o)),
        fla_training(x, d_o),
        *peers,
    ]
    truth = training_truth(heads.inputs(x), d_o[:, :, heads.v])
    return compete(
        case.fields(), _graphs(contenders, setup.machine), truth, setup.machine,
        pick=heads.results, floor_ms=training_floor_ms(case), memory=True,
    )  # fmt: skip


def backward(setup: Setup) -> list[Job]:
    """Every gradient of one forward, which ran outside: a graph cannot capture what its stream was not part of."""
    return [Job(case.fields(), partial(_backward, setup, case)) for case in setup.sizes.backward]


def _backward(setup: Setup, case: Case) -> list[Row]:
    x = make_inputs(case, setup.machine.device)
    heads, d_o = Heads.first_and_last(x), upstream(x)
    contenders = [
        *(ours_training(b, x._replace(recompute_above=1.0), d_o, backward_alone=True) for b in setup.backends),
        fla_training(x, d_o, disable_recompute=True, backward_alone=True),
        cudnn_training(x, d_o, backward_alone=True),
    ]
    contenders = [replace(c, fields=c.fields | {"mode": CALL}) for c in contenders]
    truth = training_truth(heads.inputs(x), d_o[:, :, heads.v])
    return compete(case.fields(), contenders, truth, setup.machine, pick=heads.results, memory=True)


def decode(setup: Setup) -> list[Job]:
    """One token for each of some sequences."""
    return _decode_jobs(setup, [Case(n, 1, setup.sizes.decode_heads) for n in setup.sizes.decode])


def gdn_decode(setup: Setup) -> list[Job]:
    """One token for each of some sequences of gated delta nets, and of KDA at the same sizes."""
    return _decode_jobs(setup, setup.sizes.gdn_decode)


def _decode_jobs(setup: Setup, cases: Iterable[Case]) -> list[Job]:
    return [Job(_decode_fields(case), partial(_decode, setup, case)) for case in cases]


def _decode_fields(case: Case) -> Row:
    return {"sequences": case.B, "H": case.H} | ({"what": case.fields()["what"]} if case.head_gates else {})


def _decode(setup: Setup, case: Case) -> list[Row]:
    machine = setup.machine
    x = decode_inputs(case, machine.device)
    heads = Heads.first_and_last(x)
    floors = {kept: decode_floor_ms(case.B, case.HV, kept) for kept in ("fp32", "bf16", "int8")}
    contenders = [ours_step(b, x, kept, floor) for b in setup.backends for kept, floor in floors.items()]
    if case.head_gates:
        channels = decode_inputs(replace(case, head_gates=False), machine.device)
        truth = oracle(heads.inputs(channels))
        steps = (
            replace(c, name=f"{c.name}, gates of channels") for c in (ours_step(b, channels) for b in setup.backends)
        )
        contenders += [*(_judged(c, truth, heads) for c in steps), fla_step(x)]
    else:
        contenders += [fla_step(x), fla_step_in_place(x)]
    truth, floor_ms = oracle(heads.inputs(x)), floors["fp32"]
    contenders = _graphs(contenders, machine)
    return compete(_decode_fields(case), contenders, truth, machine, pick=heads.results, floor_ms=floor_ms)


def _judged(c: Contender, truth: Results, heads: Heads) -> Contender:
    """The contender with a truth of its own for these heads."""

    def prepare() -> Prepared:
        p = c.prepare()
        return p._replace(results=lambda out: heads.results(p.results(out)))

    return replace(c, prepare=prepare, truth=truth)


HOST_PASSES = ("forward", "forward + backward", "decode")


def host(setup: Setup) -> list[Job]:
    """Host time of a call, at a size at which the GPU does not hold the host up."""
    return [Job(_host_fields(setup, p), partial(_host, setup, p)) for p in HOST_PASSES]


def _host_fields(setup: Setup, pass_: str) -> Row:
    case = setup.sizes.host
    return {"pass": pass_, "B": case.B, "T": 1 if pass_ == "decode" else case.T, "H": case.H}


def _host(setup: Setup, pass_: str) -> list[Row]:
    machine, case = setup.machine, setup.sizes.host
    fields = _host_fields(setup, pass_)
    x = decode_inputs(replace(case, T=1), machine.device) if pass_ == "decode" else make_inputs(case, machine.device)
    heads = Heads.first_and_last(x)
    if pass_ == "forward":
        contenders = [*(ours_forward(b, x) for b in setup.backends), fla_forward(x), cudnn_forward(x)]
        truth = forward_truth(heads.inputs(x))
    elif pass_ == "decode":
        contenders = [*(ours_step(b, x) for b in setup.backends), fla_step(x), fla_step_in_place(x)]
        truth = oracle(heads.inputs(x))
    else:
        d_o = upstream(x)
        contenders = [*(ours_training(b, x, d_o) for b in setup.backends), fla_training(x, d_o), cudnn_training(x, d_o)]
        truth = training_truth(heads.inputs(x), d_o[:, :, heads.v])
    return _host_times(fields, contenders, truth, machine, heads.results)


def _host_times(
    fields: Row, contenders: Iterable[Contender], truth: Results, machine: Machine, pick: Pick
) -> list[Row]:
    """A row for each contender, whose time is in microseconds of the host."""
    rows, runs = [], {}
    for c in contenders:
        prepared, row = admit(c, truth, machine, pick)
        rows.append(fields | row)
        if prepared is not None:
            runs[c.name] = prepared.run
    return _with_times(rows, machine.host_us(runs))


def _with_times(rows: list[Row], times: dict[str, Times | Exception]) -> list[Row]:
    """The rows, those of contenders with times as timed, or failed."""
    for row in (r for r in rows if r["contender"] in times):
        try:
            row |= timed(times[row["contender"]])
        except Exception as problem:
            row |= {"status": "failed", "reason": reason(problem)}
    return rows


def hard(setup: Setup) -> list[Job]:
    """Errors, not times, on inputs on which fast kernels have been wrong."""
    T, H = setup.sizes.hard
    return [Job({"input": name, "T": T, "H": H}, partial(_hard, setup, name)) for name in HARD]


def _hard(setup: Setup, name: str) -> list[Row]:
    T, H = setup.sizes.hard
    x = hard_inputs(name, T, H, setup.machine.device)
    contenders = [*(ours_forward(b, x) for b in setup.backends), fla_forward(x), cudnn_forward(x)]
    truth = oracle(x)
    return [{"input": name, "T": T, "H": H} | admit(c, truth, setup.machine)[1] for c in contenders]


def hard_gradients(setup: Setup) -> list[Job]:
    """Errors of every gradient on the same inputs."""
    T, H = setup.sizes.hard
    return [Job({"input": name, "T": T, "H": H}, partial(_hard_gradients, setup, name)) for name in HARD]


def _hard_gradients(setup: Setup, name: str) -> list[Row]:
    T, H = setup.sizes.hard
    x = hard_inputs(name, T, H, setup.machine.device)._replace(final_state=False)
    d_o = upstream(x)
    contenders = [*(ours_training(b, x, d_o) for b in setup.backends), fla_training(x, d_o), cudnn_training(x, d_o)]
    truth = oracle_gradients(x, d_o)
    return [{"input": name, "T": T, "H": H} | admit(c, truth, setup.machine)[1] for c in contenders]


# ---------------------------------------------------------------- against softmax attention


def context(setup: Setup) -> list[Job]:
    """The operator and softmax attention of the same width against the sequence length: README's figure."""
    H = setup.sizes.context_heads
    cases = [Case(1, T, H) for T in setup.sizes.context]
    kinds = (("forward", _context_forward), ("forward + backward", _context_training))
    return [
        Job(_context_fields(c, pass_), partial(run, setup, c)) for c in cases for pass_, run in kinds
    ]  # fmt: skip


def _context_fields(case: Case, pass_: str) -> Row:
    return {"pass": pass_, "B": case.B, "T": case.T, "H": case.H}


def _context_forward(setup: Setup, case: Case) -> list[Row]:
    x, machine, fields = make_inputs(case, setup.machine.device), setup.machine, _context_fields(case, "forward")
    heads = Heads.first_and_last(x)
    softmax = replace(softmax_forward(x, heads.v), truth=softmax_truth(x, heads.v))
    contenders = [*(ours_forward(b, x) for b in setup.backends), fla_forward(x), cudnn_forward(x), softmax]
    truth, floor_ms = forward_truth(heads.inputs(x)), forward_floor_ms(case)
    return compete(fields, _graphs(contenders, machine), truth, machine, pick=heads.results, floor_ms=floor_ms)


def _context_training(setup: Setup, case: Case) -> list[Row]:
    x, machine = make_inputs(case, setup.machine.device), setup.machine
    fields, heads, d_o = _context_fields(case, "forward + backward"), Heads.first_and_last(x), upstream(x)
    softmax = replace(softmax_training(x, d_o, heads.v), truth=softmax_truth(x, heads.v, d_o))
    contenders = [
        *(ours_training(b, x, d_o) for b in setup.backends),
        fla_training(x, d_o),
        *_on_activated((cudnn_training,), activated(x), d_o, heads),  # its backward takes no others
        softmax,
    ]
    truth, floor_ms = training_truth(heads.inputs(x), d_o[:, :, heads.v]), training_floor_ms(case)
    return compete(fields, _graphs(contenders, machine), truth, machine, pick=heads.results, floor_ms=floor_ms)


def _on_activated(
    peers: Iterable[Callable[[Inputs, Tensor], Contender]], x: Inputs, d_o: Tensor, heads: Heads
) -> list[Contender]:
    """Forward and backward of peers on activated inputs `x`, and so with other gradients."""
    truth = training_truth(heads.inputs(x), d_o[:, :, heads.v])
    return [replace(_judged(peer(x, d_o), truth, heads), fields=ACTIVATED) for peer in peers]


# ---------------------------------------------------------------- what our operator adds to the kernels below it


def overhead(setup: Setup) -> list[Job]:
    """Our operator over flash-linear-attention's kernels against its own public function."""
    big, small = setup.sizes.overhead
    return [
        Job({"pass": pass_, "measure": measure, **case.fields()}, partial(_overhead, setup, pass_, measure, case))
        for pass_ in ("forward", "forward + backward")
        for measure, case in (("GPU ms", big), ("host us", small))
    ]


def _overhead(setup: Setup, pass_: str, measure: str, case: Case) -> list[Row]:
    machine, fields = setup.machine, {"pass": pass_, "measure": measure, **case.fields()}
    x = make_inputs(case, machine.device)
    heads = Heads.first_and_last(x)
    if pass_ == "forward":
        contenders = [ours_forward(BASELINE, x), fla_forward(x)]
        truth = forward_truth(heads.inputs(x))
    else:
        d_o = upstream(x)
        contenders = [ours_training(BASELINE, x, d_o), fla_training(x, d_o)]
        truth = training_truth(heads.inputs(x), d_o[:, :, heads.v])
    if measure == "host us":
        rows = _host_times(fields, contenders, truth, machine, heads.results)
    else:
        rows = compete(fields, _graphs(contenders, machine), truth, machine, pick=heads.results)
    return rows + _difference(fields, [r for r in rows if r["status"] == "timed"], measure)


def _difference(fields: Row, timed: list[Row], measure: str) -> list[Row]:
    """Return the time ours takes more, in microseconds and percent; empty unless both were timed."""
    if len(timed) != 2:
        return []
    ours, other = (r["time"]["median"] for r in timed)
    more_us = (ours - other) * (1e3 if measure == "GPU ms" else 1)
    return [
        fields | {
            "contender": "difference", "ours": False, "status": "right",
            "more us": more_us, "more percent": (ours / other - 1) * 100,
        }
    ]  # fmt: skip
