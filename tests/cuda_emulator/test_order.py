"""The emulated machine refuses kernels that lack a fence or a barrier, whatever the seed, and takes them with it."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cuda_emulator import HERE, EmulatorError, compile_kernel, guarded, order_checked

pytestmark = pytest.mark.emulated

SEEDS = range(8)
UNFENCED = r"wgmma reads byte \d+ of shared memory, written by block .* at fences.cu:.*"
UNFENCED_BULK = "a bulk copy reads global memory at 0x.*, written by .* at fences.cu:.*"
RACE = (
    "race: reads (byte|global memory at) .* at fences.cu:.*, written by .* at fences.cu:.*, and nothing orders the two"
)
OVERWRITTEN = "race: writes byte .*, (read|written) by .* at fences.cu:.*, and nothing orders the two"


class Params(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("test", ctypes.c_int),
        ("variant", ctypes.c_int),
    )


class Launch(NamedTuple):
    """Launch of a kernel of fences.cu, and its valid variants."""

    threads: int
    words: int
    grid: int = 1
    cluster: int = 1
    valid: tuple[int, ...] = (0,)


LAUNCHES = {
    "shared_to_wgmma": Launch(128, 1024, valid=(0, 5)),
    "copies_to_wgmma": Launch(128, 1024),
    "global_to_bulk_copy": Launch(128, 256),
    "shared_to_bulk_copy": Launch(128, 128),
    "bulk_store": Launch(128, 128, valid=(0, 1)),
    "initialize_for_cluster": Launch(32, 64, grid=2, cluster=2),
    "hand_over": Launch(32, 65, grid=2, valid=(0, 3)),
    "registers_to_wgmma": Launch(128, 1024),
    "held_to_wgmma": Launch(128, 4096),
    "race": Launch(64, 32),
    "overwrite": Launch(64, 32),
}
FORGOTTEN = {
    ("shared_to_wgmma", 1): f"{UNFENCED}, without fence_proxy_async_shared in between",
    ("shared_to_wgmma", 2): f"{UNFENCED}, without fence_proxy_async_shared in between",  # before the writes
    (
        "shared_to_wgmma",
        3,
    ): f"{UNFENCED}, without fence_proxy_async_shared in between",  # of another thread
    ("shared_to_wgmma", 4): f"{UNFENCED}, (without fence_proxy_async_shared|and nothing orders the two)",  # no barrier
    ("copies_to_wgmma", 1): f"{UNFENCED}, without fence_proxy_async_shared in between",  # before the wait
    ("copies_to_wgmma", 2): f"{UNFENCED}, without fence_proxy_async_shared in between",
    ("global_to_bulk_copy", 1): f"{UNFENCED_BULK}, without fence_proxy_async_global in between",
    ("global_to_bulk_copy", 2): f"{UNFENCED_BULK}, without fence_proxy_async_global in between",  # before the barrier
    ("global_to_bulk_copy", 3): f"{UNFENCED_BULK}, without fence_proxy_async_global in between",
    ("global_to_bulk_copy", 4): "no fence_mbarrier_init since the mbarrier was initialized; in cp_async_bulk_multicast",
    (
        "shared_to_bulk_copy",
        1,
    ): "a bulk copy writes byte .*, written by .*, without fence_proxy_async_shared",
    ("bulk_store", 2): "a bulk copy reads byte .*, written by .*, without fence_proxy_async_shared",
    (
        "bulk_store",
        3,
    ): f"{OVERWRITTEN}|being read by|a bulk copy reads byte .*nothing orders the two",
    (
        "bulk_store",
        4,
    ): "race: writes byte .*, being read by .*|it has not waited for its bulk copies from shared memory",
    (
        "initialize_for_cluster",
        1,
    ): "no fence_mbarrier_init since the mbarrier was initialized; in mbarrier_arrive",
    (
        "initialize_for_cluster",
        2,
    ): "no fence_mbarrier_init since the mbarrier was initialized; in mbarrier_arrive",
    ("hand_over", 1): RACE,  # no acquire
    ("hand_over", 2): RACE,  # the release is one lane's, without a barrier of the warp
    ("hand_over", 4): RACE,  # no release
    ("hand_over", 5): RACE,  # the acquire is one lane's
    ("registers_to_wgmma", 1): r"no wgmma_fence since thread \d+ had the registers",
    ("registers_to_wgmma", 2): "registers were accessed before wgmma_wait and fence_operand",
    ("registers_to_wgmma", 3): "registers were accessed before wgmma_wait and fence_operand",
    ("registers_to_wgmma", 4): "registers were accessed before wgmma_wait and fence_operand",
    ("registers_to_wgmma", 5): "registers were accessed before wgmma_wait and fence_operand",
    ("registers_to_wgmma", 6): "the accumulator's registers were accessed after the last wgmma_fence",
    ("registers_to_wgmma", 7): r"no wgmma_fence since thread \d+ had the registers",
    ("registers_to_wgmma", 8): "registers were accessed before wgmma_wait and fence_operand",
    ("registers_to_wgmma", 9): "race: writes byte .* at fences.cu:.*, being read by block .* at fences.cu:.*",
    ("held_to_wgmma", 1): "the registers of its first operand were written after the last wgmma_fence",
    ("held_to_wgmma", 2): r"no wgmma_fence since thread \d+ had the registers",
    ("held_to_wgmma", 3): "first operand were written while it was under way",
    ("race", 1): RACE,
    ("race", 2): RACE,
    ("overwrite", 1): f"{RACE}|{OVERWRITTEN}",
    ("overwrite", 2): f"{RACE}|{OVERWRITTEN}",
    ("overwrite", 3): f"{RACE}|{OVERWRITTEN}",
}
# Found without checking the order, too: the state of an mbarrier, and of an accumulator, is always known.
ALWAYS_FOUND = [
    *(("global_to_bulk_copy", 4), ("initialize_for_cluster", 1), ("initialize_for_cluster", 2)),
    ("bulk_store", 4),
    *(("registers_to_wgmma", variant) for variant in (1, 7, 8)),
    ("held_to_wgmma", 2),
]


def run(name: str, variant: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The words that a kernel reads and writes."""
    launch, numbers_of = LAUNCHES[name], {name.upper(): i for i, name in enumerate(LAUNCHES)}
    kernel = compile_kernel(HERE / "fences.cu", "fences", {"HAS_WGMMA": 1, **numbers_of})
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    x, out = guarded(numbers.view(torch.int32)), guarded(torch.zeros(launch.words, dtype=torch.int32))
    kernel(
        grid=(launch.grid, 1, 1), block=launch.threads, cluster=launch.cluster, resident=launch.grid // launch.cluster,
        shared_bytes=4096, params=Params(x.data_ptr(), out.data_ptr(), numbers_of[name.upper()], variant), seed=seed,
    )  # fmt: skip
    return x, out


