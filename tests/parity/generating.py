"""`generate` with its options."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from tests.parity.calls import Refusal, calls_of
from tests.parity.subjects import SHORT, TEXT, Subject, assert_close, greedy, logits, subject

call = calls_of("Generating")
STATEFUL = Refusal(
    "assisted generation is not supported with stateful models", "call `enable_speculative_decoding(model)` first"
)


def assert_greedy(on: Subject, out: Tensor, inputs: dict[str, Tensor], new: int = 6) -> None:
    """Raise unless each row of [B, T + new] is the most likely continuation, by a forward over that row alone."""
    T = inputs["input_ids"].shape[1]
    assert out.shape == (len(inputs["input_ids"]), T + new)
    for row, mask in zip(out, inputs["attention_mask"], strict=True):
        alone = row[T - int(mask.sum()) :][None]
        best = logits(on.shared, dict(input_ids=alone))[0].argmax(-1)
        assert torch.equal(best[-new - 1 : -1], alone[0, -new:])


@call("`generate(max_new_tokens=6, do_sample=False)`")
def greedy_search(on: Subject) -> Any:
    assert_greedy(on, greedy(on.shared, on.tokens()), on.tokens())


@call("a batch of prompts padded on the left")
def batch(on: Subject) -> Any:
    inputs = on.tokens(TEXT, SHORT, "a")
    assert_greedy(on, greedy(on.shared, inputs), inputs)


@call("`generate(use_cache=False)`")
def without_cache(on: Subject) -> Any:
    assert_greedy(on, greedy(on.shared, on.tokens(), use_cache=False), on.tokens())


def sampled(on: Subject, **options: Any) -> Tensor:
    """Return sampled tokens [B, T]; the same seed must give the same."""
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(on.shared.generate(**on.tokens(), do_sample=True, max_new_tokens=8, **options))
    assert torch.equal(*runs)
    return runs[0]


@call("sampling with `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`")
def sampling(on: Subject) -> Any:
    options = (dict(temperature=2.0), dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1), dict(typical_p=0.9))
    return [sampled(on, **o).shape for o in options]


@call("`generate(do_sample=True, num_return_sequences=3)`")
def several_samples(on: Subject) -> Any:
    rows = sampled(on, num_return_sequences=3, temperature=3.0)
    return rows.shape, len({tuple(row.tolist()) for row in rows}) > 1


@call("`generate(num_beams=3, num_return_sequences=2)`, and beam sampling")
def beam_search(on: Subject) -> Any:
    rows = greedy(on.shared, on.tokens(TEXT, SHORT), num_beams=3, num_return_sequences=2)
    best = greedy(on.shared, on.tokens(), num_beams=3)
    uncached = greedy(on.shared, on.tokens(), num_beams=3, use_cache=False)
    assert torch.equal(best, uncached)
    return rows.shape, sampled(on, num_beams=2).shape


@call("`generate(assistant_model=...)` (a swapped model after `enable_speculative_decoding`)")
def assisted(on: Subject) -> Any:
    out = greedy(on.speculative(), on.tokens(), assistant_model=on.build(seed=2))
    assert_greedy(on, out, on.tokens())


@call("`generate(assistant_model=...)` of a swapped model that may not draft yet", refused={"kimi": STATEFUL})
def assisted_at_once(on: Subject) -> Any:
    assert_greedy(on, greedy(on.shared, on.tokens(), assistant_model=subject("llama").shared), on.tokens())


@call("as the assistant of another model")
def assistant(on: Subject) -> Any:
    target = subject("llama")
    out = greedy(target.shared, on.tokens(), assistant_model=on.model())
    assert_greedy(target, out, on.tokens())


@call("`generate(prompt_lookup_num_tokens=3)`")
def prompt_lookup(on: Subject) -> Any:
    inputs = on.tokens("the cat the cat the c")
    assert_greedy(on, greedy(on.speculative(), inputs, prompt_lookup_num_tokens=3), inputs)


@call("`generate(assistant_early_exit=2)`, and `generate` after it")
def early_exit(on: Subject) -> Any:
    m = on.speculative()
    assert_greedy(on, greedy(m, on.tokens(), assistant_early_exit=2), on.tokens())
    assert_greedy(on, greedy(m, on.tokens()), on.tokens())


@call('`generate(cache_implementation="static")`')
def static_cache(on: Subject) -> Any:
    out = greedy(on.model(), on.tokens(), cache_implementation="static", disable_compile=True)
    assert_greedy(on, out, on.tokens())


@call("`generate(prefill_chunk_size=4)`")
def chunked_prefill(on: Subject) -> Any:
    assert_greedy(on, greedy(on.shared, on.tokens(), prefill_chunk_size=4), on.tokens())


@call("`generate(streamer=TextStreamer(tokenizer))`")
def text_streamer(on: Subject) -> Any:
    pieces: list[str] = []

    class Collect(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    out = greedy(on.shared, on.tokens(), streamer=Collect(on.tokenizer, skip_prompt=True))
    assert "".join(pieces) == on.tokenizer.decode(out[0, -6:])


@call("`TextIteratorStreamer` and a thread")
def iterator_streamer(on: Subject) -> Any:
    streamer = TextIteratorStreamer(on.tokenizer, skip_prompt=True, timeout=60)
    options = dict(max_new_tokens=6, do_sample=False, streamer=streamer)
    thread = threading.Thread(target=on.shared.generate, kwargs=on.tokens() | options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == on.tokenizer.decode(greedy(on.shared, on.tokens())[0, -6:])


@call("`generate(stopping_criteria=...)`, `max_time`")
def stopping_criteria(on: Subject) -> Any:
    def third(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= on.tokens()["input_ids"].shape[1] + 3)

    out = greedy(on.shared, on.tokens(), stopping_criteria=StoppingCriteriaList([third]))
    return out.shape, greedy(on.shared, on.tokens(), max_time=60.0).shape


@call("`generate(tokenizer=tokenizer)`")
def given_tokenizer(on: Subject) -> Any:
    assert_greedy(on, greedy(on.shared, on.tokens(), tokenizer=on.tokenizer), on.tokens())


@call("`generate(stop_strings=[...], tokenizer=tokenizer)`")
def stop_strings(on: Subject) -> Any:
    T, options = on.tokens()["input_ids"].shape[1], dict(suppress_tokens=[0, 1, 2, 3])  # special tokens have no text
    new = on.tokenizer.decode(greedy(on.shared, on.tokens(), 12, **options)[0, T:])
    out = greedy(on.shared, on.tokens(), 12, stop_strings=[new[3]], tokenizer=on.tokenizer, **options)
    assert on.tokenizer.decode(out[0, T:]) == new[: new.index(new[3]) + 1]


@call("`generate(token_healing=True, tokenizer=tokenizer)`")
def token_healing(on: Subject) -> Any:
    return greedy(on.shared, on.tokens(), token_healing=True, tokenizer=on.tokenizer).shape


@call("`generate(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True)`")
def returned_dict(on: Subject) -> Any:
    out = greedy(
        on.shared, on.tokens(), return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True,
    )  # fmt: skip
    assert_greedy(on, out.sequences, on.tokens())
    transitions = on.shared.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert (transitions <= 0).all()
    return [s.shape for s in out.logits], [len(h) for h in out.hidden_states], transitions.shape, sorted(out.keys())


@call("`generate(output_attentions=True, return_dict_in_generate=True)`")
def returned_attentions(on: Subject) -> Any:
    m = on.model()
    m.set_attn_implementation("eager")
    out = greedy(m, on.tokens(), output_attentions=True, return_dict_in_generate=True)
    assert_greedy(on, out.sequences, on.tokens())
    return len(out.attentions)


@call("`repetition_penalty`, `no_repeat_ngram_size`, `bad_words_ids`, `suppress_tokens`, `sequence_bias`")
def penalties(on: Subject) -> Any:
    first = int(greedy(on.shared, on.tokens(), 1)[0, -1])
    options = (
        dict(repetition_penalty=1.5), dict(no_repeat_ngram_size=2), dict(bad_words_ids=[[first]]),
        dict(suppress_tokens=[first]), dict(sequence_bias={(first,): -1e4}),
    )  # fmt: skip
    rows = [greedy(on.shared, on.tokens(), **o)[0] for o in options]
    assert all(first not in row[-6:] for row in rows[2:])
    pairs = list(zip(rows[1].tolist()[:-1], rows[1].tolist()[1:], strict=True))
    new = pairs[-6:]
    assert all(pair not in pairs[: len(pairs) - 6 + i] for i, pair in enumerate(new))
    return [row.shape for row in rows]


@call("`min_new_tokens`, `forced_eos_token_id`, `eos_token_id`")
def end_tokens(on: Subject) -> Any:
    first = int(greedy(on.shared, on.tokens(), 1)[0, -1])
    rows = [
        greedy(on.shared, on.tokens(), eos_token_id=first),
        greedy(on.shared, on.tokens(), eos_token_id=first, min_new_tokens=6),
        greedy(on.shared, on.tokens(), forced_eos_token_id=2),
    ]
    assert first not in rows[1][0, -6:]
    return [row.shape for row in rows], int(rows[2][0, -1])


@call("`logits_processor=[...]`, `prefix_allowed_tokens_fn` (constrained decoding)")
def constrained(on: Subject) -> Any:
    class OnlyA(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores.masked_fill(torch.arange(scores.shape[-1]) != 4, -torch.inf)

    a = greedy(on.shared, on.tokens(), logits_processor=LogitsProcessorList([OnlyA()]))
    b = greedy(on.shared, on.tokens(), prefix_allowed_tokens_fn=lambda batch, ids: [5, 6])
    return a[0, -6:].tolist(), set(b[0, -6:].tolist()) <= {5, 6}


@call("`guidance_scale=1.5` with `negative_prompt_ids`")
def guidance(on: Subject) -> Any:
    out = greedy(on.shared, on.tokens(), guidance_scale=1.5, negative_prompt_ids=on.tokens(SHORT)["input_ids"])
    return out.shape


@call("`generate(inputs_embeds=...)`")
def from_embeds(on: Subject) -> Any:
    inputs = on.tokens()
    embeds = on.shared.get_input_embeddings()(inputs["input_ids"])
    out = greedy(on.shared, dict(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]))
    assert torch.equal(out, greedy(on.shared, inputs)[:, -6:])


@call("`generate()` without a prompt")
def without_prompt(on: Subject) -> Any:
    return on.shared.generate(max_new_tokens=4, do_sample=False).shape


@call("a chat continued with its saved cache: `generate(past_key_values=cache)`")
def chat_with_cache(on: Subject) -> Any:
    cache, inputs = DynamicCache(config=on.shared.config), on.tokens(SHORT)
    for turn in (" and?", " no."):
        out = greedy(on.shared, inputs, past_key_values=cache)
        assert_greedy(on, out, inputs)
        ids = torch.cat((out, on.tokens(turn)["input_ids"]), 1)
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))


@call("a common prompt read once: `generate(past_key_values=copy.deepcopy(cache))`")
def shared_prompt(on: Subject) -> Any:
    with torch.no_grad():
        cache = on.shared(**on.tokens(SHORT), use_cache=True).past_key_values
    for end in (" why?", " a cat."):
        inputs = on.tokens(SHORT + end)
        assert_greedy(on, greedy(on.shared, inputs, past_key_values=copy.deepcopy(cache)), inputs)


@call("`generate(generation_config=GenerationConfig(...))`")
def given_config(on: Subject) -> Any:
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert_greedy(on, on.shared.generate(**on.tokens(), generation_config=config), on.tokens())


@call("`generate(custom_generate=function)`")
def custom_generate(on: Subject) -> Any:
    def loop(model: Any, input_ids: Tensor, generation_config: Any, **_: Any) -> Tensor:
        for _step in range(generation_config.max_new_tokens):
            input_ids = torch.cat((input_ids, model(input_ids).logits[:, -1:].argmax(-1)), 1)
        return input_ids

    out = on.shared.generate(on.tokens()["input_ids"], custom_generate=loop, max_new_tokens=6)
    assert_greedy(on, out, on.tokens())


@call("`generate` of a bf16 model")
def in_bf16(on: Subject) -> Any:
    m = on.load(dtype=torch.bfloat16)
    first, second = (greedy(m, on.tokens(TEXT, SHORT)) for _ in range(2))
    assert torch.equal(first, second)
    return first.shape


@call("`generate` in training mode, as GRPO does, then a training step")
def between_steps(on: Subject) -> Any:
    m = on.model().train()
    out = greedy(m, on.tokens())
    m(input_ids=out, labels=out).loss.backward()
    return out.shape


@call('a model loaded with `AutoModelForCausalLM`, `attn_implementation="eager"`')
def eager_attention(on: Subject) -> Any:
    m = on.swapped(AutoModelForCausalLM.from_pretrained(on.folder, attn_implementation="eager"))
    inputs = on.tokens(TEXT, SHORT)
    assert_close(logits(m, on.tokens()), logits(on.shared, on.tokens()))
    assert_greedy(on, greedy(m, inputs), inputs)
