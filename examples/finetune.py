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
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from common.cli import InputError, add_data_option, check_ranges, check_writable, exit_status
from common.context import ContextParallelTrainer
from common.excerpts import load_data
from common.pretrained import load_model, swap
from common.processes import check_processes
from common.text import load_text
from common.trainer import RunRecord, check_same, defining_options, last_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import is_accelerate_available

TINY = Path(__file__).resolve().parents[1] / "kda_layers" / "configs" / "tiny.json"


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
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the run (%(default)s)")
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
                gc.collect()  # free DDP before its group: the reverse order can deadlock gloo's threads on the GIL
                torch.distributed.destroy_process_group()
        return 0

    return exit_status("finetune.py", example)


if __name__ == "__main__":
    sys.exit(main())
