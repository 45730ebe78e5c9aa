"""The computation of a KDA layer, apart from who holds its parameters."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kda_layers.kernels.checks import check_offsets, sequence_offsets
from kda_layers.kernels.gated_norm.op import gated_rms_norm
from kda_layers.kernels.kda.contract import state_dtype
from kda_layers.kernels.short_conv.op import short_convs
from kda_layers.modeling.cache import LayerState
from kda_layers.modeling.precision import KeepsFP32


class KDAMixer(KeepsFP32):
    """KDA from hidden states to hidden states: projections, short convolution, operator, gated norm.

    A subclass holds the modules q_proj, k_proj, v_proj, conv1d, b_proj, o_norm and o_proj, sets hidden_size (D),
    head_dim (K), head_v_dim (V), layer_idx and `kda_options` (options of `kda_layers.kda`), and says how its gates are
    computed.
    """

    kept_in_fp32 = ("A_log", "dt_bias")  # the decay is exponential in A_log

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    conv1d: nn.Conv1d
    b_proj: nn.Module
    o_norm: Any  # with a parameter `weight` [V]
    o_proj: nn.Module
    hidden_size: int
    head_dim: int
    head_v_dim: int
    layer_idx: int | None
    kda_options: dict[str, Any]

    @property
    def backend(self) -> str | None:
        """Name of the kernel backend that this layer asks for."""
        return self.kda_options.get("backend")

    def decay_logits(self, x: Tensor) -> Tensor:
        """Logits [B, T, HV * K] of the log-decay, before dt_bias."""
        raise NotImplementedError

    def decay_parameters(self) -> tuple[Tensor, Tensor]:
        """A_log [HV] and dt_bias [HV * K]."""
        raise NotImplementedError

    def output_gate(self, x: Tensor) -> Tensor:
        """Logits [B, T, HV * V] of the output gate."""
        raise NotImplementedError

    def plain_gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        """o [B, T, HV, V] normalised by the module `o_norm`, times the sigmoid of gate [B, T, HV, V]."""
        raise NotImplementedError

    @property
    def norm_eps(self) -> float:
        """Epsilon of `o_norm`."""
        raise NotImplementedError

    def gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        """As `plain_gated_norm`, by a fused kernel where one serves."""
        return gated_rms_norm(o, gate, self.o_norm.weight, self.norm_eps, self.plain_gated_norm, self.backend)

    def mix(
        self, hidden_states: Tensor, attention_mask: Tensor | None, cache: Cache | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """[B, T, D] to [B, T, D]; arguments and errors as in `KimiDeltaAttention.forward`."""
        self._check_call(hidden_states)
        mask = _local_mask(attention_mask, hidden_states, cu_seqlens)
        if cu_seqlens is not None:
            _check_packed(cu_seqlens, hidden_states)
        sequences = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = LayerState(cache, self.layer_idx, sequences)
        x = hidden_states if mask is None else hidden_states.masked_fill(~mask[..., None], 0)

        qkv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        (q, k, v), conv_state = short_convs(
            qkv, self.conv1d.weight[:, 0], state.conv, cu_seqlens, mask, cache is not None, self.backend
        )
        q, k = (rearrange(t, "b t (h k) -> b t h k", k=self.head_dim) for t in (q, k))
        v = rearrange(v, "b t (h v) -> b t h v", v=self.head_v_dim)

        g = rearrange(self.decay_logits(x), "b t (h k) -> b t h k", k=self.head_dim)
        beta = self.b_proj(x)
        if mask is not None:  # logits this low mean no decay and no write, exactly
            if g.dtype == torch.float16:  # whose lowest number times a small exp(A_log) would still be a decay
                g = g.float()
            g = g.masked_fill(~mask[..., None, None], torch.finfo(g.dtype).min)
            beta = beta.masked_fill(~mask[..., None], torch.finfo(beta.dtype).min)

        wide = state_dtype(q.dtype)
        A_log, dt_bias = self.decay_parameters()
        o = state.attend(
            q, k, v, g, beta, cu_seqlens=cu_seqlens,
            A_log=A_log.to(wide), dt_bias=dt_bias.to(wide).view(-1, self.head_dim), **self.kda_options,
        )  # fmt: skip
        state.store_conv(conv_state, qkv, mask)
        gate = rearrange(self.output_gate(x), "b t (h v) -> b t h v", v=self.head_v_dim)
        return self.o_proj(rearrange(self.gated_norm(o, gate), "b t h v -> b t (h v)"))

    def _check_call(self, hidden_states: Tensor) -> None:
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must have shape [B, T, D = {self.hidden_size}], got {list(hidden_states.shape)}"
            )
        for name in ("conv1d", "o_norm"):
            module = getattr(self, name)
            if "base_layer" in module._modules:  # as PEFT's layers hold the module that they adapt
                raise ValueError(
                    f"{name} must have no adapter, got {type(module).__name__}: its weight is read without calling it, "
                    f"so an adapter has no effect. Leave {name} out of target_modules, or train its weight itself "
                    f"with modules_to_save=[{name!r}]"
                )


def _local_mask(mask: Tensor | None, x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
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
    return mask[:, -T:] != 0


def _check_packed(cu_seqlens: Tensor, x: Tensor) -> None:
    """Checks offsets before any work; their values only where reading them does not wait for a device."""
    check_offsets(cu_seqlens, x)
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        sequence_offsets(cu_seqlens, x.shape[1])
