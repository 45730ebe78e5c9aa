"""Trains a KDA language model on English text; a stopped run resumes with the same loss curve.

    python examples/train_lm.py                              # tiny, on the text of Python's documentation: the demo
    python examples/train_lm.py --data book.txt --steps 2000
    python examples/train_lm.py --resume runs/lm
    python examples/train_lm.py --preset 120m --minutes 5    # on one GPU, on the texts installed with Python
    python examples/train_lm.py --preset 120m --steps 500 --backend fla --output runs/fla
    python examples/train_lm.py --preset 120m --minutes 5 --cuda-graph   # no step waits for the host

Writes run.json, summary.md, loss.png and a checkpoint to --output, at each evaluation and on Ctrl-C. The first steps,
in which everything is compiled, are trained on but not timed, and neither is evaluation. With --minutes the learning
rate follows the clock, so that the number of steps and the loss curve depend on the machine: compare backends with
--steps (and compare_runs.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from common import cli
from common.checkpoint import check_replaceable, checkpoint_of, held_signals, load_model, save_checkpoint
from common.corpus import load_corpus
from common.decoding import sample
from common.model import chosen_backend, load_config, serving_backend
from common.optimization import precision
from common.plots import plot_run
from common.report import run_report, run_table
from common.settings import PRESETS, LMSettings, lm_settings
from common.throughput import machine, peak_tflops
from common.training import Training, load_run, start

from kda_layers import KDAForCausalLM

PROMPT, SAMPLE = "The ", 300


def save(training: Training, facts: dict[str, Any], data: str | None, output: Path) -> dict[str, Any]:
    """Write the checkpoint, run.json, summary.md and loss.png of a run, finished or not; return the report."""
    save_checkpoint(output / "checkpoint", training.model, training.state(data), training.corpus.tokenizer)
    report = facts | run_report(training, facts["peak_tflops"])
    (output / "run.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (output / "summary.md").write_text(run_table(report) + "\n")
    plot_run(report, output / "loss.png")
    return report


def train(args: argparse.Namespace) -> int:
    if args.peak_tflops is not None:
        cli.check_range("peak_tflops", args.peak_tflops, 1e-3)
    device, resumed = cli.as_device(args.device), load_run(args.resume) if args.resume else None
    s = lm_settings(cli.given(args, LMSettings), args.preset, resumed and resumed["settings"], args.resume)
    path: str | None = args.data or (resumed["data"] if resumed else None)
    data = path and str(Path(path).resolve())
    if s.threads:
        torch.set_num_threads(s.threads)
    torch.manual_seed(s.seed)
    # A new model is initialised on the CPU: the same on every device.
    model: Any = load_model(checkpoint_of(args.resume), device) if args.resume else KDAForCausalLM(load_config(s))
    with chosen_backend(args.backend):
        backend = serving_backend(model.config, s, device)
        check_replaceable(args.output / "checkpoint")
        if args.cache is not None:
            cli.check_writable(args.cache, "--cache")
        print("reading the text ...", flush=True)
        vocab_size = None if s.vocab == "byte" else model.config.vocab_size
        cache = args.cache or args.output
        corpus = load_corpus(path, s.max_mb, s.heldout_kb, vocab_size, s.seq_len, cache, s.text)
        text = corpus.facts
        if resumed and text["sha256"] != resumed["data_sha256"]:
            raise cli.InputError(
                f"--data {path or '(default)'}: expected the text that {args.resume} was trained on, "
                f"SHA-256 {resumed['data_sha256'][:12]}..., got {text['sha256'][:12]}..."
            )
        compiled = device.type == "cuda" if args.compile is None else args.compile
        training = start(s, model.to(device), corpus, compiled, resumed, args.cuda_graph, backend)
        facts = {
            "config": model.config.to_dict(),
            "backend": {"requested": args.backend, "serves": backend},
            "compiled": compiled,
            "peak_tflops": peak_tflops(device, s.dtype, args.peak_tflops),
            "machine": machine(device, args.commit),
        }
        if args.cuda_graph:
            facts["cuda_graph"] = True
        print(
            f"{text['bytes']:,} bytes of text, SHA-256 {text['sha256'][:12]}..., from {text['source']}\n"
            f"{text['train_tokens']:,} tokens to train on, {text['heldout_tokens']:,} held out ({text['tokens']})\n"
            f"{training.parameters():,} parameters with a vocabulary of {model.config.vocab_size:,}; backend {backend}",
            flush=True,
        )
        with held_signals() as received:
            training.run(received, lambda: save(training, facts, data, args.output))
            report = save(training, facts, data, args.output)
    print(run_table(report))
    print(f"{report['status']}; run.json, summary.md, loss.png and the checkpoint are in {args.output}")
    if training.trigram is not None and training.heldout:
        bits = training.heldout[-1]["bits_per_byte"]
        print(f"held-out bits per byte: {bits:.3f} KDA, {training.trigram:.3f} interpolated byte trigrams")
    if received:
        print(f"to continue: --resume {args.output}")
        return 128 + received[0]
    if report["status"] == "finished":
        with precision(device, s):
            sample(model.eval(), corpus.tokenizer, PROMPT, SAMPLE)
    return int(report["status"] != "finished")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_data_option(parser, "that of --text")
    parser.add_argument("--output", metavar="DIR", type=Path, help="run to write (runs/lm, or that of --resume)")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="run to continue, with its settings and text")
    parser.add_argument("--preset", choices=PRESETS, help="defaults of all settings below (demo)")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="where text and tokens are kept (--output)")
    cli.add_device_option(parser)
    parser.add_argument("--backend", metavar="NAME", help="of the KDA kernels (the best one here)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile the model (on CUDA)")
    parser.add_argument("--cuda-graph", action="store_true", help="capture the training step, on CUDA (no)")
    parser.add_argument("--peak-tflops", type=float, metavar="N", help="of the device in --dtype, for its utilization")
    parser.add_argument("--commit", metavar="HASH", help="of these sources (what git says)")
    cli.add_options(parser, LMSettings, PRESETS)
    args = parser.parse_args(argv)
    if args.resume and args.resume.name == "checkpoint":
        args.resume = args.resume.parent
    args.output = (args.output or args.resume or Path("runs/lm")).resolve()
    return args


def main(argv: list[str] | None = None) -> int:
    def example() -> int:
        try:
            return train(parse(argv))
        except torch.OutOfMemoryError as error:
            print(f"train_lm.py: error: a smaller --batch-size may help: {str(error).splitlines()[0]}", file=sys.stderr)
            return 1

    return cli.exit_status("train_lm.py", example)


if __name__ == "__main__":
    sys.exit(main())
