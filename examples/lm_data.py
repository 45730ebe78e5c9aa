"""A text as tokens, bytes or those of a BPE trained on it, in a part to train on and one that is held out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from installed_text import installed_text
from text_data import BYTES, InputError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BPE_CHARACTERS = 30_000_000  # of the training text that a BPE is trained on
PIECE = 50_000  # characters that are tokenized at once, roughly; BPE never joins across their ends, which are lines'


class Corpus(NamedTuple):
    """Token ids, and what is known of them."""

    train: Tensor  # [N], uint8 or int32
    heldout: Tensor  # [M], like it
    heldout_bytes: int  # of text that the held-out tokens stand for
    tokenizer: Tokenizer | None  # of BPE
    facts: dict[str, Any]  # for the report


def load_text(path: str | None, max_mb: float, cache: Path) -> tuple[bytes, dict[str, Any]]:
    """The text in a file, or what is installed, cut to `max_mb`; and what it is.

    What is installed is kept in `cache`, for other runs to name as their file: finding it takes a while.
    """
    most = int(max_mb * 1e6)
    if path is None:
        data, kinds = installed_text(most)
        _write(cache / "corpus.txt", lambda new: new.write_bytes(data))
        source: dict[str, Any] = {"source": "texts of the installed Python packages", "bytes_by_kind": kinds}
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(most)
        except OSError as error:
            raise InputError(f"--data {path}: expected a readable file, got: {error.strerror}") from error
        if len(data) == most:
            data = data[: data.rfind(b"\n") + 1 or most]  # not within a character
        source = {"source": path}
    return data, source | {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def split_tail(data: bytes, most: int) -> tuple[bytes, bytes]:
    """`data` without its tail, and the tail: a tenth, or about `most` bytes, from the start of a paragraph on."""
    tail = min(len(data) // 10, most)
    cut = len(data) - tail
    paragraph = data.rfind(b"\n\n", cut - tail, cut)
    if paragraph >= 0:
        cut = paragraph + 2
    while cut < len(data) and data[cut] & 0xC0 == 0x80:  # not within a character
        cut += 1
    return data[:cut], data[cut:]


def load_corpus(
    path: str | None, max_mb: float, heldout_kb: int, vocab_size: int | None, length: int, cache: Path
) -> Corpus:
    """The corpus in tokens of a BPE of `vocab_size`, or in bytes if that is None, to be cut into excerpts of `length`.

    Args:
        path: of the text; None for what is installed.
        max_mb: what is read of it at most, in MB.
        heldout_kb: about what is held out of it at most, in kB: the same text, whatever the tokens.
        vocab_size: of the BPE.
        length: tokens of an excerpt.
        cache: folder in which the BPE and the tokens are looked for, and else kept; the text is kept there, too.

    Raises:
        InputError: the file cannot be read, or is no UTF-8, or has too little text for the BPE or for ten excerpts.
    """
    data, facts = load_text(path, max_mb, cache)
    _expect(len(data), "bytes", length, path)
    train, heldout = split_tail(data, 1000 * heldout_kb)
    facts |= {"heldout_bytes": len(heldout), "tokens": "bytes", "vocab_size": BYTES}
    tokenizer = None
    if vocab_size is None:
        ids = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, heldout)]
    else:
        facts |= {"tokens": "byte-level BPE", "vocab_size": vocab_size}
        try:
            texts = train.decode(), heldout.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"--data {path}: expected UTF-8 text with --vocab bpe, got: {error}") from error
        tokenizer, ids = _bpe_tokens(texts, vocab_size, facts, cache)
    facts |= {"train_tokens": len(ids[0]), "heldout_tokens": len(ids[1])}
    _expect(sum(map(len, ids)), "tokens", length, path)
    return Corpus(ids[0], ids[1], len(heldout), tokenizer, facts)


def _bpe_tokens(
    texts: tuple[str, str], vocab_size: int, facts: dict[str, Any], cache: Path
) -> tuple[Tokenizer, list[Tensor]]:
    """The BPE and the tokens of both texts, from the cache or new; what is new adds its seconds to `facts`."""
    key = hashlib.sha256(f"{facts['sha256']} {len(texts[1])} {vocab_size} {BPE_CHARACTERS}".encode()).hexdigest()[:16]
    bpe, tokens = cache / f"tokenizer-{key}.json", cache / f"tokens-{key}.pt"
    if not bpe.is_file():
        began = time.perf_counter()
        _write(bpe, lambda new: train_bpe(texts[0], vocab_size).save(str(new)))
        facts["bpe_seconds"] = round(time.perf_counter() - began, 1)
    tokenizer = Tokenizer.from_file(str(bpe))
    if not tokens.is_file():
        began = time.perf_counter()
        _write(tokens, lambda new: torch.save([encode(tokenizer, text) for text in texts], new))
        facts["tokenizing_seconds"] = round(time.perf_counter() - began, 1)
    return tokenizer, torch.load(tokens, weights_only=True)


def train_bpe(text: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE, which can write any text, trained on the beginning of this one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(pieces(text[:BPE_CHARACTERS]), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(
            f"--vocab-size {vocab_size}: expected more text, or at most {tokenizer.get_vocab_size()}, "
            f"which is all that {len(text):,} characters give"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    """[N] int32."""
    ids: list[Tensor] = [torch.empty(0, dtype=torch.int32)]
    batch = list(pieces(text))
    for i in range(0, len(batch), 256):  # the library's results are large: not all at once
        results = tokenizer.encode_batch_fast(batch[i : i + 256], add_special_tokens=False)
        ids += [torch.tensor(result.ids, dtype=torch.int32) for result in results]
    return torch.cat(ids)


def pieces(text: str) -> Iterator[str]:
    """`text`, cut after the first line end beyond each `PIECE` characters."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def unigram_nats(corpus: Corpus, vocab_size: int) -> float:
    """Per held-out token, of a model that only knows how often each token occurs in the training text."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    counts += torch.bincount(corpus.train, minlength=vocab_size)
    return -((counts + 1) / (counts + 1).sum())[corpus.heldout.long()].log().mean().item()


def _expect(count: int, unit: str, length: int, path: str | None) -> None:
    if count < 10 * length:
        raise InputError(
            f"--data {path or '(default)'}: expected at least {10 * length:,} {unit}, ten of --seq-len {length}, "
            f"got {count:,} {unit}"
        )


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Makes a file, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
