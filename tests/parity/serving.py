"""Pipelines, chat templates, continuous batching, transformers' server."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, pipeline

from kda_layers.serving import enable_continuous_batching
from tests.parity.calls import calls_of
from tests.parity.subjects import SHORT, TEXT, Subject, assert_close, greedy, scratch

call = calls_of("Pipelines and serving")
CHAT = [dict(role="user", content="a cat?")]
NEW = dict(max_new_tokens=6, do_sample=False)
STOCK_CLASS = "a server loads models by name: a Kimi-Linear comes unswapped, as transformers' own"


def continuation(on: Subject, text: str, **options: Any) -> str:
    """Return greedy text after a prompt, as pipelines return it."""
    inputs = on.tokens(text)
    out = greedy(on.shared, inputs, **options)
    return on.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def text_generation(on: Subject, **options: Any) -> Any:
    return pipeline("text-generation", model=on.model(), tokenizer=on.tokenizer, **options)


@call('`pipeline("text-generation", model=model, tokenizer=tokenizer)`')
def generation_pipeline(on: Subject) -> Any:
    out = text_generation(on)(TEXT, **NEW)
    assert out[0]["generated_text"] == TEXT + continuation(on, TEXT)
    return sorted(out[0])


@call('`pipeline("text-generation", model=folder)`')
def pipeline_of_folder(on: Subject) -> Any:
    pipe = pipeline("text-generation", model=str(on.folder), dtype=torch.float32)
    out = pipe(TEXT, return_full_text=False, **NEW)
    assert out[0]["generated_text"] == continuation(on, TEXT)


@call("`pipeline(..., batch_size=2)` over many prompts")
def batched_pipeline(on: Subject) -> Any:
    texts = [TEXT, SHORT, "the dog."]
    out = text_generation(on, batch_size=2)(texts, return_full_text=False, **NEW)
    assert [o[0]["generated_text"] for o in out] == [continuation(on, text) for text in texts]


@call('`pipeline("text-generation")(..., stop_sequence=...)`')
def stop_sequence(on: Subject) -> Any:
    letters = dict(suppress_tokens=[0, 1, 2, 3])  # no special tokens, which have no text
    whole = continuation(on, TEXT, **letters)
    out = text_generation(on)(TEXT, return_full_text=False, stop_sequence=whole[2], **letters, **NEW)
    assert out[0]["generated_text"] == whole[: whole.index(whole[2]) + 1]


@call('`pipeline("text-generation")(messages)`: chat')
def chat_pipeline(on: Subject) -> Any:
    out = text_generation(on)(CHAT, **NEW)[0]["generated_text"]
    prompt = on.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert out[-1]["content"] == continuation(on, prompt)
    return [m["role"] for m in out]


@call("`tokenizer.apply_chat_template(..., return_dict=True)` and `generate(**inputs)`")
def chat_template(on: Subject) -> Any:
    options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = on.tokenizer.apply_chat_template(CHAT, **options)
    out = greedy(on.shared, dict(inputs))
    prompt = on.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    new = on.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert new == continuation(on, prompt)


@call('`pipeline("feature-extraction", model=base_model)`')
def feature_extraction(on: Subject) -> Any:
    pipe = pipeline("feature-extraction", model=on.model().model, tokenizer=on.tokenizer)
    out = torch.tensor(pipe(TEXT))
    with torch.no_grad():
        assert_close(out, on.shared.model(**on.tokens()).last_hidden_state)
    return out.shape


@call("`model.generate_batch(prompts)` (after `enable_continuous_batching()`)", since="5.19")
def generate_batch(on: Subject) -> Any:
    enable_continuous_batching()
    m, texts = on.model(), (TEXT, SHORT, "the dog.")
    prompts = [on.tokens(text)["input_ids"][0].tolist() for text in texts]
    out = m.generate_batch(
        prompts, generation_config=GenerationConfig(**NEW, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=40, max_batch_tokens=64), progress_bar=False,
    )  # fmt: skip
    found = [o.generated_tokens for o in out.values()]
    assert sorted(found) == sorted(greedy(on.shared, on.tokens(text))[0, -6:].tolist() for text in texts)


@contextlib.contextmanager
def server(on: Subject, **options: Any) -> Iterator[Any]:
    """Serve the model in a thread, and give a client and the model's name."""
    import openai
    from transformers.cli.serve import Serve

    m = on.model()
    m.generation_config.update(do_sample=False, max_new_tokens=6)
    folder = str(on.save(m, scratch()))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    serve = Serve(folder, device="cpu", host="127.0.0.1", port=port, non_blocking=True, log_level="error", **options)
    try:
        end = time.monotonic() + 60
        while not serve.server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=60) as client:
            yield client, folder
    finally:
        serve.kill_server()


def answers(client: Any, folder: str) -> tuple[str, str, str]:
    """Return a completion, a chat, and a streamed chat."""
    complete = client.completions.create(model=folder, prompt=TEXT, max_tokens=6)
    chat = client.chat.completions.create(model=folder, messages=CHAT, max_tokens=6)
    stream = client.chat.completions.create(model=folder, messages=CHAT, max_tokens=6, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    return complete.choices[0].text, chat.choices[0].message.content, "".join(pieces)


def assert_served(on: Subject, **options: Any) -> None:
    """Raise unless the server's answers are those of generate."""
    prompt = on.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    with server(on, **options) as (client, folder):
        text, chat, streamed = answers(client, folder)
    assert (text, chat, streamed) == (continuation(on, TEXT), *(continuation(on, prompt),) * 2)


@call("`transformers serve`: completions, chat, a stream", heavy=True, absent=dict(kimi=STOCK_CLASS))
def serve(on: Subject) -> Any:
    assert_served(on)


@call("`transformers serve --continuous-batching` (after `enable_continuous_batching()`)", heavy=True, since="5.19")
def serve_continuous_batching(on: Subject) -> Any:
    enable_continuous_batching()
    assert_served(on, continuous_batching=True, cb_num_blocks=40, cb_max_batch_tokens=64)
