"""Continues a prompt with a checkpoint of train_lm.py and prints the text as it is generated."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common.checkpoint import checkpoint_of, load_model, load_tokenizer
from common.cli import InputError, add_device_option, as_device, check_ranges, exit_status
from common.decoding import ByteStreamer, encode
from common.text import BYTES
from transformers import TextStreamer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="directory that train_lm.py wrote")
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=400, metavar="N", help="tokens to generate (400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time (0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="sample from the K likeliest, 0: all (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
    add_device_option(parser)
    return parser.parse_args(argv)


def generate(args: argparse.Namespace) -> int:
    if not args.prompt:
        raise InputError("prompt: expected at least one character, got none")
    numbers = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "seed")}
    coldest = 1e-4 if args.temperature else 0  # logits divided by less overflow; 0 does not divide
    check_ranges(numbers, {"temperature": coldest, "top_k": 0, "seed": 0})
    directory = checkpoint_of(args.checkpoint)
    model: Any = load_model(directory, as_device(args.device))
    tokenizer: Any = load_tokenizer(directory)
    if tokenizer is None and model.config.vocab_size != BYTES:
        size = model.config.vocab_size
        raise InputError(f"{directory}: expected a tokenizer, or a vocabulary of the {BYTES} bytes, got {size} tokens")
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k} if args.temperature else {}
    streamer = TextStreamer(tokenizer) if tokenizer else ByteStreamer()
    ids = encode(tokenizer, args.prompt).to(model.device)
    model.generate(ids, max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_status("generate.py", lambda: generate(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
