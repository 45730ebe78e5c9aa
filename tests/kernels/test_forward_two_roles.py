"""The forward by blocks of two roles in the emulator: the bits of forward.cu, however blocks are shared out."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from kda_layers import KDAOutput, explain, use_backend
from kda_layers.kernels.cuda.machine import Properties
from kda_layers.kernels.kda.contract import KDA, Inputs
from kda_layers.kernels.kda.cuda import forms
from kda_layers.kernels.kda.cuda.forward import costs, last_tokens, two_roles
from kda_layers.kernels.kda.cuda.forward.costs import Split
from kda_layers.kernels.kda.cuda.spec import ALWAYS, AUTO, Signature
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import BF16, FP16, Case, ids, make_inputs, outputs
from tests.kernels.emulated_backends import EMULATED, registered

# Groups that scan, blocks that prepare, ring slots of a group; three groups share two of four tiles.
SPLITS = [Split(1, 2, 4), Split(3, 2, 5), Split(4, 6, 12)]
NARROW = Case(K=64, V=64, dtype=FP16, gate="softplus", g_wide=True, T=200, state=True, checkpoints=False)
PACKED = Case(lengths=(130, 0, 64, 1, 200, 5, 63), state=True, checkpoints=False)
CASES = [
    Case(B=2, T=330, state=True, checkpoints=False),
    Case(B=2, T=300, H=1, group=2, slow=True, final=False, checkpoints=False),  # runs of 7, 7 and 6 chunks
    Case(T=40, state=True, dt_bias=False, A_log=False, l2norm=False, scale=0.3, checkpoints=False),
    Case(T=192, dtype=FP16, gate="log_decay", beta="2sigmoid", g_wide=True, checkpoints=False),
    NARROW,
    PACKED,
    Case(lengths=(64,) * 5, H=2, group=1, slow=True, final=False, checkpoints=False),
    Case(lengths=(300, 65, 66), K=64, V=64, dtype=FP16, gate="softplus", g_wide=True, checkpoints=False),
    Case(lengths=(0, 0), state=True, checkpoints=False),
]
STORING = [
    Case(B=2, T=330, state=True),
    Case(B=2, T=300, H=1, group=2, final=False),  # runs of 7, 7 and 6 chunks
    Case(B=3, T=128, H=1, group=1, dtype=FP16, gate="softplus", g_wide=True),
    Case(T=40),  # no whole chunk
    dataclasses.replace(NARROW, checkpoints=True),
    dataclasses.replace(PACKED, checkpoints=True),
    Case(lengths=(64, 128, 63, 1, 192), H=2, group=1, slow=True, final=False),
    Case(lengths=(65, 1, 0) * 12, H=1, group=1, K=64, V=64, dtype=FP16, gate="softplus", g_wide=True),
]


def by_two_roles(x: Inputs, i: int, seed: int = 0) -> KDAOutput:
    """The outputs with SPLITS[i], and at most as many groups as there are heads to scan."""
    heads = x.v.shape[0] * x.v.shape[2] if x.cu_seqlens is None else costs.MOST_GROUPS_PACKED
    split = SPLITS[i]._replace(groups=min(SPLITS[i].groups, heads))
    return emulated.two_roles(x, split, seed=seed)


def assert_same(got: KDAOutput, want: KDAOutput) -> None:
    assert outputs(got).keys() == outputs(want).keys()
    assert [n for n, t in outputs(want).items() if not torch.equal(outputs(got)[n], t)] == []


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids(CASES + STORING))
def test_bits_of_the_forward_kernel(case: Case) -> None:
    x = make_inputs(case)
    want = emulated.forward(x)
    for i in range(len(SPLITS)):
        assert_same(by_two_roles(x, i), want)


@pytest.mark.emulated
def test_tokens_of_zeros() -> None:
    x = make_inputs(CASES[0])
    for t in (x.q, x.k, x.v):
        t[:, 64:128], t[0, 130:140] = 0, 0
    assert_same(by_two_roles(x, 1), emulated.forward(x))


@pytest.mark.emulated
def test_the_fastest_decay_without_biases() -> None:
    """exp(A_log) is infinite, and a bias of zero stays zero."""
    x = make_inputs(Case(T=40, state=True, dt_bias=False, checkpoints=False))
    x.A_log.fill_(100.0)
    got = by_two_roles(x, 1)
    assert_same(got, emulated.forward(x))
    assert got.o.isfinite().all()


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids([CASES[0], NARROW, PACKED, STORING[1], STORING[5]]))
def test_order_of_concurrent_operations(case: Case) -> None:
    x = make_inputs(case)
    want = by_two_roles(x, 0)
    for seed in range(1, 6):
        assert_same(by_two_roles(x, seed % 3, seed=seed), want)


@pytest.mark.emulated
@pytest.mark.parametrize("more", [{"B": 2}, {"lengths": (130, 65)}, {"B": 2, "checkpoints": True}], ids=str)
def test_accesses_are_ordered(more: dict[str, Any]) -> None:
    """Also those of a state that one group hands to another; the machine raises an error where nothing orders two."""
    x = make_inputs(dataclasses.replace(NARROW, **more))
    with cuda_emulator.order_checked():
        by_two_roles(x, 1)


TAILED = (1, 66, 0, 130, 3, 64, 195)


@pytest.mark.emulated
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize(
    ("case", "many"),
    [
        (Case(B=2, T=66, state=True, checkpoints=False), 96),
        (Case(B=2, T=192, state=True, checkpoints=False), 96),
        (Case(B=2, T=197, state=True, checkpoints=False), 96),
        (Case(B=2, T=66, state=True), 96),
        (Case(lengths=TAILED, H=2, state=True, checkpoints=False), 96),
        (Case(lengths=TAILED, H=2, state=True, checkpoints=False, offsets_dtype=torch.int64), 3),  # listed
        (Case(lengths=TAILED, H=2), 3),
    ],
    ids=str,
)
def test_chosen_with_last_tokens(case: Case, many: int, final: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes this kernel has the bits of one that does not, last tokens and states too."""
    x = make_inputs(dataclasses.replace(case, final=final))
    monkeypatch.setattr(last_tokens, "MANY", many)

    def call(x: Inputs) -> KDAOutput:
        with emulated.GuardedMemory():
            return forms.forward(emulated.guarded_inputs(x), emulated.Emulator(processors=16), False)[0]

    with emulated.without_two_roles():
        want = call(x)
    form = forms.TWO_ROLES._replace(serves=lambda *_: [], expected_us=lambda *_: 0.0)
    with (
        mock.patch.object(two_roles, "split_of", return_value=SPLITS[1]),
        mock.patch.object(forms, "FORMS", (form, forms.ONE_ROLE)),
        mock.patch.object(forms, "run", wraps=forms.run) as launched,
    ):
        assert_same(call(x), want)
    assert [plan.launches[0].cooperative for _, plan, _ in (c.args for c in launched.call_args_list)] == [True]


