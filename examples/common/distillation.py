"""Distillation of a model with swapped attention from the original: layer by layer, then end to end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from common.optimization import fit
from common.settings import TrainingSettings
from common.text import Text


def distil_layers(
    teacher: PreTrainedModel, student: PreTrainedModel, text: Text, s: TrainingSettings, steps: int
) -> list[float]:
    """Train each KDA layer to return the output of the softmax layer in its place, for that layer's input in `teacher`.

    All layers learn at once, from one forward pass of the teacher.

    Returns:
        Loss of each step: the squared error relative to the square of the output, averaged over layers.
    """
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    learners = nn.ModuleList()
    hooks = []
    indices = [i for i, kind in enumerate(student.config.layer_types) if kind == "linear_attention"]
    for i in indices:

        def see(_: Any, args: Any, kwargs: Any, output: Any, i: int = i) -> None:
            seen[i] = kwargs["hidden_states"], output[0]

        hooks.append(teacher.model.layers[i].self_attn.register_forward_hook(see, with_kwargs=True))
        learners.append(student.model.layers[i].self_attn)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            teacher(batch, use_cache=False)
        loss = torch.zeros((), device=batch.device)
        for learner, i in zip(learners, indices, strict=True):
            x, want = (t.float() for t in seen[i])
            got, _ = learner(hidden_states=x)
            loss = loss + (got.float() - want).square().mean() / want.square().mean()
        return loss / len(indices)

    try:
        return fit(learners, loss_of, text, s, steps, teacher.device, "distilling layers")
    finally:
        for hook in hooks:
            hook.remove()


def distil_logits(
    teacher: PreTrainedModel, student: PreTrainedModel, text: Text, s: TrainingSettings, steps: int
) -> list[float]:
    """Train all of `student` on the teacher's next-token probabilities; return the KL divergences in nats per token."""

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            want = log_softmax(teacher(batch, use_cache=False).logits.float(), -1)
        got = log_softmax(student(batch, use_cache=False).logits.float(), -1)
        return kl_div(got.flatten(0, 1), want.flatten(0, 1), reduction="batchmean", log_target=True)

    return fit(student.train(), loss_of, text, s, steps, teacher.device, "distilling logits")
