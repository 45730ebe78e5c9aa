"""The KDA layer: projections, short convolution, gates, the operator, gated norm, output projection."""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from kda_layers.kernels.contract import MIN_LOWER_BOUND, check_lower_bound, check_offsets, sequence_offsets, state_dtype
from kda_layers.kernels.short_conv import short_conv
from kda_layers.modeling.cache import LayerState


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution with SiLU: `kernels.short_conv` with its weight [D, 1, W]; no bias."""

    def __init__(self, channels: int, kernel_size: int):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, left_padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return short_conv(x, self.weight[:, 0], state, cu_seqlens, left_padding)


class KimiDeltaAttention(nn.Module):
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
        layer_idx: this layer's index in a cache; needed only to use one.
        backend: name of a kernel backend; None chooses (see `kda_layers.explain`).

    Raises:
        ValueError: num_v_heads not a multiple of num_heads; a size below 1; a bad gate_activation or lower_bound.
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
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if num_v_heads % num_heads:
            raise ValueError(f"num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}")
        if gate_activation not in ("lower_bound", "softplus"):
            raise ValueError(f"gate_activation must be 'lower_bound' or 'softplus', got {gate_activation!r}")
        check_lower_bound(gate_activation, lower_bound)
        self.hidden_size, self.head_dim, self.head_v_dim = hidden_size, head_dim, head_v_dim
        self.num_heads, self.num_v_heads, self.layer_idx = num_heads, num_v_heads, layer_idx
        self.q_dim, self.v_dim = num_heads * head_dim, num_v_heads * head_v_dim
        self.options = dict(
            gate_activation=gate_activation,
            lower_bound=lower_bound,
            beta_activation="2sigmoid" if allow_neg_eigval else "sigmoid",
            backend=backend,
        )

        def linear(d_in: int, d_out: int) -> nn.Linear:
            return nn.Linear(d_in, d_out, bias=False)

        self.q_proj, self.k_proj = linear(hidden_size, self.q_dim), linear(hidden_size, self.q_dim)
        self.v_proj = linear(hidden_size, self.v_dim)
        self.conv1d = ShortConvolution(2 * self.q_dim + self.v_dim, conv_size)
        self.f_a_proj, self.f_b_proj = linear(hidden_size, head_v_dim), linear(head_v_dim, num_v_heads * head_dim)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads * head_dim, dtype=torch.float32))
        self.b_proj = linear(hidden_size, num_v_heads)
        self.g_a_proj, self.g_b_proj = linear(hidden_size, head_v_dim), linear(head_v_dim, self.v_dim)
        self.o_norm = nn.RMSNorm(head_v_dim, eps=norm_eps)
        self.o_proj = linear(self.v_dim, hidden_size)
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
        if self.options["gate_activation"] == "softplus":
            init.copy_(self.A_log, init.uniform_(self.A_log, a=1.0, b=16.0).log())
        else:
            init.zeros_(self.A_log)
        dt = init.uniform_(self.dt_bias, a=math.log(1e-3), b=math.log(1e-1)).exp()
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

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
            attention_mask: [B, S] with S >= T, nonzero for real tokens; the last T columns count. Padding neither
                writes nor decays the state. With a cache only left padding is allowed.
            past_key_values: a transformers cache whose layer `layer_idx` is of linear attention; read and updated.
            cu_seqlens: [N + 1] int32 or int64 offsets of the sequences packed along T (then B = 1); the cache then
                has N rows. Not with attention_mask.

        Returns:
            [B, T, D] in the dtype of hidden_states.

        Raises:
            ValueError: attention_mask of another rank or size, right padding with a cache, cu_seqlens with a mask,
                a cache of another number of sequences; what `kda_layers.kda` raises.
        """
        mask = _local_mask(attention_mask, hidden_states, cu_seqlens, past_key_values is not None)
        if cu_seqlens is not None:
            _check_packed(cu_seqlens, hidden_states)
        sequences = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = LayerState(past_key_values, self.layer_idx, sequences)
        x = hidden_states if mask is None else hidden_states.masked_fill(~mask[..., None], 0)

        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        left_padding = None if mask is None else (~mask).sum(1)
        convolved, conv_state = self.conv1d(qkv, state.conv, cu_seqlens, left_padding)
        q, k, v = convolved.split((self.q_dim, self.q_dim, self.v_dim), -1)
        q, k = (rearrange(t, "b t (h k) -> b t h k", k=self.head_dim) for t in (q, k))
        v = rearrange(v, "b t (h v) -> b t h v", v=self.head_v_dim)

        g = rearrange(self.f_b_proj(self.f_a_proj(x)), "b t (h k) -> b t h k", k=self.head_dim)
        beta = self.b_proj(x)
        if mask is not None:  # logits this low mean no decay and no write, exactly
            g = g.masked_fill(~mask[..., None, None], torch.finfo(g.dtype).min)
            beta = beta.masked_fill(~mask[..., None], torch.finfo(beta.dtype).min)

        wide = state_dtype(q.dtype)
        o = state.attend(
            q, k, v, g, beta, cu_seqlens=cu_seqlens,
            A_log=self.A_log.to(wide), dt_bias=self.dt_bias.to(wide).view(-1, self.head_dim), **self.options,
        )  # fmt: skip
        state.store_conv(conv_state, qkv, left_padding)

        gate = rearrange(self.g_b_proj(self.g_a_proj(x)), "b t (h v) -> b t h v", v=self.head_v_dim)
        o = self.o_norm(o.to(self.o_norm.weight.dtype)) * torch.sigmoid(gate)
        return self.o_proj(rearrange(o, "b t h v -> b t (h v)"))

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, v_heads={self.num_v_heads}, K={self.head_dim}, V={self.head_v_dim}, "
            + ", ".join(f"{name}={value}" for name, value in self.options.items())
        )


def _local_mask(mask: Tensor | None, x: Tensor, cu_seqlens: Tensor | None, cached: bool) -> Tensor | None:
    """The mask of this call's tokens, [B, T] bool, after checking it."""
    if mask is None:
        return None
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        raise ValueError("attention_mask must be None with cu_seqlens: packed sequences have no padding")
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have 2 dimensions [B, S], nonzero for real tokens, got shape {tuple(mask.shape)}"
        )
    if mask.shape[0] != B or mask.shape[1] < T:
        raise ValueError(f"attention_mask must have shape [{B}, at least {T}], got {list(mask.shape)}")
    local = mask[:, -T:] != 0
    if cached and not torch.compiler.is_compiling() and not bool((local[:, 1:] >= local[:, :-1]).all()):
        raise ValueError(
            "attention_mask must have its padding on the left when a cache is used: tokens after padding would "
            "otherwise follow the wrong state. Pad on the left, or pass past_key_values=None"
        )
    return local


def _check_packed(cu_seqlens: Tensor, x: Tensor) -> None:
    """Checks offsets before any work; their values only where reading them does not wait for a device."""
    check_offsets(cu_seqlens, x)
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        sequence_offsets(cu_seqlens, x.shape[1])
