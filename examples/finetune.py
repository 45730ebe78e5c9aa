"""Trains or fine-tunes a language model with KDA layers on a text file, with transformers' Trainer.

The same script runs in one process, or in one per GPU (or on the CPU) with data-parallel training:

    python examples/finetune.py --data book.txt
    torchrun --nproc-per-node 8 examples/finetune.py --data book.txt --model DIR --bf16
    accelerate launch --multi_gpu --num_processes 8 examples/finetune.py --data book.txt --model DIR --swap 3:1

The model is a new one (a configuration in a .json file) or a checkpoint of any model with KDA layers; with --swap its
attention is swapped first, so that it can also be a Llama. Text is read with the model's tokenizer, or as bytes where
the vocabulary is that of bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from checkpoint import check_writable
from command import exit_status, first_line
from safetensors import safe_open
from settings import check_range, flag
from text_data import BYTES, InputError, Text, load_text
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState
from transformers.utils import is_accelerate_available

import kda_layers

TINY = Path(__file__).resolve().parents[1] / "configs" / "tiny.json"


class Excerpts(Dataset):
    """Tokens [N] cut into excerpts of `length`; what is left at the end is dropped."""

    def __init__(self, tokens: Tensor, length: int):
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class RunRecord(TrainerCallback, ExportableState):
    """What must stay the same when a run is resumed; the Trainer stores it in the state of each checkpoint."""

    def __init__(self, options: dict[str, Any]):
        self.options = options

    def state(self) -> dict[str, Any]:
        return {"args": {"options": self.options}, "attributes": {}}


def load_model(name: str) -> PreTrainedModel:
    """A new model for the path of a .json configuration, else the checkpoint of that path or name."""
    try:
        if name.endswith(".json"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
        return AutoModelForCausalLM.from_pretrained(name)
    except Exception as error:  # damaged files fail in as many ways as there are parsers
        reason = first_line(error)
        raise InputError(f"--model {name}: expected a checkpoint or a .json configuration, got: {reason}") from error


def swap(model: PreTrainedModel, layers: str) -> PreTrainedModel:
    """The model with its attention swapped: itself if it has KDA layers, else a converted one."""
    indices = layers.replace(",", "").isdecimal()
    chosen: Any = [int(i) for i in layers.split(",") if i] if indices else layers
    try:
        swapped: Any = kda_layers.swap_attention(model, chosen)
    except (TypeError, ValueError) as error:
        raise InputError(f"--swap {layers}: {error}") from error
    return swapped if isinstance(swapped, PreTrainedModel) else model


def load_data(
    text: Text, path: str | None, model: PreTrainedModel, name: str, length: int
) -> tuple[Excerpts, Excerpts]:
    """The part of the text to train on, and the rest, in the model's tokens."""
    parts = [text.train, text.heldout]
    if model.config.get_text_config().vocab_size != BYTES:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise InputError(
                f"--model {name}: expected a tokenizer beside it, or a vocabulary of the {BYTES} bytes"
            ) from error
        strings = [bytes(part.tolist()).decode(errors="replace") for part in parts]
        parts = [torch.tensor(tokenizer(s, add_special_tokens=False, verbose=False)["input_ids"]) for s in strings]
    train, heldout = (Excerpts(part, length) for part in parts)
    if not len(train) or not len(heldout):
        raise InputError(f"--data {path or '(default)'}: expected more than ten excerpts of --seq-len {length} tokens")
    return train, heldout


def last_checkpoint(output: str) -> tuple[str, dict[str, Any]]:
    """The newest whole checkpoint in `output` and the options of its run.

    Newer ones that an interrupted save left are named and renamed: the Trainer keeps the checkpoint with the highest
    number where a file system has no exact times.
    """
    found = {int(m[1]): path for path in Path(output).glob("*") if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))}
    for _, path in sorted(found.items(), reverse=True):
        try:
            state = whole_state(path)
        except Exception as error:  # damaged files fail in as many ways as there are parsers
            if os.environ.get("RANK", "0") == "0":
                print(f"{path} is skipped and renamed: it is not a whole checkpoint, {first_line(error)}")
                aside = path.with_name(f"incomplete-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            continue
        try:
            return str(path), state["stateful_callbacks"][RunRecord.__name__]["args"]["options"]
        except KeyError as error:
            raise InputError(f"--resume: expected a checkpoint of this version of the script, got {path}") from error
    raise InputError(f"--resume: expected a run with --save-every in --output {output}, got no whole checkpoint there")


def whole_state(checkpoint: Path) -> dict[str, Any]:
    """The Trainer's state in a checkpoint; raises unless each of its files is there and whole."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())  # the file that the Trainer writes last
    for pattern in ("*model[-._]*", "optimizer*", "scheduler*"):
        if not any(checkpoint.glob(pattern)):
            raise FileNotFoundError(f"it has no {pattern}")
    index = checkpoint / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    for path in {*checkpoint.glob("*.safetensors"), *(checkpoint / shard for shard in shards)}:
        with safe_open(path, "pt"):  # fails unless the file has the length that its header promises
            pass
    for path in (*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")):
        if not zipfile.is_zipfile(path):  # whose directory is at the end
            raise ValueError(f"{path.name} is cut short")
    return state


def defining_options(args: argparse.Namespace, text: Text) -> dict[str, Any]:
    """What a run cannot change when it is resumed: the checkpoint holds it, or the loss curve would have a kink."""
    names = ("swap", "seq_len", "batch_size", "lr", "seed", "bf16")
    model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    return {"model": model, "data": text.sha256} | {name: getattr(args, name) for name in names}


def check_same(options: dict[str, Any], recorded: dict[str, Any], checkpoint: str, data: str | None) -> None:
    """Raise an InputError that names the first option which is not as in the run to resume."""
    if options["data"] != recorded.get("data"):
        raise InputError(f"--data {data or '(default)'}: expected the text that {checkpoint} was trained on")
    for name, value in options.items():
        if value != recorded.get(name):
            raise InputError(f"{flag(name)} {value}: expected {recorded.get(name)} as in {checkpoint}")


def finetune(args: argparse.Namespace) -> Trainer:
    """Trains, saves to --output, and returns the Trainer; called by every process."""
    if not is_accelerate_available():
        raise InputError("the Trainer of transformers needs accelerate: pip install -U accelerate")
    for name, least in (("steps", 1), ("batch_size", 1), ("seq_len", 2), ("save_every", 0), ("seed", 0), ("lr", 0)):
        check_range(name, getattr(args, name), least)
    text, checkpoint = load_text(args.data, args.seq_len), None
    options = defining_options(args, text)
    if args.resume:
        checkpoint, recorded = last_checkpoint(args.output)
        check_same(options, recorded, checkpoint, args.data)
    check_writable(Path(args.output))
    set_seed(args.seed)  # the same new weights in every process
    model = load_model(args.model)
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
        ddp_find_unused_parameters=False,  # every parameter has a gradient in every step
        prediction_loss_only=True,  # the logits of all of the held-out text would not fit
        eval_on_start=True,  # calling evaluate() before train() would leave the processes' gradients unshared
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=heldout, callbacks=[RunRecord(options)])
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    before, *_, after = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    model.config.use_cache = True
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"held-out loss {before:.3f} -> {after:.3f} nats per token, {arguments.world_size} processes")
        print(f"the model is in {args.output}")
    return trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="text to train on (Python's reference documentation)")
    parser.add_argument("--model", default=str(TINY), help="checkpoint, or .json configuration (configs/tiny.json)")
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
