"""`make bench-swap`: a Kimi-Linear of transformers before and after `swap_attention`, side by side in one run.

On a CPU: 4 layers of hidden size 512, 4 KDA heads of 128, fp32, 2048 tokens, two threads; stock is transformers'
PyTorch path, and peak extra memory is that of a fresh process. On a GPU (--device cuda): 12 layers of hidden size
2048, 16 KDA heads of 128, bf16; stock runs on flash-linear-attention where that is installed. Dense MLPs in both:
routed experts cost the same before and after. Logits are compared first.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from benchmarks import report
from kda_layers import swap_attention

SIZES: dict[str, dict[str, Any]] = {
    "cpu": dict(num_hidden_layers=4, hidden_size=512, intermediate_size=1024, linear_num_heads=4, vocab_size=1024),
    "cuda": dict(num_hidden_layers=12, hidden_size=2048, intermediate_size=5632, linear_num_heads=16, vocab_size=32000),
}
CASES = {  # (what, batch, tokens)
    "cpu": [("forward", 1, 2048), ("training step", 1, 2048)],
    "cuda": [("prefill", 1, 8192), ("decode step", 1, 1), ("decode step", 32, 1), ("training step", 1, 8192)],
}
CONTEXT = 512  # tokens in the cache of a decode step


def model(device: str, swapped: bool) -> Any:
    """The model with random weights; the same ones in every process."""
    torch.manual_seed(0)
    layers = SIZES[device]["num_hidden_layers"]
    heads = SIZES[device]["linear_num_heads"]
    config = transformers.KimiLinearConfig(
        **SIZES[device], mlp_layer_types=["dense"] * layers, num_attention_heads=heads, num_key_value_heads=heads,
        kv_lora_rank=SIZES[device]["hidden_size"] // 4, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made = transformers.KimiLinearForCausalLM(config).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    if swapped:
        swap_attention(made)
    return made


def call(m: Any, case: tuple[str, int, int]) -> Callable[[], Any]:
    """The case's work, without what it needs done before."""
    what, B, T = case
    device = m.device
    tokens = torch.randint(m.config.vocab_size, (B, T), device=device)
    if what in ("forward", "prefill"):
        return torch.no_grad()(lambda: m(tokens, use_cache=what == "prefill", logits_to_keep=1))
    if what == "decode step":
        with torch.no_grad():
            prompt = torch.randint(m.config.vocab_size, (B, CONTEXT), device=device)
            cache = m(prompt, use_cache=True, logits_to_keep=1).past_key_values
        return torch.no_grad()(lambda: m(tokens, past_key_values=cache))

    def step() -> None:
        m.zero_grad()
        m(tokens, labels=tokens, use_cache=False).loss.backward()

    return step


def check(stock: Any, swapped: Any) -> float:
    """Relative L2 difference of the logits; refuses to go on where it is more than the dtype explains.

    In bf16 the two round differently in every layer: the limit there is ten units of its rounding.
    """
    tokens = torch.randint(stock.config.vocab_size, (1, 256), device=stock.device)
    with torch.no_grad():
        a, b = (m(tokens, use_cache=False).logits.double() for m in (stock, swapped))
    error = ((a - b).norm() / a.norm()).item()
    if not error < (1e-4 if stock.dtype == torch.float32 else 10 * 2**-8):
        raise RuntimeError(f"logits differ by {error:.1e} (relative L2): nothing is timed")
    return error


def memory(device: str, case: tuple[str, int, int], swapped: bool, m: Any) -> float:
    """Peak extra MiB of one call: of a fresh process, or as CUDA's allocator counts it."""
    if device == "cpu":
        return report.in_fresh_process("benchmarks.swap", "--memory-of", json.dumps([case, swapped]))
    f = call(m, case)
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _print_memory(case: tuple[str, int, int], swapped: bool) -> None:
    m = model("cpu", swapped)
    call(m, (case[0], 1, 64))()  # what the first call loads is not the model's memory
    m.zero_grad()
    print(report.peak_extra_mib(call(m, case)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--repeats", type=int, default=7)
    report.add_commit_option(parser)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(2)
    if args.memory_of:
        case, swapped = json.loads(args.memory_of)
        return _print_memory(tuple(case), swapped)
    stock = model(args.device, swapped=False)
    models = {"stock": stock, "swapped": copy.deepcopy(stock)}
    swap_attention(models["swapped"])
    error = check(**models)
    kernels = "flash-linear-attention" if importlib.util.find_spec("fla") and args.device == "cuda" else "PyTorch"
    rows: list[dict[str, Any]] = []
    for case in tqdm(CASES[args.device], desc="cases"):
        what, B, T = case
        row: dict[str, Any] = {"case": what, "B": B, "T": T, "stock kernels": kernels, "error": error}
        for name, m in models.items():
            f = call(m, case)

            def synchronous(f: Callable[[], Any] = f) -> None:
                f()
                if args.device == "cuda":
                    torch.cuda.synchronize()

            row[f"{name} times"] = report.summary(report.times_ms(synchronous, args.repeats))
            row[f"{name} ms"] = row[f"{name} times"]["median"]
            row[f"{name} MiB"] = memory(args.device, case, name == "swapped", m)
            m.zero_grad()
        row["times faster"] = row["stock ms"] / row["swapped ms"]
        row["of its memory"] = row["swapped MiB"] / max(row["stock MiB"], 1e-9)
        rows.append(row)
        tqdm.write(f"{case}: swapped {row['swapped ms']:.1f} ms, stock {row['stock ms']:.1f} ms")
    columns = ["case", "B", "T", "stock kernels", "swapped ms", "stock ms", "times faster"]
    columns += ["swapped MiB", "stock MiB", "of its memory", "error"]
    report.write(args.output, f"swap_{args.device}", rows, columns, args.commit)


if __name__ == "__main__":
    main()
