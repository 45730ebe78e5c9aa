"""examples/finetune.py with sequences, heads or weights cut over two processes trains what one process trains.

As a script, this file is what each of the two processes runs: the example's arguments follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import finetune  # noqa: E402
from common import pretrained, processes, text  # noqa: E402
from common.context import Repeated  # noqa: E402

from kda_layers import KDAConfig, KDAForCausalLM  # noqa: E402
from kda_layers.testing.budgets import BF16, budget, error  # noqa: E402
from tests.processes import once, run_two  # noqa: E402

SEQ = 32
STEPS = 4
BATCH = 4
# Of losses and of norms of gradients after STEPS steps, relative: at most 1.1e-5 was seen, of a norm with heads cut. A
# gradient that is not shared, or of another batch, changes them by 1e-1.
ROUNDING = 5e-5
WAYS: dict[str, tuple[int, list[str]]] = {  # excerpts of a process and step, options
    "data": (BATCH // 2, []),
    "FSDP2": (BATCH // 2, ["--fsdp"]),
    "context": (BATCH, ["--context-parallel", "2"]),
    "context, FSDP2": (BATCH, ["--fsdp", "--context-parallel", "2"]),
    "heads": (BATCH, ["--tensor-parallel", "2"]),
}  # fmt: skip


def arguments(folder: Path, output: str, batch: int) -> list[str]:
    return [
        "--model", str(folder / "model"), "--data", str(folder / "text.txt"), "--output", str(folder / output),
        "--seq-len", str(SEQ), "--batch-size", str(batch), "--steps", str(STEPS), "--lr", "1e-2",
    ]  # fmt: skip


def train(options: list[str]) -> None:
    """Run the example, and leave the Trainer's log beside the model."""
    args = finetune.parse(options)
    trainer: Any = finetune.finetune(args)
    if trainer.is_world_process_zero():
        (Path(args.output) / "log.json").write_text(json.dumps(trainer.state.log_history))


def write_inputs(path: Path, head_dim: int) -> None:
    """A text with 4 held-out batches for one process, and a new model."""
    (path / "text.txt").write_bytes(text.python_reference()[: 10 * 4 * BATCH * SEQ])
    torch.manual_seed(0)
    config = KDAConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, linear_num_heads=2,
        linear_head_dim=head_dim, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    KDAForCausalLM(config).save_pretrained(path / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After one process ran in it, and two in each way."""

    def run(path: Path) -> None:
        write_inputs(path, head_dim=8)
        train([*arguments(path, "one", BATCH), "--cpu"])
        for way, (batch, options) in WAYS.items():
            printed = run_two(__file__, *arguments(path, way, batch), "--cpu", *options)
            (path / f"{way}.txt").write_text(printed)

    return once(tmp_path_factory, "finetune_parallel", run)


def logged(path: Path, name: str) -> list[float]:
    return [entry[name] for entry in json.loads((path / "log.json").read_text()) if name in entry]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(way: str, folder: Path) -> None:
    assert "2 processes" in (folder / f"{way}.txt").read_text()
    for name, count in (("loss", STEPS), ("grad_norm", STEPS), ("eval_loss", 2)):
        one, two = logged(folder / "one", name), logged(folder / way, name)
        assert len(one) >= count
        assert two == pytest.approx(one, rel=ROUNDING), name


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_model_is_saved(way: str, folder: Path) -> None:
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("one", way)]
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        losses = [float(m(input_ids=tokens, labels=tokens).loss) for m in models]
    assert losses[1] == pytest.approx(losses[0], rel=ROUNDING)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_heads_over_two_gpus(tmp_path: Path) -> None:
    """In fp32, and under autocast with our kernels, where two GPUs may be twice as far from fp32 as one, and a
    rounding."""
    write_inputs(tmp_path, head_dim=64)
    for name, options in (("fp32", []), ("bf16", ["--bf16"])):
        command = [sys.executable, __file__, *arguments(tmp_path, f"one {name}", BATCH), *options]
        subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"}, check=True)
        command = [__file__, *arguments(tmp_path, f"two {name}", BATCH), *options, "--tensor-parallel", "2"]
        assert "2 processes" in run_two(*command, CUDA_VISIBLE_DEVICES="0,1")
    for name in ("loss", "grad_norm", "eval_loss"):
        one, two, one_bf16, two_bf16 = (
            torch.tensor(logged(tmp_path / f"{count} {dtype}", name))
            for dtype in ("fp32", "bf16")
            for count in ("one", "two")
        )
        assert error(two, one) <= ROUNDING, name
        assert error(two_bf16, one) <= budget(error(one_bf16, one), BF16), name


def test_batches_are_repeated_for_processes_that_share_them() -> None:
    indices: Any = range(5)
    assert list(Repeated(indices, 2, 3)) == [0, 1] * 3 + [2, 3] * 3 + [4, 4] * 3
    assert len(Repeated(indices, 2, 3)) == 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context-parallel", "2"], "--context-parallel 2: expected a divisor of the number of processes, 1"),
        (["--tensor-parallel", "0"], "--tensor-parallel 0: expected a divisor of the number of processes, 1"),
        (["--fsdp"], "--fsdp: expected several processes, got one"),
    ],
)
def test_options_for_several_processes(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main(options) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context-parallel", "2", "--seq-len", "30"], "--seq-len 30: expected a multiple of twice"),
        (["--tensor-parallel", "2", "--fsdp"], "--tensor-parallel 2: expected no --fsdp with it"),
        (["--tensor-parallel", "2", "--context-parallel", "2"], "expected no --context-parallel with it"),
        (["--tensor-parallel", "2", "--save-every", "1"], "expected no --save-every with it"),
        (["--tensor-parallel", "2", "--swap", "all"], "expected no --swap with it"),
        (["--tensor-parallel", "2", "--cpu"], "--tensor-parallel 2: expected GPUs"),
    ],
)
def test_options_of_two_processes(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert finetune.main(options) != 0
    assert message in capsys.readouterr().err


def test_heads_of_a_new_model_are_not_shared() -> None:
    with pytest.raises(
        pretrained.InputError, match=r"--tensor-parallel 2: expected a checkpoint in --model, got a\.json"
    ):
        pretrained.load_model("a.json", 2)


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        if "--cpu" in sys.argv:  # accelerate shares heads over GPUs alone; nothing else of it depends on them
            stack.enter_context(mock.patch("accelerate.parallelism_config.ParallelismConfig._validate_accelerator"))
            stack.enter_context(mock.patch.object(processes, "check_tensor_parallel"))
        train(sys.argv[1:])
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
