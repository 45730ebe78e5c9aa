"""Tiny random models of every kind, and calls that their tests share: the language model, converted and swapped ones.

Models are in fp64 by default, where two ways of computing the same logits cannot disagree about the largest one.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kda_layers import KDAConfig, KDAForCausalLM, convert_attention, swap_attention
from tests.kernels.cases import FP64
from tests.modeling import stock_models

TINY = dict(
    vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
    pad_token_id=0,
)  # fmt: skip
KDA_LM: dict[str, dict[str, Any]] = {  # fields of KDAConfig
    "kda": {},
    "hybrid": dict(full_attention_interval=2),
    "softplus_tied": dict(linear_gate_activation="softplus", linear_lower_bound=None, tie_word_embeddings=True),
    "grouped": dict(
        linear_num_value_heads=4, linear_value_head_dim=12, linear_conv_kernel_dim=3, linear_allow_neg_eigval=True,
        layer_types=["full_attention", "linear_attention"],
    ),
    "key_bias": dict(attention_bias="key", full_attention_interval=2),
    "head_decay": dict(linear_decay="head", linear_num_value_heads=4, full_attention_interval=2),
}  # fmt: skip
TINY_STOCK = dict(
    vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
STOCK: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=None)),
    "windows": (
        Qwen3Config, Qwen3ForCausalLM,
        dict(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2,
             num_hidden_layers=4),
    ),
}  # fmt: skip
CONVERTED: dict[str, tuple[str, Any, dict[str, Any]]] = {  # family, layers, fields
    "llama": ("llama", "1:1", {}),
    "llama, all": ("llama", "all", dict(linear_num_heads=2)),
    "qwen3": ("qwen3", [1], dict(linear_gate_activation="softplus", linear_lower_bound=None, linear_gate_rank=0)),
    "qwen2": ("qwen2", "1:1", {}),
    "windows": ("windows", [1], dict(linear_allow_neg_eigval=True)),
    "mistral": ("mistral", [0, -2], dict(linear_conv_kernel_dim=3)),
}
OURS = [*KDA_LM, *CONVERTED]  # models of this package's classes
ALL_KDA = ("kda", "softplus_tied", "llama, all")  # without softmax layers
SWAPPED = [f"swapped {family}" for family in stock_models.IN_PLACE]
# The models of `make test`: each has something that none of the others has.
FEW = ("kda", "hybrid", "grouped", "key_bias", "llama", "windows", "swapped kimi_linear")


def of_models(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrise a test by models; those beyond `FEW` are slow."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FEW)) for n in names])


every_model = of_models(OURS)
every_model_and_swapped = of_models([*OURS, *SWAPPED])
every_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def stock(family: str, dtype: torch.dtype = FP64, seed: int = 1, **fields: Any) -> PreTrainedModel:
    """A random stock model; norms and biases are random, too, so that one that is forgotten shows."""
    torch.manual_seed(seed)
    config, model_class, more = STOCK[family]
    m = model_class(config(**(TINY_STOCK | more | fields)))
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                p.normal_()
    return m.to(dtype).eval()


def swapped(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A stock model after `swap_attention`, in place."""
    m = stock_models.build(family, dense=True).to(dtype)
    swap_attention(m)
    return m


def build(name: str, dtype: torch.dtype = FP64, seed: int = 1, **fields: Any) -> PreTrainedModel:
    """A new model; `fields` of its config replace those of the tiny one."""
    if name in SWAPPED:
        return swapped(name.removeprefix("swapped "), dtype)
    if name in CONVERTED:
        family, layers, options = CONVERTED[name]
        return convert_attention(stock(family, dtype, seed, **fields), layers, **options)
    torch.manual_seed(seed)
    m = KDAForCausalLM(KDAConfig(**(TINY | KDA_LM[name] | fields))).to(dtype).eval()
    for n, p in m.named_parameters():
        if n.endswith(".A"):  # it starts at 0, where biases do nothing
            torch.nn.init.normal_(p, std=0.3)
    return m


@functools.cache
def model(name: str, attention: str | None = None) -> Any:
    """A model that tests share and leave as it is."""
    m = build(name)
    if attention is not None:
        m.set_attn_implementation(attention)
    return m


def attention_layers(m: PreTrainedModel) -> list[torch.nn.Module]:
    """The attention of each decoder layer."""
    return [layer for path, layer in m.named_modules() if path.endswith(".self_attn")]


def ids(*shape: int, seed: int = 1, high: int = 29) -> Tensor:
    """Random tokens from 1 to high - 1."""
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def generate(m: PreTrainedModel, tokens: Tensor, **options: Any) -> Any:
    """Ten greedy tokens by default."""
    options = dict(max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(tokens)) | options
    return m.generate(tokens, **options)


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows [n_i] -> [B, max n] with token 3 in front of the short ones, and the mask."""
    T = max(len(row) for row in rows)
    tokens = torch.stack([torch.cat((row.new_full((T - len(row),), 3), row)) for row in rows])
    return tokens, (torch.arange(T) >= torch.tensor([[T - len(row)] for row in rows])).long()


CACHES: dict[str, dict[str, Any]] = {
    "none": dict(use_cache=False),
    "static": dict(cache_implementation="static"),
    "chunked prefill": dict(prefill_chunk_size=4),
    "chunks of one": dict(prefill_chunk_size=1),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "sampling": dict(do_sample=True),
    "several samples": dict(do_sample=True, num_return_sequences=3),
    "beams": dict(num_beams=3),
    "several beams": dict(num_beams=4, num_return_sequences=2, length_penalty=0.5),
    "sampled beams": dict(num_beams=2, do_sample=True),
}
GUESSES: dict[str, Any] = {
    "prompt lookup": lambda draft: dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=2),
    "draft": lambda draft: dict(assistant_model=draft),
}


@functools.cache
def guessable(name: str) -> tuple[Any, Any]:
    """A model of few tokens, which a guess often hits, and a draft that is nearly the same model."""
    m = build(name, vocab_size=7, pad_token_id=None)  # a draft would hide a pad token that it has itself generated
    draft = copy.deepcopy(m)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.15 * p.std(correction=0) * torch.randn_like(p))
    return m, draft


DOCUMENTS = (5, 1, 66, 2)
HOW_PACKED = ("cu_seqlens", "cu_seqlens, int64", "position_ids", "seq_idx", "flash", "flash, position_ids", "all")


def packing(how: str) -> dict[str, Any]:
    """Arguments that say where documents start, as transformers' collator gives them."""
    documents = [{"input_ids": ids(n, seed=n).tolist()} for n in DOCUMENTS]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(documents)
    batch = {k: v if isinstance(v, Tensor) or not isinstance(v, list) else torch.tensor(v) for k, v in batch.items()}
    tokens, offsets = batch.pop("input_ids"), torch.tensor((0, *itertools.accumulate(DOCUMENTS)))
    assert torch.equal(batch["cu_seq_lens_q"].long(), offsets)
    flash = {k: v for k, v in batch.items() if k.startswith(("cu_seq", "max_length"))}
    arguments = {
        "cu_seqlens": dict(cu_seqlens=offsets.int()),
        "cu_seqlens, int64": dict(cu_seqlens=offsets),
        "position_ids": dict(position_ids=batch["position_ids"]),
        "seq_idx": dict(seq_idx=batch["seq_idx"]),
        "flash": flash,
        "flash, position_ids": flash | dict(position_ids=batch["position_ids"]),
        "all": {k: v for k, v in batch.items() if k != "labels"},
    }
    return dict(input_ids=tokens) | arguments[how]
