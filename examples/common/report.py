"""Reports of training runs: what run.json holds, and a Markdown table of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common.settings import FIRST_STEPS
from common.throughput import FORMULA, flops_per_token
from common.training import Training


def run_report(run: Training, peak_tflops: float | None) -> dict[str, Any]:
    """Return the progress and the speed of a run in numbers that JSON can hold."""
    s, per_step = run.settings, run.settings.batch_size * run.settings.seq_len
    flops, rates = flops_per_token(run.model, s.seq_len), run.clock.rates(per_step)
    gpu = run.device.type == "cuda"
    return {
        "status": run.status,
        "settings": asdict(s) | {"config": Path(s.config).name} | {"minutes" if s.steps else "steps": None},
        "learning_rate_follows": "steps" if s.steps else "the clock: steps and losses depend on the machine",
        "corpus": run.corpus.facts,
        "parameters": run.parameters(),
        "steps": run.step,
        "tokens": run.step * per_step,
        "epochs": run.step * per_step / len(run.corpus.train),
        "tokens_per_s": rates,
        "mfu": rates["median"] * flops["total"] / (peak_tflops * 1e12) if rates and peak_tflops else None,
        "flops_per_token": flops | {"formula": FORMULA},
        "timed": f"windows of {s.log_every} steps, without {FIRST_STEPS} steps after each start and evaluations",
        "first_steps_seconds": run.first_steps_seconds,
        "training_seconds": run.clock.seconds_in_windows(),
        "peak_memory_gib": torch.cuda.max_memory_allocated(run.device) / 2**30 if gpu else None,
        "unigram_nats_per_token": run.unigram,
        "trigram_bits_per_byte": run.trigram,
        "heldout": run.heldout,
        "windows": run.clock.windows,
        "losses": run.losses,
    }


def run_label(report: Mapping[str, Any]) -> str:
    """Model, backend and speed of a report in a few words."""
    rate = report["tokens_per_s"]
    speed = f", {rate['median']:,.0f} tokens/s" if rate else ""
    return f"{Path(report['settings']['config']).stem}, {report['backend']['serves']}{speed}"


def run_table(report: Mapping[str, Any]) -> str:
    """Result of a report as a Markdown table of one row."""
    rate, mfu, heldout = report["tokens_per_s"], report["mfu"], report["heldout"]
    s, machine = report["settings"], report["machine"]
    cells = {
        "model": f"{Path(s['config']).stem}, {report['parameters']:,} parameters",
        "KDA backend": report["backend"]["serves"] + (", compiled" if report["compiled"] else ""),
        "machine": f"{machine.get('gpu', machine['cpu'])}, torch {machine['torch']}",
        "batch": f"{s['batch_size']} x {s['seq_len']}, {s['dtype']}",
        "steps": f"{report['steps']:,}",
        "tokens": f"{report['tokens'] / 1e6:,.2f} M ({report['epochs']:.2f} epochs)",
        "tokens/s": f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})" if rate else "not timed",
        "MFU": f"{100 * mfu:.1f}% of {report['peak_tflops']:g} TFLOP/s" if mfu is not None else "no peak known",
        "held-out nats/token": f"{heldout[-1]['nats_per_token']:.3f}" if heldout else "not evaluated",
        "held-out bits/byte": f"{heldout[-1]['bits_per_byte']:.3f}" if heldout else "not evaluated",
    }
    return "\n".join(
        ("| " + " | ".join(cells) + " |", "|" + " --- |" * len(cells), "| " + " | ".join(cells.values()) + " |")
    )
