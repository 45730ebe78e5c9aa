"""examples/finetune.py in one process and in two, and what data-parallel training does to a model with KDA layers.

As a script, this file is what each of the two processes runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import finetune  # noqa: E402
from common import text  # noqa: E402

from kda_layers import KDAConfig, KDAForCausalLM  # noqa: E402
from tests.modeling.stock_models import FAMILIES, build  # noqa: E402
from tests.processes import once, run_two  # noqa: E402

SIZE: dict[str, Any] = dict(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
FEW = ["--cpu", "--seq-len", "32", "--batch-size", "4", "--lr", "1e-2"]
STEPS = 24


def hybrid() -> Any:
    torch.manual_seed(0)
    config = KDAConfig(**SIZE, linear_num_heads=2, linear_head_dim=8, full_attention_interval=2, initializer_range=0.2)
    return KDAForCausalLM(config).double()


def batch() -> torch.Tensor:
    return torch.randint(256, (4, 70), generator=torch.Generator().manual_seed(1))


def process(folder: Path) -> None:
    """One of two processes: the example, then one backward pass of DDP, in its process group, on half of a batch."""
    model_file, data = str(folder / "config.json"), str(folder / "text.txt")
    arguments = ["--model", model_file, "--data", data, "--output", str(folder / "run"), "--steps", str(STEPS), *FEW]
    trainer: Any = finetune.finetune(finetune.parse(arguments))
    rank = distributed.get_rank()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    ddp = DistributedDataParallel(hybrid())
    rows = batch()[2 * rank : 2 * rank + 2]
    ddp(input_ids=rows, labels=rows).loss.backward()
    gradients = {name: p.grad for name, p in ddp.module.named_parameters()}
    torch.save((losses, trained, gradients), folder / f"rank{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # all is saved; the interpreter's end, with gloo's threads, was seen to hang now and then


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After both processes ran in it."""

    def run(path: Path) -> None:
        (path / "text.txt").write_bytes(text.python_reference()[:6000])
        hybrid().config.to_json_file(path / "config.json")
        assert "2 processes" in run_two(__file__, str(path))

    return once(tmp_path_factory, "finetune", run)


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Any]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
def test_the_loss_falls_and_the_processes_agree_on_the_parameters(folder: Path, results: list[Any]) -> None:
    (losses, first, _), (_, second, _) = results
    assert losses[-1] < 0.7 * losses[0]
    saved = AutoModelForCausalLM.from_pretrained(folder / "run").state_dict()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name
        assert torch.equal(parameter, saved[name]), name


@pytest.mark.slow
def test_gradients_of_two_processes_are_those_of_one_on_the_joined_batch(results: list[Any]) -> None:
    model = hybrid()
    model(input_ids=batch(), labels=batch()).loss.backward()
    for _, _, gradients in results:
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().max() > 0, name
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13)


