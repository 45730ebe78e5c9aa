"""train_lm.py with the 120m preset at a tiny size: it learns, counts and times as reported, and explains bad input."""

from __future__ import annotations

import functools
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.modeling.cuda_graphs import training_step
from tests.modeling.taped_graphs import TapedGraphs
from tests.processes import once

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import compare_runs  # noqa: E402
import train_lm  # noqa: E402
from common import installed_text, throughput, training  # noqa: E402
from common.corpus import split_tail  # noqa: E402
from common.optimization import heldout_nats, rate_factor  # noqa: E402
from common.settings import LMSettings  # noqa: E402
from common.text import python_reference, training_batch  # noqa: E402

CONFIG = dict(
    model_type="kda_lm", vocab_size=300, hidden_size=64, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=16,
    intermediate_size=128, num_attention_heads=2, tie_word_embeddings=True,
)  # fmt: skip
SIZE = "--preset 120m --device cpu --dtype float32 --seq-len 64 --batch-size 4 --lr 5e-3 --heldout-kb 4"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a text."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_bytes(python_reference()[:100_000])
    return folder


def train(files: Path, output: Path, more: str) -> int:
    command = f"{SIZE} --config {files}/tiny.json --data {files}/text.txt --output {output} {more}"
    return train_lm.main(command.split())


