"""The KDA layer."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...kernels.checks import OUTPUT_ACTIVATIONS
from ...kernels.deprecation import recompute_words, renamed_attribute
from ...kernels.over_ranks.shards import Shards
from ..checks import as_int, check_kda_arguments, check_no_unknown, reads_old_keywords
from ..inputs.arguments import takes_cache
from .forward import KDAForward
from .slots import Slots
from .weights import KeepsFP32

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


class KimiDeltaAttention(KDAForward, KeepsFP32):
    """Kimi Delta Attention layer (Kimi Linear, arXiv 2510.26692, section 4).

    Arguments have the names of the fields of `KDAConfig`, without their linear_.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: query / key heads H.
        head_dim: key width K.
        num_value_heads: value heads HV, a multiple of num_heads; None for num_heads.
        value_head_dim: value width V; None for head_dim.
        conv_kernel_dim: taps W of the short convolution over q, k and v.
        gate_activation: "lower_bound" (log-decay in (lower_bound, 0)) or "softplus" (unbounded).
        lower_bound: in [-5, 0) nats per token with "lower_bound"; None with "softplus".
        decay: "channel" for a log-decay of each key channel, or "head" for one that all channels of a value head share,
            as in gated delta nets: f_proj is [HV, D] and dt_bias [HV].
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        rms_norm_eps: epsilon of the output norm.
        gate_rank: rank of the output gate's projection, and of the log-decay's unless decay_rank is given; None for
            value_head_dim, as in Kimi Linear and GLM-5.3-Flash; 0 for full rank, as in Ling / Ring.
        decay_rank: rank of the log-decay's projection; None for gate_rank, 0 for full rank. Kimi K3 has decay_rank =
            head_dim beside gate_rank = 0. With decay="head" None or 0, as the rank is full.
        learned_rate: False to fix the rate exp(A_log) at 1, without the parameter A_log; with "lower_bound" only.
        output_gate_bias: True for an output gate with a bias, as in flash-linear-attention.
        output_activation: of the output gate: "sigmoid", or "silu" as in gated delta nets; no field of `KDAConfig`.
        layer_idx: index of this layer in a cache; needed only to use one.
        backend: name of a kernel backend; None chooses (see `kda_layers.explain`).
        state_dtype: "float32", "bfloat16" or "int8", in which a cache keeps the recurrent states, with inputs in fp64
            "float32" alone, for fp64. A cache that holds states keeps their dtype.
        recompute, memory_share: as in `kda_layers.kda`; "auto" in a model depends on its number of KDA layers.

    Raises:
        TypeError: an unknown keyword; a size, a rank or layer_idx that is not an integer; rms_norm_eps or lower_bound
            that is not a number.
        ValueError: num_value_heads not a multiple of num_heads; a size below 1; a bad gate_activation, lower_bound,
            decay, output_activation, state_dtype, recompute or memory_share; a negative rms_norm_eps or rank; a
            decay_rank with decay="head"; "softplus" without a learned rate.
    """

    kept_in_fp32 = ("A_log", "dt_bias")  # the decay is exponential in A_log

    @reads_old_keywords("KimiDeltaAttention")
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        *,
        num_value_heads: int | None = None,
        value_head_dim: int | None = None,
        conv_kernel_dim: int = 4,
        gate_activation: str = "lower_bound",
        lower_bound: float | None = -5.0,
        decay: str = "channel",
        allow_neg_eigval: bool = False,
        rms_norm_eps: float = 1e-6,
        gate_rank: int | None = None,
        decay_rank: int | None = None,
        learned_rate: bool = True,
        output_gate_bias: bool = False,
        output_activation: str = "sigmoid",
        layer_idx: int | None = None,
        backend: str | None = None,
        state_dtype: str = "float32",
        recompute: str = "auto",
        memory_share: float | None = None,
        **unknown: Any,
    ):
        super().__init__()
        check_no_unknown(type(self), unknown)
        num_value_heads = num_heads if num_value_heads is None else num_value_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        sizes = dict(
            hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, num_value_heads=num_value_heads,
            value_head_dim=value_head_dim, conv_kernel_dim=conv_kernel_dim,
        )  # fmt: skip
        sizes = {name: as_int(name, size) for name, size in sizes.items()}
        hidden_size, num_heads, head_dim, num_value_heads, value_head_dim, conv_kernel_dim = sizes.values()
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be at least 1, got {hidden_size}")
        self.recompute, self.memory_share = recompute_words(recompute, memory_share)
        given = dict(
            gate_activation=gate_activation, lower_bound=lower_bound, decay=decay, rms_norm_eps=rms_norm_eps,
            gate_rank=gate_rank, decay_rank=decay_rank, learned_rate=learned_rate, state_dtype=state_dtype,
            recompute=self.recompute, memory_share=self.memory_share,
        )  # fmt: skip
        check_kda_arguments(sizes | given)
        if output_activation not in OUTPUT_ACTIVATIONS:
            names = " or ".join(map(repr, OUTPUT_ACTIVATIONS))
            raise ValueError(f"output_activation must be {names}, got {output_activation!r}")
        self.state_dtype, self.output_activation = state_dtype, output_activation
        self.gate_rank = value_head_dim if gate_rank is None else as_int("gate_rank", gate_rank)
        self.head_gates = decay == "head"
        rank = decay_rank if decay_rank is not None else 0 if self.head_gates else self.gate_rank
        self.decay_rank = as_int("decay_rank", rank)
        self.hidden_size, self.head_dim, self.value_head_dim = hidden_size, head_dim, value_head_dim
        self.num_heads, self.num_value_heads = num_heads, num_value_heads
        self.layer_idx = None if layer_idx is None else as_int("layer_idx", layer_idx)
        self.kda_options: dict[str, Any] = dict(
            gate_activation=gate_activation,
            lower_bound=lower_bound,
            beta_activation="2sigmoid" if allow_neg_eigval else "sigmoid",
            backend=backend,
        )

        self._make_parameters(conv_kernel_dim, rms_norm_eps, learned_rate, output_gate_bias)
        self.reset_gate()

    def _make_parameters(self, W: int, eps: float, learned_rate: bool, output_gate_bias: bool) -> None:
        D, HV, K, V = self.hidden_size, self.num_value_heads, self.head_dim, self.value_head_dim
        q_dim, v_dim, gate_dim = self.num_heads * K, HV * V, HV if self.head_gates else HV * K
        linear = partial(nn.Linear, bias=False)
        self.q_proj, self.k_proj, self.v_proj = linear(D, q_dim), linear(D, q_dim), linear(D, v_dim)
        channels = 2 * q_dim + v_dim
        self.conv1d = nn.Conv1d(channels, channels, W, groups=channels, bias=False)
        if rank := self.decay_rank:
            self.f_a_proj, self.f_b_proj = linear(D, rank), linear(rank, gate_dim)
        else:
            self.f_proj = linear(D, gate_dim)
        if rank := self.gate_rank:
            self.g_a_proj, self.g_b_proj = linear(D, rank), linear(rank, v_dim, bias=output_gate_bias)
        else:
            self.g_proj = linear(D, v_dim, bias=output_gate_bias)
        self.A_log = nn.Parameter(torch.empty(HV, dtype=torch.float32)) if learned_rate else None
        self.dt_bias = nn.Parameter(torch.empty(gate_dim, dtype=torch.float32))
        self.b_proj = linear(D, HV)
        self.o_norm = nn.RMSNorm(V, eps=eps)
        self.o_proj = linear(v_dim, D)
        vars(self).update(self.new_weights())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)  # from_pretrained replaces parameters through this
        self._mark_no_weight_decay()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # copies and pickles lose attributes of parameters
        self._mark_no_weight_decay()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)  # to_empty makes new parameters
        self._mark_no_weight_decay()
        return self

    def _mark_no_weight_decay(self) -> None:
        """Mark A_log and dt_bias for code that builds an optimizer's parameter groups."""
        for name in ("A_log", "dt_bias"):
            p = self._parameters.get(name)
            if p is not None:
                p._no_weight_decay = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Initialise A_log and dt_bias from dt log-uniform in [1e-3, 1e-1] for each log-decay.

        softplus, as in Kimi Linear: log-decay -exp(A_log) dt, with rates exp(A_log) uniform in [1, 16].
        lower_bound, as in GLM-5.3-Flash: log-decay lower_bound (1 - exp(-dt)), with rate 1, fixed or learned.
        """
        try:
            from transformers import initialization as init  # leaves weights alone that were loaded
        except ImportError:  # without transformers, or one that is too old for models: nothing was loaded by it
            init = nn.init
        copy_ = getattr(init, "copy_", Tensor.copy_)
        if self.kda_options["gate_activation"] == "softplus":
            copy_(self.A_log, init.uniform_(self.A_log, a=1.0, b=16.0).log())
        elif self.A_log is not None:
            init.zeros_(self.A_log)
        dt = init.uniform_(self.dt_bias, a=math.log(1e-3), b=math.log(1e-1)).exp()
        copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | Slots | None = None,
        cu_seqlens: Tensor | None = None,
        shards: Shards | None = None,
    ) -> Tensor:
        """Return the attention output.

        Args:
            hidden_states: [B, T, D].
            attention_mask: [B, S] with S >= T, nonzero for real tokens; only the last T columns are read. Padding may
                be anywhere: it neither writes nor decays the state, and the convolution skips it.
            cache: a transformers cache whose layer `layer_idx` is a linear-attention layer; read and updated.
                No gradient flows into or out of it. Or the slots of a serving engine, whose cu_seqlens must be given.
            cu_seqlens: [N + 1] int32 or int64 offsets of the sequences packed along T (then B = 1); the cache then
                has N rows. Not with attention_mask. With `shards`, offsets into the tokens of all ranks.
            shards: places of these tokens in sequences that are cut over a process group; every rank must call the
                layer. Not with a mask or a cache. Gradients of parameters are partial sums.

        Returns:
            [B, T, D] in the dtype of hidden_states.

        Raises:
            ValueError: hidden_states or attention_mask of a wrong rank or size, cu_seqlens with a mask, a cache of
                another number of sequences, an adapter on conv1d or o_norm; what `kda_layers.kda` raises.
        """
        return self.compute(hidden_states, attention_mask, cache, cu_seqlens, shards)

    @property
    def decay(self) -> str:
        """As the argument, "channel" or "head"."""
        return "head" if self.head_gates else "channel"

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the output norm."""
        return self.o_norm.eps

    num_v_heads, head_v_dim = renamed_attribute("num_value_heads"), renamed_attribute("value_head_dim")
    norm_eps = renamed_attribute("rms_norm_eps")

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, v_heads={self.num_value_heads}, K={self.head_dim}, V={self.value_head_dim}, "
            f"decay={self.decay}, decay_rank={self.decay_rank}, gate_rank={self.gate_rank}, "
            f"learned_rate={self.A_log is not None}, output_activation={self.output_activation}, "
            + ", ".join(f"{name}={value}" for name, value in self.kda_options.items())
            + f", state_dtype={self.state_dtype}, recompute={self.recompute}, memory_share={self.memory_share}"
        )
