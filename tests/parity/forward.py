"""Calls of the model itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from tests.parity.calls import Refusal, calls_of
from tests.parity.subjects import OURS, SHORT, TEXT, Subject, assert_close, greedy, logits

call = calls_of("Calling the model")


@call("`model(**inputs, labels=...)` in evaluation: loss and logits")
def loss_in_evaluation(on: Subject) -> Any:
    inputs = on.tokens()
    with torch.no_grad():
        out = on.shared(**inputs, labels=inputs["input_ids"])
    assert_close(out.loss, cross_entropy(out.logits[0, :-1], inputs["input_ids"][0, 1:]))
    return out.logits.shape, list(out.keys())


@call("`out.loss.backward()`, and `out.logits`, `out[1]` after training with labels")
def logits_in_training(on: Subject) -> Any:
    m, inputs = on.model().train(), on.tokens()
    out = m(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    assert_close(out.logits.float(), logits(on.shared, inputs))
    assert_close(out[1], logits(on.shared, inputs))
    accuracy = (out.logits[:, :-1].argmax(-1) == inputs["input_ids"][:, 1:]).float().mean()
    assert 0 <= accuracy <= 1
    return out["logits"].shape, len(out.to_tuple()) >= 2


@call("a loss of one's own beside the model's: both in one backward (z-loss, distillation)")
def auxiliary_loss(on: Subject) -> Any:
    m, inputs = on.model().train(), on.tokens()
    out = m(**inputs, labels=inputs["input_ids"])
    (out.loss + out.logits.logsumexp(-1).square().mean()).backward()
    both = m.lm_head.weight.grad.clone()
    m.zero_grad()
    m(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert (both - m.lm_head.weight.grad).abs().max() > 1e-3
    return bool(both.isfinite().all())


@call("`model(ids, return_dict=False)`")
def return_tuple(on: Subject) -> Any:
    out = on.shared(on.tokens()["input_ids"], return_dict=False)
    return type(out), out[0].shape


@call("`model(ids, output_hidden_states=True)`")
def output_hidden_states(on: Subject) -> Any:
    out = on.shared(**on.tokens(), output_hidden_states=True)
    assert_close(on.shared.lm_head(out.hidden_states[-1]), out.logits)
    return [h.shape for h in out.hidden_states]


@call("`model(ids, output_attentions=True)`: of the softmax layers")
def output_attentions(on: Subject) -> Any:
    m = on.model()
    m.set_attn_implementation("eager")
    inputs = on.tokens()
    attentions, T = m(**inputs, output_attentions=True).attentions, inputs["input_ids"].shape[1]
    softmax = [k for k in getattr(m.config, "layer_types", None) or ["full_attention"] * 3 if k == "full_attention"]
    assert len(attentions or ()) == len(softmax)
    for a in attentions or ():
        assert a.shape[-2:] == (T, T)
        assert_close(a.sum(-1), torch.ones_like(a.sum(-1)))
    return {a.dtype for a in attentions} if attentions else {torch.float32}


@call("`model(inputs_embeds=...)`")
def inputs_embeds(on: Subject) -> Any:
    ids = on.tokens()["input_ids"]
    embeds = on.shared.get_input_embeddings()(ids)
    assert_close(logits(on.shared, dict(inputs_embeds=embeds)), logits(on.shared, dict(input_ids=ids)))


@call("gradients of `inputs_embeds` (saliency)")
def saliency(on: Subject) -> Any:
    embeds = on.shared.get_input_embeddings()(on.tokens()["input_ids"]).detach().requires_grad_()
    on.shared(inputs_embeds=embeds).logits[0, -1].max().backward()
    assert embeds.grad[0].norm(dim=-1).min() > 0
    return embeds.grad.shape


@call("rows padded on the left: the logits of each row alone")
def left_padding(on: Subject) -> Any:
    out = logits(on.shared, on.tokens(TEXT, SHORT))
    for text, row in zip((TEXT, SHORT), out, strict=True):
        alone = logits(on.shared, on.tokens(text))[0]
        assert_close(row[-len(alone) :], alone)


@call("rows padded on the right: the logits of each row alone")
def right_padding(on: Subject) -> Any:
    inputs = on.tokenizer([TEXT, SHORT], padding=True, padding_side="right", return_tensors="pt")
    out = logits(on.shared, dict(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]))
    for text, row in zip((TEXT, SHORT), out, strict=True):
        alone = logits(on.shared, on.tokens(text))[0]
        assert_close(row[: len(alone)], alone)


@call("`model(ids, position_ids=...)`")
def position_ids(on: Subject) -> Any:
    ids = on.tokens()["input_ids"]
    out = logits(on.shared, dict(input_ids=ids), position_ids=torch.arange(ids.shape[1])[None])
    assert_close(out, logits(on.shared, dict(input_ids=ids)))


@call("a causal mask of four dimensions")
def mask_of_scores(on: Subject) -> Any:
    ids = on.tokens()["input_ids"]
    T = ids.shape[1]
    mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]
    assert_close(logits(on.shared, dict(input_ids=ids), attention_mask=mask), logits(on.shared, dict(input_ids=ids)))


@call("`past_key_values` continued over calls, token by token and in pieces")
def continued_cache(on: Subject) -> Any:
    ids = on.tokens()["input_ids"]
    whole = logits(on.shared, dict(input_ids=ids))
    for sizes in ([5, 1, 1, ids.shape[1] - 7], [1] * ids.shape[1]):
        cache, parts = None, []
        with torch.no_grad():
            for piece in ids.split(sizes, 1):
                out = on.shared(piece, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                parts.append(out.logits)
        assert_close(torch.cat(parts, 1), whole)
    return cache.get_seq_length()


@call("`DynamicCache(config=model.config)` given to the model")
def given_cache(on: Subject) -> Any:
    cache, ids = DynamicCache(config=on.shared.config), on.tokens()["input_ids"]
    out = logits(on.shared, dict(input_ids=ids[:, :5]), past_key_values=cache, use_cache=True)
    rest = logits(on.shared, dict(input_ids=ids[:, 5:]), past_key_values=cache, use_cache=True)
    assert_close(torch.cat((out, rest), 1), logits(on.shared, dict(input_ids=ids)))


@call("`copy.deepcopy(cache)`: two continuations of one prompt")
def copied_cache(on: Subject) -> Any:
    ids = on.tokens()["input_ids"]
    with torch.no_grad():
        cache = on.shared(ids[:, :9], use_cache=True).past_key_values
    for rest in (ids[:, 9:12], ids[:, 12:]):
        both = logits(on.shared, dict(input_ids=torch.cat((ids[:, :9], rest), 1)))[:, 9:]
        assert_close(logits(on.shared, dict(input_ids=rest), past_key_values=copy.deepcopy(cache)), both)


@call("`model(ids, logits_to_keep=1)`")
def logits_to_keep(on: Subject) -> Any:
    inputs = on.tokens()
    kept = logits(on.shared, inputs, logits_to_keep=1)
    assert_close(kept, logits(on.shared, inputs)[:, -1:])
    return kept.shape


@call("all columns of a tokenizer: `model(**tokenizer(..., return_length=True, return_special_tokens_mask=True))`")
def tokenizer_columns(on: Subject) -> Any:
    columns = on.tokenizer([TEXT], return_tensors="pt", return_length=True, return_special_tokens_mask=True)
    columns["token_type_ids"] = torch.zeros_like(columns["input_ids"])
    assert_close(logits(on.shared, dict(columns)), logits(on.shared, on.tokens()))
    return sorted(columns)


@call("labels of which some are -100")
def ignored_labels(on: Subject) -> Any:
    inputs = on.tokens()
    labels = inputs["input_ids"].clone()
    labels[:, :10] = -100
    with torch.no_grad():
        loss = on.shared(**inputs, labels=labels).loss
    assert_close(loss, cross_entropy(logits(on.shared, inputs)[0, 9:-1], labels[0, 10:]))


@call("`model.loss_function = ...`: a loss of one's own")
def own_loss(on: Subject) -> Any:
    m, inputs, seen = on.model().train(), on.tokens(), []

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        seen.append(logits.shape)
        return logits.square().mean()

    m.loss_function = loss
    out = m(**inputs, labels=inputs["input_ids"])
    assert_close(out.loss, logits(on.shared, inputs).square().mean())
    return seen


@call("`torch.inference_mode()`")
def inference_mode(on: Subject) -> Any:
    with torch.inference_mode():
        out = on.shared(**on.tokens()).logits
        tokens = greedy(on.shared, on.tokens())
    assert_close(out.clone(), logits(on.shared, on.tokens()))
    return tokens.shape


@call("a decoder cut to its first layers: `model.model.layers = model.model.layers[:k]`")
def cut_decoder(on: Subject) -> Any:
    m = on.model()
    m.model.layers = m.model.layers[:2]
    m.config.num_hidden_layers = 2
    if getattr(m.config, "layer_types", None):
        m.config.layer_types = m.config.layer_types[:2]
    return logits(m, on.tokens()).shape, greedy(m, on.tokens()).shape


@call(
    "a misspelt keyword that would change the result: `model(ids, cu_seqlen=...)`",
    refused=dict.fromkeys(OURS, Refusal("did you mean cu_seqlens", "transformers ignores it; here the error names it")),
)
def misspelt_keyword(on: Subject) -> Any:
    ids = on.tokens()["input_ids"]
    return on.shared(ids, cu_seqlen=torch.tensor([0, 3, ids.shape[1]])).logits.shape
