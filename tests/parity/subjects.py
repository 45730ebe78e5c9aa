"""The five models that every call is tried on, their tokenizer and checkpoints, all tiny and random."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kda_layers import KDAConfig, KDAForCausalLM, convert_attention, load_pretrained, swap_attention
from kda_layers.serving import enable_speculative_decoding
from tests.modeling import stock_models

LETTERS = "abcdefghijklmnopqrstuvwxyz .,:?!"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
TINY: dict[str, Any] = dict(
    vocab_size=len(SPECIAL) + len(LETTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.4, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
KDA = dict(linear_num_heads=2, linear_head_dim=8)
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_scratch = tempfile.TemporaryDirectory(prefix="parity")


def _kimi(**fields: Any) -> Any:
    own = {
        n: TINY[n] for n in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings")
    }
    m = stock_models.build("kimi_linear", **(own | fields))
    swap_attention(m)
    return m


def _hybrid(**fields: Any) -> Any:
    return KDAForCausalLM(KDAConfig(**(TINY | KDA | dict(full_attention_interval=3) | fields)))


BUILDERS: dict[str, Callable[..., Any]] = {
    "llama": lambda **fields: LlamaForCausalLM(LlamaConfig(**(TINY | fields))),
    "kda": lambda **fields: KDAForCausalLM(KDAConfig(**(TINY | KDA | fields))),
    "hybrid": _hybrid,
    "converted": lambda **fields: convert_attention(BUILDERS["llama"](**fields), layers="1:1"),
    "kimi": _kimi,
}
STOCK, *OURS = BUILDERS


def scratch() -> Path:
    """Return a new folder that goes when the process ends."""
    return Path(tempfile.mkdtemp(dir=_scratch.name))


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *LETTERS))}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    t = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=512,
    )  # fmt: skip
    t.chat_template = CHAT
    return t


class Subject:
    """One of the models; `name` is a key of BUILDERS."""

    def __init__(self, name: str):
        self.name, self.tokenizer = name, tokenizer()

    def build(self, seed: int = 1, **fields: Any) -> Any:
        """Return a new model in evaluation mode; `fields` are of its stock or KDA configuration."""
        torch.manual_seed(seed)
        return BUILDERS[self.name](**fields).eval()

    @functools.cached_property
    def shared(self) -> Any:
        """The model, for calls that leave it as it is."""
        return self.build()

    def model(self) -> Any:
        """Return a copy of the model."""
        return copy.deepcopy(self.shared)

    @functools.cached_property
    def folder(self) -> Path:
        """A folder with the saved model and tokenizer."""
        return self.save(self.shared)

    def save(self, model: Any, folder: Path | None = None, **options: Any) -> Path:
        """Save a model and the tokenizer, and return the folder."""
        folder = scratch() if folder is None else folder
        model.save_pretrained(folder, **options)
        self.tokenizer.save_pretrained(folder)
        return folder

    def load(self, path: Any = None, **options: Any) -> Any:
        """Load a causal model from a folder, by default the saved one."""
        load = load_pretrained if self.name == "kimi" else AutoModelForCausalLM.from_pretrained
        return load(str(self.folder) if path is None else path, **options)

    def swapped(self, model: Any) -> Any:
        """Return a model that transformers made, swapped if the subject is: what users of `swap_attention` write."""
        if self.name == "kimi":
            swap_attention(model)
        return model

    def speculative(self) -> Any:
        """Return a copy of the model that may draft."""
        m = self.model()
        if self.name == "kimi":
            enable_speculative_decoding(m)
        return m

    def tokens(self, *texts: str) -> dict[str, Tensor]:
        """Return input_ids and attention_mask [B, T] of texts, padded on the left."""
        return dict(
            self.tokenizer(list(texts or (TEXT,)), padding=True, return_tensors="pt", return_token_type_ids=False)
        )


TEXT, SHORT = "the cat sat on the mat.", "a dog."


@functools.cache
def subject(name: str) -> Subject:
    """Return the subject that calls share."""
    return Subject(name)


def greedy(m: Any, inputs: dict[str, Tensor], new: int = 6, **options: Any) -> Any:
    """Return what generate returns for `new` greedy tokens; two runs must agree."""
    options = dict(max_new_tokens=new, do_sample=False) | options
    return m.generate(**inputs, **options)


@torch.no_grad()
def logits(m: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Return logits [B, T, vocabulary]."""
    return m(**inputs, **options).logits


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    """Raise unless both are finite and differ by at most `tolerance` times the larger of 1 and the largest entry."""
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape
    assert a.isfinite().all()
    assert (a.double() - b.double()).abs().max() <= tolerance * max(1.0, float(b.abs().max()))
