"""The steps of a `generate` on the device: the model, the choice of tokens, and the graph that holds both."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import EosTokenCriteria, MaxLengthCriteria

from kda_layers.kernels.torch_private import current_stream
from kda_layers.modeling.cuda_graphs.capture import (
    CONSTANTS,
    CacheState,
    CudaGraphs,
    Step,
    capture_step,
    failed_captures,
)
from kda_layers.modeling.cuda_graphs.decoding import has_only_kda_layers, rounded
from kda_layers.modeling.cuda_graphs.kept import MOST_BYTES, Kept, ModelState, circumstances, history_of
from kda_layers.modeling.inputs.masks import masks_for_generate
from kda_layers.modeling.seams import CACHE


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


class Steps:
    """The decode steps of a request, over tensors at fixed addresses.

    Attributes:
        ids: [B, at least the most tokens]; places of later tokens hold the row's first new token.
        counts: [3] int64: tokens of the longest sequence, sequences that have not ended, and draws from NaN.
    """

    # Tensors that a step reads or writes, besides those of the cache and the model.
    TENSORS = "ids", "counts", "_going", "_token", "_column", "_positions", "_mask", "_end", "_pad"

    def __init__(self, model: Any, request: Request) -> None:
        """Create the steps of a request whose prompt is still to be read, which may change its arguments."""
        self.model, self.request, self.cache = model, request, request.cache
        self._end, pad = request.end_tokens, request.generation_config._pad_token_tensor
        self._pad: Tensor | None = None if pad is None else pad.clone()  # as a graph may outlive the configuration
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
        first, left = self._choose(logits)[:, None], rounded(self.request.most_tokens) - length
        self.ids = torch.cat((prompt, first.expand(-1, left)), 1)
        self._token, self._column = first.clone(), torch.full((1,), length, **new)
        if self._mask is not None:
            self._mask = nn.functional.pad(self._mask, (0, left))

    def tensors(self) -> dict[str, Tensor]:
        """Return `TENSORS` by name, without those that are None."""
        return {name: t for name in self.TENSORS if (t := getattr(self, name)) is not None}

    def move_to(self, places: dict[str, Tensor]) -> None:
        """Copy all tensors to these places, and use these from now on."""
        for name, t in self.tensors().items():
            setattr(self, name, places[name].copy_(t))

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
    """Advances the steps of a request, from a CUDA graph once such a step has run in this `generate` or before.

    After `keep`, the graph outlives the `generate`, with its tensors: the next request of this kind moves into them,
    unless the model has changed.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._history = steps, history_of(steps.model)
        self._state, self._device = CacheState(steps.cache), steps.ids.device
        self._graphs: CudaGraphs | None = None
        self._step: Step | None = None
        self._model: ModelState | None = None  # when the step was captured
        self._failures = 0  # of captures before it
        self._has_run, self._failed = False, not self._state.is_readable(self._device)
        autocast = torch.get_autocast_dtype(self._device.type) if torch.is_autocast_enabled(self._device.type) else None
        choices, samples = steps.request.logits_processor, steps.request.generation_config.do_sample
        kind = self._state.kind(), autocast, torch.is_inference_mode_enabled(), samples
        self._kind = hash((*kind, *map(type, choices)))
        values = [(type(choice), *vars(choice).items()) for choice in choices]
        places = [(name, t.shape, t.dtype) for name, t in steps.tensors().items()]
        stream = current_stream(self._device.index) if self._device.type == "cuda" else None
        around, size = circumstances(), sum(t.nbytes for t in (*steps.tensors().values(), *self._state.tensors()))
        self._key = (*kind, values, places, stream, around)
        constant = all(isinstance(value, CONSTANTS) for choice in choices for value in vars(choice).values())
        self.lasts = constant and around is not None and size <= MOST_BYTES and not steps.request.returns_cache
        if self.lasts and not self._failed and (found := self._history.take_kept(self._key, steps.model)) is not None:
            kept, self._model = found
            self._state.move_to(kept.places)
            steps.move_to(kept.tensors)
            self._state, self._failures = CacheState(steps.cache), kept.failures
            self._step, self._graphs = kept.step, kept.graphs

    def __call__(self) -> None:
        """Run one step."""
        if self._step is None and not self._failed and (self._has_run or self._kind in self._history.captured):
            self._capture()
        if self._step is None:
            self._steps.advance()
        else:
            self._step.run(self._state)
        self._has_run = True

    def keep(self) -> None:
        """Leave the graph to later requests. The cache gets copies of the tensors that the graph writes."""
        if self._step is None or self._graphs is None or self._model is None:
            return
        places = self._state.tensors()
        CacheState(self._steps.cache).part_from(places)
        kept = Kept(self._key, self._failures, self._step, self._graphs, self._steps.tensors(), places)
        self._history.keep(kept, self._model)
        self._graphs = None

    def __del__(self) -> None:
        if getattr(self, "_graphs", None) is not None:
            self._history.idle.append(self._graphs)

    def _capture(self) -> None:
        graphs = self._history.take(self._device)
        self._model = self._history.state_of(self._steps.model) if self.lasts else None
        step = capture_step(graphs, self._state, self._steps.advance)
        if not isinstance(step, str):
            self._step, self._graphs, self._failures = step, graphs, failed_captures()
            self._history.captured.add(self._kind)
            return
        self._history.captured.discard(self._kind)
        self._failed = self._has_run
        if self._failed:
            self._history.warn(self._steps.model, step)
