"""Stock gated delta nets of transformers: KDA with one decay for each head, and an output gate by SiLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from kda_layers.kernels.checks import OUTPUT_ACTIVATIONS
from kda_layers.modeling.layer.weights import as_local
from kda_layers.modeling.swap.in_place import KDAFamily, StockForward


class StockGatedDeltaNet(StockForward):
    """A stock gated delta net with our forward; a subclass tells how its projections are stored."""

    projections: ClassVar[tuple[str, ...]]  # names of the linear layers that read the input
    head_gates = True
    decay_rank = gate_rank = 0

    head_dim = property(lambda self: self.head_k_dim)
    value_head_dim = property(lambda self: self.head_v_dim)
    rms_norm_eps = property(lambda self: self.o_norm.variance_epsilon)
    output_activation: Any = property(lambda self: _activation(self.o_norm))

    def gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_norm(o, gate)

    def _heads(self) -> tuple[int, int]:
        return self.num_k_heads, self.num_v_heads

    def _inputs(self) -> tuple[Any, ...]:
        return tuple(as_local(getattr(self, name)) for name in self.projections)


class StockQwenLayer(StockGatedDeltaNet):
    """Qwen's gated delta net, with one projection for q, k and v, as from Qwen3.5 on."""

    projections: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    o_norm = property(lambda self: self.norm)
    o_proj = property(lambda self: self.out_proj)

    def _split(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        qkv, z, b, a = outputs
        return list(qkv.split((self.key_dim, self.key_dim, self.value_dim), -1)), a, b, z


@dataclass(frozen=True, kw_only=True)
class GatedDeltaFamily(KDAFamily):
    """A family whose models have gated delta nets."""

    mixin: type[nn.Module] = StockQwenLayer
    lower_bound: Callable[[Any], None] = lambda layer: None
    noun = "gated delta net"

    def check(self, layer: Any) -> None:
        super().check(layer)
        norm = next(m for name, m in layer.named_children() if name in ("norm", "o_norm"))
        if _activation(norm) not in OUTPUT_ACTIVATIONS:
            raise ValueError(f"the output gate's activation must be 'silu' or 'sigmoid', got {norm.activation!r}")

    def kda_options(self, layer: Any, backend: str | None) -> dict[str, Any]:
        beta = "2sigmoid" if getattr(layer, "allow_neg_eigval", False) else "sigmoid"
        return super().kda_options(layer, backend) | dict(beta_activation=beta)


def _activation(norm: Any) -> str:
    """Return the activation of a gated norm, SiLU by one of its two names."""
    name: str = norm.activation
    return "silu" if name == "swish" else name
