"""The examples, at a tiny size: they run, resume exactly, survive interruptions, and explain bad input in one line."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import checkpoint  # noqa: E402
import generate  # noqa: E402
import hybrid_key_bias  # noqa: E402
import text_data  # noqa: E402
import train_tiny_lm as trainer  # noqa: E402

CPU = torch.device("cpu")
SIZE = ["--hidden-size", "32", "--layers", "1", "--heads", "1", "--seq-len", "32", "--batch-size", "2"]


@pytest.fixture(autouse=True)
def short_sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trainer, "SAMPLE", 8)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(text_data.python_reference()[:3000])
    return path


def train(data: Path, output: Path, *more: str, steps: int = 4) -> int:
    return trainer.main(
        [*SIZE, "--device", "cpu", "--data", str(data), "--output", str(output), "--steps", str(steps), *more]
    )


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "SAMPLE", 8)
        assert train(data, output) == 0
    return output


def contents(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Parameters and the trainer's state of a checkpoint."""
    return checkpoint.load_model(directory, CPU).state_dict(), checkpoint.load_state(directory)


def assert_same(a: Any, b: Any) -> None:
    """Equal to the last bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_same(a[name], b[name])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes Ctrl-C arrive while `step` is being computed."""
    batch = text_data.training_batch

    def interrupted(*args: Any) -> torch.Tensor:
        if args[-1] == step:
            signal.raise_signal(signal.SIGINT)
        return batch(*args)

    monkeypatch.setattr(trainer, "training_batch", interrupted)


# ---------------------------------------------------------------- text and trigrams


def test_every_heldout_byte_is_scored_once_with_context() -> None:
    train, heldout = torch.arange(200) % 256, torch.arange(200, 253)
    inputs, labels = text_data.heldout_windows(train, heldout, 16)
    assert torch.equal(labels[labels >= 0], heldout)
    assert (labels[:, :8] == -100).all()  # half a window of context
    assert torch.equal(inputs[labels >= 0], heldout)
    text = torch.cat([train, heldout])
    assert torch.equal(inputs[1], text[200 : 200 + 16])
    assert torch.equal(inputs[0], text[200 - 8 : 200 + 8])


def test_batches_are_a_function_of_seed_and_step() -> None:
    train = torch.arange(5000)

    def batch(seed: int, step: int) -> torch.Tensor:
        return text_data.training_batch(train, 4, 16, seed, step)

    assert torch.equal(batch(0, 7), batch(0, 7))
    assert not torch.equal(batch(0, 7), batch(0, 8))
    assert not torch.equal(batch(0, 7), batch(1, 7))
    assert torch.equal(batch(3, 1).diff(dim=1), torch.ones(4, 15, dtype=torch.long))