@pytest.mark.emulated
def test_falling_offsets_are_not_waited_for() -> None:
    """Decreasing offsets are the caller's error, but must not hang the GPU; a hang is a test that never ends."""
    x = make_inputs(Case(lengths=(200, 0, 200), checkpoints=False))
    assert x.cu_seqlens is not None
    x.cu_seqlens[2] = 0  # a length of -200, which is -2 chunks
    assert by_two_roles(x, 0).o.shape == x.v.shape


# ---------------------------------------------------------------- the choice

H100 = Properties(132, 90, 2**37)


def signature(
    B: int, T: int, HV: int, sequences: int | None = None, states: int = 0, stores: bool = False
) -> Signature:
    """The signature of a call without gradients; `sequences` are packed."""
    bf16, offsets = torch.bfloat16, None if sequences is None else (sequences + 1, torch.int32)
    return Signature(
        torch.device("cpu"), bf16, bf16, bf16, (B, T, HV, 128), (B, T, HV, 128), offsets, "lower_bound", -5.0,
        "sigmoid", True, 0.1, states > 0, states > 1, stores, last_tokens=True,
    )  # fmt: skip


def groups_of(s: Signature, properties: Properties = H100) -> int | None:
    """The number of groups that scan, or None where a call goes to blocks of one role."""
    form = forms.choose(s, properties)
    return two_roles.split_of(s, properties.processors).groups if form is forms.TWO_ROLES else None


@pytest.mark.parametrize(
    ("tiles", "tokens", "groups"),
    [
        (4, 8192, 4), (8, 8192, 8), (12, 8192, 12), (16, 8192, 16), (20, 8192, 20), (24, 8192, 22), (24, 16384, 22),
        (26, 8192, 22), (32, 8192, 22), (40, 8192, 22), (64, 8192, 22), (96, 8192, 22), (128, 8192, 22), (8, 65536, 8),
        (10, 3072, 10), (8, 4096, 8), (12, 4096, 12),
        (4, 1024, None), (12, 2048, None), (8, 4, None),
    ],
)  # fmt: skip
def test_measured_choices(tiles: int, tokens: int, groups: int | None) -> None:
    """Choices agree with what an H200 or an H100 ran faster."""
    s = signature(1, tokens, tiles)
    assert groups_of(s) == groups
    if groups:
        split = two_roles.split_of(s, 132)
        assert (split.groups + split.followers) * 2 + split.preparers <= 132
        assert split.ring_slots >= split.least_slots


