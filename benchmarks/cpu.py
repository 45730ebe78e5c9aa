"""`make bench-cpu`: the eager backend against transformers' own PyTorch path for KDA, in one run.

fp32, K = V = 128, two threads, both gate regimes (docs/glossary.md): "slow" gates are those of a fresh or
long-memory model, "fast" ones forget within some ten tokens. Results are checked against the fp64 oracle first.
Peak extra memory is that of a fresh process: the highest resident size during the call less that before it. Contenders
take turns (benchmarks/timing.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import report, timing
from kda_layers import kda, kda_step
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.reference import recurrence

TITLE = "The eager backend beside transformers' own PyTorch path for KDA"
K = 128
CASES = [  # what, B, T, H, gates
    ("forward", 1, 1024, 4, "slow"),
    ("forward", 1, 1024, 4, "fast"),
    ("forward", 1, 4096, 4, "slow"),
    ("forward", 1, 4096, 4, "fast"),
    ("forward + backward", 1, 1024, 4, "slow"),
    ("forward + backward", 1, 1024, 4, "fast"),
    ("decode step", 32, 1, 8, "slow"),
]
SWEEP = [("forward", 1, T, 4, "slow") for T in (512, 2048, 8192)]  # with the forwards above: time and memory against T
STOCK_MAX_T = 4096  # beyond this the stock path takes gigabytes
COLUMNS = [
    "case", "B", "T", "H", "gates", "kda_layers ms", "transformers ms", "times faster", "kda_layers MiB",
    "transformers MiB", "of its memory", "error",
]  # fmt: skip


def inputs(B: int, T: int, H: int, gates: str) -> list[Tensor]:
    """q, k, v, log-decay [B, T, H, 128] and beta [B, T, H], as the stock functions take them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, K) for _ in range(3))
    if gates == "fast":
        g = -5 * torch.sigmoid(torch.rand(H, 1).exp() * (torch.randn(B, T, H, K) + torch.rand(H, K)))
    else:
        dt = torch.exp(torch.rand(H, K) * 4.6052 - 6.9078)  # log-uniform in [1e-3, 1e-1]
        g = -5 * torch.sigmoid(0.3 * torch.randn(B, T, H, K) + dt + torch.log(-torch.expm1(-dt)))
    return [q, k, v, g, torch.rand(B, T, H)]


def calls(case: tuple[str, int, int, int, str]) -> dict[str, Callable[[], Any]]:
    """name -> a call of the case's work that returns something to compare."""
    from transformers.models.kimi_linear.modeling_kimi_linear import (
        chunk_kimi_delta_attention,
        recurrent_kimi_delta_attention,
    )

    what, B, T, H, gates = case
    args = inputs(B, T, H, gates)
    if what == "decode step":
        state = torch.randn(B, H, K, K) * 0.1
        stock_state = state.mT.contiguous()
        q, k, v, g, beta = args
        # Each keeps its own state going, as a decoding loop does: ours in place, theirs in a new tensor.
        return {
            "kda_layers": torch.no_grad()(
                lambda: kda_step(q, k, v, g, beta, state, gate_activation="log_decay", beta_activation="given")
            ),
            "transformers": torch.no_grad()(
                lambda: recurrent_kimi_delta_attention(*args, stock_state, True, use_qk_l2norm_in_kernel=True)[0]
            ),
        }

    def ours() -> Tensor:
        return kda(*args, gate_activation="log_decay", beta_activation="given", return_final_state=True).o

    def stock() -> Tensor:
        return chunk_kimi_delta_attention(*args, output_final_state=True, use_qk_l2norm_in_kernel=True)[0]

    if what == "forward":
        return {"kda_layers": torch.no_grad()(ours), "transformers": torch.no_grad()(stock)}
    weights = torch.randn_like(args[2])

    def step(forward: Callable[[], Tensor]) -> Tensor:
        leaves = [t.requires_grad_() for t in args]
        return torch.cat([g.flatten() for g in torch.autograd.grad((forward() * weights).sum(), leaves)])

    return {"kda_layers": lambda: step(ours), "transformers": lambda: step(stock)}


def check(case: tuple[str, int, int, int, str]) -> float:
    """Relative L2 difference of the two on this case's inputs cut to 256 tokens; both against the fp64 oracle."""
    what, B, T, H, gates = case
    small = (what, B, min(T, 256), H, gates)
    results = {name: f().double() for name, f in calls(small).items()}
    if what == "forward":
        q, k, v, g, beta = (t.double() for t in inputs(*small[1:]))
        options = ("log_decay", 0.0, "given", True, K**-0.5, False, 0)
        results["oracle"] = recurrence(Inputs(q, k, v, g, beta, None, None, None, None, *options))[0]
    truth = results.get("oracle", results["transformers"])
    error = ((results["kda_layers"] - truth).norm() / truth.norm()).item()
    if not error < 1e-5:
        raise RuntimeError(f"{case}: results differ by {error:.1e} (relative L2): nothing is timed")
    return error


def _print_memory(case: tuple[str, int, int, int, str], name: str) -> None:
    tiny = (case[0], case[1], min(case[2], 64), *case[3:])
    calls(tiny)[name]()  # what the first call loads is not the operator's memory
    print(report.peak_extra_mib(calls(case)[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--calls", type=int, default=20, help="timed calls of a decode step in each turn; of others 1")
    report.add_commit_option(parser)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.memory_of:
        case, name = json.loads(args.memory_of)
        return _print_memory(tuple(case), name)
    rows = []
    for case in tqdm(CASES + SWEEP, desc="cases"):
        what, B, T, H, gates = case
        row: dict[str, Any] = {"case": what, "B": B, "T": T, "H": H, "gates": gates, "error": check(case)}
        runs = {n: f for n, f in calls(case).items() if n != "transformers" or T <= STOCK_MAX_T}
        for name, times in timing.compare_ms(runs, calls=args.calls if T == 1 else 1).items():
            row[f"{name} times"], row[f"{name} ms"] = times, times["median"]
            if T > 1:
                row[f"{name} MiB"] = report.in_fresh_process("benchmarks.cpu", "--memory-of", json.dumps([case, name]))
        if "transformers ms" in row:
            row["times faster"] = row["transformers ms"] / row["kda_layers ms"]
            if T > 1:
                row["of its memory"] = row["kda_layers MiB"] / row["transformers MiB"]
        rows.append(row)
        results = report.document("cpu-operator", TITLE, rows, COLUMNS, report.stamp(args.commit))
        report.save(args.output, results)
    print(report.text(results))


if __name__ == "__main__":
    main()
