"""Cost of a language model beside its peers: `python -m benchmarks.lm --size 0.7b`, on a GPU.

Models of one size with random weights in bf16: ours, the same with softmax attention in every fourth layer (`hybrid`)
and in every layer, flash-linear-attention's own KDA model where that is installed, and transformers' Kimi-Linear, as it
is (`kimi`) and with our layers (`kimi-swapped`), with KDA in every layer but the last, as it has no cache without
attention; for training also ours with the wide projections in float8, by torchao (`ours-float8`). Tasks: a training
step (zero_grad, forward, loss, backward), the same with clipping and AdamW, a prefill that fills a cache, and a greedy
decode step; each called as it is and, where that can be captured, replayed from a CUDA graph, the step with AdamW as a
`CapturedStep`; and `generate`, whose figures are those of a token: without options, with a static cache, of eager steps
(`disable_compile`), and transformers' loop with a forward that does nothing (`loop`). Wall time from one
synchronisation to the next, in turns; GPU time, kernels and where the time goes from the profiler; memory is the peak
of PyTorch's allocator above the parameters, gradients included, and is not measured in a graph, whose memory is
reserved by its capture.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, KimiLinearConfig, KimiLinearForCausalLM, StaticCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks import report, timing
from benchmarks.gpu.kernel_shares import trace
from benchmarks.gpu.layer import to_bf16
from benchmarks.gpu.machine import CaptureError, CudaMachine
from benchmarks.gpu.model import PEAK
from kda_layers import KDAConfig, KDAForCausalLM, swap_attention
from kda_layers.training import CapturedStep

TITLE = "Whole language models: training step, prefill and decode step"
SIZES: dict[str, dict[str, Any]] = {
    "0.7b": dict(hidden_size=2048, num_hidden_layers=12, heads=16, intermediate_size=5632, vocab_size=32000),
    "120m": dict(hidden_size=768, num_hidden_layers=12, heads=6, intermediate_size=2048, vocab_size=32000),
}
DEVICE = "cuda"
T = 8192  # tokens of a training step and of a prefill
PROMPT = 64  # tokens before a decode step
TOKENS = 256  # that `generate` adds
NARROW = 512  # inputs or outputs of a projection that stays in 16 bits beside float8
BATCHES = (1, 64)  # sequences of a decode step
NO_MASK = {"full_attention": None, "linear_attention": None}
CACHES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
CONTENDERS = ("ours", "hybrid", "softmax", "fla", "kimi", "kimi-swapped", "ours-float8")
COLUMNS = ["task", "mode", "batch", "contender", "wall ms", "GPU ms", "kernels", "MiB", "tokens/s", "MFU %"]
# Parts of a step's GPU time: the first that matches a kernel's name.
PARTS = {
    "operator": ("kda_", "chunk_kda", "chunk_gla", "chunk_gated_delta", "recompute_w_u", "kda_gate"),
    "convolution": ("conv",),
    "softmax attention": ("flash", "attention", "fmha"),
    "GEMM": ("gemm", "nvjet", "cutlass", "gemv", "splitk", "xmma", "row_kernel", "tile_kernel"),
    "loss": ("softmax", "nll", "cross_entropy", "loss_kernel", "scale_kernel"),
    "norm": ("norm", "rms"),
    "activation": ("swiglu", "silu"),
}


def build(contender: str, size: str) -> Any:
    """The model on the device, in bf16 but for the gates' parameters."""
    fields = dict(SIZES[size])
    heads = fields.pop("heads")
    torch.manual_seed(0)
    if contender == "fla":
        from fla.models import KDAConfig as FLAConfig
        from fla.models import KDAForCausalLM as FLAForCausalLM

        config: Any = FLAConfig(
            **fields, num_heads=heads, head_dim=128, safe_gate=True, lower_bound=-5, tie_word_embeddings=True
        )
        with torch.device(DEVICE):
            return to_bf16(FLAForCausalLM(config))
    if contender == "ours-float8":
        return in_float8(build("ours", size), DEVICE)
    if contender.startswith("kimi"):
        return _kimi(fields, heads, swapped=contender == "kimi-swapped")
    kinds = {"full_attention_interval": {"ours": 0, "hybrid": 4, "softmax": 1}[contender]}
    config = KDAConfig(
        **fields, **kinds, linear_num_heads=heads, linear_head_dim=128, num_attention_heads=heads,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(DEVICE):
        return to_bf16(KDAForCausalLM(config))


def in_float8(model: Any, device: str) -> Any:
    """The model with torchao's float8 in its large products; torch.compile fuses the casts of each on a GPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    def is_wide(layer: torch.nn.Module, name: str) -> bool:
        return name != "lm_head" and isinstance(layer, torch.nn.Linear) and min(layer.weight.shape) >= NARROW

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=device == "cpu"), module_filter_fn=is_wide)
    layers = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    if not layers:
        raise ValueError(
            f"model must have projections of at least {NARROW} inputs and outputs, got none: nothing would run in "
            "float8. Take a wider model"
        )
    for layer in layers if device != "cpu" else ():
        layer.compile()
    return model


def _kimi(fields: dict[str, Any], heads: int, swapped: bool) -> Any:
    layers = fields["num_hidden_layers"]
    config = KimiLinearConfig(
        **fields, linear_num_heads=heads, linear_head_dim=128, num_attention_heads=heads, num_key_value_heads=heads,
        layer_types=["linear_attention"] * (layers - 1) + ["full_attention"], mlp_layer_types=["dense"] * layers,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = to_bf16(KimiLinearForCausalLM(config))
    if swapped:
        swap_attention(model)
    return model


def training_step(model: Any, batch: int) -> Callable[[], Tensor]:
    """Zero_grad, forward, loss and backward of one sequence."""
    tokens = torch.randint(model.config.vocab_size, (batch, T), device=DEVICE)
    model.train()

    def run() -> Tensor:
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return run


def optimizer_step(model: Any, batch: int) -> Callable[[], Any]:
    """A training step with clipping and AdamW."""
    compute, optimizer = training_step(model, batch), adamw(model)

    def run() -> None:
        compute()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


def captured_optimizer_step(model: Any, batch: int, compiled: bool = False) -> Callable[[], Any]:
    """The same as one CUDA graph, by the public helper; AdamW's kernels are torch's fused ones or torch.compile's."""
    optimizer = adamw(model)
    if compiled:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True, capturable=True)
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    step = CapturedStep(model.train(), optimizer, max_norm=1.0)
    tokens = torch.randint(model.config.vocab_size, (batch, T), device=DEVICE)
    run = partial(step, dict(input_ids=tokens, labels=tokens, use_cache=False))
    while not step.captured:
        run()
    return run


