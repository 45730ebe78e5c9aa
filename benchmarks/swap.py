"""`make bench-swap`: a Kimi-Linear of transformers before and after `swap_attention`, in turns in one run.

On a CPU: 4 layers of hidden size 512, 4 KDA heads of 128, fp32, 2048 tokens, two threads; stock is transformers'
PyTorch path, and peak extra memory is that of a fresh process. On a GPU (--device cuda): 12 layers of hidden size
2048, 16 KDA heads of 128, bf16; stock runs on flash-linear-attention where that is installed. Dense MLPs in both:
routed experts cost the same before and after. A decode step is timed at one length of the cache, which is put back
before each call; steps at lengths not seen before: benchmarks/decode_lengths.py. Logits are compared first.

--model qwen3_next: a Qwen3-Next of these sizes, with one q and k head for two value heads.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from benchmarks import report, timing
from kda_layers import swap_attention

TITLE = "A {} of transformers before and after swap_attention"
NAMES = {"kimi_linear": "Kimi-Linear", "qwen3_next": "Qwen3-Next"}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "kimi_linear": {
        "cpu": dict(num_hidden_layers=4, hidden_size=512, intermediate_size=1024, linear_num_heads=4, vocab_size=1024),
        "cuda": dict(
            num_hidden_layers=12, hidden_size=2048, intermediate_size=5632, linear_num_heads=16, vocab_size=32000
        ),
    },
    "qwen3_next": {
        "cpu": dict(
            num_hidden_layers=4, hidden_size=512, intermediate_size=1024, linear_num_key_heads=2,
            linear_num_value_heads=4, num_attention_heads=4, num_key_value_heads=2, head_dim=128, vocab_size=1024,
        ),
        "cuda": dict(
            num_hidden_layers=12, hidden_size=2048, intermediate_size=5632, linear_num_key_heads=16,
            linear_num_value_heads=32, num_attention_heads=16, num_key_value_heads=2, head_dim=256, vocab_size=32000,
        ),
    },
}  # fmt: skip
CASES = {  # (what, batch, tokens)
    "cpu": [("forward", 1, 2048), ("training step", 1, 2048)],
    "cuda": [("prefill", 1, 8192), ("decode step", 1, 1), ("decode step", 32, 1), ("training step", 1, 8192)],
}
# flash-linear-attention refuses to train gated delta nets on Hopper with Triton 3.4 to 3.7.0.
LEFT_OUT = {("qwen3_next", "cuda", "training step")}
CONTEXT = 512  # tokens in the cache of a decode step
CALLS = {"cpu": 1, "cuda": 4}  # in each turn
CHECKED = (4, 256)  # prompts and tokens whose logits are compared
# How far the swapped model may be from fp32, in units of the stock model's distance. Twelve pairs of the CPU's models
# in bf16 had ratios of 0.967 to 0.988 (`ratios(12)`, 2 x 128 tokens), one of the GPU's 0.0320 / 0.0347 = 0.922. The
# limit is the largest of these and twice their range, 0.066. Three pairs of Qwen3-Next on a CPU: 0.989 to 0.995.
FACTOR = 1.12

Case = tuple[str, int, int]


class Call(NamedTuple):
    """The timed work of a case, and what comes before each call of it, untimed."""

    run: Callable[[], Any]
    before: Callable[[], None]


def config_of(family: str, device: str) -> Any:
    """The configuration of a model, without experts."""
    sizes = SIZES[family][device] | dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
    layers = sizes["num_hidden_layers"]
    if family == "qwen3_next":
        return transformers.Qwen3NextConfig(**sizes, mlp_only_layers=list(range(layers)))
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), sizes["linear_num_heads"])
    return transformers.KimiLinearConfig(
        **sizes, **heads, mlp_layer_types=["dense"] * layers, kv_lora_rank=sizes["hidden_size"] // 4
    )


def model(family: str, device: str, swapped: bool, seed: int = 0) -> Any:
    """The model with random weights; the same ones in every process."""
    torch.manual_seed(seed)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config_of(family, device))
    made = made.to(torch.float32 if device == "cpu" else torch.bfloat16)
    if swapped:
        swap_attention(made)
    return made


def call(m: Any, case: Case) -> Call:
    """The case's work."""
    what, B, T = case
    tokens = torch.randint(m.config.vocab_size, (B, T), device=m.device)
    if what in ("forward", "prefill"):
        run = torch.no_grad()(lambda: m(tokens, use_cache=what == "prefill", logits_to_keep=1))
        return Call(run, lambda: None)
    if what == "decode step":
        with torch.no_grad():
            prompt = torch.randint(m.config.vocab_size, (B, CONTEXT), device=m.device)
            filled = m(prompt, use_cache=True, logits_to_keep=1).past_key_values
        caches = [filled]

        def put_back() -> None:
            caches[0] = copy.deepcopy(filled)

        return Call(torch.no_grad()(lambda: m(tokens, past_key_values=caches[0])), put_back)

    def step() -> None:
        m(tokens, labels=tokens, use_cache=False).loss.backward()

    return Call(step, m.zero_grad)


