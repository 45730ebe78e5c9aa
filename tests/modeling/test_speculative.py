"""Speculative decoding in bf16: the tokens of greedy decoding, up to the ties that greedy decoding itself has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import KDAConfig, KDAForCausalLM, swap_attention
from kda_layers.serving import enable_speculative_decoding
from tests.kernels.cases import BF16, DEVICES
from tests.modeling.stock_models import FAMILIES, build, cast

pytestmark = pytest.mark.slow

NEW = 24


@pytest.fixture(autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with torch.device(request.param) as device:
        yield device


def model_of(name: str) -> Any:
    """A bf16 model of few tokens, which a guess often hits."""
    if name != "hybrid":
        model = cast(build(name, dense=True), BF16)
        swap_attention(model)
        enable_speculative_decoding(model)
        model.generation_config.suppress_tokens = [0, 1, 2, *range(9, 97)]
        return model
    torch.manual_seed(1)
    config = KDAConfig(
        vocab_size=9, hidden_size=32, num_hidden_layers=3, linear_num_heads=2, linear_head_dim=16,
        num_attention_heads=2, full_attention_interval=3, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return KDAForCausalLM(config).to(BF16).eval()


def last_logits(model: Any, tokens: Tensor, prompt: int) -> list[Tensor]:
    """The logits after `tokens` [1, T], in fp32, computed in several ways.

    Token by token after the prompt, in pieces as long as a check of drafts, and at once.
    """
    found = []
    with torch.no_grad():
        for piece in (1, 2, 3, 5):
            out = model(tokens[:, :prompt], use_cache=True)
            for part in tokens[:, prompt:].split(piece, 1):
                out = model(part, past_key_values=out.past_key_values)
            found.append(out.logits[0, -1].float())
        found.append(model(tokens, use_cache=False).logits[0, -1].float())
    return found


def check_ties(model: Any, greedy: Tensor, got: Tensor, prompt: int) -> None:
    """Fail unless the logits of the first token that differs from greedy decoding are as close as rounding explains."""
    differ = (got != greedy).nonzero()
    if not len(differ):
        return
    at = int(differ[0, 1])
    stepwise, *others = last_logits(model, greedy[:, :at], prompt)
    margin = abs(stepwise[greedy[0, at]] - stepwise[got[0, at]])
    rounding = max((way - stepwise).abs().max() for way in others)
    assert margin <= 2 * rounding, f"token {at} differs by more than a tie: {margin}"


@pytest.mark.parametrize("how", ["prompt lookup", "draft"])
@pytest.mark.parametrize("name", ["hybrid", *FAMILIES])
def test_bf16_is_greedy_but_for_ties(name: str, how: str) -> None:
    """The logit of the first other token and the greedy one's are closer than two ways to compute them."""
    model = model_of(name)
    draft = copy.deepcopy(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.05 * p.std(correction=0) * torch.randn_like(p))
    guess = dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    if how == "draft":
        guess = dict(assistant_model=draft)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    fewer, prompt = 0, 20
    for seed in range(4):
        random = torch.Generator("cpu").manual_seed(seed)
        tokens = torch.randint(3, 9, (1, prompt), generator=random, device="cpu").to(torch.get_default_device())
        greedy = model.generate(tokens, max_new_tokens=NEW, do_sample=False)
        calls.clear()
        got = model.generate(tokens, max_new_tokens=NEW, do_sample=False, **guess)
        fewer += len(calls) < NEW
        check_ties(model, greedy, got, prompt)
    assert fewer, "no guess was right"
