"""vLLM: our operator in place of the Triton functions that its KDA models call.

Two kinds of modules of vLLM have such functions: those of Kimi-K3 and Kimi-Linear take logits of gate and beta, those
of GLM-5.3-Flash and Ling take beta, and the log-decay of decoded tokens, after their activation. In both, slots up to 0
of a pool are padding.

Written for vLLM 0.33. vLLM itself has not been run with it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_layers.engines import calls, wanted
from kda_layers.kernels.kda.contract import NO_SLOT

TESTED = "0.33"
logger = logging.getLogger("kda_layers")


def register() -> None:
    """Entry point of vLLM's general plug-ins: replace the functions, if KDA_LAYERS_ENGINES names vllm.

    Raises:
        RuntimeError: this vLLM has none of the modules whose functions are to be replaced.
    """
    if not wanted("vllm"):
        return
    replaced = [name for module, functions in FUNCTIONS.items() for name in _replace(module, functions)]
    if not replaced:
        raise RuntimeError(
            f"KDA_LAYERS_ENGINES names vllm, but vLLM {importlib.metadata.version('vllm')} has none of "
            f"{', '.join(FUNCTIONS)}: use vLLM {TESTED}, or leave the variable empty"
        )
    logger.info("kda_layers serves %s", ", ".join(replaced))


def _replace(module_name: str, functions: dict[str, Callable[..., Any]]) -> list[str]:
    """Set the functions of a module that it has, there and where vLLM has imported them; return their full names."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            return []
        raise
    replaced = []
    for name, function in functions.items():
        original = getattr(module, name, None)
        if original is None:
            continue
        for loaded in [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "vllm"]:
            for alias in [a for a, value in list(vars(loaded).items()) if value is original]:
                setattr(loaded, alias, function)
        replaced.append(f"{module_name}.{name}")
    return replaced


def _slots(indices: Tensor) -> Tensor:
    return torch.where(indices > 0, indices, NO_SLOT)


# ---------------------------------------------------------------- Kimi-K3, Kimi-Linear: logits


def chunk_from_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    beta_activation: str = "sigmoid",
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda_with_fused_gate`: o [1, T, HV, V] and the states [N, HV, V, K] after packed sequences.

    `beta_activation`, as of `kda`, is not vLLM's.
    """
    found = calls.prefill(
        q, k, v, raw_g, raw_beta, initial_state=initial_state, final_state=output_final_state, scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, beta_activation=beta_activation,
        **calls.gate(A_log, g_bias, lower_bound, q.shape[3]),
    )  # fmt: skip
    return found.o, found.final_state


def recurrent_from_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda`: o [1, T, H, V] of a few tokens of each sequence, and the pool, which is updated.

    `fuse_gate` chooses between two ways to the same result there.
    """
    o = calls.step(
        q, k, v, raw_g, raw_beta, initial_state, _slots(ssm_state_indices), cu_seqlens,
        out, num_accepted=num_accepted_tokens, **calls.gate(A_log, dt_bias, lower_bound, q.shape[3]),
    )  # fmt: skip
    return o, initial_state


def packed_decode_from_logits(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda_packed_decode`: one token of each sequence, q, k and v in one row [N, 2 H K + H V]."""
    _, H, V, K = initial_state.shape
    q, k, v = (t.unflatten(-1, (H, -1))[None] for t in mixed_qkv.split([H * K, H * K, H * V], -1))
    o = calls.step(
        q, k, v, raw_g, raw_beta, initial_state, _slots(state_indices), None, out, scale=scale,
        **calls.gate(A_log, dt_bias, lower_bound, K),
    )  # fmt: skip
    return o, initial_state


# ---------------------------------------------------------------- GLM-5.3-Flash, Ling: activations


def chunk_from_beta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_from_logits` with beta after its activation; `safe_gate` says that the gate has the lower bound."""
    return chunk_from_logits(
        q, k, v, raw_g, beta, A_log, g_bias, scale, initial_state, output_final_state,
        lower_bound if safe_gate else None, use_qk_l2norm_in_kernel, cu_seqlens, beta_activation="given",
    )  # fmt: skip


def recurrent_from_decays(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
) -> tuple[Tensor, Tensor]:
    """As `recurrent_from_logits` with the log-decay g, or with `compute_gate` its logits, and beta, or with
    `sigmoid_beta` its logits.

    Raises:
        ValueError: states that are not to be updated in place.
    """
    if initial_state is None or ssm_state_indices is None or not inplace_final_state:
        raise ValueError(
            "fused_recurrent_kda of kda_layers takes a pool and its slots, which it updates: initial_state and "
            "ssm_state_indices must be given and inplace_final_state True"
        )
    if compute_gate:
        assert a_log is not None
        activation = calls.gate(a_log, g_bias, lower_bound, q.shape[3])
    else:
        activation = dict(gate_activation="log_decay")
    o = calls.step(
        q, k, v, g, beta, initial_state, _slots(ssm_state_indices), cu_seqlens, out, scale=scale,
        num_accepted=num_accepted_tokens, qk_l2norm=use_qk_l2norm_in_kernel,
        beta_activation="sigmoid" if sigmoid_beta else "given", **activation,
    )  # fmt: skip
    return o, initial_state


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": chunk_from_logits,
        "fused_recurrent_kda": recurrent_from_logits,
        "fused_recurrent_kda_packed_decode": packed_decode_from_logits,
    },
    **{
        module: {"chunk_kda_with_fused_gate": chunk_from_beta, "fused_recurrent_kda": recurrent_from_decays}
        for module in (
            "vllm.models.glm5next.nvidia.ops.third_party.kda",
            "vllm.third_party.flash_linear_attention.ops.kda",
        )
    },
}
