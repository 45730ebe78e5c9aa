"""Trains a KDA language model of some 100 million parameters on one GPU, for minutes or for steps, on real text.

    python examples/train_lm.py --minutes 5
    python examples/train_lm.py --steps 500 --backend fla --output runs/fla
    python examples/train_lm.py --compare runs/*/run.json --output runs

The text is what is installed with Python unless --data names a file. Writes run.json, loss.png, summary.md and a
checkpoint to --output; Ctrl-C saves, too. The first steps, in which everything is compiled, are trained on but not
timed, and neither is evaluation. With --minutes the learning rate follows the clock, so that the number of steps and
the loss curve depend on the machine: compare backends with --steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from checkpoint import as_device, check_replaceable, check_writable, held_signals, save_checkpoint
from command import exit_status
from huggingface_hub.errors import StrictDataclassError
from lm_data import Corpus, load_corpus
from lm_training import LMSettings, Training
from report import plot_comparison, plot_run, run_table
from settings import check_range, flag
from text_data import BYTES, InputError
from throughput import machine, peak_tflops
from transformers import PreTrainedTokenizerFast

from kda_layers import KDAConfig, KDAForCausalLM, use_backend
from kda_layers.kernels.kda.dispatch import KDA, default_problem


def load_config(s: LMSettings) -> Any:
    """The configuration in s.config, with the vocabulary of s."""
    try:
        found = json.loads(Path(s.config).read_text())
        if not isinstance(found, dict) or found.get("model_type") != KDAConfig.model_type:
            raise ValueError(f"no model_type {KDAConfig.model_type!r}")
        size = BYTES if s.vocab == "byte" else s.vocab_size or found.get("vocab_size", KDAConfig.vocab_size)
        tokens = {"vocab_size": size, "bos_token_id": None, "eos_token_id": None}  # the vocabularies have neither
        return KDAConfig.from_dict(found | tokens)
    except OSError as error:
        raise InputError(f"--config {s.config}: expected a readable file, got: {error.strerror}") from error
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"--config {s.config}: expected a configuration of a KDA model, got: {reason}") from error


def serving_backend(c: Any, s: LMSettings, device: torch.device) -> str:
    """Name of the backend that will train the KDA layers."""
    dtype = getattr(torch, s.dtype)
    problem = replace(
        default_problem(str(device)),
        dtype=dtype,
        beta_dtype=dtype,
        K=c.linear_head_dim,
        V=c.linear_value_head_dim,
        group=c.linear_num_value_heads // c.linear_num_heads,
        gate_activation=c.linear_gate_activation,
        beta_activation="2sigmoid" if c.linear_allow_neg_eigval else "sigmoid",
    )
    try:
        return KDA.select(problem).name
    except ValueError as error:
        raise InputError(f"--backend: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def chosen_backend(name: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if name is not None:
            try:
                stack.enter_context(use_backend(name))
            except ValueError as error:
                raise InputError(f"--backend {name}: {error}") from error
        yield


def save(training: Training, facts: dict[str, Any], output: Path) -> dict[str, Any]:
    """Writes what is known of a run, finished or not: run.json, summary.md, loss.png; returns the report."""
    report = facts | training.report(facts["peak_tflops"])
    output.mkdir(parents=True, exist_ok=True)
    (output / "run.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (output / "summary.md").write_text(run_table(report) + "\n")
    plot_run(report, output / "loss.png")
    return report


def save_model(training: Training, corpus: Corpus, output: Path) -> None:
    """A checkpoint that transformers loads, with the BPE; the optimizer is left out, since nothing resumes here."""
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer) if corpus.tokenizer else None
    save_checkpoint(output, training.model, {"step": training.step, "losses": training.losses}, tokenizer)


def run_example(args: argparse.Namespace) -> int:
    s = LMSettings(**{f.name: getattr(args, f.name) for f in fields(LMSettings)})
    if args.peak_tflops is not None:
        check_range("peak_tflops", args.peak_tflops, 1e-3)
    device = as_device(args.device)
    config = load_config(s)
    with chosen_backend(args.backend):
        backend = serving_backend(config, s, device)
        check_replaceable(args.output / "checkpoint")
        if args.cache is not None:
            check_writable(args.cache, "--cache")
        print("reading the text ...", flush=True)
        corpus = load_corpus(
            args.data, s.max_mb, s.heldout_kb, None if s.vocab == "byte" else config.vocab_size, s.seq_len,
            args.cache or args.output,
        )  # fmt: skip
        torch.manual_seed(s.seed)
        model: Any = KDAForCausalLM(config)  # initialised on the CPU: the same on every device
        compiled = device.type == "cuda" if args.compile is None else args.compile
        training = Training(s, model.to(device), corpus, compiled)
        facts = {
            "config": config.to_dict(),
            "backend": {"requested": args.backend, "serves": backend},
            "compiled": compiled,
            "peak_tflops": peak_tflops(device, s.dtype, args.peak_tflops),
            "machine": machine(device, args.commit),
        }
        text = corpus.facts
        print(
            f"{text['bytes']:,} bytes of text, SHA-256 {text['sha256'][:12]}..., from {text['source']}\n"
            f"{text['train_tokens']:,} tokens to train on, {text['heldout_tokens']:,} held out ({text['tokens']})\n"
            f"{training.parameters():,} parameters with a vocabulary of {config.vocab_size:,}, of which "
            f"{model.get_input_embeddings().weight.numel():,} in the embedding; backend {backend}",
            flush=True,
        )
        with held_signals() as received:
            training.run(received, lambda: save(training, facts, args.output))
            report = save(training, facts, args.output)
            save_model(training, corpus, args.output / "checkpoint")
    print(run_table(report))
    print(f"{report['status']}; run.json, summary.md, loss.png and the checkpoint are in {args.output}")
    return 128 + received[0] if received else int(report["status"] != "finished")


def compare(paths: list[Path], output: Path) -> int:
    """Draws runs into one picture, and says where they are not comparable."""
    reports = {}
    for path in paths:
        try:
            report = json.loads(path.read_text())
            run_table(report)
            for part in ("corpus", "losses", "windows", "unigram_nats_per_token"):
                report[part]
            reports[str(path.parent if path.name == "run.json" else path.with_suffix(""))] = report
        except OSError as error:
            raise InputError(f"--compare {path}: expected a readable file, got: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"--compare {path}: expected a run.json of this script, got: {error!r}") from error
    first, *others = reports.values()
    for part in ("settings", "corpus", "machine"):
        names = [n for n, value in first[part].items() if any(o[part].get(n) != value for o in others)]
        if names:
            print(f"these runs differ in {part}: {', '.join(names)}")
    check_writable(output)
    plot_comparison(reports, output / "comparison.png")
    rows = [run_table(report).splitlines() for report in reports.values()]
    (output / "comparison.md").write_text("\n".join([*rows[0][:2], *(row[2] for row in rows)]) + "\n")
    print(f"comparison.png and comparison.md are in {output}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="text to train on (what is installed with Python)")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("runs/lm"), help="(%(default)s)")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="where text and tokens are kept (--output)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--backend", metavar="NAME", help="of the KDA kernels (the best one here)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile the model (on CUDA)")
    parser.add_argument("--peak-tflops", type=float, metavar="N", help="of the device in --dtype, for its utilization")
    parser.add_argument("--commit", metavar="HASH", help="of these sources (what git says)")
    parser.add_argument("--compare", metavar="JSON", type=Path, nargs="+", help="only draw these runs into one picture")
    length = parser.add_mutually_exclusive_group()
    for f in fields(LMSettings):
        group: Any = length if f.name in ("minutes", "steps") else parser
        group.add_argument(flag(f.name), type=type(f.default), default=f.default, **f.metadata)
    args = parser.parse_args(argv)
    args.output = args.output.resolve()
    return args


def main(argv: list[str] | None = None) -> int:
    def example() -> int:
        args = parse(argv)
        try:
            return compare(args.compare, args.output) if args.compare else run_example(args)
        except torch.OutOfMemoryError as error:
            print(f"train_lm.py: error: a smaller --batch-size may help: {str(error).splitlines()[0]}", file=sys.stderr)
            return 1

    return exit_status("train_lm.py", example)


if __name__ == "__main__":
    sys.exit(main())
