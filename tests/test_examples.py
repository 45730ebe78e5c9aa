"""The examples at a tiny size: they run, resume exactly, survive interruptions, and explain bad input in one line."""

from __future__ import annotations

import json
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
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import generate  # noqa: E402
import hybrid_key_bias  # noqa: E402
import train_lm  # noqa: E402
from common import checkpoint, text, training  # noqa: E402
from common.bpe import train_bpe  # noqa: E402
from common.cli import InputError  # noqa: E402
from common.corpus import split_tail  # noqa: E402
from common.decoding import ByteStreamer  # noqa: E402
from common.optimization import build_optimizer, fit, rate_factor  # noqa: E402
from common.trigram import Trigram  # noqa: E402

import kda_layers  # noqa: E402
from kda_layers import KDAConfig, KDAForCausalLM  # noqa: E402

CPU = torch.device("cpu")
CONFIG = dict(
    model_type="kda_lm", vocab_size=256, hidden_size=32, num_hidden_layers=1, linear_num_heads=1, linear_head_dim=32,
    tie_word_embeddings=True,
)  # fmt: skip
SIZE = ["--seq-len", "32", "--batch-size", "2", "--log-every", "1", "--evaluations", "3"]
STEPS = 9


@pytest.fixture(autouse=True)
def short_sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(train_lm, "SAMPLE", 8)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(text.python_reference()[:3000])
    return path


def train(data: Path, output: Path, *more: str, steps: int = STEPS) -> int:
    config = data.with_name("tiny.json")
    config.write_text(json.dumps(CONFIG))
    files = ["--config", str(config), "--data", str(data), "--output", str(output)]
    return train_lm.main([*SIZE, *files, "--device", "cpu", "--steps", str(steps), *more])


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of nine steps."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm, "SAMPLE", 8)
        assert train(data, output) == 0
    return output


def load_state(run: Path) -> dict[str, Any]:
    return checkpoint.load_state(run / "checkpoint")


