"""Loading and saving checkpoints."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.parity.calls import calls_of
from tests.parity.subjects import SHORT, TEXT, Subject, assert_close, greedy, logits, scratch

call = calls_of("Loading and saving")


def assert_same(on: Subject, m: Any, tolerance: float = 1e-4) -> None:
    """Raise unless a model computes what the subject does."""
    inputs = on.tokens(TEXT, SHORT)
    real = inputs["attention_mask"].bool()
    assert_close(logits(m, inputs)[real].float(), logits(on.shared, inputs)[real], tolerance)


@call("`AutoModelForCausalLM.from_pretrained(folder)`")
def from_pretrained(on: Subject) -> Any:
    m = on.load()
    assert_same(on, m, 0)
    return m.dtype, m.training, str(m.device)


@call("`from_pretrained(folder, dtype=torch.bfloat16)`")
def dtype(on: Subject) -> Any:
    m = on.load(dtype=torch.bfloat16)
    assert logits(m, on.tokens()).isfinite().all()
    return m.dtype, m.config.dtype, logits(m, on.tokens()).dtype


@call('`from_pretrained(folder, dtype="auto")` of a bf16 checkpoint')
def dtype_auto(on: Subject) -> Any:
    return on.load(on.save(on.model().bfloat16()), dtype="auto").dtype


@call('`from_pretrained(folder, device_map="auto")`, and with a map')
def device_map(on: Subject) -> Any:
    for where in ("auto", "cpu", {"": "cpu"}):
        assert_same(on, m := on.load(device_map=where), 0)
    return str(m.device)


@call("`from_pretrained(folder, low_cpu_mem_usage=True)`")
def low_cpu_mem_usage(on: Subject) -> Any:
    assert_same(on, m := on.load(low_cpu_mem_usage=True), 0)
    return m.dtype


@call("`from_pretrained(folder, use_safetensors=True)`")
def use_safetensors(on: Subject) -> Any:
    assert_same(on, on.load(use_safetensors=True), 0)


@call('`from_pretrained(folder, subfolder="inner")`')
def subfolder(on: Subject) -> Any:
    outer = scratch()
    on.save(on.shared, outer / "inner")
    assert_same(on, on.load(outer, subfolder="inner"), 0)


@call('`save_pretrained(folder, variant="other")`, and loading it')
def variant(on: Subject) -> Any:
    folder = scratch()
    on.build(seed=2).save_pretrained(folder)
    on.shared.save_pretrained(folder, variant="other")
    assert_same(on, on.load(folder, variant="other"), 0)


def hub_cache(on: Subject, repository: str) -> Path:
    """Return a cache of the Hub with a repository whose branch "v1" is the subject, and whose "main" differs."""
    cache = scratch()
    place = cache / f"models--{repository.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    for name, model, commit in (("v1", on.model(), "1" * 40), ("main", on.build(seed=2), "2" * 40)):
        model.config.initializer_range = 0.125 if name == "v1" else 0.25
        model.save_pretrained(place / "snapshots" / commit)
        (place / "refs" / name).write_text(commit)
    return cache


@call("`from_pretrained(repository, revision=..., cache_dir=..., token=..., local_files_only=True)`")
def revision(on: Subject) -> Any:
    where = dict(cache_dir=str(hub_cache(on, "someone/tiny")), local_files_only=True, token=False)
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):  # transformers asks for some files all the same
        m, other = (on.load("someone/tiny", revision=r, **where) for r in ("v1", "main"))
    assert_same(on, m, 0)
    return m.config.initializer_range, other.config.initializer_range


@call("`from_pretrained(folder, use_cache=False, ...)`: fields of the configuration")
def fields_of_the_configuration(on: Subject) -> Any:
    m = on.load(use_cache=False, output_hidden_states=True)
    out = m(**on.tokens())
    return m.config.use_cache, out.past_key_values, len(out.hidden_states) - m.config.num_hidden_layers


@call("`from_pretrained(folder, config=config)`")
def given_configuration(on: Subject) -> Any:
    config = AutoConfig.from_pretrained(on.folder)
    config.use_cache = False
    assert_same(on, m := on.load(config=config), 0)
    return m.config.use_cache


@call("`from_pretrained(folder, unknown=1)` raises, as for any model")
def unknown_keyword(on: Subject) -> Any:
    try:
        on.load(no_such_field=1)
    except TypeError as error:
        return "no_such_field" in str(error)
    raise AssertionError("a keyword was ignored")


@call('`from_pretrained(folder, attn_implementation="eager")`')
def attn_implementation(on: Subject) -> Any:
    assert_same(on, m := on.load(attn_implementation="eager"))
    return m.config._attn_implementation


@call('`model.set_attn_implementation("eager")`')
def set_attn_implementation(on: Subject) -> Any:
    m = on.model()
    m.set_attn_implementation("eager")
    assert_same(on, m)
    return m.config._attn_implementation


@call("`from_pretrained(folder, output_loading_info=True)`")
def output_loading_info(on: Subject) -> Any:
    m, info = on.load(output_loading_info=True)
    assert_same(on, m, 0)
    return {name: len(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")}


@call("`from_pretrained(folder, vocab_size=..., ignore_mismatched_sizes=True)`")
def ignore_mismatched_sizes(on: Subject) -> Any:
    m = on.load(vocab_size=50, ignore_mismatched_sizes=True)
    return logits(m, on.tokens()).shape


@call("`Model.from_pretrained(None, config=config, state_dict=state_dict)`")
def from_state_dict(on: Subject) -> Any:
    m = type(on.shared).from_pretrained(None, config=on.shared.config, state_dict=on.shared.state_dict())
    assert_same(on, on.swapped(m), 0)


@call("`AutoModel.from_pretrained(folder)`")
def base_model(on: Subject) -> Any:
    m = on.swapped(AutoModel.from_pretrained(on.folder))
    inputs = on.tokens()
    with torch.no_grad():
        assert_close(m(**inputs).last_hidden_state, on.shared.model(**inputs).last_hidden_state, 0)
    return m(**inputs).last_hidden_state.shape


@call("`AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))`")
def from_config(on: Subject) -> Any:
    config = AutoConfig.from_pretrained(on.folder)
    m = on.swapped(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    assert type(m) is type(on.shared)
    assert logits(m, on.tokens()).isfinite().all()
    return m.dtype, m.num_parameters() == on.shared.num_parameters()


@call("`save_pretrained(folder, max_shard_size=...)`, and loading the shards")
def shards(on: Subject) -> Any:
    folder = on.save(on.shared, max_shard_size="20KB")
    assert_same(on, on.load(folder), 0)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return len(set(index["weight_map"].values())) > 1, len(list(folder.glob("*.safetensors"))) > 1


@call("`save_pretrained(folder, state_dict=...)`")
def save_state_dict(on: Subject) -> Any:
    m = on.build(seed=2)
    assert_same(on, on.load(on.save(m, state_dict=on.shared.state_dict())), 0)


@call("`model.generation_config`, saved, loaded and used")
def generation_config(on: Subject) -> Any:
    m = on.model()
    m.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    again = on.load(on.save(m))
    return again.generation_config.max_new_tokens, again.generate(**on.tokens()).shape


@call("`AutoTokenizer.from_pretrained(folder)` beside the model")
def tokenizer_of_folder(on: Subject) -> Any:
    return AutoTokenizer.from_pretrained(on.folder)(TEXT)["input_ids"]


@call("`torch.save(model.state_dict())` and `load_state_dict`")
def state_dict(on: Subject) -> Any:
    file = io.BytesIO()
    torch.save(on.shared.state_dict(), file)
    file.seek(0)
    m = on.build(seed=2)
    result = m.load_state_dict(torch.load(file))
    assert_same(on, m, 0)
    return list(result.missing_keys), list(result.unexpected_keys)


@call("`torch.save(model)`, `pickle.dumps(model)`")
def pickled(on: Subject) -> Any:
    file = io.BytesIO()
    torch.save(on.shared, file)
    file.seek(0)
    for m in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(on.shared))):
        assert_same(on, m, 0)
        assert torch.equal(greedy(m, on.tokens()), greedy(on.shared, on.tokens()))


@call("`copy.deepcopy(model)`")
def deepcopied(on: Subject) -> Any:
    m = copy.deepcopy(on.shared)
    assert_same(on, m, 0)
    assert torch.equal(greedy(m, on.tokens()), greedy(on.shared, on.tokens()))
    assert not {p.data_ptr() for p in m.parameters()} & {p.data_ptr() for p in on.shared.parameters()}


@call("a saved folder that was moved")
def moved_folder(on: Subject) -> Any:
    folder = scratch()
    shutil.move(on.save(on.shared), folder / "moved")
    assert_same(on, on.load(folder / "moved"), 0)