@contextmanager
def plain_pytorch(model: Any) -> Iterator[None]:
    """Run the model's stock linear attention on transformers' own functions, whatever kernels it has picked."""
    module = sys.modules[type(model).__module__]
    names = ("kimi_delta_attention", "gated_delta_rule")
    picked = {n: f for n, f in vars(module).items() if n.endswith(names) and callable(f)}
    for name, f in picked.items():
        setattr(module, name, inspect.unwrap(f))
    try:
        yield
    finally:
        for name, f in picked.items():
            setattr(module, name, f)


def errors(stock: Any, swapped: Any) -> tuple[float, float]:
    """Relative L2 errors of both models' logits against the stock model in fp32 on transformers' own PyTorch."""
    generator = torch.Generator(stock.device).manual_seed(1)
    tokens = torch.randint(stock.config.vocab_size, CHECKED, device=stock.device, generator=generator)

    def logits(m: Any) -> Tensor:
        with torch.no_grad():
            return m(tokens, use_cache=False).logits.double()

    wide = copy.deepcopy(stock).float()
    with plain_pytorch(wide):
        truth = logits(wide)
    found = [((logits(m) - truth).norm() / truth.norm()).item() for m in (stock, swapped)]
    return found[0], found[1]


def check(stock: Any, swapped: Any) -> tuple[float, float]:
    """The errors of both, after checking that the swapped model's is no larger than rounding explains.

    Raises:
        RuntimeError: it is.
    """
    found = errors(stock, swapped)
    limit = 1e-4 if stock.dtype == torch.float32 else FACTOR * found[0]
    if not found[1] <= limit:
        raise RuntimeError(
            f"logits of the swapped model are {found[1]:.3g} from fp32 (relative L2), those of the stock model "
            f"{found[0]:.3g}; allowed: {limit:.3g}. Nothing is timed"
        )
    return found


def ratios(seeds: int, family: str = "kimi_linear") -> list[float]:
    """Errors of the swapped model in those of the stock one, of the CPU's models in bf16: what FACTOR is from."""
    found = []
    for seed in range(seeds):
        stock = model(family, "cpu", swapped=False, seed=seed).bfloat16()
        swapped = copy.deepcopy(stock)
        swap_attention(swapped)
        of_stock, of_swapped = errors(stock, swapped)
        found.append(of_swapped / of_stock)
    return found


def memory(family: str, device: str, case: Case, swapped: bool, m: Any) -> float:
    """Peak extra MiB of one call: of a fresh process, or as CUDA's allocator counts it."""
    if device == "cpu":
        return report.in_fresh_process("benchmarks.swap", "--memory-of", json.dumps([case, family, swapped]))
    run, before = call(m, case)
    before()
    run()
    before()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def _print_memory(case: Case, family: str, swapped: bool) -> None:
    m = model(family, "cpu", swapped)
    call(m, (case[0], 1, 64)).run()  # what the first call loads is not the model's memory
    m.zero_grad()
    print(report.peak_extra_mib(call(m, case).run))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=NAMES, default="kimi_linear")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_commit_option(parser)
    timing.add_tuning_option(parser)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def file_name(args: argparse.Namespace) -> str:
    """The name of the results: of Kimi-Linear's, that of this benchmark alone."""
    device = "gpu" if args.device == "cuda" else "cpu"
    return f"{device}-swap" + ("" if args.model == "kimi_linear" else "-" + args.model.replace("_", "-"))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cpu":
        torch.set_num_threads(2)
    if args.memory_of:
        case, family, swapped = json.loads(args.memory_of)
        return _print_memory(tuple(case), family, swapped)
    stock = model(args.model, args.device, swapped=False)
    models = {"stock": stock, "swapped": copy.deepcopy(stock)}
    swap_attention(models["swapped"])
    of_stock, of_swapped = check(**models)
    kernels = "flash-linear-attention" if importlib.util.find_spec("fla") and args.device == "cuda" else "PyTorch"
    synchronize = torch.cuda.synchronize if args.device == "cuda" else None
    columns = ["case", "B", "T", "stock kernels", "swapped ms", "stock ms", "times faster"]
    columns += ["swapped MiB", "stock MiB", "of its memory", "swapped error", "stock error"]
    rows: list[dict[str, Any]] = []
    cases = [case for case in CASES[args.device] if (args.model, args.device, case[0]) not in LEFT_OUT]
    for case in tqdm(cases, desc="cases"):
        what, B, T = case
        row: dict[str, Any] = {"case": what, "B": B, "T": T, "stock kernels": kernels}
        calls = {name: call(m, case) for name, m in models.items()}
        runs, before = ({n: c[i] for n, c in calls.items()} for i in (0, 1))
        for name, times in timing.compare_ms(runs, before, synchronize, CALLS[args.device]).items():
            row[f"{name} times"], row[f"{name} ms"] = times, times["median"]
        del calls, runs, before
        for name, m in models.items():
            m.zero_grad()
            row[f"{name} MiB"] = memory(args.model, args.device, case, name == "swapped", m)
            m.zero_grad()
        row["times faster"] = row["stock ms"] / row["swapped ms"]
        row["of its memory"] = row["swapped MiB"] / max(row["stock MiB"], 1e-9)
        row |= {"swapped error": of_swapped, "stock error": of_stock}
        rows.append(row)
        title = TITLE.format(NAMES[args.model])
        results = report.document(file_name(args), title, rows, columns, report.stamp(args.commit))
        report.save(args.output, results)
    print(report.text(results))


if __name__ == "__main__":
    main()