def product(x: Tensor, columns: int) -> Tensor:
    """The words, by thread, of the product of the operands that the input begins with: [64, 16] and [columns, 16]."""
    a, b = x.view(torch.bfloat16).float()[: 64 * 16], x.view(torch.bfloat16).float()[64 * 16 :][: columns * 16]
    a, b = (m.view(-1, 2, 8, 8).transpose(1, 2).reshape(-1, 16) for m in (a, b))
    return by_lane(a @ b.T)


def by_lane(d: Tensor) -> Tensor:
    """d [64, columns] in mma's accumulator order: [128, columns / 2]."""
    d = d.view(4, 2, 8, -1, 4, 2)  # warp, upper 8 rows, row, 8 columns, pair of columns, column
    return d.permute(0, 2, 4, 3, 1, 5).reshape(128, -1)


def expected(name: str, x: Tensor) -> Tensor:
    if name in ("shared_to_wgmma", "copies_to_wgmma"):
        return product(x, 16)
    if name == "registers_to_wgmma":
        return 2 * product(x, 16)
    if name == "held_to_wgmma":
        numbers = x.view(torch.bfloat16).float()
        a = numbers[: 64 * 16].view(4, 8, 4, 2, 2, 2)  # warp, row, pair, right 8 columns, lower 8 rows, column
        a = a.permute(0, 4, 1, 3, 2, 5).reshape(64, 16)
        b = numbers[64 * 16 :][: 64 * 16].view(-1, 2, 8, 8).transpose(1, 2).reshape(-1, 16)
        return by_lane(a @ b.T)
    words = {
        "global_to_bulk_copy": [x[:128], x[:128].flip(0)],
        "shared_to_bulk_copy": [x[:128]],
        "bulk_store": [x[:128]],
        "initialize_for_cluster": [x[:32], x[:32]],
        "hand_over": [x[:32], x[:32].flip(0), torch.ones(1, dtype=torch.int32)],
        "race": [x[:32].flip(0)],
        "overwrite": [x[:32]],
    }
    return torch.cat(words[name])


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", LAUNCHES)
def test_valid(name: str, checked: bool) -> None:
    with order_checked(checked):
        for variant in LAUNCHES[name].valid:
            for seed in SEEDS:
                x, out = run(name, variant, seed)
                want = expected(name, x)
                got: Any = out.view(want.dtype).view(want.shape)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "variant"), FORGOTTEN)
def test_forgotten(name: str, variant: int) -> None:
    for checked in [True, *([False] if (name, variant) in ALWAYS_FOUND else [])]:
        for seed in SEEDS:
            with order_checked(checked), pytest.raises(EmulatorError, match=FORGOTTEN[name, variant]):
                run(name, variant, seed)
