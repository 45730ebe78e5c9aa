"""The emulated machine does what PTX says, shows races, and refuses the broken kernels that README.md lists."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch

from tests.cuda_emulator import HERE, KERNELS, EmulatorError, Kernel, compile_kernel, guarded

pytestmark = pytest.mark.emulated

TESTS = ["MMA_BF16", "MMA_FP16", "MMA_FP16_OF_8", "MMA_INT8", "CONVERT_BF16", "CONVERT_FP16", "MULTIPLY"]
TESTS += ["MULTIPLY_ADD", "LOAD", "TRANSPOSE", "SHUFFLE", "HAND_OVER", "COPY", "MULTICAST", "RELAY", "BROKEN"]
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
SEEDS = range(20)


class Params(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("test", ctypes.c_int),
        ("variant", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return compile_kernel(HERE / "self_test.cu", "self_test", {name: i for i, name in enumerate(TESTS)})


def run(kernel: Kernel, test: str, x: torch.Tensor, words: int, variant: int = 0, **launch: Any) -> torch.Tensor:
    """The `words` 32-bit words, zeros before, that a test of self_test.cu makes of the words of x."""
    out = guarded(torch.zeros(words, dtype=torch.int32))
    x = guarded(x.contiguous())
    params = Params(x.data_ptr(), out.data_ptr(), TESTS.index(test), variant)
    kernel(**{"grid": (1, 1, 1), "block": 32, "shared_bytes": 1024, "params": params, **launch})
    return out


def words(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("name", DTYPES)
def test_mma(kernel: Kernel, name: str) -> None:
    """Fragments as the tables of PTX's mma.m16n8k16 say: element i of a lane's A, B and C."""
    dtype, generator = DTYPES[name], torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(*shape, generator=generator) for shape in ((16, 16), (16, 8), (16, 8)))
    a, b = a.to(dtype), b.to(dtype)
    group, thread = torch.arange(32)[:, None] // 4, torch.arange(32)[:, None] % 4
    i = torch.arange(8)
    fragment_a = a[group + 8 * (i // 2 % 2), thread * 2 + i % 2 + 8 * (i // 4)]
    i = torch.arange(4)
    fragment_b = b[thread * 2 + i % 2 + 8 * (i // 2), group]
    place_c = (group + 8 * (i // 2), thread * 2 + i % 2)
    x = torch.cat([words(fragment_a), words(fragment_b), words(c[place_c])], dim=1)
    out = run(kernel, f"MMA_{name}", x, 128, variant=1).view(torch.float32).view(32, 4)
    torch.testing.assert_close(out, (a.float() @ b.float() + c)[place_c], rtol=1e-6, atol=2e-6)


def test_mma_of_8(kernel: Kernel) -> None:
    """Fragments as the tables of PTX's mma.m16n8k8 of fp16 say."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(*shape, generator=generator) for shape in ((16, 8), (8, 8), (16, 8)))
    a, b = a.half(), b.half()
    group, thread = torch.arange(32)[:, None] // 4, torch.arange(32)[:, None] % 4
    i = torch.arange(4)
    place = (group + 8 * (i // 2), thread * 2 + i % 2)  # of A and of C
    fragment_b = b[thread * 2 + i[:2], group]
    x = torch.cat([words(a[place]), words(fragment_b), words(c[place])], dim=1)
    out = run(kernel, "MMA_FP16_OF_8", x, 128).view(torch.float32).view(32, 4)
    torch.testing.assert_close(out, (a.float() @ b.float() + c)[place], rtol=1e-6, atol=2e-6)


def test_int8_mma(kernel: Kernel) -> None:
    """Fragments as the tables of PTX's mma.m16n8k32 say: element i of a lane's A, B and C."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8) for shape in ((16, 32), (32, 8)))
    c = torch.randint(-(2**20), 2**20, (16, 8), generator=generator, dtype=torch.int32)
    group, thread = torch.arange(32)[:, None] // 4, torch.arange(32)[:, None] % 4
    i = torch.arange(16)
    fragment_a = a[group + 8 * (i // 4 % 2), thread * 4 + i % 4 + 16 * (i // 8)]
    i = torch.arange(8)
    fragment_b = b[thread * 4 + i % 4 + 16 * (i // 4), group]
    i = torch.arange(4)
    place_c = (group + 8 * (i // 2), thread * 2 + i % 2)
    x = torch.cat([words(fragment_a), words(fragment_b), c[place_c]], dim=1)
    out = run(kernel, "MMA_INT8", x, 128, variant=1).view(32, 4)
    assert torch.equal(out, (a.int() @ b.int() + c)[place_c])


@pytest.mark.parametrize("name", DTYPES)
def test_numbers(kernel: Kernel, name: str) -> None:
    dtype, x = DTYPES[name], torch.randn(64, generator=torch.Generator().manual_seed(0))
    ulp = torch.finfo(dtype).eps
    x[:8] = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, 0.0, -0.0, torch.inf, -torch.inf, 1e30, 1e-6])
    rounded = x.to(dtype)
    out = run(kernel, f"CONVERT_{name}", words(x), 96).view(32, 3)
    assert torch.equal(out[:, 0], words(rounded))
    assert torch.equal(out[:, 1:].flatten(), words(rounded.float()))


def test_multiply(kernel: Kernel) -> None:
    x = torch.randn(32, 2, 2, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(run(kernel, "MULTIPLY", words(x), 32), words(x[:, 0] * x[:, 1]).flatten())


def test_multiply_add(kernel: Kernel) -> None:
    """Rounded once, not after the product, too."""
    x = torch.randn(32, 3, 2, generator=torch.Generator().manual_seed(0)).half()
    want = (x[:, 0].double() * x[:, 1] + x[:, 2]).half()
    assert torch.equal(run(kernel, "MULTIPLY_ADD", words(x), 32), words(want).flatten())
    assert not torch.equal(want, x[:, 0] * x[:, 1] + x[:, 2])


@pytest.mark.parametrize("transposed", [0, 1, 2])
def test_load_matrices(kernel: Kernel, transposed: int) -> None:
    """Lane 4 i + j gets the elements 2 j and 2 j + 1 of each matrix's row i (column i)."""
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    out = run(kernel, "LOAD", words(matrices), 128, transposed).view(torch.int16).view(8, 4, 4, 2)
    expected = matrices.mT if transposed else matrices
    assert torch.equal(out.permute(2, 0, 1, 3).reshape(4, 8, 8), expected)


def test_transpose(kernel: Kernel) -> None:
    matrix = torch.arange(64, dtype=torch.int16).view(8, 8)
    assert torch.equal(run(kernel, "TRANSPOSE", words(matrix), 32), words(matrix.T).flatten())


@pytest.mark.parametrize("mask", [1, 6, 16, 31])
def test_shuffle(kernel: Kernel, mask: int) -> None:
    x = torch.arange(32, dtype=torch.int32)
    assert torch.equal(run(kernel, "SHUFFLE", x, 32, mask), x ^ mask)


def test_named_barriers(kernel: Kernel) -> None:
    x = torch.arange(32, dtype=torch.int32)
    expected = (x.flip(0) + torch.arange(10, dtype=torch.int32)[:, None]).flatten()

    def right(variant: int, seed: int) -> bool:
        return torch.equal(run(kernel, "HAND_OVER", x, 320, variant, block=64, seed=seed), expected)

    assert all(right(0, seed) for seed in SEEDS)
    assert not any(right(1, seed) for seed in SEEDS), "without barriers the warps race"


def test_async_copies_are_late(kernel: Kernel) -> None:
    x = torch.arange(256, dtype=torch.int32)
    expected = x.view(32, 2, 4).clone()
    expected[::2, 1] = 0  # even threads copy zeros
    waits_for_all, waits_for_first, waits_for_none = (run(kernel, "COPY", x, 256, v).view(32, 2, 4) for v in range(3))
    assert torch.equal(waits_for_all, expected)
    assert torch.equal(waits_for_first[:, 0], expected[:, 0])
    assert waits_for_first[:, 1].view(torch.float32).isnan().all()
    assert waits_for_none.view(torch.float32).isnan().all()


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_multicast(kernel: Kernel, blocks: int) -> None:
    x = torch.arange(9 * 64, dtype=torch.int32)
    launch = dict(grid=(blocks, 1, 1), cluster=blocks, block=96, shared_bytes=544)

    def right(variant: int, seed: int) -> bool:
        """Waits left out lose data, or end the kernel before its copies."""
        try:
            out = run(kernel, "MULTICAST", x, blocks * 9 * 64, variant, seed=seed, **launch)
        except EmulatorError:
            return False
        return torch.equal(out, x.repeat(blocks))

    assert all(right(0, seed) for seed in SEEDS)
    assert not all(right(1, seed) for seed in SEEDS)
    assert not any(right(2, seed) for seed in SEEDS)


def test_counters_between_blocks(kernel: Kernel) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    expected = 0
    for i in reversed(range(6)):
        expected = expected * 3 + i
    for seed in SEEDS:
        assert run(kernel, "RELAY", x, 2, grid=(6, 1, 1), cluster=2, resident=3, seed=seed).tolist() == [6, expected]
    with pytest.raises(EmulatorError, match=r"warps only poll mbarriers and counters"):
        run(kernel, "RELAY", x, 2, grid=(6, 1, 1), cluster=2, resident=2)


BROKEN = [
    (32, "the lanes of a warp diverge: .*(warp_sync|shuffle_xor) at self_test.cu:.*(warp_sync|shuffle_xor) at"),
    (32, "deadlock:\n.* warp 0 lanes 0xffffff80: warp_sync at .*lanes 0x0000007f are missing, 0x0000007f have exited"),
    (64, r"deadlock:\n.*warp 0 all lanes: barrier_sync\(1, 64\).*\n.*warp 1 all lanes: barrier_sync\(2, 64\)"),
    (64, r"warp 1 all lanes: mbarrier_wait\(byte 0, parity 0\) at .*parity 0, 1 arrivals and 0 bytes missing"),
    (64, "warps only poll mbarriers"),
    (32, "the mbarrier is not initialized"),
    (32, "16 bytes at byte 1016 are outside the 1016 bytes of shared memory"),
    (32, "byte 8 of shared memory is not aligned to 16 bytes"),
    (32, "byte 4... of 1016 bytes of shared memory.*trapped at self_test.cu"),
    (32, "wrote byte 1016 of 1016 bytes of shared memory"),
    (32, "misaligned access or array index out of range.*trapped at self_test.cu"),
    (32, "misaligned access or array index out of range.*trapped at self_test.cu"),
    (32, "invalid access to.*trapped at self_test.cu"),
    (32, "there is no rank 2 in a cluster of 1 blocks"),
    (32, "more than 1 arrivals in a phase of an mbarrier"),
    (32, "block 0 of the cluster exited before its bulk copy came"),
    (32, "below the stack of 131072 bytes.*trapped at self_test.cu"),
]


@pytest.mark.parametrize("variant", range(len(BROKEN)))
def test_broken(kernel: Kernel, variant: int) -> None:
    block, message = BROKEN[variant]
    x = torch.arange(32, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=message):
        run(kernel, "BROKEN", x, 128, variant, block=block, shared_bytes=1016)


def test_launch_is_checked(kernel: Kernel) -> None:
    x = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(EmulatorError, match="got blocks of 48 threads"):
        run(kernel, "SHUFFLE", x, 32, block=48)
    with pytest.raises(EmulatorError, match="got 3 bytes of parameters; expected 24"):
        run(kernel, "SHUFFLE", x, 32, params=b"abc")


def test_every_wrapper_is_emulated() -> None:
    ours, theirs = (set(re.findall(r"DEVICE [^(]*?(\w+)\(", (f / "ptx.cuh").read_text())) for f in (HERE, KERNELS))
    assert theirs - ours == set(), "functions of the kernels' ptx.cuh that the emulator's does not have"


def test_compiler_messages() -> None:
    with pytest.raises(EmulatorError, match="MMA_BF16"):
        compile_kernel(HERE / "self_test.cu", "self_test")