def test_default_text_repeats_no_paragraph() -> None:
    paragraphs = text_data.python_reference().split(b"\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert sum(map(len, paragraphs)) > 200_000


def test_trigram_is_a_distribution_and_generalises() -> None:
    train, heldout = text_data.load_text(None, 256)[:2]
    model = text_data.Trigram(train)
    for context in (b"th", b"q\x00", b"\x00\x01"):  # seen; only its second byte seen; neither
        windows = torch.tensor([[*context, x] for x in range(256)])
        p = model.probabilities(windows)
        assert (p > 0).all()
        torch.testing.assert_close(p.sum(), torch.ones((), dtype=p.dtype))
    on_heldout, on_training = model.bits_per_byte(train, heldout), model.bits_per_byte(train[:2], train[2:])
    assert on_training < on_heldout < 3.0
    frequencies = torch.bincount(train, minlength=256) / len(train)
    assert on_heldout < -frequencies[heldout].log2().mean() - 1


# ---------------------------------------------------------------- training


def test_finished_run_reports_and_can_be_used(trained: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainer.main(["--resume", str(trained), "--device", "cpu"]) == 0  # finished: only reports
    out = capsys.readouterr().out
    assert "held-out bits per byte" in out
    assert "trigrams" in out
    sizes = out.rsplit("cache: ", 1)[1].split()
    assert sizes[:2] == [sizes[5], "bytes"]  # after N and after 2 N tokens
    assert (trained / "loss.png").stat().st_size > 10_000
    assert {p.name for p in trained.parent.iterdir()} == {"whole"}  # no temporary directories


def test_same_seed_same_losses(data: Path, tmp_path: Path) -> None:
    losses = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert train(data, tmp_path / name, "--seed", seed, steps=2) == 0
        losses.append(checkpoint.load_state(tmp_path / name)["losses"])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_stop_and_resume_equals_an_uninterrupted_run(
    step: int, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        assert train(data, tmp_path / "run") == 130
    assert checkpoint.load_state(tmp_path / "run")["step"] == step + 1
    assert (tmp_path / "run" / "loss.png").exists()
    assert trainer.main(["--resume", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert_same(contents(tmp_path / "run"), contents(trained))


def test_bfloat16_keeps_parameters_in_float32(data: Path, tmp_path: Path) -> None:
    assert train(data, tmp_path / "run", "--dtype", "bfloat16", steps=1) == 0
    parameters, state = contents(tmp_path / "run")
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert state["settings"]["dtype"] == "bfloat16"


def test_only_matrices_decay() -> None:
    settings = trainer.Settings(hidden_size=32, layers=1, heads=1)
    model = trainer.build_model(settings, CPU)
    decay, rest = (group["params"] for group in trainer.build_optimizer(model).param_groups)
    names = {id(p): name for name, p in model.named_parameters()}
    assert len(decay) + len(rest) == len(names)
    assert all(names[id(p)].endswith(("proj.weight", "embed_tokens.weight")) for p in decay)
    assert {names[id(p)].rsplit("self_attn.")[-1] for p in rest} >= {
        "A_log",
        "dt_bias",
        "conv1d.weight",
        "o_norm.weight",
    }


def test_learning_rate_warms_up_and_falls() -> None:
    settings = trainer.Settings(steps=100, lr=1.0)
    rates = [trainer.learning_rate(step, settings) for step in range(100)]
    assert rates[4] == max(rates) == 1.0
    assert rates[0] == pytest.approx(0.2)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


# ---------------------------------------------------------------- interruptions


@pytest.mark.parametrize("broken", ["torch.save", "os.fsync", "second rename"])
def test_interrupted_save_keeps_the_previous_checkpoint(
    broken: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    model, state = checkpoint.load_model(trained, CPU), checkpoint.load_state(trained)
    checkpoint.save_checkpoint(directory, model, state)
    before = contents(directory)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)

    def fail(*args: Any, **_: Any) -> None:
        raise KeyboardInterrupt

    rename = Path.rename

    def fail_second(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError("disk on fire")
        return rename(self, target)

    with monkeypatch.context() as patch:
        if broken == "second rename":
            patch.setattr(Path, "rename", fail_second)
        else:
            patch.setattr(broken, fail)
        with pytest.raises((KeyboardInterrupt, OSError)):
            checkpoint.save_checkpoint(directory, model, state)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert_same(contents(directory), before)
    checkpoint.save_checkpoint(directory, model, state)
    assert_same(contents(directory)[0], model.state_dict())


def test_power_failure_between_the_renames_is_repaired(trained: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    model, state = checkpoint.load_model(trained, CPU), checkpoint.load_state(trained)
    checkpoint.save_checkpoint(directory, model, state)
    directory.rename(tmp_path / ".run.aside")
    assert_same(contents(directory), contents(trained))


def test_ctrl_c_saves_and_a_second_one_does_no_harm(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_tiny_lm.py"), *SIZE, "--device", "cpu", "--data", str(data)]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "run"), "--steps", "100000"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        progress = b""
        while b"tokens/s" not in progress:
            read = os.read(process.stderr.fileno(), 4096)
            assert read, progress.decode()
            progress += read
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    state = checkpoint.load_state(tmp_path / "run")
    assert f"stopped at step {state['step']} of 100000" in out.decode()
    assert state["step"] == len(state["losses"]) > 0
    checkpoint.load_model(tmp_path / "run", CPU)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--data missing.txt", "--data missing.txt: expected a readable file, got: No such file"),
        ("--data .", "--data .: expected a readable file, got: Is a directory"),
        ("--data empty.txt", "got 0 bytes"),
        ("--data small.txt", "expected at least 2,560 bytes"),
        ("--resume missing", "expected a checkpoint of train_tiny_lm.py, got: no such directory"),
        ("--resume files", "expected a checkpoint of train_tiny_lm.py, got: no config.json, model.safetensors"),
        ("--resume run --steps 5", "--steps 5: expected 4 as in run, or nothing"),
        ("--resume run --seed 1", "--seed 1: expected 0 as in run, or nothing"),
        ("--resume run --dtype bfloat16", "--dtype bfloat16: expected float32 as in run"),
        ("--resume run --data other.txt", "--data other.txt: expected the text that run was trained on"),
        ("--resume damaged_state", "damaged_state: expected a checkpoint of train_tiny_lm.py, got: "),
        ("--resume damaged_model", "damaged_model: expected a checkpoint of train_tiny_lm.py, got: "),
        ("--resume foreign_state", "foreign_state: expected a checkpoint of this version"),
        ("--output files", "--output {cwd}/files: expected a new directory, an empty one or a checkpoint"),
        ("--output small.txt", "--output {cwd}/small.txt: expected a new directory"),
        ("--steps 0", "--steps 0: expected at least 1"),
        ("--seed -1", "--seed -1: expected at least 0"),
        ("--lr nan", "--lr nan: expected at least 0.0"),
        ("--device abacus", "--device abacus: expected a device that works here, got: "),
        ("--device meta", "--device meta: expected a device that works here, got: "),
        ("--output small.txt/run", "--output {cwd}/small.txt: expected a directory to write to, got: File exists"),
        ("--output /proc/run", "--output /proc: expected a directory to write to, got: "),  # which root cannot either
        ("--output /", "--output /: expected a new directory"),
        ("--resume .", ".: expected a checkpoint of train_tiny_lm.py, got: no config.json"),
    ],
)
def test_trainer_explains_bad_input(
    argv: str,
    message: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "damaged_state", "damaged_model", "foreign_state"):
        checkpoint.save_checkpoint(tmp_path / name, checkpoint.load_model(trained, CPU), checkpoint.load_state(trained))
    torch.save({"epoch": 3}, "foreign_state/trainer.pt")
    for damaged in ("damaged_state/trainer.pt", "damaged_model/model.safetensors"):
        Path(damaged).write_bytes(Path(damaged).read_bytes()[:1000])
    Path("files").mkdir()
    Path("files/notes.txt").write_text("mine")
    Path("empty.txt").touch()
    Path("small.txt").write_text("too small")
    Path("other.txt").write_text("another text\n" * 1000)

    assert trainer.main(argv.split()) == 2
    err = capsys.readouterr().err
    assert message.format(cwd=tmp_path) in err
    assert err.startswith("train_tiny_lm.py: error: ")
    assert err.count("\n") == 1
    assert Path("files/notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["missing", "Hi"], "missing: expected a checkpoint of train_tiny_lm.py, got: no such directory"),
        (["{trained}", ""], "prompt: expected at least one character"),
        (["{trained}", "Hi", "--max-new-tokens", "0"], "--max-new-tokens 0: expected at least 1"),
        (["{trained}", "Hi", "--temperature", "-1"], "--temperature -1.0"),
        (["{trained}", "Hi", "--temperature", "nan"], "--temperature nan: expected at least 0.0001"),
        (["{trained}", "Hi", "--temperature", "1e-40"], "--temperature 1e-40: expected at least 0.0001"),
        (["{trained}", "Hi", "--seed", "-1"], "--seed -1: expected at least 0"),
        (["{trained}", "Hi", "--device", "meta"], "--device meta: expected a device that works here"),
        (["/", "Hi"], "/: expected a checkpoint of train_tiny_lm.py, got: no config.json"),
        (["", "Hi"], ".: expected a checkpoint of train_tiny_lm.py, got: no config.json"),
    ],
)
def test_generate_explains_bad_input(
    argv: list[str], message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main([a.format(trained=trained) for a in argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- the other examples


def test_generate_continues_the_prompt(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> str:
        assert generate.main([str(trained), "Hé", "--device", "cpu", "--max-new-tokens", "12", *more]) == 0
        return capsys.readouterr().out

    assert run().startswith("Hé")
    assert run() == run() != run("--seed", "1")
    assert run("--temperature", "0") == run("--temperature", "0", "--seed", "1")
    assert run("--top-k", "0") != run("--top-k", "1")


def generated(trained: Path, stdout: Any, prompt: str = "Hi", **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "generate.py"), str(trained), prompt, "--device", "cpu"],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, stdout=stdout, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_reader_that_goes_away_ends_it_quietly(trained: Path) -> None:
    process = generated(trained, subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"H"
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 128 + signal.SIGPIPE)


def test_a_full_stdout_is_one_line(trained: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = generated(trained, full)
    error = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert error == "generate.py: error: [Errno 28] No space left on device\n"


def test_what_stdout_cannot_encode_is_escaped(trained: Path) -> None:
    process = generated(trained, subprocess.PIPE, "Hé", PYTHONIOENCODING="ascii")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, b"")
    assert out.startswith(b"H\\xe9")


def test_characters_are_printed_when_complete(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = generate.ByteStreamer()
    printed = []
    for byte in "é→a".encode() + b"\xe2":
        streamer.put(torch.tensor([byte]))
        printed.append(capsys.readouterr().out)
    streamer.end()
    assert printed == ["", "é", "", "", "→", "a", ""]
    assert capsys.readouterr().out == "�\n"


def test_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "quickstart.py"))
    assert "operator:  (2, 100, 4, 32)" in capsys.readouterr().out
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 40


# ---------------------------------------------------------------- with a bias for each key and without


def key_bias(data: Path, *more: str) -> int:
    size = ["--hidden-size", "32", "--layers", "2", "--heads", "1", "--seq-len", "32", "--batch-size", "2"]
    return hybrid_key_bias.main([*size, "--device", "cpu", "--data", str(data), *more])


def test_both_models_start_equal_and_only_one_has_a_bias(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert key_bias(data, "--steps", "4", "--seeds", "2", "--lr", "0.1") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed")]
    pattern = r"seed (\d), attention_bias (\w+), +([\d,]+) parameters: .* ([\d.]+) before, ([\d.]+) after 4 steps"
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    assert [f[:2] for f in found] == [("0", "none"), ("0", "key"), ("1", "none"), ("1", "key")]
    assert [int(f[2].replace(",", "")) for f in found[1:2]] == [int(found[0][2].replace(",", "")) + 32 + 1]
    for none, key in (found[:2], found[2:]):
        assert none[3] == key[3]
        assert none[4] != key[4], "the bias has done nothing"
        assert float(none[4]) < float(none[3])
    assert found[0][3] != found[2][3]


def test_the_unbiased_model_is_any_hybrid(data: Path) -> None:
    """The comparison is with what the plain configuration gives: the same weights and the same layers."""
    models = hybrid_key_bias.build_models(hybrid_key_bias.BiasSettings(hidden_size=32, heads=1), CPU)
    none, key = models["none"].state_dict(), models["key"].state_dict()
    assert all(torch.equal(key[name], p) for name, p in none.items())
    assert {name.rsplit("self_attn.")[-1] for name in key.keys() - none.keys()} == {"A", "dt_proj.weight"}
    assert (models["none"].config.attention_bias, models["key"].config.attention_bias) == ("none", "key")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "1"], "--layers 1: expected at least 2"),
        (["--seeds", "0"], "--seeds 0: expected at least 1"),
        (["--data", "/no/such/file"], "--data /no/such/file: expected a readable file"),
        (["--device", "meta"], "--device meta: expected a device that works here"),
    ],
    ids=str,
)
def test_key_bias_explains_bad_input(
    arguments: list[str], message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert key_bias(data, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("hybrid_key_bias.py: error: ")
    assert message in error
    assert error.count("\n") == 1
