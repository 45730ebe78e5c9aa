"""SGLang: our operator as its Triton kernel of KDA, which every KDA model takes unless it is told otherwise.

What we do not compute stays with the stock kernel, and the log says so once: verification of drafts, states between all
chunks, buffered decoding (ReplaySSM).

Written for SGLang 0.5.23. SGLang itself has not been run with it.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kda_layers.engines import calls, wanted
from kda_layers.kernels.kda.contract import CHUNK, NO_SLOT

TESTED = "0.5.23"
MODULE = "sglang.srt.layers.attention.linear.kernels.kda_triton"
CLASS = "TritonKDAKernel"
logger = logging.getLogger("kda_layers")


def register() -> None:
    """Entry point of SGLang's plug-ins: replace the kernel's class, if KDA_LAYERS_ENGINES names sglang.

    Raises:
        ImportError: this SGLang has no such class.
    """
    if not wanted("sglang"):
        return
    hooks = import_module("sglang.srt.plugins.hook_registry")
    stock = getattr(import_module(MODULE), CLASS, None)
    if stock is None:
        raise ImportError(f"{MODULE} has no {CLASS}: use SGLang {TESTED}, or leave KDA_LAYERS_ENGINES empty")
    hooks.HookRegistry.register(f"{MODULE}.{CLASS}", kernel(stock), hooks.HookType.REPLACE)


def kernel(stock: type[Any]) -> type[Any]:
    """Return a subclass of SGLang's kernel class with `extend`, `decode` and `packed_decode` by our operator."""
    told: set[tuple[str, str]] = set()

    def leave(method: str, reason: str) -> None:
        if (method, reason) not in told:
            told.add((method, reason))
            logger.warning("SGLang's own kernel serves %s, not kda_layers: %s", method, reason)

    class KDALayersKernel(stock):
        """States [slots, HV, V, K] are updated in place; slot -1 is padding."""

        def extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            A_log: Tensor | None = None,
            dt_bias: Tensor | None = None,
            lower_bound: float | None = None,
            beta_is_raw: bool = False,
            return_intermediate_states: bool = False,
            track_state: Tensor | None = None,
            track_chunk_idx: Tensor | None = None,
            **others: Any,
        ) -> Any:
            """Return o [1, T, HV, V], and with return_intermediate_states None beside it.

            Args:
                track_state: [N, HV, V, K], gets the state before chunk track_chunk_idx[n] unless that is negative.
            """
            if return_intermediate_states and track_state is None:
                leave("extend", "states between all chunks are asked for, and not one of each sequence (track_state)")
                return super().extend(
                    q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
                    query_start_loc=query_start_loc, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                    beta_is_raw=beta_is_raw, return_intermediate_states=True, **others,
                )  # fmt: skip
            activation: dict[str, Any] = dict(gate_activation="log_decay")
            if A_log is not None:
                activation = calls.gate(A_log, dt_bias, lower_bound, q.shape[3])
            at = None
            if track_chunk_idx is not None:
                at = torch.where(track_chunk_idx < 0, NO_SLOT, track_chunk_idx * CHUNK)
            found = calls.prefill(
                q, k, v, g, beta, initial_state=ssm_states, state_indices=cache_indices, checkpoint_at=at,
                cu_seqlens=query_start_loc, beta_activation="sigmoid" if beta_is_raw else "given",
                state_dtype=torch.float32, **activation,
            )  # fmt: skip
            if track_state is not None and at is not None and found.checkpoints is not None:
                track_state.copy_(torch.where((at < 0)[:, None, None, None], track_state, found.checkpoints))
            return (found.o, None) if return_intermediate_states else found.o

        def decode(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            A_log: Tensor,
            dt_bias: Tensor,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            lower_bound: float | None = None,
            **others: Any,
        ) -> Tensor:
            """Return o [1, N, HV, V] of one token of each sequence."""
            options = calls.gate(A_log, dt_bias, lower_bound, q.shape[3])
            return calls.step(q, k, v, a, b, ssm_states, cache_indices, query_start_loc, **options)

        def packed_decode(
            self,
            mixed_qkv: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            A_log: Tensor,
            dt_bias: Tensor,
            scale: float,
            ssm_states: Tensor,
            cache_indices: Tensor,
            num_v_heads: int,
            head_v_dim: int,
            lower_bound: float | None = None,
            **others: Any,
        ) -> Tensor:
            """As `decode`, with q, k and v in one row [N, 2 H K + HV V]."""
            if others.get("replayssm_write_pos") is not None:
                leave("packed_decode", "updates of states are buffered (ReplaySSM)")
                return super().packed_decode(
                    mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states,
                    cache_indices=cache_indices, num_v_heads=num_v_heads, head_v_dim=head_v_dim,
                    lower_bound=lower_bound, **others,
                )  # fmt: skip
            K, v_dim = ssm_states.shape[3], num_v_heads * head_v_dim
            qk_dim = (mixed_qkv.shape[1] - v_dim) // 2
            q, k, v = mixed_qkv.split([qk_dim, qk_dim, v_dim], -1)
            q, k, v = (t.unflatten(-1, (-1, D))[None] for t, D in ((q, K), (k, K), (v, head_v_dim)))
            options = calls.gate(A_log, dt_bias, lower_bound, K)
            return calls.step(q, k, v, a, b, ssm_states, cache_indices, None, scale=scale, **options)

    return KDALayersKernel