def adamw(model: Any) -> torch.optim.Optimizer:
    """Fused AdamW that a graph can hold."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)


def generate(model: Any, batch: int, **options: Any) -> Callable[[], Any]:
    """Greedy generation of TOKENS tokens after a short prompt, the first by a prefill."""
    prompt = torch.randint(1, model.config.vocab_size, (batch, PROMPT), device=DEVICE)
    options |= dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    return partial(
        model.eval().generate, prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, **options
    )


def generation_loop(model: Any, batch: int) -> Callable[[], Any]:
    """`generate` with a forward that does nothing."""
    logits = torch.randn(batch, 1, model.config.vocab_size, device=DEVICE, dtype=model.dtype)

    def forward(self: Any, input_ids: Any = None, past_key_values: Any = None, **rest: Any) -> Any:
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    model.forward = MethodType(forward, model)
    return generate(model, batch, cache_implementation="static")


def prefill(model: Any, batch: int) -> Callable[[], Tensor]:
    """A prompt into a new cache, and the last token's logits."""
    tokens = torch.randint(model.config.vocab_size, (batch, T), device=DEVICE)
    model.eval()

    @torch.no_grad()
    def run() -> Tensor:
        return model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits

    return run


def decode(model: Any, batch: int) -> Callable[[], Tensor]:
    """A greedy step over a cache that holds a prompt; of a softmax model, at one length, which is put back."""
    prompt = torch.randint(model.config.vocab_size, (batch, PROMPT), device=DEVICE)
    model.eval()
    ours = isinstance(model, KDAForCausalLM)
    # Of a static cache a softmax model gets its best case: every position is in use, so that no mask is built.
    cache: Any = StaticCache(config=model.config, max_cache_len=PROMPT + 1) if ours else None
    softmax = ours and "full_attention" in model.config.layer_types
    with torch.no_grad():
        first = model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache = first.past_key_values
    read: list[Tensor] = []
    ids = first.logits[:, -1:].argmax(-1)
    mask = {"attention_mask": NO_MASK} if ours else {}

    @torch.no_grad()
    def run() -> Tensor:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            read.extend(tensors_of(cache))  # the graph's, also where a step puts new tensors in their place
        if softmax:
            for layer in cache.layers:
                if isinstance(layer, StaticLayer):
                    layer.cumulative_length.fill_(PROMPT)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **mask).logits
        ids.copy_(logits[:, -1:].argmax(-1))
        return logits

    return run