def test_a_llama_is_swapped_and_a_run_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZE)).save_pretrained(tmp_path / "llama")
    (tmp_path / "text.txt").write_bytes(text.python_reference()[:3000])
    common = ["--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "run"), "--save-every", "1", *FEW]
    swap = ["--model", str(tmp_path / "llama"), "--swap", "1:1"]
    assert finetune.main([*common, *swap, "--steps", "2"]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert model.config.use_cache
    assert finetune.main([*common, *swap, "--steps", "3", "--resume"]) == 0
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert {0, 2} <= {entry["step"] for entry in state["log_history"] if "eval_loss" in entry}  # where each run began
    assert "1 processes" in capsys.readouterr().out


def interrupt(_: Any, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
    """A callback's method that stops a run in its sixth step."""
    if state.global_step == 6:
        raise KeyboardInterrupt


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "glm5_next"])  # no causal LM to the Auto class
def test_a_swapped_stock_model_is_resumed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved weights have the Hub's names, and `--resume` starts from other weights if it does not read them."""
    build(family, vocab_size=256).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(text.python_reference()[:3000])

    def run(output: str, *more: str) -> Any:
        files = ["--data", str(tmp_path / "text.txt"), "--model", str(tmp_path / "model"), "--swap", "all"]
        options = [*files, "--output", str(tmp_path / output), "--steps", "8", "--save-every", "4", *FEW, *more]
        return finetune.finetune(finetune.parse(options))

    def losses(trainer: Any) -> list[float]:
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = run("whole")
    with monkeypatch.context() as patched:
        patched.setattr(finetune.RunRecord, "on_step_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("cut")
    resumed = run("cut", "--resume")
    assert len(losses(whole)) == 8
    assert losses(resumed) == losses(whole)
    parameters = dict(whole.model.named_parameters())
    assert all(torch.equal(p, parameters[n]) for n, p in resumed.model.named_parameters())


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and the run of two steps whose one checkpoint is of the last."""
    path = tmp_path_factory.mktemp("interrupted")
    (path / "text.txt").write_bytes(text.python_reference()[:3000])
    hybrid().config.to_json_file(path / "config.json")
    assert finetune.main([*resumable(path), "--steps", "2"]) == 0
    return path


def resumable(path: Path) -> list[str]:
    files = ["--data", str(path / "text.txt"), "--model", str(path / "config.json"), "--output", str(path / "run")]
    return [*files, "--save-every", "2", *FEW]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda new: (new / "trainer_state.json").unlink(), "trainer_state.json"),
        (lambda new: cut(new / "trainer_state.json"), "line "),
        (lambda new: cut(new / "model.safetensors"), "file not fully covered"),
        (lambda new: (new / "model.safetensors").unlink(), "it has no *model[-._]*"),
        (lambda new: cut(new / "optimizer.pt"), "optimizer.pt is cut short"),
        (lambda new: (new / "optimizer.pt").unlink(), "it has no optimizer*"),
        (lambda new: cut(new / "rng_state.pth"), "rng_state.pth is cut short"),
    ],
)
def test_the_newest_whole_checkpoint_is_resumed(
    damage: Any, reason: str, interrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(interrupted, path)
    new = path / "run" / "checkpoint-10"
    shutil.copytree(path / "run" / "checkpoint-2", new)
    damage(new)
    same = ["--model", str(interrupted / "config.json")]
    capsys.readouterr()
    assert finetune.main([*resumable(path), *same, "--steps", "4", "--resume"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{new} is skipped and renamed: it is not a complete checkpoint, .*{re.escape(reason)}", out)
    assert [p.name for p in new.parent.iterdir() if p.name.endswith("-10")] == ["incomplete-checkpoint-10"]
    state = json.loads((path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [0, 2]  # where each run began


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", str(finetune.TINY)], "--model {root}/kda_layers/configs/tiny.json: expected {path}/config."),
        (["--swap", "all"], "--swap all: expected None as in {path}/run/checkpoint-2"),
        (["--data", str(ROOT / "README.md")], "--data {root}/README.md: expected the text that {path}/run/checkpoint-"),
        (["--lr", "1e-3"], "--lr 0.001: expected 0.01 as in {path}/run/checkpoint-2"),
        (["--batch-size", "3"], "--batch-size 3: expected 4 as in {path}/run/checkpoint-2"),
        (["--seq-len", "16"], "--seq-len 16: expected 32 as in {path}/run/checkpoint-2"),
        (["--seed", "1"], "--seed 1: expected 0 as in {path}/run/checkpoint-2"),
        (["--bf16"], "--bf16 True: expected False as in {path}/run/checkpoint-2"),
    ],
)
def test_another_run_is_not_resumed(
    options: list[str], message: str, interrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert finetune.main([*resumable(interrupted), "--steps", "3", "--resume", *options]) == 2
    assert message.format(root=ROOT, path=interrupted) in capsys.readouterr().err
    assert not (interrupted / "run" / "checkpoint-3").exists()


def test_a_checkpoint_without_a_record_is_not_resumed(
    interrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["RunRecord"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    assert finetune.main([*resumable(tmp_path), "--steps", "3", "--resume"]) == 2
    message = f"--resume: expected a checkpoint of this version of the script, got {checkpoint}"
    assert message in capsys.readouterr().err


def test_accelerate_is_asked_for_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(finetune, "is_accelerate_available", lambda: False)
    monkeypatch.setattr(finetune, "load_text", None)
    assert finetune.main([]) == 2
    assert capsys.readouterr().err.endswith("the Trainer of transformers needs accelerate: pip install -U accelerate\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "nan"], "--lr nan: expected at least 0"),
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--seed", "99999999999"], "--seed 99999999999: expected at least 0 and less than 2^32"),
        (["--output", "/dev/null"], "--output /dev/null: expected a directory to write to, got: File exists"),
        (["--output", "/dev/null/run"], "--output /dev/null/run: expected a directory to write to, got: Not a dir"),
        (["--output", "/proc/run"], "--output /proc/run: expected a directory to write to, got: "),
        (["--swap", "²"], "--swap ²: "),
        (["--data", "nowhere.txt"], "--data nowhere.txt: expected a readable file"),
        (["--model", "./nowhere"], "--model ./nowhere: expected a checkpoint or a .json configuration"),
        (["--swap", "all"], "--swap all: "),
        (["--seq-len", "100000"], "--seq-len 100000"),
        (["--resume", "--output", "nowhere"], "--resume: expected a run with --save-every in --output nowhere"),
    ],
)
def test_bad_input_is_explained(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main(options) == 2
    assert message in capsys.readouterr().err


def test_a_vocabulary_of_other_tokens_needs_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZE | {"vocab_size": 100})).save_pretrained(tmp_path)
    assert finetune.main(["--model", str(tmp_path)]) == 2
    assert "expected a tokenizer beside it" in capsys.readouterr().err


if __name__ == "__main__":
    process(Path(sys.argv[1]))
