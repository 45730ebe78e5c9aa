"""A Trainer of transformers whose forward and backward are replayed from a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from kda_layers.modeling.cuda_graphs.clipping import clip_grad_norm_
from kda_layers.modeling.cuda_graphs.training_step import CapturedStep, NotCapturable, check_batches
from kda_layers.modeling.seams import OF_TRAINER, check

check(OF_TRAINER)
logger = logging.getLogger("kda_layers")

DEVICES = ("cuda",)
FILTERING = "training_step", "floating_point_ops"  # methods that Trainer calls before and after it adds a loss
DIVISOR, ITEMS = "gradient_accumulation_steps", "num_items_in_batch"  # of a batch, beside what the model gets


class Gradients(torch.optim.Optimizer):
    """An optimizer for a `CapturedStep` that leaves the gradients to another one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, dict(lr=0.0, capturable=True))

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class CapturedTrainer(Trainer):
    """A `Trainer` that replays forward and backward of a batch from a CUDA graph: the GPU no longer waits for the host.

    Losses and gradients have the bits of `Trainer`'s. Accumulation of gradients, optimizer, schedulers, callbacks,
    evaluation and checkpoints are `Trainer`'s own. Gradients are clipped by fewer kernels, to the same bits, and the
    host does not wait for the GPU at every step: batches in pinned memory are copied without waiting
    (`accelerator_config`'s non_blocking, also if it is False), and `logging_nan_inf_filter` corrects the sum of
    losses on the GPU, unless a subclass overrides `training_step` or `floating_point_ops`. What a graph cannot hold
    runs as in `Trainer`, and the logger `kda_layers` gives each reason once: batches of other shapes than the first
    one (pad or pack to one length), several GPUs or processes, a loss scaler (fp16), optimizers that step in the
    backward (LOMO, layerwise ones), `torch_empty_cache_steps`, a model or a `compute_loss` that reads tensors on the
    host. The last accumulation of an epoch runs eagerly too, without a line in the log, if it has fewer batches.
    `CapturedStep` lists the constraints on a captured model.
    """

    _step: CapturedStep | None = None
    _parameters: list[nn.Parameter]  # that are trained
    _gradients: list[Tensor | None] = []  # noqa: RUF012  (the graph's own, of the parameters)
    _failed = ""  # why the step cannot be captured
    _told: frozenset[str] = frozenset()  # reasons that were logged
    _unfiltered: tuple[Tensor, Tensor] | None = None  # a loss that Trainer adds, and the sum of losses before it
    _operations: tuple[Any, int] = None, 0  # shapes of a batch, and its floating point operations

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a `Trainer` of these arguments."""
        super().__init__(*args, **kwargs)
        if self.args.dataloader_pin_memory and not self._reason():
            self.accelerator.dataloader_config.non_blocking = True  # a copy would wait for the optimizer's step

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add the gradients of a batch to those of the model and return its loss; see `Trainer.training_step`."""
        arguments = model, inputs, num_items_in_batch
        self._filter()  # if an exception left it off
        if reason := self._reason() or self._prepare_step(model):
            return self._eager(reason, *arguments)
        assert self._step is not None
        batch = {**self._prepare_inputs(inputs), DIVISOR: self.current_gradient_accumulation_steps}
        batch[ITEMS] = num_items_in_batch
        held = self._step._inputs
        if held and held[0][DIVISOR] != batch[DIVISOR]:
            return super().training_step(*arguments)
        try:
            check_batches((batch,), held, self.args.device)
        except (TypeError, ValueError) as error:
            return self._eager(f"of a batch, {error}", *arguments)
        model.train()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        own = {id(gradient) for gradient in self._gradients}  # which the replay overwrites
        before = [p.grad.clone() if p.grad is not None and id(p.grad) in own else p.grad for p in self._parameters]
        was_captured = self._step.captured
        try:
            loss = self._step(batch)
        except (NotCapturable, torch.OutOfMemoryError) as error:
            if was_captured or self._step._calls < self._step.warmup:  # out of memory in an eager step
                raise
            for p, old in zip(self._parameters, before, strict=True):
                p.grad = old
            self._step, self._failed = None, str(error)
            return self._eager(self._failed, *arguments)
        if not was_captured:
            self._gradients = [p.grad for p in self._parameters]
        self._add_to(before)
        self._defer_filter(loss)
        return loss

    def _defer_filter(self, loss: Tensor) -> None:
        """Turn `logging_nan_inf_filter` off until `_filter`: Trainer's own would wait for the loss."""
        mine = all(getattr(type(self), name) is getattr(CapturedTrainer, name) for name in FILTERING)
        if self.args.logging_nan_inf_filter and mine and hasattr(self, "_tr_loss"):
            self.args.logging_nan_inf_filter, self._unfiltered = False, (loss, self._tr_loss.clone())

    def _filter(self) -> None:
        """Turn the filter on again, and apply it on the GPU to the loss that Trainer has added."""
        if self._unfiltered is not None:
            (loss, before), self._unfiltered, self.args.logging_nan_inf_filter = self._unfiltered, None, True
            steps = 1 + self.state.global_step - self._globalstep_last_logged
            self._tr_loss.copy_(torch.where(loss.isfinite(), self._tr_loss, before + before / steps))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return `Trainer.floating_point_ops`, which walks over all modules for 1.5 ms, once for batches of a shape.

        `Trainer` calls it after each batch, next after it has added the loss.
        """
        self._filter()
        if not isinstance(inputs, Mapping):
            return super().floating_point_ops(inputs)
        shapes = self.model, {name: getattr(value, "shape", None) for name, value in inputs.items()}
        if shapes != self._operations[0]:
            self._operations = shapes, super().floating_point_ops(inputs)
        return self._operations[1]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._reason():
            return super()._clip_grad_norm(model)
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _prepare_step(self, model: nn.Module) -> str:
        """Build the step of the model's trainable parameters, unless it is there; return why it cannot be."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        same = self._step is not None and self._step.model is model and len(parameters) == len(self._parameters)
        if same and all(map(is_, parameters, self._parameters)):
            return ""
        try:
            self._step = CapturedStep(model, Gradients(parameters), loss_of=self._loss_of)
            self._parameters, self._gradients = parameters, []
        except ValueError as error:
            self._failed = str(error)
        return self._failed

    def _add_to(self, before: list[Tensor | None]) -> None:
        """Set the gradients to those of the batch, added to those that were there before."""
        for p, old, new in zip(self._parameters, before, self._gradients, strict=True):
            if old is None and new is not None and self.current_gradient_accumulation_steps > 1:
                new = new.clone()  # the next replay overwrites the graph's own
            p.grad = new if old is None else old if new is None else old.add_(new)

    def _reason(self) -> str:
        """Return why no step can be captured; empty if nothing speaks against it."""
        if self.args.device.type not in DEVICES:
            return f"the device is {self.args.device.type}"
        if self.args.n_gpu > 1 or self.args.world_size > 1 or self.accelerator.distributed_type != "NO":
            return "several GPUs or processes train"
        if self.accelerator.scaler is not None:
            return "a loss scaler reads gradients on the host: train in bfloat16"
        if (optim := self.args.optim.value) in ("lomo", "adalomo") or optim.endswith("_layerwise"):
            return f"{optim} takes its step in the backward"
        if self.args.torch_empty_cache_steps is not None:
            return "torch_empty_cache_steps frees memory between steps"
        return self._failed

    def _eager(self, reason: str, *arguments: Any) -> Tensor:
        """Take a step of `Trainer`; log each reason once, that of batches for the first one."""
        if (kind := reason.partition(",")[0]) not in self._told:
            self._told |= {kind}
            logger.warning("CapturedTrainer runs as Trainer, without a CUDA graph: %s", reason)
        return super().training_step(*arguments)

    def _loss_of(self, **batch: Any) -> Tensor:
        """Return the loss of a batch as `Trainer.training_step` computes it."""
        assert self._step is not None
        divisor, items = batch.pop(DIVISOR), batch.pop(ITEMS)
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(self._step.model, batch, num_items_in_batch=items)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        return loss if scaled else loss / divisor