def tensors_of(holder: Any) -> list[Tensor]:
    """The tensors that a cache holds, in its layers' attributes, lists and dicts."""
    if isinstance(holder, Tensor):
        return [holder]
    if isinstance(holder, dict):
        parts: Any = holder.values()
    elif isinstance(holder, (list, tuple)):
        parts = holder
    else:
        parts = vars(holder).values() if isinstance(holder, CACHES) else ()
    return [t for part in parts for t in tensors_of(part)]


def compiled_decode(model: Any, batch: int) -> Callable[[], Tensor]:
    """`decode` by torch.compile after a prefill without it, as transformers' `generate` with a static cache."""
    torch._dynamo.reset()
    run = decode(model, batch)
    model.forward = torch.compile(model.forward, fullgraph=True)
    return run


TASKS = {
    "training step": training_step, "optimizer step": optimizer_step, "prefill": prefill, "decode step": decode,
    "generate": generate,
}  # fmt: skip
MODES = {
    "training step": ("call", "graph"), "prefill": ("call",),
    "optimizer step": ("call", "captured", "captured with compiled AdamW"),
    "decode step": ("call", "graph", "compiled graph"), "generate": ("call", "static", "eager", "loop"),
}  # fmt: skip
# Modes other than a call and its graph.
SPECIAL: dict[tuple[str, str], Callable[[Any, int], Callable[[], Any]]] = {
    ("optimizer step", "captured"): captured_optimizer_step, ("decode step", "compiled graph"): compiled_decode,
    ("optimizer step", "captured with compiled AdamW"): partial(captured_optimizer_step, compiled=True),
    ("generate", "loop"): generation_loop, ("generate", "eager"): partial(generate, disable_compile=True),
    ("generate", "static"): partial(generate, cache_implementation="static"),
}  # fmt: skip
STEPS = {"generate": TOKENS}  # of a call; times are per step


def part_of(kernel: str) -> str:
    name = kernel.lower()
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "rest")


