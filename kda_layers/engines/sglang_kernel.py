"""SGLang's kernel class of KDA by our operator.

What we do not compute stays with the stock kernel, and the log says so once: trees of drafts, buffered updates of
states (ReplaySSM), and states between all chunks, which no call of SGLang 0.5.23 asks for.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kda_layers.engines import calls
from kda_layers.engines.patching import announced
from kda_layers.kernels.kda.contract import CHUNK, NO_SLOT

logger = logging.getLogger("sglang.kda_layers")  # that of the plug-in
REPLAY = "d", "k", "g", "write_pos"  # what SGLang needs to buffer the updates of states, which are not bounded then
_told: set[tuple[type[Any], str, str]] = set()


def _leave(kernel: object, method: str, reason: str) -> None:
    """Log, once for each class and reason, that SGLang's own method serves."""
    if (told := (type(kernel), method, reason)) not in _told:
        _told.add(told)
        logger.warning("SGLang's own kernel serves %s, not kda_layers: %s", method, reason)


class KDALayersKernel:
    """Mixin before SGLang's kernel class in the MRO: its methods by our operator.

    States [slots, HV, V, K] are updated in place; slot -1 is padding.
    """

    supports_packed_decode_safe_gate = True

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
        track_ssm_h_src: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return o [1, T, HV, V], and with return_intermediate_states None beside it.

        Args:
            track_state: [N, HV, V, K], gets the state before chunk track_chunk_idx[n]; rows where that is negative
                are not read.
            track_ssm_h_src: the states between chunks that the caller reads if there is no track_state; none of
                them if all boundaries are ends of sequences, whose states are in the pool.
            chunk_indices: given by a captured prefill, whose offsets may end before its tokens.
        """
        if return_intermediate_states and track_state is None and (track_ssm_h_src is None or len(track_ssm_h_src)):
            _leave(
                self,
                "extend",
                "states between all chunks are asked for, and not one of each sequence (track_state)",
            )
            return super().extend(  # type: ignore[misc]
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                beta_is_raw=beta_is_raw, return_intermediate_states=True, chunk_indices=chunk_indices, **others,
            )  # fmt: skip
        activation: dict[str, Any] = dict(gate_activation="log_decay")
        if A_log is not None:
            activation = calls.gate(A_log, dt_bias, lower_bound, q.shape[3])
        at = None
        if track_state is not None and track_chunk_idx is not None:
            at = torch.where(track_chunk_idx < 0, NO_SLOT, track_chunk_idx * CHUNK)
        if chunk_indices is not None:  # one more sequence, without a slot, for the tokens of padding
            query_start_loc = pad(query_start_loc, (0, 1), value=q.shape[1])
            cache_indices = pad(cache_indices, (0, 1), value=NO_SLOT)
            at = None if at is None else pad(at, (0, 1), value=NO_SLOT)
        found = calls.prefill(
            q, k, v, g, beta, ssm_states, state_indices=cache_indices, checkpoint_at=at,
            cu_seqlens=query_start_loc, beta_activation="sigmoid" if beta_is_raw else "given", **activation,
        )  # fmt: skip
        if track_state is not None and found.checkpoints is not None:
            track_state.copy_(found.checkpoints[: track_state.shape[0]])
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
        if lower_bound is None and all(others.get(f"replayssm_{name}") is not None for name in REPLAY):
            _leave(self, "packed_decode", "updates of states are buffered (ReplaySSM)")
            return super().packed_decode(  # type: ignore[misc]
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

    def target_verify(
        self,
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        intermediate_states_buffer: Tensor | None,
        intermediate_state_indices: Tensor,
        cache_steps: int,
        retrieve_parent_token: Tensor | None,
        lower_bound: float | None = None,
        **others: Any,
    ) -> Any:
        """Return o [1, T, HV, V] of a chain of drafted tokens of each sequence; `ssm_states` is only read.

        Args:
            cache_indices, intermediate_state_indices: [N or more]; only the first N are read.
            intermediate_states_buffer: [rows, at least cache_steps, HV, V, K], gets the state after token t of
                sequence n at [intermediate_state_indices[n], t].
            cache_steps: the most tokens of a sequence.
        """
        kept, reason = intermediate_states_buffer, None
        if retrieve_parent_token is not None:
            reason = "drafts form a tree"
        elif kept is None:
            reason = "what was drafted is buffered in place of states (ReplaySSM)"
        elif kept.dtype != ssm_states.dtype or kept.stride(0) % kept.stride(1):
            reason = f"it keeps states of {kept.dtype} with strides {kept.stride()}, the pool {ssm_states.dtype}"
        if kept is None or reason is not None:
            _leave(self, "target_verify", str(reason))
            return super().target_verify(  # type: ignore[misc]
                A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, ssm_states=ssm_states,
                cache_indices=cache_indices, query_start_loc=query_start_loc, intermediate_states_buffer=kept,
                intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
                retrieve_parent_token=retrieve_parent_token, lower_bound=lower_bound, **others,
            )  # fmt: skip
        # The buffer as a pool with a slot for each token; SGLang may give a part of each row.
        N, pitch, rows = query_start_loc.shape[0] - 1, kept.stride(0) // kept.stride(1), kept.shape[0]
        pool = kept.as_strided(((rows - 1) * pitch + kept.shape[1], *kept.shape[2:]), kept.stride()[1:])
        steps = torch.arange(cache_steps, dtype=torch.int32, device=q.device)
        slots = torch.add(steps, intermediate_state_indices[:N, None], alpha=pitch)
        return calls.step(
            q, k, v, a, b, pool, slots, query_start_loc, initial_state=ssm_states, initial_indices=cache_indices[:N],
            **calls.gate(A_log, dt_bias, lower_bound, q.shape[3]),
        )  # fmt: skip


def kernel(stock: type[Any]) -> type[Any]:
    """Return a subclass of SGLang's kernel class with its methods by our operator."""
    say = "kda_layers serves %s of KDA layers"
    served = {
        name: announced(getattr(KDALayersKernel, name), partial(logger.info, say, name))
        for name in ("extend", "decode", "packed_decode", "target_verify")
    }
    return type(KDALayersKernel.__name__, (KDALayersKernel, stock), served)
