"""benchmarks/vllm_layers.py with a stand-in of vLLM; needs no GPU."""

from __future__ import annotations

import os
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
        ours = os.environ["KDA_LAYERS_ENGINES"] == "vllm"
        self.off = ({off}) if ours or {off!r}.startswith("os") else 0.0
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


def arguments(folder: Path, monkeypatch: pytest.MonkeyPatch, off: str = "0.02", core: str = "0") -> list[str]:
    """Return arguments for a model and a stand-in in `folder`, whose layer with our plug-in has these attributes."""
    (folder / "vllm.py").write_text(VLLM.format(off=off, core=core))
    (folder / "config.json").write_text('{"vocab_size": 50}')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(vllm_layers, "version", lambda _: "0")
    monkeypatch.setattr(vllm_layers, "ROUNDS", 3)
    tasks, options = "--tasks=prefill 2x9,decode 2,mixed", '--options={"max_num_seqs": 7}'
    return [str(folder), tasks, options, f"--output={folder}", "--name=cpu-engines"]


@pytest.mark.slow
def test_engines_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are 0.01 apart between prompts alone and together, and 0.02 between the engines."""
    vllm_layers.main(arguments(tmp_path, monkeypatch))
    found = report.load(tmp_path / "cpu-engines.json")
    rows = {(row["first"], row["layer"], row["task"]): row for row in found["rows"]}
    assert len(rows) == 2 * 2 * 3
    assert all(row["ms"] >= 0 and row["wall"]["calls"] == 6 for row in rows.values())
    for first in vllm_layers.ENGINES:
        assert found["details"][f"{first} started first"] == pytest.approx({"apart": 0.02, "noise": 0.01}, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stand_in", "problem"),
    [
        (dict(off='float("nan")'), "log-probabilities must be finite, got .*'apart': nan"),
        (dict(core="None"), r"expected KDA layers that are served .* \[\('XDeltaAttention', False\)\]"),
        (dict(off="os._exit(3)"), "the process of stock ended with 3: layers"),
    ],
    ids=["NaN", "left to vLLM", "ended"],
)
def test_what_is_not_measured(
    stand_in: dict[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=problem):
        vllm_layers.main(arguments(tmp_path, monkeypatch, **stand_in))
