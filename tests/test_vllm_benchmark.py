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

class XDeltaAttention: pass

class LLM:
    def __init__(self, model, **options):
        assert options["max_num_seqs"] == 7
        self.off = {off} if os.environ["KDA_LAYERS_ENGINES"] == "vllm" else 0.0
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


@pytest.mark.slow
@pytest.mark.parametrize("off", [0.02, 0.05])
def test_engines_in_turns(off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities that are 0.01 apart between prompts alone and together allow 0.02 with our layer, not 0.05."""
    (tmp_path / "vllm.py").write_text(VLLM.format(off=off))
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    monkeypatch.syspath_prepend(tmp_path)  # processes inherit it
    monkeypatch.setattr(vllm_layers, "version", lambda _: "0")
    monkeypatch.setattr(vllm_layers, "ROUNDS", 3)
    tasks, options = "--tasks=prefill 2x9,decode 2,mixed", '--options={"max_num_seqs": 7}'
    arguments = [str(tmp_path), tasks, options, f"--output={tmp_path}", "--name=cpu-engines"]
    if off > 0.04:
        with pytest.raises(RuntimeError, match=r"must be within 4 x 0\.01 of vLLM's, .* got 0\.05"):
            vllm_layers.main(arguments)
        return
    vllm_layers.main(arguments)
    found = report.load(tmp_path / "cpu-engines.json")
    rows = {(row["first"], row["layer"], row["task"]): row for row in found["rows"]}
    assert len(rows) == 2 * 2 * 3
    assert all(row["ms"] >= 0 and row["wall"]["calls"] == 6 for row in rows.values())
    assert found["details"]["distances, ours first"] == pytest.approx({"apart": 0.02, "noise": 0.01}, rel=1e-3)
