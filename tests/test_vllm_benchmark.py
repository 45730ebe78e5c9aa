"""benchmarks/vllm_layers.py with a stand-in of vLLM; needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report, vllm_layers

VLLM = """
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        self.new = options["max_tokens"]

class XDeltaAttention:
    core = {core} if os.environ["KDA_LAYERS_ENGINES"] == "vllm" else None

class LLM:
    def __init__(self, model, **options):
        assert options["max_num_seqs"] == 7
        self.off = ({off}) * (os.environ["KDA_LAYERS_ENGINES"] == "vllm")
        self.llm_engine = SimpleNamespace(step=lambda: None)

    def apply_model(self, function):
        return [function(SimpleNamespace(modules=lambda: [XDeltaAttention(), self]))]

    def generate(self, prompts, sampling, use_tqdm):
        for _ in range(sampling.new):
            self.llm_engine.step()
        off = self.off + 0.01 * (len(prompts) == 1)
        outputs = []
        for prompt in prompts:
            first, *tokens = prompt["prompt_token_ids"]
            found = [{{token: SimpleNamespace(logprob=off - token)}} for token in tokens]
            outputs.append(SimpleNamespace(prompt_token_ids=[first, *tokens], prompt_logprobs=[None, *found]))
        return outputs
"""


def arguments(folder: Path, monkeypatch: pytest.MonkeyPatch, **stand_in: object) -> list[str]:
    (folder / "vllm.py").write_text(VLLM.format(**stand_in))
    (folder / "config.json").write_text('{"vocab_size": 50}')
    monkeypatch.syspath_prepend(folder)  # processes inherit it
    monkeypatch.setattr(vllm_layers, "version", lambda _: "0")
    monkeypatch.setattr(vllm_layers, "ROUNDS", 3)
    tasks, options = "--tasks=prefill 2x9,decode 2,mixed", '--options={"max_num_seqs": 7}'
    return [str(folder), tasks, options, f"--output={folder}", "--name=cpu-engines"]


@pytest.mark.slow
@pytest.mark.parametrize("off", [0.02, 0.05])
def test_engines_in_turns(off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities that are 0.01 apart between prompts alone and together allow 0.02 with our layer, not 0.05."""
    given = arguments(tmp_path, monkeypatch, off=off, core="0")
    if off > 0.04:
        with pytest.raises(RuntimeError, match=r"must be within 4 x 0\.01 of vLLM's, .* got 0\.05"):
            vllm_layers.main(given)
        return
    vllm_layers.main(given)
    found = report.load(tmp_path / "cpu-engines.json")
    rows = {(row["first"], row["layer"], row["task"]): row for row in found["rows"]}
    assert len(rows) == 2 * 2 * 3
    assert all(row["ms"] >= 0 and row["wall"]["calls"] == 6 for row in rows.values())
    assert found["details"]["distances, ours first"] == pytest.approx({"apart": 0.02, "noise": 0.01}, rel=1e-3)


@pytest.mark.slow
def test_a_layer_that_is_left_to_vllm_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"served by ours, got \{'XDeltaAttention': False\}"):
        vllm_layers.main(arguments(tmp_path, monkeypatch, off=0.02, core=None))


@pytest.mark.slow
def test_a_process_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="the process of stock ended with 3"):
        vllm_layers.main(arguments(tmp_path, monkeypatch, off="os._exit(3)", core=None))
