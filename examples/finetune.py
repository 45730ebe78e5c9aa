"""Trains or fine-tunes a language model with KDA layers on a text file, with transformers' Trainer.

The same script runs in one process, or in one per GPU (or on the CPU) with data-parallel training:

    python examples/finetune.py --data book.txt
    torchrun --nproc-per-node 8 examples/finetune.py --data book.txt --model DIR --bf16
    accelerate launch --multi_gpu --num_processes 8 examples/finetune.py --data book.txt --model DIR --swap 3:1
    torchrun --nproc-per-node 8 examples/finetune.py --data book.txt --model DIR --fsdp --context-parallel 4
    torchrun --nproc-per-node 8 examples/finetune.py --data book.txt --model DIR --tensor-parallel 8

The model is a new one (a configuration in a .json file) or a checkpoint of any model with KDA layers; with --swap its
attention is swapped first, so that it can also be a Llama. Text is read with the model's tokenizer, or as bytes where
the vocabulary is that of bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from common.cli import InputError, add_data_option, check_ranges, check_writable, exit_status, first_line, flag
from common.context import ContextParallelTrainer
from common.excerpts import load_data
from common.text import load_text
from common.trainer import RunRecord, check_same, defining_options, last_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

import kda_layers

TINY = Path(__file__).resolve().parents[1] / "kda_layers" / "configs" / "tiny.json"


def load_model(name: str, tensor_parallel: int = 1) -> PreTrainedModel:
    """Build a new model from a .json configuration, or load the checkpoint of that path or name.

    Args:
        tensor_parallel: processes that share its heads; only of a checkpoint.
    """
    if tensor_parallel > 1 and name.endswith(".json"):
        raise InputError(f"--tensor-parallel {tensor_parallel}: expected a checkpoint in --model, got {name}")
    shared = DistributedConfig(tp_size=tensor_parallel, tp_plan="auto") if tensor_parallel > 1 else None
    try:
        if name.endswith(".json"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
        return AutoModelForCausalLM.from_pretrained(name, distributed_config=shared)
    except Exception as error:  # damaged files fail in as many ways as there are parsers
        reason = first_line(error)
        raise InputError(f"--model {name}: expected a checkpoint or a .json configuration, got: {reason}") from error


def swap(model: PreTrainedModel, layers: str) -> PreTrainedModel:
    """Swap the attention of a model; return it if it has KDA layers, else a converted model."""
    indices = layers.replace(",", "").isdecimal()
    chosen: Any = [int(i) for i in layers.split(",") if i] if indices else layers
    try:
        swapped: Any = kda_layers.swap_attention(model, chosen)
    except (TypeError, ValueError) as error:
        raise InputError(f"--swap {layers}: {error}") from error
    return swapped if isinstance(swapped, PreTrainedModel) else model


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


def finetune(args: argparse.Namespace) -> Trainer:
    """Train, save to --output, and return the Trainer; called by every process."""
    if not is_accelerate_available():
        raise InputError("the Trainer of transformers needs accelerate: pip install -U accelerate")
    numbers = {name: getattr(args, name) for name in ("steps", "batch_size", "seq_len", "save_every", "seed", "lr")}
    check_ranges(numbers, {"seq_len": 2, "save_every": 0, "seed": 0, "lr": 0})
    check_processes(args)
    text, checkpoint = load_text(args.data, args.seq_len), None
    options = defining_options(args, text)
    if args.resume:
        checkpoint, recorded = last_checkpoint(args.output)
        check_same(options, recorded, checkpoint, args.data)
    check_writable(Path(args.output))
    set_seed(args.seed)  # the same new weights in every process
    model = load_model(args.model, args.tensor_parallel)
    if args.swap is not None:
        model = swap(model, args.swap)
    train, heldout = load_data(text, args.data, model, args.model, args.seq_len)
    model.config.use_cache = False  # nothing is generated here
    arguments = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 20),
        bf16=args.bf16,
        use_cpu=args.cpu or not torch.cuda.is_available(),
        seed=args.seed,
        logging_steps=max(1, args.steps // 20),
        save_strategy="steps" if args.save_every else "no",
        save_steps=args.save_every or args.steps,
        save_total_limit=1,
        fsdp=args.fsdp,
        ddp_find_unused_parameters=False,  # every parameter has a gradient in every step
        prediction_loss_only=True,  # the logits of all of the held-out text would not fit
        eval_on_start=True,  # calling evaluate() before train() would leave the processes' gradients unshared
        report_to=[],
    )
    given: Any = dict(train_dataset=train, eval_dataset=heldout, callbacks=[RunRecord(options)])
    if args.context_parallel > 1:
        shape = (arguments.world_size // args.context_parallel, args.context_parallel)
        mesh = init_device_mesh(arguments.device.type, shape, mesh_dim_names=("data", "context"))["context"]
        trainer: Trainer = ContextParallelTrainer(model, arguments, mesh, **given)
    else:
        trainer = Trainer(model, arguments, **given)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    before, *_, after = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    model.config.use_cache = True
    if args.tensor_parallel > 1:
        model.save_pretrained(args.output)  # on every process, as each has a part
    else:
        trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"held-out loss {before:.3f} -> {after:.3f} nats per token, {arguments.world_size} processes")
        print(f"the model is in {args.output}")
    return trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser)
    parser.add_argument("--model", default=str(TINY), help="checkpoint, or .json configuration")
    parser.add_argument("--swap", metavar="LAYERS", help='swap attention first: "all", "3:1" or indices such as 0,2')
    parser.add_argument("--output", default="runs/finetune", metavar="DIR", help="where the model goes (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    parser.add_argument(
        "--save-every", type=int, default=0, metavar="N", help="steps per checkpoint to resume from (0: none)"
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the whole run (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="excerpts per process and step (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per excerpt (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of new weights and data order (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16, with parameters as they are")
    parser.add_argument("--fsdp", action="store_true", help="shard weights, gradients and optimizer over the processes")
    parser.add_argument(
        "--context-parallel", type=int, default=1, metavar="N", help="processes that share each excerpt (%(default)s)"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="processes that share the heads (%(default)s)"
    )
    parser.add_argument("--cpu", action="store_true", help="train on the CPU although there is a GPU")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    def example() -> int:
        try:
            finetune(parse(argv))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return 0

    return exit_status("finetune.py", example)


if __name__ == "__main__":
    sys.exit(main())
