"""Heads for sequences, tokens and questions on our base models."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from tests.kernels.cases import BF16, FP32
from tests.modeling.common import same
from tests.modeling.models import build, every_model, ids

AUTO: dict[str, Any] = {
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
    "QuestionAnswering": AutoModelForQuestionAnswering,
}
every_head = pytest.mark.parametrize("head", AUTO)


@every_model
@every_head
def test_a_head_loads_a_language_model_and_itself(name: str, head: str, tmp_path: pathlib.Path) -> None:
    """The body has the checkpoint's weights, the head is new; saved and loaded, it is the same model, and it trains."""
    lm, tokens = build(name, FP32), ids(2, 9)
    lm.save_pretrained(tmp_path / "lm")
    m, info = AUTO[head].from_pretrained(tmp_path / "lm", output_loading_info=True)
    assert type(m).__name__ == type(lm).__name__.replace("CausalLM", head)
    assert all(key.startswith(("score", "qa_outputs")) for key in info["missing_keys"])
    assert torch.equal(m.model(tokens).last_hidden_state, lm.model(tokens).last_hidden_state)
    m.save_pretrained(tmp_path / "own")
    assert f"AutoModelFor{head}.from_pretrained" in (tmp_path / "own" / "README.md").read_text()
    loaded = AUTO[head].from_pretrained(tmp_path / "own").eval()
    assert pickle.loads(pickle.dumps(type(m))) is type(m)
    same(loaded(tokens).to_tuple()[:1], m.eval()(tokens).to_tuple()[:1])
    target = torch.zeros(2, 9, dtype=torch.long) if head == "TokenClassification" else torch.zeros(2, dtype=torch.long)
    labels = dict(start_positions=target, end_positions=target) if head == "QuestionAnswering" else dict(labels=target)
    m.train()(tokens, **labels).loss.backward()
    assert all(
        p.grad.abs().sum() > 0 for n, p in m.named_parameters() if "layers.0" in n and n.endswith("o_proj.weight")
    )


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_score(name: str, side: str, tmp_path: pathlib.Path) -> None:
    """A reward model's call: one label, pairs of rows of different lengths."""
    build(name, FP32).save_pretrained(tmp_path)
    m: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    rows = [ids(n, seed=n) for n in (9, 5)]
    padding = rows[1].new_zeros(4)
    tokens = torch.stack([rows[0], torch.cat((rows[1], padding) if side == "right" else (padding, rows[1]))])
    with torch.no_grad():
        scores = m(tokens, attention_mask=(tokens != 0).long()).logits
        assert scores.shape == (2, 1)
        for row, score in zip(rows, scores, strict=True):
            torch.testing.assert_close(m(row[None]).logits[0], score, rtol=1e-4, atol=1e-4)


@every_head
def test_gates_stay_in_fp32(head: str, tmp_path: pathlib.Path) -> None:
    build("llama", FP32).save_pretrained(tmp_path)
    m = AUTO[head].from_pretrained(tmp_path, dtype=BF16)
    in_fp32 = {n.rpartition(".")[2] for n, p in m.named_parameters() if p.dtype == FP32}
    assert in_fp32 == {"A_log", "dt_bias"}
