"""Decide how much the KDA layers of a model keep for the backward: `recompute="auto"` of many layers together."""

from __future__ import annotations

from ...kernels.kda.contract import MOST_SAVED

MOST_KEPT = 0.1  # share of the device's memory that the KDA layers of a model may keep together with "auto"


class ChoosesRecompute:
    """A KDA layer with the operator's `recompute`; a mixin of modules.

    From a forward to its backward, every KDA layer of a model keeps what the operator saves. With "auto", each of n
    layers may keep a share MOST_KEPT / n of the device's memory, at most the MOST_SAVED of a layer that is used alone.

    With gradient checkpointing, one layer at a time keeps anything: between its second forward and its backward. Its
    share is then that of a layer alone, because an operator that recomputes would run its forward three times. In a
    model that `swap_attention` changed in place, layers that transformers' every_n_layers leaves out count as
    checkpointed, too.
    """

    recompute: bool | float | str = "auto"  # as in `kda`
    layers_in_model: int = 1  # KDA layers that keep their share at the same time
    gradient_checkpointing: bool  # of a layer in a model; transformers sets it
    training: bool

    def operator_recompute(self) -> bool | float | str:
        """Return the `recompute` of one call of the operator."""
        if self.layers_in_model == 1 or not isinstance(self.recompute, str):
            return self.recompute
        if self.gradient_checkpointing and self.training:
            return self.recompute
        return min(MOST_SAVED, MOST_KEPT / self.layers_in_model)
