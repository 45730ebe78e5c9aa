"""The loop of a `generate` on the device: a CUDA graph holds a decode step and the choice of its tokens.

The host replays it several times before it checks whether all sequences have ended. Tokens are those of transformers'
own loop over the same cache, sampled ones included.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kda_layers.kernels.torch_private import dispatch_modes
from kda_layers.modeling.cuda_graphs.decode_steps import Advance, Request, Steps
from kda_layers.modeling.cuda_graphs.decoding import (
    CAPTURED_DECODING,
    DEFAULT_CACHES,
    Buffers,
    has_only_kda_layers,
    what_moves,
)
from kda_layers.modeling.inputs.masks import MASKS
from kda_layers.modeling.layer.cache import with_kda_layers
from kda_layers.modeling.layer.fast_paths import Call, Reason, fast_path
from kda_layers.modeling.layer.weights import is_capturing
from kda_layers.modeling.seams import (
    CACHE,
    MASKS_ON_DEVICE,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    StaticCache,
)

STEPS = 8  # between two synchronisations with the host
# Logits processors that read the scores alone, or `input_ids` as a set: the buffer of ids is padded with copies.
PROCESSORS = (
    RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper,
)  # fmt: skip
CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
MOST_TOKENS = 2**20  # of a sequence: the buffer of ids is allocated at once
# Methods that transformers' loop calls in a step.
CALLED = (
    "forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill",
    "create_masks_for_generate", "_has_unfinished_sequences",
)  # fmt: skip
# Attention of transformers that takes any mask, and whose mask is made without a copy from the host.
ATTENTION = ("sdpa", "eager") if MASKS_ON_DEVICE else ("sdpa",)
# Arguments of a step; our models drop the tokenizer.
ARGUMENTS = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "tokenizer", CACHE}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@fast_path("loop of `generate` on the device", instead="transformers' loop on the host")
def DECODE_LOOP(call: Any, model: Any, request: Request) -> Iterator[Reason]:
    """A `generate` that needs nothing of a step but its tokens, chosen by what a CUDA graph can hold."""
    config, cache = request.generation_config, request.cache
    yield from CAPTURED_DECODING.reasons(call, model)
    if config.disable_compile:
        yield Reason("has disable_compile=True")
    if (config.compile_config or getattr(model.generation_config, "compile_config", None)) is not None:
        yield Reason("has a compile_config")
    if moves := what_moves(cache):
        yield Reason(f"has {moves}, whose tensors move between steps")
    kinds = set(getattr(model.config, "layer_types", None) or ["a configuration of several models"])
    if others := sorted(kinds - {"linear_attention", *MASKS}):
        yield Reason(f"has {', '.join(others)}, for which no masks are made here")
    attention = model.config._attn_implementation
    if not (has_only_kda_layers(model.config) or attention in ATTENTION):
        yield Reason(f"has {attention}, which takes no mask of empty slots", "attn_implementation='sdpa'")
    for kind, allowed in (("logits_processor", PROCESSORS), ("stopping_criteria", CRITERIA)):
        others = [type(x).__name__ for x in getattr(request, kind) if type(x) not in allowed]
        if others:
            yield Reason(f"has {', '.join(others)} for {kind}")
    if request.most_tokens > MOST_TOKENS:
        yield Reason(f"may have more than {MOST_TOKENS} tokens", "generate(..., max_new_tokens=n)")
    ignored = (getattr(p, "prompt_ignore_length", None) for p in request.logits_processor)
    if any(n is not None and int(torch.as_tensor(n).max()) > request.input_ids.shape[1] for n in ignored):
        yield Reason("has a repetition penalty that leaves out new tokens")
    if (mode := config.get_generation_mode()) not in MODES:
        yield Reason(f"decodes by {mode.value}")
    if config.stop_strings:
        yield Reason("has stop strings")
    asked = [name for name in OUTPUTS if getattr(config, name)]
    if asked and config.return_dict_in_generate:
        yield Reason(f"returns what each step computes ({', '.join(asked)})")
    if unknown := sorted(request.model_kwargs.keys() - ARGUMENTS):
        yield Reason(f"passes {', '.join(unknown)} to the model")
    if cache is None or not request.model_kwargs.get("use_cache"):
        yield Reason("has no cache")
    if request.synced_gpus or config.is_assistant:
        yield Reason("waits for other processes" if request.synced_gpus else "drafts for another model")
    if model.training:
        yield Reason("is in training mode", "call model.eval()")
    if call.grad:
        yield Reason("runs with gradients enabled")
    if dispatch_modes() or is_capturing(call.device):
        yield Reason("runs under a dispatch mode of torch or in a capture")
    if changed := [name for name in CALLED if not _is_known(model, name)]:
        yield Reason(f"has {', '.join(changed)} of its own")


def _is_known(model: Any, name: str) -> bool:
    """Return True if a method is transformers' or this package's, or PEFT's that leaves a step as it is."""
    replaced = vars(model).get(name)
    if replaced is None:
        method = getattr(type(model), name, None)  # stock classes have no method for masks since transformers 5.24
        return method is None or method.__module__.partition(".")[0] in ("transformers", __name__.partition(".")[0])
    adapter = getattr(getattr(replaced, "__self__", None), "active_peft_config", None)
    return not getattr(adapter, "is_prompt_learning", True)