def gpu_time(machine: CudaMachine, run: Callable[[], Any], calls: int = 3) -> tuple[dict[str, float], int, Counter]:
    """Milliseconds by part and kernels of one call, and milliseconds by kernel."""
    trace(machine, run, 1)
    events = [e for e in trace(machine, run, calls) if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    parts: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for e in events:
        parts[part_of(e["name"])] += e["dur"] / calls / 1e3
        kernels[e["name"][:100]] += e["dur"] / calls / 1e3
    return dict(parts), round(len(events) / calls), kernels


def prepare(machine: CudaMachine, task: str, mode: str, batch: int, model: Any) -> Callable[[], Any]:
    """The work of one row.

    Raises:
        CaptureError: it cannot be captured.
    """
    run = SPECIAL.get((task, mode), TASKS[task])(model, batch)
    if "graph" not in mode:
        return run
    replay = machine.graph(run)
    return lambda: (replay(), run)[0]  # the graph reads the model's parameters, which `run` keeps


def takes_part(contender: str, task: str) -> bool:
    """Return False for a contender that only trains, in another task."""
    return contender != "ours-float8" or task in ("training step", "optimizer step")


def measure(machine: CudaMachine, contenders: Sequence[str], task: str, mode: str, batch: int, size: str) -> list[Any]:
    """A row for each contender, in turns."""
    length, steps = T if task in ("training step", "optimizer step", "prefill") else 1, STEPS.get(task, 1)
    fields = {"task": task, "mode": mode, "batch": batch, "T": length}
    rows, runs, parameters = {}, {}, {}
    for name in contenders:
        rows[name] = fields | {"contender": name}
        held = torch.cuda.memory_allocated()
        model = build(name, size)
        parameters[name] = sum(p.numel() for p in model.parameters())
        held += sum(p.nbytes for p in model.parameters())
        try:
            runs[name] = prepare(machine, task, mode, batch, model)
            runs[name]()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()  # of building and warming up
            runs[name]()
            torch.cuda.synchronize()
        except (CaptureError, RuntimeError, TypeError, ValueError) as problem:
            rows[name]["reason"] = f"{type(problem).__name__}: {problem}"[:200]
            continue
        if mode == "call":
            rows[name]["MiB"] = (torch.cuda.max_memory_allocated() - held) / 2**20
        parts, kernels, by_name = gpu_time(machine, runs[name])
        parts = {part: ms / steps for part, ms in parts.items()}
        rows[name] |= {"GPU ms": sum(parts.values()), "kernels": kernels / steps, "parts": parts}
        rows[name]["slowest"] = {kernel: ms / steps for kernel, ms in by_name.most_common(25)}
    for name, times in timing.compare_ms(runs, synchronize=torch.cuda.synchronize, calls=5).items():
        seconds, tokens = times["median"] / steps / 1e3, batch * length
        rows[name] |= {"wall": times, "wall ms": seconds * 1e3, "tokens/s": tokens / seconds}
        if task in ("training step", "optimizer step"):
            rows[name]["MFU %"] = 600 * parameters[name] * tokens / seconds / PEAK
    runs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="0.7b")
    parser.add_argument("--contenders", default="ours,softmax" + (",fla" if importlib.util.find_spec("fla") else ""))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--modes", default=",".join(dict.fromkeys(mode for modes in MODES.values() for mode in modes)))
    report.add_name_option(parser, "gpu-lm-<size>")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_commit_option(parser)
    timing.add_tuning_option(parser)
    args = parser.parse_args(argv)
    contenders = args.contenders.split(",")
    if unknown := [name for name in contenders if name not in CONTENDERS]:
        parser.error(f"argument --contenders: expected some of {', '.join(CONTENDERS)}, got {', '.join(unknown)}")
    machine, rows = CudaMachine(), []
    name = args.name or f"gpu-lm-{args.size.replace('.', '')}"
    jobs = [
        partial(measure, machine, [c for c in contenders if takes_part(c, task)], task, mode, batch, args.size)
        for task in args.tasks.split(",")
        for mode in MODES[task]
        if mode in args.modes.split(",")
        for batch in (BATCHES if task in ("decode step", "generate") else (1,))
    ]
    for job in tqdm(jobs, unit="case"):
        rows += job()
        results = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit))
        report.save(args.output, results)
    print(report.text(results))


if __name__ == "__main__":
    main()
