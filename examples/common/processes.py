"""Checks of what several processes may share."""

from __future__ import annotations

import argparse
import os

import torch

from common.cli import InputError, flag


def check_processes(args: argparse.Namespace) -> None:
    """Raise an InputError if processes cannot share sequences or heads as asked for."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for name in ("context_parallel", "tensor_parallel"):
        value = getattr(args, name)
        if value < 1 or processes % value:
            raise InputError(f"{flag(name)} {value}: expected a divisor of the number of processes, {processes}")
    if args.tensor_parallel > 1:
        check_tensor_parallel(args)
    if args.fsdp and processes == 1:
        raise InputError("--fsdp: expected several processes, got one: start it with torchrun --nproc-per-node N")
    if args.seq_len % (2 * args.context_parallel) and args.context_parallel > 1:
        raise InputError(f"--seq-len {args.seq_len}: expected a multiple of twice --context-parallel")


def check_tensor_parallel(args: argparse.Namespace) -> None:
    for given, option in ((args.context_parallel > 1, "--context-parallel"), (args.fsdp, "--fsdp"),
                          (args.save_every > 0, "--save-every"), (args.swap is not None, "--swap")):  # fmt: skip
        if given:
            raise InputError(f"--tensor-parallel {args.tensor_parallel}: expected no {option} with it")
    if args.cpu or not torch.cuda.is_available():
        raise InputError(f"--tensor-parallel {args.tensor_parallel}: expected GPUs, as accelerate serves no others")