def supposed_request(model: Any, config: Any) -> Request:
    """Return the request of a `generate` with this configuration that is not made, for `explain`."""
    config = copy.deepcopy(config)
    config.max_length = config.max_length or 1  # `generate` sets it
    model._prepare_special_tokens(config, True, device="cpu")
    cache, made = config.cache_implementation, dict(config=model.config)
    if config.cache_implementation in DEFAULT_CACHES:
        cache = with_kda_layers(DynamicCache(**made))
    elif config.cache_implementation == "static":
        cache = with_kda_layers(StaticCache(**made, max_cache_len=1))
    criteria = copy.copy(config)
    criteria.stop_strings = None  # which would need the tokenizer
    return Request(
        torch.empty((1, 1), dtype=torch.long),
        model._get_logits_processor(config, input_ids_seq_length=1, logits_processor=[], device="cpu"),
        model._get_stopping_criteria(criteria, []), config, False, None,
        {"use_cache": config.use_cache is not False, CACHE: cache},
    )  # fmt: skip


def loops_on_device(model: Any, request: Request) -> bool:
    """Return True if `sample_on_device` serves a request."""
    return DECODE_LOOP.serves(Call(request.input_ids), model, request)


def sample_on_device(model: Any, request: Request) -> Any:
    """Return what `GenerationMixin._sample` returns for a request that `loops_on_device`.

    Raises:
        RuntimeError: tokens are drawn from scores that are NaN or infinite.
    """
    steps = Steps(model, request)
    prompt = model._prefill(request.input_ids, request.generation_config, request.model_kwargs, is_first_iteration=True)
    buffers = Buffers(request.cache)
    try:
        steps.begin(prompt.logits)
        del prompt
        with model._optimize_model_for_decode():  # switches experts to batched_mm on a GPU, as transformers' loop does
            ids, first = _run(steps, buffers)
    finally:
        buffers.give_back()
    if first is not None:
        first.keep()
    if not request.generation_config.return_dict_in_generate:
        return ids
    return GenerateDecoderOnlyOutput(sequences=ids, **{CACHE: request.cache})


def _run(steps: Steps, buffers: Buffers) -> tuple[Tensor, Advance | None]:
    """Run the steps after the first tokens; return all tokens [B, length], and what can be kept of the first steps."""
    request = steps.request
    streamer, ends, draws = request.streamer, request.end_tokens is not None, request.generation_config.do_sample
    together = 1 if ends and request.returns_cache else STEPS
    generator, before, advance, kept = _generator(steps.ids.device), None, None, None
    shown = request.input_ids.shape[1]  # tokens given to the streamer
    first = shown + 1  # tokens before the steps
    ran, all_steps, last = 0, request.most_tokens - first, 0  # steps; those at the last synchronisation
    most = all_steps if request.returns_cache else sys.maxsize  # that buffers have places for
    while True:
        if ends or streamer is not None or ran == all_steps:
            longest, going, invalid = steps.counts.tolist()
            if invalid:
                raise RuntimeError("scores must be finite where tokens are drawn, got NaN or inf")
            if streamer is not None:
                for tokens in steps.ids[:, shown:longest].T.contiguous().cpu():
                    streamer.put(tokens)
            shown = longest
            if not going or ran == all_steps:
                break
        if not buffers.free:
            advance = None  # which holds the buffers
            buffers.grow(ran, most)
        advance = advance or Advance(steps)
        if ran == 0 and advance.lasts:
            kept = advance  # graphs over larger buffers share its tensors and are not kept
        last, before = ran, generator.get_state() if ends and draws else None
        more = min(together, all_steps - ran, buffers.free)
        for _ in range(more):
            advance()
        ran, buffers.free = ran + more, buffers.free - more
    if first + ran > longest and before is not None:  # as many random numbers as transformers would have drawn
        generator.set_state(before)
        for _ in range(first + last, longest):
            steps.draw()
    if streamer is not None:
        streamer.end()
    return steps.ids[:, :longest].clone(memory_format=torch.contiguous_format), kept


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
