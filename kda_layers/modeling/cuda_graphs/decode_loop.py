"""The loop of a `generate` on the device: a CUDA graph holds a decode step and the choice of its tokens.

The host replays it several times before it checks whether all sequences have ended. Tokens are those of transformers'
own loop over the same cache, sampled ones included.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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
from kda_layers.modeling.cuda_graphs.capture import CacheState, CudaGraphs, capture_step, history_of
from kda_layers.modeling.cuda_graphs.decoding import (
    CAPTURED_DECODING,
    DEFAULT_CACHES,
    Buffers,
    has_only_kda_layers,
    what_moves,
)
from kda_layers.modeling.inputs.masks import masks_for_generate
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
    "create_masks_for_generate",
)  # fmt: skip
# Attention of transformers that takes any mask, and whose mask is made without a copy from the host.
ATTENTION = ("sdpa", "eager") if MASKS_ON_DEVICE else ("sdpa",)
# Arguments of a step; our models drop the tokenizer.
ARGUMENTS = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "tokenizer", CACHE}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Request(NamedTuple):
    """The arguments of `GenerationMixin._sample`."""

    input_ids: Tensor
    logits_processor: Any  # a LogitsProcessorList
    stopping_criteria: Sequence[Any]
    generation_config: Any
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]

    @property
    def cache(self) -> Any:
        return self.model_kwargs.get(CACHE)

    @property
    def end_tokens(self) -> Tensor | None:
        """[n] tokens that end a sequence; None if none does."""
        found = [c.eos_token_id.flatten() for c in self.stopping_criteria if isinstance(c, EosTokenCriteria)]
        return torch.cat([t.to(self.input_ids.device) for t in found]) if found else None

    @property
    def most_tokens(self) -> int:
        """The length of a sequence with its prompt, at most; one token is always chosen."""
        lengths: list[int] = [c.max_length for c in self.stopping_criteria if isinstance(c, MaxLengthCriteria)]
        return max(min(lengths, default=sys.maxsize), self.input_ids.shape[1] + 1)

    @property
    def returns_cache(self) -> bool:
        """True if the caller gets the cache, which then must not run ahead of the tokens."""
        return self.generation_config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)


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
        return getattr(type(model), name).__module__.partition(".")[0] in ("transformers", __name__.partition(".")[0])
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


class Steps:
    """The decode steps of a request, over tensors at fixed addresses.

    Attributes:
        ids: [B, most tokens]; places of later tokens hold the row's first new token.
        counts: [3] int64: tokens of the longest sequence, sequences that have not ended, and draws from NaN.
    """

    def __init__(self, model: Any, request: Request) -> None:
        """Create the steps of a request whose prompt is still to be read, which may change its arguments."""
        self.model, self.request, self.cache = model, request, request.cache
        self._end, self._pad = request.end_tokens, request.generation_config._pad_token_tensor
        self._has_masks = not has_only_kda_layers(model.config)
        positions, mask = (request.model_kwargs.get(n) for n in ("position_ids", "attention_mask"))
        self._positions = positions[..., -1:] + 1 if self._has_masks and positions is not None else None
        self._mask: Tensor | None = mask if self._has_masks else None

    def begin(self, logits: Tensor) -> None:
        """Choose the first tokens from the prompt's logits [B, 1, vocabulary]."""
        prompt = self.request.input_ids
        (rows, length), new = prompt.shape, dict[str, Any](dtype=torch.long, device=prompt.device)
        self.counts = torch.tensor([length, rows, 0], **new)
        self._going, self.ids = torch.ones(rows, **new), prompt
        first = self._choose(logits)[:, None]
        self.ids = torch.cat((prompt, first.expand(-1, self.request.most_tokens - length)), 1)
        self._token, self._column = first.clone(), torch.full((1,), length, **new)
        if self._mask is not None:
            self._mask = nn.functional.pad(self._mask, (0, self.request.most_tokens - length))

    def advance(self) -> None:
        """Run the model on the last tokens, which are at `_column`, and choose the next ones."""
        outputs = self.model(
            input_ids=self._token, attention_mask=self._masks(), position_ids=self._positions, use_cache=True,
            logits_to_keep=1, return_dict=True, **{CACHE: self.cache},
        )  # fmt: skip
        chosen = self._choose(outputs.logits)[:, None]
        self._column += 1
        self.ids.index_copy_(1, self._column, chosen)
        self._token.copy_(chosen)
        if self._positions is not None:
            self._positions += 1

    def draw(self) -> None:
        """Draw random numbers as one step does."""
        torch.empty(self._drawn, device=self.ids.device).exponential_(1)

    def _masks(self) -> dict[str, Any]:
        if not self._has_masks:
            return {"linear_attention": None}
        if self._mask is not None:
            self._mask.index_fill_(1, self._column + (self._mask.shape[1] - self.ids.shape[1]), 1)
        like = torch.empty((len(self._token), 1, 0), dtype=self.model.dtype, device=self._token.device)
        masks = masks_for_generate(self.model.config, like, self._mask, self.cache)
        assert masks is not None, "without a mask, softmax layers would see the slots that are empty"
        return masks | {"linear_attention": None}

    def _choose(self, logits: Tensor) -> Tensor:
        """Return the next tokens [B] of logits [B, 1, vocabulary], as transformers chooses them."""
        scores = self.request.logits_processor(self.ids, logits[:, -1].to(copy=True, dtype=torch.float32))
        longest, going, invalid = self.counts
        longest += going > 0
        if self.request.generation_config.do_sample:
            scores = nn.functional.softmax(scores, dim=-1)
            # softmax makes a NaN of all scores of a row, or of none
            invalid += scores[:, 0].isnan().any() & (going > 0)
            self._drawn = scores.shape
            scores = scores / torch.empty_like(scores).exponential_(1)  # as torch.multinomial draws one
        chosen = scores.argmax(-1)
        if self._end is not None:
            chosen = chosen * self._going + self._pad * (1 - self._going)
            self._going &= ~(chosen[:, None] == self._end).any(-1)  # torch.isin may wait for the device
            going.copy_(self._going.sum())
        return chosen


