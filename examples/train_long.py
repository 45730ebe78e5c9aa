"""Trains a KDA language model on long sequences of bytes, each cut over the processes: context parallelism.

    torchrun --nproc-per-node 8 examples/train_long.py --data book.txt --seq-len 1048576 --bf16 --gradient-checkpointing
    torchrun --nproc-per-node 2 examples/train_long.py

With one process (or without torchrun) the same sequences are trained uncut, to the same losses up to rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.cli import add_data_option, check_ranges, exit_status
from common.text import load_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import kda_layers

TINY = Path(__file__).resolve().parents[1] / "kda_layers" / "configs" / "tiny.json"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser)
    parser.add_argument("--model", default=str(TINY), help=".json configuration of a model of KDA layers")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a sequence, over all processes (4096)")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of one sequence each (50)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (3e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and excerpts (0)")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16, with parameters in fp32")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="keep the input of each layer alone")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU although there is a GPU")
    return parser.parse_args(argv)


def step(model: nn.Module, tokens: Tensor, mesh: Any, bf16: bool = False) -> Tensor:
    """Return the mean loss of a sequence [1, T + 1]; gradients are those of the full sequence on every process."""
    T, ranks, rank = tokens.shape[1] - 1, mesh.size(), mesh.get_local_rank()
    own = slice(T * rank // ranks, T * (rank + 1) // ranks)
    labels, positions = tokens[:, 1:][:, own], torch.arange(T, device=tokens.device)[None, own]
    call = dict(input_ids=tokens[:, :-1][:, own], position_ids=positions, labels=labels, shift_labels=labels)
    # The loss is a sum over this process's labels, divided by all T.
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        loss = model(**call, num_items_in_batch=T, use_cache=False).loss
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # FSDP2 or DDP would do it for a larger model
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


def train(args: argparse.Namespace) -> int:
    numbers = {name: getattr(args, name) for name in ("steps", "seq_len", "seed", "lr")}
    check_ranges(numbers, {"seq_len": 64, "seed": 0, "lr": 0})
    device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    for name, alone in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0").items():
        os.environ.setdefault(name, alone)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    text = load_text(args.data, args.seq_len).train
    torch.manual_seed(args.seed)  # the same weights and excerpts in every process
    model: Any = kda_layers.KDAForCausalLM(kda_layers.KDAConfig.from_pretrained(args.model)).to(device).train()
    # After the model: transformers imports torch.distributed.nn, whose default arguments keep a group that exists by
    # then beyond destroy_process_group; its threads can end the interpreter with "terminate called".
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    kda_layers.parallel.enable_context_parallel(model, mesh["cp"])
    if args.gradient_checkpointing:
        # transformers 5.23 renamed it, and warns of the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    bar = tqdm(range(args.steps), disable=dist.get_rank() > 0, unit="step")
    for _ in bar:
        start = int(torch.randint(len(text) - args.seq_len, ()))
        loss = step(model, text[None, start : start + args.seq_len + 1].to(device), mesh, args.bf16)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} nats per byte after {args.steps} steps on {dist.get_world_size()} processes")
    return 0


def main(argv: list[str] | None = None) -> int:
    def example() -> int:
        try:
            return train(parse(argv))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return exit_status("train_long.py", example)


if __name__ == "__main__":
    sys.exit(main())
