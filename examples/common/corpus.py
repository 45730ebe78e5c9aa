"""The corpus of a training run: a text as tokens, bytes or those of a BPE trained on it, with a held-out part."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from common.bpe import BPE_CHARACTERS, encode, train_bpe
from common.cli import InputError
from common.installed_text import installed_text
from common.text import BYTES, check_length, python_reference, read_bytes


class Corpus(NamedTuple):
    """Token ids of a text, its tokenizer, and facts about it."""

    train: Tensor  # [N], uint8 or int32
    heldout: Tensor  # [M], the same dtype
    heldout_bytes: int  # of text that the held-out tokens encode
    tokenizer: PreTrainedTokenizerFast | None  # of a BPE
    facts: dict[str, Any]  # for the report


def load_corpus(
    path: str | None,
    max_mb: float,
    heldout_kb: int,
    vocab_size: int | None,
    length: int,
    cache: Path,
    text: str = "installed",
) -> Corpus:
    """Return the corpus in tokens of a BPE of `vocab_size`, or in bytes if that is None.

    Args:
        path: file of the text; None for the default text.
        max_mb: megabytes of it to read at most.
        heldout_kb: kilobytes of it to hold out at most, roughly: the same text, whatever the tokens.
        vocab_size: tokens of the BPE.
        length: tokens of an excerpt.
        cache: folder that keeps the installed text, the BPE and the tokens; the last two are read if they are there.
        text: the default text, "installed" or "reference".

    Raises:
        InputError: the file cannot be read, is not UTF-8, or has too little text for the BPE or for ten excerpts.
    """
    data, facts = _read_text(path, max_mb, cache, text)
    check_length(len(data), "bytes", length, path)
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
    check_length(sum(map(len, ids)), "tokens", length, path)
    return Corpus(ids[0], ids[1], len(heldout), tokenizer, facts)


def split_tail(data: bytes, most: int) -> tuple[bytes, bytes]:
    """Split off the tail of `data`: a tenth, or about `most` bytes, extended to the start of a paragraph."""
    tail = min(len(data) // 10, most)
    cut = len(data) - tail
    paragraph = data.rfind(b"\n\n", cut - tail, cut)
    if paragraph >= 0:
        cut = paragraph + 2
    while cut < len(data) and data[cut] & 0xC0 == 0x80:  # not within a character
        cut += 1
    return data[:cut], data[cut:]


def unigram_nats(corpus: Corpus, vocab_size: int) -> float:
    """Nats per held-out token of a model that only knows how often each token occurs in the training text."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    counts += torch.bincount(corpus.train, minlength=vocab_size)
    return -((counts + 1) / (counts + 1).sum())[corpus.heldout.long()].log().mean().item()


def _read_text(path: str | None, max_mb: float, cache: Path, text: str) -> tuple[bytes, dict[str, Any]]:
    """Return the text, cut to `max_mb`, with its source, size and hash.

    The installed text takes a while to find, so it is also written to `cache`, for other runs to use as `--data`.
    """
    most = int(max_mb * 1e6)
    if path is None and text == "installed":
        data, kinds = installed_text(most)
        _write(cache / "corpus.txt", lambda new: new.write_bytes(data))
        source: dict[str, Any] = {"source": "texts of the installed Python packages", "bytes_by_kind": kinds}
    elif path is None:
        data, source = python_reference()[:most], {"source": "Python's reference documentation"}
    else:
        data, source = read_bytes(path, most), {"source": path}
        if len(data) == most:
            data = data[: data.rfind(b"\n") + 1 or most]  # not within a character
    return data, source | {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _bpe_tokens(
    texts: tuple[str, str], vocab_size: int, facts: dict[str, Any], cache: Path
) -> tuple[PreTrainedTokenizerFast, list[Tensor]]:
    """Return the BPE and the tokens of both texts, from the cache or new; add the seconds of new ones to `facts`."""
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
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return wrapped, torch.load(tokens, weights_only=True)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file through a temporary one, so that it is complete or missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