class Advance:
    """Advances the steps of a request, from a CUDA graph once such a step has run in this `generate` or before."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._history = steps, history_of(steps.model)
        self._state, self._device = CacheState(steps.cache), steps.ids.device
        self._graphs: CudaGraphs | None = None
        self._replay: Callable[[], None] | None = None
        self._has_run, self._failed = False, not self._state.is_readable(self._device)
        autocast = torch.get_autocast_dtype(self._device.type) if torch.is_autocast_enabled(self._device.type) else None
        chooses = *map(type, steps.request.logits_processor), steps.request.generation_config.do_sample
        self._kind = hash((self._state.kind(), chooses, autocast, torch.is_inference_mode_enabled()))

    def __call__(self) -> None:
        """Run one step."""
        if self._replay is None and not self._failed and (self._has_run or self._kind in self._history.captured):
            self._capture()
        (self._replay or self._steps.advance)()
        self._has_run = True

    def __del__(self) -> None:
        if getattr(self, "_graphs", None) is not None:
            self._history.idle.append(self._graphs)

    def _capture(self) -> None:
        graphs = self._history.take(self._device)
        step = capture_step(graphs, self._state, self._steps.advance)
        if not isinstance(step, str):
            self._replay, self._graphs = step, graphs
            self._history.captured.add(self._kind)
            return
        self._history.captured.discard(self._kind)
        self._failed = self._has_run
        if self._failed:
            self._history.warn(self._steps.model, step)


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
        ids = _run(steps, buffers)
    finally:
        buffers.give_back()
    if not request.generation_config.return_dict_in_generate:
        return ids
    return GenerateDecoderOnlyOutput(sequences=ids, **{CACHE: request.cache})


def _run(steps: Steps, buffers: Buffers) -> Tensor:
    """Run the steps after the first tokens; return all tokens [B, length]."""
    request = steps.request
    streamer, ends, draws = request.streamer, request.end_tokens is not None, request.generation_config.do_sample
    together = 1 if ends and request.returns_cache else STEPS
    generator, before, advance = _generator(steps.ids.device), None, None
    shown = request.input_ids.shape[1]  # tokens given to the streamer
    first = shown + 1  # tokens before the steps
    ran, all_steps, last = 0, request.most_tokens - first, 0  # steps; those at the last synchronisation
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
            buffers.grow(ran, all_steps)
        advance = advance or Advance(steps)
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
    if longest == request.most_tokens:
        return steps.ids
    return steps.ids[:, :longest].clone(memory_format=torch.contiguous_format)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