def contents(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Parameters and the trainer's state of a checkpoint, but for seconds."""
    state = checkpoint.load_state(directory)
    del state["windows"], state["first_steps_seconds"]
    state["heldout"] = [{n: v for n, v in h.items() if n != "seconds"} for h in state["heldout"]]
    return checkpoint.load_model(directory, CPU).state_dict(), state


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
    batch = text.training_batch

    def interrupted(*args: Any) -> torch.Tensor:
        if args[-1] == step:
            signal.raise_signal(signal.SIGINT)
        return batch(*args)

    monkeypatch.setattr(training, "training_batch", interrupted)


# ---------------------------------------------------------------- text and trigrams


def test_every_heldout_byte_is_scored_once_with_context() -> None:
    train, heldout = torch.arange(200) % 256, torch.arange(200, 253)
    inputs, labels = text.heldout_windows(train, heldout, 16)
    assert torch.equal(labels[labels >= 0], heldout)
    assert (labels[:, :8] == -100).all()  # half a window of context
    assert torch.equal(inputs[labels >= 0], heldout)
    whole = torch.cat([train, heldout])
    assert torch.equal(inputs[1], whole[200 : 200 + 16])
    assert torch.equal(inputs[0], whole[200 - 8 : 200 + 8])


def test_batches_are_a_function_of_seed_and_step() -> None:
    train = torch.arange(5000)

    def batch(seed: int, step: int) -> torch.Tensor:
        return text.training_batch(train, 4, 16, seed, step)

    assert torch.equal(batch(0, 7), batch(0, 7))
    assert not torch.equal(batch(0, 7), batch(0, 8))
    assert not torch.equal(batch(0, 7), batch(1, 7))
    assert torch.equal(batch(3, 1).diff(dim=1), torch.ones(4, 15, dtype=torch.long))


def test_default_text_repeats_no_paragraph() -> None:
    paragraphs = text.python_reference().split(b"\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert sum(map(len, paragraphs)) > 200_000


def test_trigram_is_a_distribution_and_generalises() -> None:
    train, heldout = text.load_text(None, 256)[:2]
    model = Trigram(train)
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
    before = contents(trained / "checkpoint")
    assert train_lm.main(["--resume", str(trained / "checkpoint"), "--device", "cpu"]) == 0  # finished: only reports
    out = capsys.readouterr().out
    assert "held-out bits per byte" in out
    assert "trigrams" in out
    sizes = out.rsplit("cache: ", 1)[1].split()
    assert sizes[:2] == [sizes[5], "bytes"]  # after N and after 2 N tokens
    assert (trained / "loss.png").stat().st_size > 10_000
    assert {p.name for p in trained.iterdir()} == {"checkpoint", "loss.png", "run.json", "summary.md"}
    assert_same(contents(trained / "checkpoint"), before)


def test_the_report_compares_with_trigrams(trained: Path, data: Path) -> None:
    train, heldout = (torch.tensor(list(part)) for part in split_tail(data.read_bytes(), 10**6))
    report = json.loads((trained / "run.json").read_text())
    assert report["trigram_bits_per_byte"] == pytest.approx(Trigram(train).bits_per_byte(train, heldout))
    assert [h["step"] for h in report["heldout"]] == [5, 6, STEPS]


def test_same_seed_same_losses(data: Path, tmp_path: Path) -> None:
    losses = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert train(data, tmp_path / name, "--seed", seed, steps=6) == 0
        losses.append(load_state(tmp_path / name)["losses"])
    assert len(losses[0]) == 6
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("step", [0, 5, 8])
def test_stop_and_resume_equals_an_uninterrupted_run(
    step: int, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        assert train(data, tmp_path / "run") == 130
    assert load_state(tmp_path / "run")["step"] == step + 1
    assert (tmp_path / "run" / "loss.png").exists()
    assert train_lm.main(["--resume", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert_same(contents(tmp_path / "run" / "checkpoint"), contents(trained / "checkpoint"))


@pytest.mark.slow
def test_a_run_by_the_clock_resumes_with_its_seconds(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 40)
        assert train(data, tmp_path / "run", "--steps", "0", "--minutes", "1000") == 130
    before = load_state(tmp_path / "run")
    seconds = sum(w["seconds"] for w in before["windows"])
    before["settings"]["minutes"] = 2 * seconds / 60
    torch.save(before, tmp_path / "run" / "checkpoint" / "trainer.pt")
    assert train_lm.main(["--resume", str(tmp_path / "run"), "--device", "cpu"]) == 0
    after = load_state(tmp_path / "run")
    assert after["losses"][:41] == before["losses"]
    assert after["step"] > 41 + 5
    assert after["windows"][: len(before["windows"])] == before["windows"]
    # The clock is read after the last window has ended, so that the windows may be less than a step short.
    assert sum(w["seconds"] for w in after["windows"]) >= 2 * seconds * (1 - 1 / after["step"])


def test_bfloat16_keeps_parameters_in_float32(data: Path, tmp_path: Path) -> None:
    assert train(data, tmp_path / "run", "--dtype", "bfloat16", steps=6) == 0
    parameters, state = contents(tmp_path / "run" / "checkpoint")
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert state["settings"]["dtype"] == "bfloat16"


def test_only_matrices_decay() -> None:
    model: Any = KDAForCausalLM(KDAConfig(**CONFIG))
    decay, rest = (group["params"] for group in build_optimizer(model).param_groups)
    names = {id(p): name for name, p in model.named_parameters()}
    assert len(decay) + len(rest) == len(names)
    assert all(names[id(p)].endswith(("proj.weight", "embed_tokens.weight")) for p in decay)
    assert {names[id(p)].rsplit("self_attn.")[-1] for p in rest} >= {
        "A_log",
        "dt_bias",
        "conv1d.weight",
        "o_norm.weight",
    }


def test_learning_rate_warms_up_and_falls(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def recorded(self: Any, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    module = torch.nn.Linear(1, 1)
    settings = hybrid_key_bias.BiasSettings(lr=2.0, seq_len=8, batch_size=1)
    fit(module, lambda batch: module.weight.sum(), text.load_text(str(data), 8), settings, 100, CPU, "")
    assert rates == [2.0 * rate_factor(step / 100) for step in range(100)]
    assert max(rates) == max(rates[:7]) > 1.97
    assert rates[:5] == sorted(rates[:5])
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert rates[-1] == pytest.approx(0.2, abs=0.01)


# ---------------------------------------------------------------- interruptions


def load(run: Path) -> tuple[Any, dict[str, Any]]:
    return checkpoint.load_model(run / "checkpoint", CPU), load_state(run)


@pytest.mark.parametrize("broken", ["torch.save", "os.fsync", "second rename"])
def test_interrupted_save_keeps_the_previous_checkpoint(
    broken: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    model, state = load(trained)
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
    model, state = load(trained)
    checkpoint.save_checkpoint(directory, model, state)
    directory.rename(tmp_path / ".run.aside")
    assert_same(contents(directory), contents(trained / "checkpoint"))


def test_ctrl_c_saves_and_a_second_one_does_no_harm(data: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    files = ["--config", str(tmp_path / "tiny.json"), "--data", str(data), "--output", str(tmp_path / "run")]
    options = [*SIZE, "--device", "cpu", *files, "--steps", "100000", "--evaluations", "10000"]
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "train_lm.py"), *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        saved = tmp_path / "run" / "checkpoint" / "trainer.pt"
        while not saved.exists() and process.poll() is None:  # from the first evaluation on, it is training
            time.sleep(0.05)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    state = load_state(tmp_path / "run")
    assert f"stopped by signal 2 at step {state['step']}" in out.decode()
    assert f"to continue: --resume {tmp_path / 'run'}" in out.decode()
    assert state["step"] == len(state["losses"]) > 0
    checkpoint.load_model(tmp_path / "run" / "checkpoint", CPU)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--data missing.txt", "--data missing.txt: expected a readable file, got: No such file"),
        ("--data .", "--data .: expected a readable file, got: Is a directory"),
        ("--data empty.txt", "got 0 bytes"),
        ("--data small.txt", "expected at least 1,280 bytes, ten of --seq-len 128, got 9 bytes"),
        ("--preset demo --resume run", "--preset demo: expected the settings as in run, or nothing"),
        ("--minutes 1 --steps 6", "--minutes 1.0: expected --minutes or --steps, got both"),
        ("--resume missing", "expected a checkpoint of train_lm.py, got: no such directory"),
        ("--resume files", "expected a checkpoint of train_lm.py, got: no config.json, model.safetensors"),
        ("--resume run --steps 5", f"--steps 5: expected {STEPS} as in run, or nothing"),
        ("--resume run --seed 1", "--seed 1: expected 0 as in run, or nothing"),
        ("--resume run --dtype bfloat16", "--dtype bfloat16: expected float32 as in run"),
        ("--resume run --data other.txt", "--data other.txt: expected the text that run was trained on"),
        ("--resume damaged_state", "damaged_state: expected a checkpoint of train_lm.py, got: "),
        ("--resume damaged_model", "damaged_model: expected a checkpoint of train_lm.py, got: "),
        ("--resume foreign_state", "foreign_state: expected a checkpoint of this version of train_lm.py, got: "),
        ("--resume old_settings", "got: missing or unknown seed"),
        ("--output mine", "--output {cwd}/mine/checkpoint: expected a new directory, an empty one or a checkpoint"),
        ("--output small.txt", "--output {cwd}/small.txt: expected a directory to write to, got: File exists"),
        ("--steps -1", "--steps -1: expected at least 0"),
        ("--seed -1", "--seed -1: expected at least 0"),
        ("--lr nan", "--lr nan: expected at least 0.0"),
        ("--device abacus", "--device abacus: expected a device that works here, got: "),
        ("--device meta", "--device meta: expected a device that works here, got: "),
        (
            "--output small.txt/run",
            "--output {cwd}/small.txt/run: expected a directory to write to, got: Not a directory",
        ),
        (
            "--output /proc/run",
            "--output /proc/run: expected a directory to write to, got: ",
        ),  # which root cannot either
        ("--resume .", ".: expected a checkpoint of train_lm.py, got: no config.json"),
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
    for name in ("run/checkpoint", "damaged_state", "damaged_model", "foreign_state", "old_settings"):
        checkpoint.save_checkpoint(tmp_path / name, *load(trained))
    torch.save({"epoch": 3}, "foreign_state/trainer.pt")
    _, state = load(trained)
    del state["settings"]["seed"]
    torch.save(state, "old_settings/trainer.pt")
    for damaged in ("damaged_state/trainer.pt", "damaged_model/model.safetensors"):
        Path(damaged).write_bytes(Path(damaged).read_bytes()[:1000])
    Path("files").mkdir()
    Path("mine/checkpoint").mkdir(parents=True)
    notes = [Path("files/notes.txt"), Path("mine/checkpoint/notes.txt")]
    for note in notes:
        note.write_text("mine")
    Path("empty.txt").touch()
    Path("small.txt").write_text("too small")
    Path("other.txt").write_text("another text\n" * 1000)

    assert train_lm.main(argv.split()) == 2
    err = capsys.readouterr().err
    assert message.format(cwd=tmp_path) in err
    assert err.startswith("train_lm.py: error: ")
    assert err.count("\n") == 1
    assert [note.read_text() for note in notes] == ["mine", "mine"]


def test_a_mount_point_is_not_replaced() -> None:
    with pytest.raises(InputError, match="--output /: expected a new directory"):
        checkpoint.check_replaceable(Path("/"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["missing", "Hi"], "missing: expected a checkpoint of train_lm.py, got: no such directory"),
        (["{trained}", ""], "prompt: expected at least one character"),
        (["{trained}", "Hi", "--max-new-tokens", "0"], "--max-new-tokens 0: expected at least 1"),
        (["{trained}", "Hi", "--temperature", "-1"], "--temperature -1.0"),
        (["{trained}", "Hi", "--temperature", "nan"], "--temperature nan: expected at least 0.0001"),
        (["{trained}", "Hi", "--temperature", "1e-40"], "--temperature 1e-40: expected at least 0.0001"),
        (["{trained}", "Hi", "--seed", "-1"], "--seed -1: expected at least 0"),
        (["{trained}", "Hi", "--device", "meta"], "--device meta: expected a device that works here"),
        (["/", "Hi"], "/: expected a checkpoint of train_lm.py, got: no config.json"),
        (["", "Hi"], ".: expected a checkpoint of train_lm.py, got: no config.json"),
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


def test_generate_prints_the_text_of_tokens(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=train_bpe(text.python_reference().decode(), 300))
    torch.manual_seed(0)
    model: Any = KDAForCausalLM(KDAConfig(**CONFIG | {"vocab_size": 300}))
    checkpoint.save_checkpoint(tmp_path / "bpe", model, {}, tokenizer)
    assert generate.main([str(tmp_path / "bpe"), "The Hé", "--device", "cpu", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("The Hé")
    (tmp_path / "bpe" / "tokenizer.json").unlink()
    assert generate.main([str(tmp_path / "bpe"), "Hi", "--device", "cpu"]) == 2
    assert "expected a tokenizer, or a vocabulary of the 256 bytes, got 300 tokens" in capsys.readouterr().err


def generated(
    trained: Path, stdout: Any, prompt: str = "Hi", tokens: int = 8, **variables: str
) -> subprocess.Popen[bytes]:
    command = [str(EXAMPLES / "generate.py"), str(trained), prompt, "--max-new-tokens", str(tokens), "--device", "cpu"]
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, stdout=stdout, stderr=subprocess.PIPE,
    )  # fmt: skip


def not_torchao(stderr: bytes) -> bytes:
    """Return what a process writes without the lines of torchao, which transformers imports where it is installed."""
    lines = stderr.splitlines(keepends=True)
    return b"".join(line for line in lines if b"torchao" not in line and b"torch/utils/_pytree.py" not in line)


def test_a_reader_that_goes_away_ends_it_quietly(trained: Path) -> None:
    process = generated(trained, subprocess.PIPE, tokens=400)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"H"
    process.stdout.close()
    assert (not_torchao(process.stderr.read()), process.wait(60)) == (b"", 128 + signal.SIGPIPE)


@pytest.mark.slow
def test_a_full_stdout_is_one_line(trained: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = generated(trained, full)
    error = not_torchao(process.communicate(timeout=60)[1]).decode()
    assert process.returncode == 1
    assert error == "generate.py: error: [Errno 28] No space left on device\n"


@pytest.mark.slow
def test_what_stdout_cannot_encode_is_escaped(trained: Path) -> None:
    process = generated(trained, subprocess.PIPE, "Hé", PYTHONIOENCODING="ascii")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, not_torchao(error)) == (0, b"")
    assert out.startswith(b"H\\xe9")


def test_characters_are_printed_when_complete(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = ByteStreamer()
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


def swap_and_generate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["swap_and_generate.py", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return runpy.run_path(str(EXAMPLES / "swap_and_generate.py"))


def test_a_swapped_kimi_linear_generates_the_same_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = swap_and_generate(monkeypatch)["model"]  # of its own making
    assert "the stock model's tokens: the same\n" in capsys.readouterr().out
    assert len(kda_layers.restore_attention(model)) == 3
    model.save_pretrained(tmp_path)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=train_bpe("", 256))
    tokenizer.save_pretrained(tmp_path)
    swap_and_generate(monkeypatch, str(tmp_path), "Hello")
    out = capsys.readouterr().out
    assert out.startswith("Hello")
    assert "the stock model's tokens: the same\n" in out


def test_each_use_is_one_short_file_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"]({path.name})" in index
        assert len(path.read_text().splitlines()) <= 150, path.name
    for name in re.findall(r"\]\(([^)]+)\)", index):
        assert (EXAMPLES / name).exists(), name


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