def report_of(output: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in run.json")

    return json.loads((output / "run.json").read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def trained(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def run(folder: Path) -> None:
        assert train(files, folder / "byte", "--vocab byte --steps 120 --evaluations 3 --peak-tflops 0.1") == 0

    return once(tmp_path_factory, "train_lm", run) / "byte"


# ---------------------------------------------------------------- a run


def test_it_learns_more_than_frequencies(files: Path, trained: Path) -> None:
    report = report_of(trained)
    text = (files / "text.txt").read_bytes()
    train_part, heldout = split_tail(text, 4000)
    assert train_part + heldout == text
    assert 4000 <= len(heldout) < 8000
    counts = torch.bincount(torch.tensor(list(train_part)), minlength=256).double() + 1
    unigram = -(counts / counts.sum())[list(heldout)].log().mean().item()
    assert report["unigram_nats_per_token"] == pytest.approx(unigram)
    assert report["heldout"][-1]["nats_per_token"] < unigram - 0.2
    assert sum(report["losses"][-20:]) / 20 < unigram - 0.2


def test_the_report_holds_what_was_done(files: Path, trained: Path) -> None:
    report = report_of(trained)
    corpus, rates = report["corpus"], report["tokens_per_s"]
    assert report["status"] == "finished"
    assert report["steps"] == len(report["losses"]) == 120
    assert report["tokens"] == 120 * 4 * 64
    assert corpus["bytes"] == corpus["train_tokens"] + corpus["heldout_tokens"] == 100_000
    assert report["epochs"] == report["tokens"] / corpus["train_tokens"]
    assert [h["step"] for h in report["heldout"]] == [45, 85, 120]
    for h in report["heldout"]:
        assert h["bits_per_byte"] == pytest.approx(h["nats_per_token"] / math.log(2))
    windows = report["windows"]
    assert [w["step"] for w in windows] == [*range(15, 120, 10), 120]
    assert sum(w["steps"] for w in windows) == 120 - 5
    assert rates["min"] <= rates["median"] <= rates["max"]
    assert rates["overall"] * report["training_seconds"] == pytest.approx((120 - 5) * 256)
    assert report["first_steps_seconds"] > 0
    assert rates["max"] == pytest.approx(max(w["steps"] * 256 / w["seconds"] for w in windows))
    assert report["mfu"] == pytest.approx(rates["median"] * report["flops_per_token"]["total"] / 0.1e12)
    assert report["backend"]["serves"] == "eager"
    assert report["machine"]["torch"] == torch.__version__
    assert (trained / "loss.png").stat().st_size > 10_000
    assert (trained / "summary.md").read_text().count("\n") == 3


def test_the_checkpoint_is_the_measured_model(files: Path, trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "checkpoint")
    report = report_of(trained)
    assert sum(p.numel() for p in model.parameters()) == report["parameters"]
    parts = split_tail((files / "text.txt").read_bytes(), 4000)
    past, heldout = (torch.tensor(list(part)) for part in parts)
    settings = LMSettings(seq_len=64, dtype="float32")
    nats = heldout_nats(model, past, heldout, settings) / len(heldout)
    assert nats == pytest.approx(report["heldout"][-1]["nats_per_token"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.compiles
def test_same_seed_same_losses_compiled_or_not(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))  # compiles in half the time
    (tmp_path / "text.txt").write_bytes((files / "text.txt").read_bytes())
    options = {"a": "", "b": "--backend eager", "seed": "--seed 1", "compiled": "--compile"}
    for name, more in options.items():
        assert train(tmp_path, tmp_path / name, f"--vocab byte --steps 6 --evaluations 1 {more}") == 0
    losses = {name: report_of(tmp_path / name)["losses"] for name in options}
    assert losses["a"] == losses["b"] != losses["seed"]
    assert losses["compiled"] == pytest.approx(losses["a"], rel=1e-4)
    assert report_of(tmp_path / "compiled")["compiled"]


def test_captured_steps_are_the_eager_ones(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the learning rate in fp32; either may go on with what the other one saved."""
    monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
    options = {"eager": "", "captured": "--cuda-graph"}
    for name, more in options.items():
        assert train(files, tmp_path / name, f"--vocab byte --steps 14 --evaluations 2 --log-every 4 {more}") == 0
    eager, captured = (report_of(tmp_path / name) for name in options)
    assert captured["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert captured["heldout"][-1]["bits_per_byte"] == pytest.approx(eager["heldout"][-1]["bits_per_byte"], rel=1e-5)
    assert captured.pop("cuda_graph") is True
    assert captured.keys() == eager.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("", "--cuda-graph"), ("--cuda-graph", "")])
def test_a_run_resumes_captured_or_not(
    first: str, then: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
    run = "--vocab byte --steps 12 --evaluations 1 --log-every 4"
    assert train(files, tmp_path / "whole", run) == 0
    with monkeypatch.context() as patch:
        patch.setattr(training, "training_batch", interrupted_at(6))
        assert train(files, tmp_path / "part", f"{run} {first}") == 130
    assert train_lm.main(f"--resume {tmp_path}/part --device cpu {then}".split()) == 0
    losses = [report_of(tmp_path / name)["losses"] for name in ("whole", "part")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def interrupted_at(step: int) -> Any:
    """`training_batch` that raises a signal in this step."""

    def interrupted(*args: Any) -> torch.Tensor:
        if args[-1] == step:
            signal.raise_signal(signal.SIGINT)
        return training_batch(*args)

    return interrupted


@pytest.mark.slow
def test_bpe_runs_by_the_clock_and_compares_with_bytes(files: Path, trained: Path, tmp_path: Path) -> None:
    """Both hold out the same text; the BPE is found again and comes with the checkpoint."""
    for name, length in (("a", "--minutes 0.02"), ("b", "--steps 6")):
        more = f"--cache {tmp_path}/cache --log-every 2 --evaluations 1 --dtype bfloat16"
        assert train(files, tmp_path / name, f"{length} {more}") == 0
    by_clock, by_steps = report_of(tmp_path / "a"), report_of(tmp_path / "b")
    assert by_clock["steps"] > 6
    assert by_clock["training_seconds"] >= 1.2
    assert "clock" in by_clock["learning_rate_follows"]
    corpus = by_clock["corpus"]
    assert corpus["heldout_bytes"] == report_of(trained)["corpus"]["heldout_bytes"]
    assert corpus.pop("bpe_seconds") >= 0 <= corpus.pop("tokenizing_seconds")
    assert corpus == by_steps["corpus"]  # found in the cache: no seconds
    h = by_clock["heldout"][-1]
    nats = h["nats_per_token"] * corpus["heldout_tokens"]
    assert h["bits_per_byte"] == pytest.approx(nats / corpus["heldout_bytes"] / math.log(2))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a" / "checkpoint")
    text = "The naïve approach"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer(text)["input_ids"]) < len(tokenizer) == CONFIG["vocab_size"]


def test_runs_are_compared(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = report_of(trained)
    other["settings"]["seed"] = 7
    (tmp_path / "other.json").write_text(json.dumps(other))
    command = [str(trained / "run.json"), str(tmp_path / "other.json"), "--output", str(tmp_path / "out")]
    assert compare_runs.main(command) == 0
    assert "these runs differ in settings: seed\n" in capsys.readouterr().out
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    assert len((tmp_path / "out" / "comparison.md").read_text().splitlines()) == 4


@pytest.mark.slow
def test_evaluation_is_not_timed(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> float:
        time.sleep(1)
        return 1.0

    monkeypatch.setattr(training, "heldout_nats", slow)
    assert train(files, tmp_path / "run", "--vocab byte --steps 12 --log-every 2 --evaluations 3") == 0
    report = report_of(tmp_path / "run")
    assert [h["step"] for h in report["heldout"]] == [5, 9, 12]
    assert [w["step"] for w in report["windows"]] == [7, 9, 11, 12]
    assert max(w["seconds"] for w in report["windows"]) < 1


@pytest.mark.parametrize(("at", "timed"), [(2, False), (9, True)])
def test_ctrl_c_saves(at: int, timed: bool, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "training_batch", interrupted_at(at))
    assert train(files, tmp_path / "run", "--vocab byte --steps 1000000") == 130
    report = report_of(tmp_path / "run")
    assert report["status"] == f"stopped by signal 2 at step {at + 1}"
    assert len(report["losses"]) == at + 1
    assert (report["tokens_per_s"] is not None) == timed
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint")


def test_a_loss_that_is_no_number_ends_the_run(files: Path, tmp_path: Path) -> None:
    assert train(files, tmp_path / "run", "--vocab byte --steps 1000000 --lr 4e9") == 1
    report = report_of(tmp_path / "run")
    assert report["status"] == f"stopped: the loss of step {len(report['losses']) + 1} is not finite"


# ---------------------------------------------------------------- what is counted


def test_operations_per_token_by_hand() -> None:
    config = KDAConfig(
        vocab_size=100, hidden_size=8, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_num_heads=1, linear_num_value_heads=2, linear_head_dim=4, linear_value_head_dim=3, linear_gate_rank=0,
        intermediate_size=5, num_attention_heads=2, num_key_value_heads=1, head_dim=6, tie_word_embeddings=True,
    )  # fmt: skip
    mlp = 3 * 8 * 5
    kda = 8 * 4 + 8 * 4 + 8 * 6 + (8 * 8 + 8 * 6) + 8 * 2 + 6 * 8  # q, k, v; both gates; beta; output
    softmax = 8 * 12 + 2 * 8 * 6 + 12 * 8
    linear = 6 * (2 * mlp + kda + softmax + 8 * 100)  # the head, although its weight is that of the embedding
    want = {"linear": linear, "kda": 18 * 4 * 3 * 2, "softmax": 6 * 10 * 6 * 2}
    found = throughput.flops_per_token(KDAForCausalLM(config), 10)
    assert found == want | {"total": sum(want.values())}


def test_the_clock_leaves_out_what_it_should() -> None:
    clock = throughput.Clock()
    clock.end_window(5)
    assert clock.seconds() == 0
    assert clock.rates(10) is None
    clock.start(5)
    with clock.paused():
        time.sleep(0.1)
    time.sleep(0.02)
    clock.end_window(7)
    (window,) = clock.windows
    assert (window["step"], window["steps"]) == (7, 2)
    assert 0.02 <= window["seconds"] < 0.1
    assert clock.rates(10)["median"] == pytest.approx(20 / window["seconds"])  # type: ignore[index]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_learning_rate_over_a_run(schedule: str) -> None:
    rates = [rate_factor(i / 1000, schedule) for i in range(1001)]
    assert min(rates) > 0
    assert max(rates) == max(rates[:60]) > 0.99
    assert rates[:45] == sorted(rates[:45])
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[-1] <= 0.1 + 1e-9
    if schedule == "wsd":
        assert set(rates[50:800]) == {1.0}


# ---------------------------------------------------------------- text


def test_installed_text_is_the_same_again_and_repeats_nothing() -> None:
    text, sizes = installed_text.installed_text(3_000_000)
    assert (text, sizes) == installed_text.installed_text(3_000_000)
    assert 2_900_000 < len(text) <= 3_000_000
    assert sum(sizes.values()) == pytest.approx(len(text), abs=2)
    assert sizes["documentation"] > 300_000
    paragraphs = [" ".join(p.split()) for p in text.decode().split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))


def test_source_is_split_from_its_strings() -> None:
    lines = [
        'def f(x):  # it\'s """ fine',
        '    """What it',
        '       does."""',
        '    y = """not at',
        '"""',
        "    z = \"'''\"",
        '    r"""raw \\d"""',
        '    return \'"""\'',
    ]
    strings, rest = installed_text.split_source("\n".join(lines))
    assert strings == "What it\ndoes.\n\nraw \\d"
    assert [line for line in rest.split("\n") if line] == [lines[0], *lines[3:6], lines[7]]


def test_the_tail_begins_with_a_paragraph_or_a_character() -> None:
    text = b"ab\n\n" * 100
    assert split_tail(text, 1000) == (text[:-40], text[-40:])
    assert split_tail(text, 9) == (text[:-12], text[-12:])
    rest, tail = split_tail(("é" * 101).encode(), 1000)
    assert (len(rest.decode()), len(tail.decode())) == (91, 10)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--config missing.json", "--config missing.json: expected a readable file, got: No such file"),
        ("--config text.txt", "--config text.txt: expected a configuration of a KDA model, got: "),
        ("--config llama.json", "got: no model_type 'kda_lm'"),
        ("--config zero.json", "got: linear_num_heads must be at least 1, got 0"),
        ("--data missing.txt", "--data missing.txt: expected a readable file, got: No such file"),
        ("--data small.txt", "--data small.txt: expected at least 640 bytes, ten of --seq-len 64, got 9 bytes"),
        ("--seq-len 20000 --vocab byte", "expected at least 200,000 bytes, ten of --seq-len 20000, got 100,000 bytes"),
        ("--data latin.txt", "--data latin.txt: expected UTF-8 text with --vocab bpe, got: "),
        ("--vocab-size 20000", "--vocab-size 20000: expected more text, or at most "),
        ("--vocab-size 256", "--vocab-size 256: expected more than the 256 bytes"),
        ("--backend abacus", "--backend abacus: unknown backend 'abacus', known: "),
        ("--steps 5", "--steps 5: expected more than the 5 that are not timed"),
        ("--minutes 0", "--minutes 0.0: expected at least 0.001"),
        ("--lr nan", "--lr nan: expected at least 0.0"),
        ("--device abacus", "--device abacus: expected a device that works here, got: "),
        ("--output small.txt", "--output {cwd}/small.txt: expected a directory to write to, got: File exists"),
        ("--output /proc/run", "--output /proc/run: expected a directory to write to, got: "),
        ("--cache small.txt", "--cache small.txt: expected a directory to write to, got: File exists"),
        ("--device meta", "--device meta: expected a device that works here, got: "),
        ("--peak-tflops nan", "--peak-tflops nan: expected at least 0.001"),
        ("--cuda-graph", "--cuda-graph: model must be on a CUDA device, got cpu"),
    ],
)
def test_bad_input_is_explained(
    argv: str, message: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("tiny.json", "text.txt"):
        Path(name).write_bytes((files / name).read_bytes())
    Path("llama.json").write_text('{"model_type": "llama"}')
    Path("zero.json").write_text(json.dumps(CONFIG | {"linear_num_heads": 0}))
    Path("small.txt").write_text("too small")
    Path("latin.txt").write_bytes("naïve ".encode("latin-1") * 1000)

    defaults = f"{SIZE} --config tiny.json --data text.txt --output run".split()
    assert train_lm.main([*defaults, *argv.split()]) == 2
    err = capsys.readouterr().err
    assert message.format(cwd=tmp_path) in err
    assert err.startswith("train_lm.py: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("part.json", "part.json: expected a run.json of train_lm.py, got: KeyError('windows')"),
        ("run.json --output small.txt", "--output small.txt: expected a directory to write to"),
        ("missing.json", "missing.json: expected a readable file, got: No such file"),
        ("tiny.json", "tiny.json: expected a run.json of train_lm.py, got: "),
        ("small.txt", "small.txt: expected a run.json of train_lm.py, got: "),
    ],
)
def test_files_that_cannot_be_compared_are_explained(
    argv: str, message: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps(report_of(trained)))
    Path("part.json").write_text(json.dumps({n: v for n, v in report_of(trained).items() if n != "windows"}))
    Path("tiny.json").write_text(json.dumps(CONFIG))
    Path("small.txt").write_text("too small")
    assert compare_runs.main(argv.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("compare_runs.py: error: ")
    assert err.count("\n") == 1
