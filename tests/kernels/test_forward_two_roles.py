"""The forward by blocks of two roles in the emulator: the bits of forward.cu, however blocks are shared out."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from kda_layers import KDAOutput
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.cuda.forward import shares as model
from kda_layers.kernels.kda.cuda.forward import tails, two_roles
from kda_layers.kernels.kda.cuda.forward.shares import Shares
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import BF16, FP16, Case, ids, make_inputs, outputs

# Groups that scan, blocks that prepare, places of a group; three groups share two of four tiles.
SHARES = [Shares(1, 2, 4), Shares(3, 2, 5), Shares(4, 6, 12)]
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


def by_two_roles(x: Inputs, i: int, arch: int = 90, seed: int = 0) -> KDAOutput:
    """The outputs with SHARES[i], and at most as many groups as there are heads to scan."""
    heads = x.v.shape[0] * x.v.shape[2] if x.cu_seqlens is None else model.MOST_GROUPS_PACKED
    shares = SHARES[i]._replace(groups=min(SHARES[i].groups, heads))
    return emulated.two_roles(x, shares, arch, seed)


def assert_same(got: KDAOutput, want: KDAOutput) -> None:
    assert outputs(got).keys() == outputs(want).keys()
    assert [n for n, t in outputs(want).items() if not torch.equal(outputs(got)[n], t)] == []


@pytest.mark.emulated
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("case", **ids(CASES + STORING))
def test_bits_of_the_forward_kernel(case: Case, arch: int) -> None:
    x = make_inputs(case)
    want = emulated.forward(x, arch=arch)
    for i in range(len(SHARES)):
        assert_same(by_two_roles(x, i, arch), want)


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
    monkeypatch.setattr(tails, "MANY", many)
    shares = SHARES[1]

    def call(x: Inputs) -> KDAOutput:
        with emulated.GuardedMemory():
            return tails.forward(emulated.guarded_inputs(x), emulated.Emulator(processors=16))

    monkeypatch.setenv(two_roles.ENVIRONMENT_VARIABLE, "0")
    want = call(x)
    monkeypatch.delenv(two_roles.ENVIRONMENT_VARIABLE)
    with (
        mock.patch.object(two_roles, "shares_of", return_value=shares),
        mock.patch.object(two_roles, "forward", wraps=two_roles.forward) as chosen,
    ):
        assert_same(call(x), want)
    assert chosen.call_count == 1


@pytest.mark.emulated
def test_falling_offsets_are_not_waited_for() -> None:
    """Decreasing offsets are the caller's error, but must not hang the GPU; a hang is a test that never ends."""
    x = make_inputs(Case(lengths=(200, 0, 200), checkpoints=False))
    assert x.cu_seqlens is not None
    x.cu_seqlens[2] = 0  # a length of -200, which is -2 chunks
    assert by_two_roles(x, 0).o.shape == x.v.shape


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("tiles", "tokens", "groups"),
    [
        (4, 8192, 4), (8, 8192, 8), (12, 8192, 12), (16, 8192, 16), (20, 8192, 20), (24, 8192, 22), (24, 16384, 22),
        (26, 8192, 22), (32, 8192, 22), (40, 8192, 22), (64, 8192, 22), (96, 8192, 22), (128, 8192, 22), (8, 65536, 8),
        (10, 3072, 10), (8, 4096, 8), (12, 4096, 12),
        (4, 1024, None), (12, 2048, None), (8, 0, None),
    ],
)  # fmt: skip
def test_measured_choices(tiles: int, tokens: int, groups: int | None) -> None:
    """Choices agree with what an H200 or an H100 ran faster."""
    shares = model.shares_for(tiles, tokens // 64, False, 132)
    assert (shares and shares.groups) == groups
    if shares:
        assert shares.groups * 2 + shares.preparers <= 132
        assert shares.places > two_roles.SCAN_STAGES


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
    shares = model.packed_shares_for(sequences, tokens, heads, states, False, 132)
    assert (shares and shares.groups) == groups


@pytest.mark.parametrize(
    ("tiles", "groups"),
    [(8, None), (16, None), (17, 17), (20, 20), (24, 24), (28, 28), (32, 28), (48, 28), (64, 28), (96, 28), (128, 28)],
)
def test_measured_choices_with_checkpoints(tiles: int, groups: int | None) -> None:
    """Choices agree with what an H200 ran faster."""
    shares = model.shares_for(tiles, 128, True, 132)
    assert (shares and shares.groups) == groups


def test_a_long_packed_sequence_is_shared_out_evenly() -> None:
    """However long one of a few sequences is, no group gets two of its heads before another one gets its first."""
    calls = itertools.product((1, 2, 5, 20, 47), (3, 8, 12, 16, 32, 48, 96))
    chosen = [(heads, model.packed_shares_for(n, 1 << 16, heads, 0, False, 132)) for n, heads in calls]
    groups = [(heads, shares.groups) for heads, shares in chosen if shares]
    assert len(groups) > 5
    assert [pair for pair in groups if pair[0] % pair[1] and pair[1] % pair[0]] == []


def test_blocks_are_whole_clusters() -> None:
    """No grid is refused, and all blocks can run at once."""
    slices = model.SLICES
    chosen = 0
    for processors, tiles in itertools.product((132, 131, 114, 33, 6), range(1, model.MOST_TILES + 1)):
        stores = tiles % 2 == 0
        plain = [model.shares_for(tiles, chunks, stores, processors) for chunks in (32, 128, 16384)]
        packed = [model.packed_shares_for(n, 1 << 16, tiles, 0, stores, processors) for n in (1, 7, 64)]
        for shares in filter(None, plain + packed):
            blocks = shares.groups * slices + shares.preparers
            assert blocks % slices == 0
            assert blocks <= processors
            assert shares.preparers > 0
            chosen += 1
    assert chosen > 1000


def test_few_multiprocessors() -> None:
    assert model.shares_for(8, 128, False, 4) is None
    assert model.packed_shares_for(1, 8192, 8, 0, False, 4) is None


def test_served_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = emulated.Emulator(processors=132)
    x = make_inputs(Case(T=8192, H=8, K=128, V=128, dtype=BF16, checkpoints=False))
    monkeypatch.setenv(two_roles.ENVIRONMENT_VARIABLE, "0")
    assert not two_roles.serves(x, machine)
    monkeypatch.delenv(two_roles.ENVIRONMENT_VARIABLE)
    assert two_roles.serves(x, machine)
    assert not two_roles.serves(x, emulated.Emulator(arch=100, processors=132))
    assert not two_roles.serves(x._replace(checkpoint_every=64), machine)
    more = make_inputs(Case(T=8192, H=24, K=128, V=128, dtype=BF16))
    assert two_roles.serves(more, machine)
    assert two_roles.serves(x._replace(cu_seqlens=torch.tensor([0, 8192])), machine)
    many = torch.arange(0, 8192 + 1, 64)  # a chunk each
    assert not two_roles.serves(x._replace(cu_seqlens=many), machine)
    short = make_inputs(Case(T=64, H=8, checkpoints=False))
    assert not two_roles.serves(short, machine)
    monkeypatch.setenv(two_roles.ENVIRONMENT_VARIABLE, "yes")
    with pytest.raises(ValueError, match="KDA_LAYERS_TWO_ROLES must be 0 or 1, got 'yes'"):
        two_roles.serves(x, machine)


@pytest.mark.parametrize(
    ("status", "way_out"),
    [
        ("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "; all blocks must run at once: .* or set KDA_LAYERS_TWO_ROLES=0"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "$"),
    ],
)
def test_a_part_of_a_gpu_is_refused_with_the_way_out(
    status: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object, cooperative: bool) -> None:
        assert cooperative
        raise RuntimeError(f"launching failed: {status}")

    monkeypatch.setattr(emulated.Emulator, "load", lambda *_: SimpleNamespace(launch=launch))
    x = make_inputs(Case(T=192, checkpoints=False))
    with pytest.raises(RuntimeError, match=status + way_out):
        by_two_roles(x, 0)