@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "states", "groups"),
    [
        (64, 8192, 32, 0, 26), (8, 8192, 96, 0, 24), (1, 8192, 8, 2, 8), (1, 8192, 16, 0, 16),
        (64, 8192, 32, 2, None), (127, 8192, 32, 0, None), (21, 8192, 32, 0, None), (0, 0, 8, 0, None),
    ],
)  # fmt: skip
def test_measured_choices_of_packed_sequences(
    sequences: int, tokens: int, heads: int, states: int, groups: int | None
) -> None:
    """Choices agree with what an H100 ran faster."""
    assert groups_of(signature(1, tokens, heads, sequences, states)) == groups


@pytest.mark.parametrize(
    ("tiles", "groups"),
    [(8, None), (16, None), (17, 17), (20, 20), (24, 24), (28, 28), (32, 28), (48, 28), (64, 28), (96, 28), (128, 28)],
)
def test_measured_choices_with_checkpoints(tiles: int, groups: int | None) -> None:
    """Choices agree with what an H200 ran faster."""
    assert groups_of(signature(1, 8192, tiles, stores=True)) == groups


@pytest.mark.parametrize("head_gates", [False, True])
def test_chosen_with_gradients(head_gates: bool) -> None:
    """Choices agree with what an H200 ran faster."""
    s = signature(1, 8192, 32)._replace(saves=True, head_gates=head_gates)
    assert abs(forms.ONE_ROLE.expected_us(s, H100) / 330 - 1) < 0.03  # an H200 took 0.33 ms
    assert 250 - 50 * head_gates < forms.TWO_ROLES.expected_us(s, H100) < 290
    assert groups_of(s) == (32 if head_gates else 27)
    assert groups_of(s._replace(v_shape=(1, 8192, 24, 128), q_shape=(1, 8192, 24, 128))) == 24
    assert groups_of(s._replace(v_shape=(1, 8192, 8, 128), q_shape=(1, 8192, 8, 128))) == 8


# B, T, H -> ms of slow gates on one H200, of the runs in docs/internals/kernels/forward.md; the model is of an H100
ONE_ROLE = {(1, 8192, 8): 0.165, (1, 8192, 16): 0.176, (2, 16384, 12): 0.486, (1, 65536, 8): 1.24, (1, 8192, 64): 0.502}
TWO_ROLES = {
    (1, 8192, 8): 0.118,
    (1, 8192, 16): 0.152,
    (2, 16384, 12): 0.368,
    (1, 65536, 8): 0.757,
    (1, 8192, 64): 0.482,
}
SEGMENTS = {
    (1, 131072, 4): 0.720, (1, 65536, 8): 0.710, (1, 8192, 8): 0.142, (1, 8192, 16): 0.222, (2, 16384, 12): 0.598,
    (1, 1048576, 1): 1.46,
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "times", "error"),
    [(forms.ONE_ROLE, ONE_ROLE, 0.13), (forms.TWO_ROLES, TWO_ROLES, 0.07), (forms.SEGMENTS, SEGMENTS, 0.17)],
    ids=["one_role", "two_roles", "segments"],
)
def test_expected_times(form: forms.Form, times: dict[tuple[int, int, int], float], error: float) -> None:
    for shape, ms in times.items():
        expected = form.expected_us(signature(*shape)._replace(cut=ALWAYS), H100) / 1000
        assert abs(expected / ms - 1) < error, (shape, expected)


def test_a_long_packed_sequence_is_shared_out_evenly() -> None:
    """However long one of a few sequences is, no group gets two of its heads before another one gets its first."""
    calls = itertools.product((1, 2, 5, 20, 47), (3, 8, 12, 16, 32, 48, 96))
    chosen = [(heads, groups_of(signature(1, 1 << 16, heads, n))) for n, heads in calls]
    pairs = [(heads, groups) for heads, groups in chosen if groups]
    assert len(pairs) > 5
    assert [(h, g) for h, g in pairs if h % g and g % h] == []


def test_blocks_are_whole_clusters() -> None:
    """No grid is refused, and all blocks can run at once."""
    slices = costs.SLICES
    chosen = 0
    some = (*range(1, 129), 192, 255, costs.MOST_TILES)
    for processors, tiles in itertools.product((132, 131, 114, 33, 6), some):
        stores = tiles % 2 == 0
        calls = [signature(1, 64 * chunks, tiles, stores=stores) for chunks in (32, 128, 16384)]
        calls += [signature(1, 1 << 16, tiles, n, stores=stores) for n in (1, 7, 64)]
        for s in calls:
            if groups_of(s, H100._replace(processors=processors)) is None:
                continue
            split = two_roles.split_of(s, processors)
            blocks = (split.groups + split.followers) * slices + split.preparers
            assert blocks % slices == 0
            assert blocks <= processors
            assert split.preparers > 0
            chosen += 1
    assert chosen > 1000


