"""The KDA layer as a module of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from kda_layers.kernels.kda.activations import MIN_LOWER_BOUND
from kda_layers.kernels.kda.checks import check_lower_bound
from kda_layers.modeling.checks import as_int, check_epsilon
from kda_layers.modeling.mixer import KDAMixer


class KimiDeltaAttention(KDAMixer):
    """Kimi Delta Attention layer (Kimi Linear, arXiv 2510.26692, section 4).

    Args:
        hidden_size: width D of the input and the output.
        num_heads: query / key heads H.
        head_dim: key width K.
        num_v_heads: value heads HV, a multiple of num_heads; None for num_heads.
        head_v_dim: value width V; None for head_dim.
        conv_size: taps W of the short convolution over q, k and v.
        gate_activation: "lower_bound" (log-decay in (lower_bound, 0)) or "softplus" (unbounded).
        lower_bound: in [-5, 0) nats per token with "lower_bound"; None with "softplus".
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        norm_eps: epsilon of the output norm.
        gate_rank: rank of the projections of the log-decay and of the output gate; None for head_v_dim, as Kimi Linear
            and GLM-5.3-Flash have it; 0 for full rank, as Ling / Ring.
        output_gate_bias: whether the output gate has a bias, as in flash-linear-attention.
        layer_idx: this layer's index in a cache; needed only to use one.
        backend: name of a kernel backend; None chooses (see `kda_layers.explain`).

    Raises:
        TypeError: a size, gate_rank or layer_idx that is no integer; norm_eps or lower_bound that is no number.
        ValueError: num_v_heads not a multiple of num_heads; a size below 1; a bad gate_activation or lower_bound; a
            negative norm_eps or gate_rank.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        gate_activation: str = "lower_bound",
        lower_bound: float | None = float(MIN_LOWER_BOUND),
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
        gate_rank: int | None = None,
        output_gate_bias: bool = False,
        layer_idx: int | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        sizes = dict(
            hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, num_v_heads=num_v_heads,
            head_v_dim=head_v_dim, conv_size=conv_size,
        )  # fmt: skip
        sizes = {name: as_int(name, size) for name, size in sizes.items()}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size = sizes.values()
        if num_v_heads % num_heads:
            raise ValueError(f"num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}")
        if gate_activation not in ("lower_bound", "softplus"):
            raise ValueError(f"gate_activation must be 'lower_bound' or 'softplus', got {gate_activation!r}")
        check_lower_bound(gate_activation, lower_bound)
        check_epsilon("norm_eps", norm_eps)
        gate_rank = head_v_dim if gate_rank is None else as_int("gate_rank", gate_rank)
        if gate_rank < 0:
            raise ValueError(f"gate_rank must be 0 (full rank) or more, got {gate_rank}")
        self.hidden_size, self.head_dim, self.head_v_dim = hidden_size, head_dim, head_v_dim
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.layer_idx = None if layer_idx is None else as_int("layer_idx", layer_idx)
        self.gate_rank = gate_rank
        q_dim, v_dim, gate_dim = num_heads * head_dim, num_v_heads * head_v_dim, num_v_heads * head_dim
        self.kda_options = dict(
            gate_activation=gate_activation,
            lower_bound=lower_bound,
            beta_activation="2sigmoid" if allow_neg_eigval else "sigmoid",
            backend=backend,
        )

        def linear(d_in: int, d_out: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(d_in, d_out, bias=bias)

        self.q_proj, self.k_proj = linear(hidden_size, q_dim), linear(hidden_size, q_dim)
        self.v_proj = linear(hidden_size, v_dim)
        channels = 2 * q_dim + v_dim
        self.conv1d = nn.Conv1d(channels, channels, conv_size, groups=channels, bias=False)
        if gate_rank:
            self.f_a_proj, self.f_b_proj = linear(hidden_size, gate_rank), linear(gate_rank, gate_dim)
            self.g_a_proj = linear(hidden_size, gate_rank)
            self.g_b_proj = linear(gate_rank, v_dim, output_gate_bias)
        else:
            self.f_proj, self.g_proj = linear(hidden_size, gate_dim), linear(hidden_size, v_dim, output_gate_bias)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim, dtype=torch.float32))
        self.b_proj = linear(hidden_size, num_v_heads)
        self.o_norm = nn.RMSNorm(head_v_dim, eps=norm_eps)
        self.o_proj = linear(v_dim, hidden_size)
        self.reset_gate()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)  # from_pretrained replaces parameters through this, too
        self._mark_no_weight_decay()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # copies and pickles lose attributes of parameters
        self._mark_no_weight_decay()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)  # to_empty makes new parameters
        self._mark_no_weight_decay()
        return self

    def _mark_no_weight_decay(self) -> None:
        """Marks A_log and dt_bias as those who build parameter groups for optimizers look for it."""
        for name in ("A_log", "dt_bias"):
            p = self._parameters.get(name)
            if p is not None:
                p._no_weight_decay = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Initialises A_log and dt_bias, from dt log-uniform in [1e-3, 1e-1] for each channel.

        softplus, as Kimi Linear: log-decay -exp(A_log) dt, with rates exp(A_log) uniform in [1, 16].
        lower_bound, as GLM-5.3-Flash: log-decay lower_bound (1 - exp(-dt)), with rate 1.
        """
        if self.kda_options["gate_activation"] == "softplus":
            init.copy_(self.A_log, init.uniform_(self.A_log, a=1.0, b=16.0).log())
        else:
            init.zeros_(self.A_log)
        dt = init.uniform_(self.dt_bias, a=math.log(1e-3), b=math.log(1e-1)).exp()
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    @force_accelerate_hooks(["conv1d", "o_norm"])  # their weights are read here, not in their own forward
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Attention output.

        Args:
            hidden_states: [B, T, D].
            attention_mask: [B, S] with S >= T, nonzero for real tokens; the last T columns count. Padding may stand
                anywhere: it neither writes nor decays the state, and the convolution skips it.
            past_key_values: a transformers cache whose layer `layer_idx` is of linear attention; read and updated.
            cu_seqlens: [N + 1] int32 or int64 offsets of the sequences packed along T (then B = 1); the cache then
                has N rows. Not with attention_mask.

        Returns:
            [B, T, D] in the dtype of hidden_states.

        Raises:
            ValueError: hidden_states or attention_mask of another rank or size, cu_seqlens with a mask, a cache of
                another number of sequences, an adapter on conv1d or o_norm; what `kda_layers.kda` raises.
        """
        return self.mix(hidden_states, attention_mask, past_key_values, cu_seqlens)

    def decay_logits(self, x: Tensor) -> Tensor:
        return self.f_b_proj(self.f_a_proj(x)) if self.gate_rank else self.f_proj(x)

    def decay_parameters(self) -> tuple[Tensor, Tensor]:
        return self.A_log, self.dt_bias

    def output_gate(self, x: Tensor) -> Tensor:
        return self.g_b_proj(self.g_a_proj(x)) if self.gate_rank else self.g_proj(x)

    def plain_gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_norm(o.to(self.o_norm.weight.dtype)) * torch.sigmoid(gate)

    @property
    def norm_eps(self) -> float:
        return self.o_norm.eps

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, v_heads={self.num_v_heads}, K={self.head_dim}, V={self.head_v_dim}, "
            + ", ".join(f"{name}={value}" for name, value in self.kda_options.items())
        )
