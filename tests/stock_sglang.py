"""Run SGLang's attention backend of KDA, from an unpacked wheel, on the CPU: with its own kernel class and with ours.

    python -m tests.stock_sglang FOLDER CALLS RESULTS

CALLS is a list of keyword arguments of `run` as torch saves it; RESULTS gets for each, and for both kernels, the output
and the arguments, whose pools have been written. `KDAAttnBackend`, its dispatcher, the kernel class and the convolution
are the wheel's, by Triton's interpreter; the base class, the pools and a layer are stand-ins (tests/stock_engines.py).
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from kda_layers.engines.sglang_kernel import kernel
from tests import stock_engines

LINEAR = "sglang.srt.layers.attention.linear"
REAL = f"{LINEAR}.kda_backend", "sglang.kernels.ops.mamba.causal_conv1d_triton"


class Triton:
    """SGLang's choice of the backend `triton`."""

    def __getattr__(self, name: str) -> Any:
        return lambda: name == "is_triton"


class Base:
    """The base class of SGLang's backends, without a cache of prefixes."""

    accept_lens_pool = None

    def _track_mamba_state_decode(self, *_: Any) -> None: ...


STAND_INS: dict[str, dict[str, Any]] = {
    "sglang.srt.layers.attention.hybrid_linear_attn_backend": {"MambaAttnBackendBase": Base},
    f"{LINEAR}.kernels.kda_flashinfer": {"build_fused_accept_indices": None},
    f"{LINEAR}.utils": {
        "LinearAttnKernelBackend": None,
        "build_verify_intermediate_state_indices": None,
        "select_verify_intermediate_state_indices": lambda indices, *_: indices,
    },
}


def backend(cache: Any, slots: Tensor, offsets: Tensor, rows: int) -> Any:
    """A `KDAAttnBackend` over the pools in `cache`, for sequences packed as `offsets` says."""
    module = importlib.import_module(f"{LINEAR}.kda_backend")
    made = object.__new__(module.KDAAttnBackend)
    made.kernel_dispatcher = module.KDAKernelDispatcher(Triton(), Triton(), Triton())
    made.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda _: cache, size=rows)
    made._fused_chain_verify_fn = None  # SGLANG_OPT_FUSED_KDA_VERIFY=0
    made.verify_intermediate_state_indices = torch.arange(rows, dtype=torch.int32)
    made.forward_metadata = SimpleNamespace(
        query_start_loc=offsets, mamba_cache_indices=slots, logical_num_tokens=None, has_mamba_track_mask=False,
        track_chunk_idx=None, retrieve_next_token=None, retrieve_next_sibling=None, retrieve_parent_token=None,
        state_checkpoint_cu_starts=None, num_state_checkpoints=0, state_checkpoint_every_n_tokens=0,
        state_checkpoint_indices=None, track_ssm_h_batch_src=None,
    )  # fmt: skip
    return made


def run(
    step: str, mixed_qkv: Tensor, a: Tensor, b: Tensor, conv: Tensor, states: Tensor, slots: Tensor, offsets: Tensor,
    weight: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None, kept_states: Tensor | None = None,
    kept_windows: Tensor | None = None, ragged: bool = False,
) -> Tensor:  # fmt: skip
    """Return the output [1, T, H, D] of a step of the backend, which updates the pools.

    Args:
        step: decode, extend or verify.
        mixed_qkv, a, b: [T, 3 H D], [T, H D] and [T, H], logits of gate and beta.
        conv, states: pools [slots, 3, 3 H D] and [slots, H, D, D]; slots [N].
        weight: [3 H D, 4].
        kept_states, kept_windows: [N, steps, ...], what verification keeps of up to `steps` drafts of a sequence.
        ragged: whether sequences have different numbers of drafts.
    """
    H, D = states.shape[1:3]
    sizes = dict.fromkeys(("head_q_dim", "head_k_dim", "head_v_dim"), D)
    sizes |= dict.fromkeys(("q_dim", "k_dim", "v_dim"), H * D)
    sizes |= dict.fromkeys(("num_q_heads", "num_k_heads", "num_v_heads"), H)
    layer = SimpleNamespace(
        layer_id=0, conv_weights=weight, bias=None, A_log=A_log, dt_bias=dt_bias, lower_bound=bound, **sizes
    )
    cache = SimpleNamespace(
        conv=[conv], temporal=states, replayssm_d=None, replayssm_k=None, replayssm_g=None,
        intermediate_ssm=kept_states, intermediate_conv_window=[kept_windows],
    )  # fmt: skip
    lengths = offsets.diff().tolist()
    steps = 0 if kept_states is None else kept_states.shape[1]
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: step == "verify", is_draft_extend_v2=lambda: False),
        spec_info=SimpleNamespace(draft_token_num=steps, ragged_verify_layout=True if ragged else None),
        extend_prefix_lens=torch.zeros(len(lengths), dtype=torch.int32), extend_seq_lens_cpu=lengths,
        req_pool_indices=None,
    )  # fmt: skip
    made = backend(cache, slots, offsets, len(lengths))
    gate = a.unflatten(-1, (H, D))[None] if step == "extend" else a
    forward = made.forward_decode if step == "decode" else made.forward_extend
    served: Tensor = forward(layer, batch, mixed_qkv, gate, b[None])
    return served


def token_by_token(mixed_qkv: Tensor, a: Tensor, b: Tensor, slots: Tensor, offsets: Tensor, **others: Any) -> Tensor:
    """`run` of a prefill by SGLang's own decoding: Triton's interpreter does not run its prefill (block pointers)."""
    lengths, outputs = offsets.diff(), {}
    for t in range(int(lengths.max())):
        live = (lengths > t).nonzero()[:, 0]
        rows = offsets[live].long() + t
        arguments = others | dict(step="decode", offsets=torch.arange(len(live) + 1, dtype=torch.int32))
        o = run(mixed_qkv=mixed_qkv[rows], a=a[rows], b=b[rows], slots=slots[live], **arguments)
        outputs |= dict(zip(rows.tolist(), o[0], strict=True))
    return torch.stack([outputs[row] for row in range(len(outputs))])[None]


def let_masks_be_integers() -> None:
    """The interpreter computes masks of scalars as integers, and then refuses them."""

    def with_bool(access: Any, at: int) -> Any:
        def call(self: Any, *args: Any) -> Any:
            args[at].data = args[at].data.astype(bool)
            return access(self, *args)

        return call

    InterpreterBuilder.create_masked_load = with_bool(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = with_bool(InterpreterBuilder.create_masked_store, 2)


def main(folder: str, calls: str, results: str) -> None:
    stock_engines.REAL += REAL
    stock_engines.STAND_INS |= STAND_INS
    stock_engines.prepare(Path(folder))
    let_masks_be_integers()
    module = importlib.import_module(f"{LINEAR}.kda_backend")
    given, stock, done = torch.load(calls, weights_only=True), module.TritonKDAKernel, []
    for arguments in given:
        of_both = []
        for chosen in (stock, kernel(stock)):
            module.TritonKDAKernel, mine = chosen, copy.deepcopy(arguments)
            by = token_by_token if chosen is stock and mine["step"] == "extend" else run
            of_both.append((by(**mine), mine))
        done.append(of_both)
    torch.save(done, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
