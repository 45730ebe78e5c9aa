"""The example that swaps attention in a Llama, at a tiny size: it distils to what it promises and reports the truth."""

from __future__ import annotations

import collections
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.processes import once

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import swap_llama  # noqa: E402
from common.cli import flag  # noqa: E402
from common.optimization import evaluate  # noqa: E402
from common.text import load_text, python_reference  # noqa: E402

SIZE = dict(
    hidden_size=64, layers=4, heads=4, kv_heads=2, linear_heads=2, seq_len=64, batch_size=8, steps=250, layer_steps=80,
    logit_steps=80, lr=4e-3, contexts="64,256", decode=8,
)  # fmt: skip


def arguments(**fields: Any) -> list[str]:
    return [word for name, value in fields.items() for word in (flag(name), str(value))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(python_reference()[:120_000])
    return path


@pytest.fixture(scope="module")
def output(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a finished run."""

    def run(folder: Path) -> None:
        threads = torch.get_num_threads()
        try:
            command = ["--device", "cpu", "--data", str(data), "--output", str(folder / "swap"), *arguments(**SIZE)]
            assert swap_llama.main(command) == 0
        finally:
            torch.set_num_threads(threads)

    return once(tmp_path_factory, "swap_example", run) / "swap"


@pytest.mark.slow
def test_distilling_brings_the_perplexity_back(data: Path, output: Path) -> None:
    """Within 10% of an original that has learnt something, which the swap alone does not give."""
    report = json.loads((output / "report.json").read_text())
    perplexity = report["perplexity"]
    text = load_text(str(data), 64)
    counts = collections.Counter(text.train.tolist())
    unigram = math.exp(
        -sum(math.log(max(counts[b], 1) / len(text.train)) for b in text.heldout.tolist()) / len(text.heldout)
    )
    assert perplexity["original"] < unigram / 2
    assert perplexity["right after the swap"] > 1.5 * perplexity["original"]
    assert perplexity["layers distilled"] < perplexity["right after the swap"]
    assert perplexity["logits distilled"] < perplexity["layers distilled"]
    assert report["ratio"] == perplexity["logits distilled"] / perplexity["original"] < 1.1
    assert [len(report["losses"][name]) for name in ("original", "layers", "logits")] == [250, 80, 80]


@pytest.mark.slow
def test_the_saved_model_is_the_measured_one(data: Path, output: Path) -> None:
    report = json.loads((output / "report.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    settings = swap_llama.SwapSettings(**report["settings"])
    bits = evaluate(model, load_text(str(data), settings.seq_len), settings)
    assert bits == pytest.approx(math.log2(report["perplexity"]["logits distilled"]), rel=1e-5)


def test_the_cache_grows_in_one_layer_instead_of_four(output: Path) -> None:
    decoding = json.loads((output / "report.json").read_text())["decoding"]
    d, W, fp32 = 16, 4, 4
    keys_and_values = {T: 2 * 2 * T * d * fp32 for T in (64, 256)}  # of one layer with 2 heads of width d
    state = (4 * d * d + (2 * 2 * d + 4 * d) * W) * fp32  # 4 value heads, and inputs of the convolutions
    for original, swapped in zip(decoding["original"], decoding["swapped"], strict=True):
        T = original["context"]
        assert original["cache_bytes"] == 4 * keys_and_values[T]
        assert swapped["cache_bytes"] == keys_and_values[T] + 3 * state
        assert original["tokens_per_s"] > 0
        assert swapped["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(swap="3:0"), "layers must be indices"),
        (dict(swap="0,x"), "--swap 0,x: expected integers, separated by commas"),
        (dict(swap="7"), r"layers must be in [-4, 4)"),
        (dict(linear_heads=3), "linear_num_heads"),
        (dict(contexts="many"), "--contexts many: expected integers"),
        (dict(layer_steps=0), "--layer-steps 0: expected at least 1"),
        (dict(data="/no/such/file"), "--data /no/such/file: expected a readable file"),
        (dict(device="quantum"), "--device quantum: expected a device that works here"),
        (dict(device="meta"), "--device meta: expected a device that works here"),
        (dict(contexts="64,0"), "--contexts 0: expected at least 1"),
        (dict(hidden_size=66), "hidden size (66) is not a multiple of the number of attention heads (4)"),
        (dict(output="/proc/run"), "--output /proc/run: expected a directory to write to, got: "),
        (dict(output="/dev/null"), "--output /dev/null: expected a directory to write to, got: "),
        (dict(output="/dev/null/run"), "--output /dev/null/run: expected a directory to write to, got: "),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    fields: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swap_llama.main(["--output", str(tmp_path / "out"), *arguments(**SIZE | dict(device="cpu") | fields)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("swap_llama.py: error: ")
    assert message in error
    assert error.count("\n") == 1