def test_reasons() -> None:
    """Every reason, each 'what it is, what it needs'."""
    x = signature(1, 8192, 8)
    served = two_roles.serves
    assert served(x, H100) == []
    assert served(x, H100._replace(capability=100)) == ["arch is sm_100, needs sm_90"]
    assert served(x, H100._replace(processors=4)) == ["the GPU has 4 multiprocessors, needs 6"]
    assert served(signature(6, 8192, 96), H100) == ["B * HV is 576, needs at most 512"]
    assert served(signature(1, 3, 8), H100) == ["no sequence has a chunk, needs one"]
    assert served(signature(1, 8192, 8, 128), H100) == ["packed sequences have 1.0 chunks, needs 2 on average"]
    narrow = x._replace(q_shape=(1, 8192, 8, 64), v_shape=(1, 8192, 8, 64))
    with emulated.without_two_roles():
        assert served(narrow, H100) == [
            "is switched off",
            "widths are K = 64 and V = 64, needs both 128",
        ]
    assert served(x, H100) == []


def test_segments_are_chosen_by_the_sequence_alone() -> None:
    """Although one piece is expected to be faster in a full batch."""
    for B in (1, 8):
        assert forms.choose(signature(B, 2**16, 4)._replace(cut=AUTO), H100) is forms.SEGMENTS
    full = signature(8, 2**16, 4)._replace(cut=AUTO)
    assert forms.SEGMENTS.expected_us(full, H100) > forms.TWO_ROLES.expected_us(full, H100)


def test_explain() -> None:
    assert forms.explain(signature(1, 8192, 8), H100) == [
        "segments  cannot: segments is 'never', needs 'auto' or 'always'",
        "two_roles 120 us expected, chosen",
        "one_role  170 us expected",
    ]


@pytest.mark.emulated
def test_explain_lists_the_forms_of_a_problem() -> None:
    """Explain the chosen backend's forms; sizes are arguments, since a problem has none."""
    backend = EMULATED["sm90@emulator"]

    def lines(**more: Any) -> list[str]:
        asked = dataclasses.replace(KDA.problem.default("cpu"), **{"needs_grad": False} | more)
        with registered(backend), use_backend(backend.name):
            return explain(asked, B=2, T=2**16, HV=4).splitlines()[-4:]

    head, cut, two, one = lines()
    assert head == "its forms for B=2, T=65536, HV=4:"
    assert cut == "  segments  cannot: the GPU has 16 multiprocessors, needs 32"
    assert two.startswith("  two_roles ")
    assert one.startswith("  one_role  ")
    assert any("us expected, chosen" in line for line in (two, one))
    _, cut, two, one = lines(needs_grad=True)
    assert two.startswith("  two_roles ")
    assert any(line.endswith("us expected, chosen") for line in (two, one))
    _, cut, two, one = lines(prefill=True)
    assert cut == "  segments  cannot: states are in slots, needs kda"
    assert any(line.endswith("us expected, chosen") for line in (two, one))
    assert lines(segments=True)[1].endswith("chosen")
    assert lines(decode=True)[-1] == f"chosen: {backend.name}"


@pytest.mark.parametrize("seg", ["never", "always"])
def test_a_part_of_a_gpu(seg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that cannot run all blocks at once: a warning once, then blocks of one role."""
    launched = []

    class Kernel(SimpleNamespace):
        def launch(self, *_: object, cooperative: bool = False, **__: object) -> None:
            if cooperative:
                raise RuntimeError("launching failed: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")
            launched.append(self.entry)

    monkeypatch.setattr(emulated.Emulator, "load", lambda _, source, entry, *__: Kernel(entry=entry))
    monkeypatch.setattr(two_roles, "declined", None)
    x = make_inputs(Case(T=8192, H=8, K=128, V=128, dtype=BF16, checkpoints=False))._replace(segments=seg)
    machine = emulated.Emulator(processors=132)
    with pytest.warns(RuntimeWarning, match="specialised CTAs are off from now on.*LAUNCH_TOO_LARGE"):
        forms.forward(x, machine, False)
    forms.forward(x, machine, False)
    once = ["kda_forward"] if seg == "never" else ["kda_forward", "kda_join_segments", "kda_scan_segments"]
    assert launched == once * 2
    assert "could not run all of its blocks at once" in "".join(forms.explain(Signature.of(x), H100))


def test_other_errors_of_a_launch_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise RuntimeError("launching failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(emulated.Emulator, "load", lambda *_: SimpleNamespace(launch=launch))
    x = make_inputs(Case(T=8192, H=8, K=128, V=128, dtype=BF16, checkpoints=False))
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        forms.forward(x, emulated.Emulator(processors=132), False)
    assert two_roles.declined is None
