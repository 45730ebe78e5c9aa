"""RecoverSSM, vLLM's drafts without a state for each token (--use-replayssm), by `kda_verify` and `kda_commit`.

Each layer keeps what its states need to advance by the drafted tokens, outside of the cache, in a row for each request
of a step. vLLM commits the accepted ones after sampling, by an object that the metadata of its Kimi-K3 holds. Ours
calls vLLM's kernels for the plan and for the convolutions' states, and `kda_commit` for the recurrent ones.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_layers.engines.patching import exists
from kda_layers.engines.vllm_core import FIRST_SLOT
from kda_layers.kernels.kda.contract import MOST_DRAFTED, NO_SLOT
from kda_layers.kernels.kda.drafts import kda_commit, verifying

METADATA = "vllm.models.kimi_k3.nvidia.kda_metadata"
KERNELS = "vllm.models.kimi_k3.nvidia.ops.recoverssm"
CHANNELS = 256  # of a convolution, per program of the kernel that moves its inputs


def is_on(cache_config: Any) -> bool:
    """Return True if vLLM keeps one state of each request and commits accepted drafts after sampling."""
    return bool(getattr(cache_config, "use_kda_recoverssm", False))


def refusals(device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int, gate: str) -> list[str]:
    """Return the reasons for which drafts of a layer cannot be verified and committed; none if they can.

    Args:
        device: of the layer's weights.
        dtype: of the activations.
        tokens: of a request in a step, at most.
        gate: activation of the decays.
    """
    found = [f"vLLM has no {name}" for name in (METADATA, KERNELS) if not exists(name)]
    if not _config().use_v2_model_runner:
        found.append("RecoverSSM is on, whose drafts only model runner V2 commits: set VLLM_USE_V2_MODEL_RUNNER=1")
    if tokens > MOST_DRAFTED:
        found.append(f"RecoverSSM is on with {tokens - 1} drafted tokens, needs at most {MOST_DRAFTED - 1}")
    if verifying(None, device, dtype, dtype, head_dim, head_dim, 1, gate, "sigmoid", True) is None:
        found.append("RecoverSSM is on, and no kernel verifies its drafts")
    return found


def new_updates(heads: int, head_dim: int, tokens: int, device: torch.device) -> Tensor:
    """Return room for the updates of a layer's drafts, [requests, tokens, heads, 3 head_dim] fp32.

    It is allocated with the weights, before vLLM measures how much memory is left for the cache.
    """
    requests = _config().scheduler_config.max_num_seqs
    return torch.zeros(requests, tokens, heads, 3 * head_dim, dtype=torch.float32, device=device)


def _config() -> Any:
    """Return the configuration of the engine that makes a layer."""
    return importlib.import_module("vllm.config").get_current_vllm_config()


@functools.cache
def backend() -> Any:
    """Return the attention backend of vLLM's Kimi-K3, with our commits: for every layer that keeps updates."""
    stock = importlib.import_module(METADATA)
    builder = type(
        "KDALayersMetadataBuilder", (stock.KimiK3KDAMetadataBuilder,),
        {"_get_recoverssm_context": _commits_of, "__module__": __name__},
    )  # fmt: skip
    members = {"get_builder_cls": staticmethod(lambda: builder), "__module__": __name__}
    return type("KDALayersBackend", (stock.KimiK3KDAAttentionBackend,), members)


def _commits_of(builder: Any) -> Commits:
    """Return the commits of a builder's layers, made once; the pools are bound before the first step."""
    if builder.recoverssm_context is None:
        layers = builder.vllm_config.compilation_config.static_forward_context
        builder.recoverssm_context = Commits([layers[name] for name in builder.layer_names])
    found: Commits = builder.recoverssm_context
    return found


class Commits:
    """Commits of accepted tokens in the layers of a cache group, in place of vLLM's KDARecoverSSMCommitContext."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers, self._kernels = layers, importlib.import_module(KERNELS)
        self._convs = [layer.pools()[0] for layer in layers]
        updates, device = layers[0].core.updates, self._convs[0].device
        self._tokens = updates.shape[1]
        # of each layer: the address, and strides of slots, channels and inputs
        table = [(conv.data_ptr(), *conv.stride()) for conv in self._convs]
        self._table = torch.tensor(table, dtype=torch.int64, device=device).T.contiguous()
        # of each request: accepted tokens, the slot of the state after them; tokens up to a boundary, and its slot
        self._plan = torch.zeros(4, len(updates), dtype=torch.int32, device=device)

    def commit(
        self, num_accepted_tokens: Tensor, state_indices: Tensor, query_start_loc: Tensor,
        request_indices: Tensor | None = None, block_table: Tensor | None = None,
        num_computed_tokens: Tensor | None = None, mamba_block_size: int | None = None,
    ) -> None:  # fmt: skip
        """Advance both states of N requests by their accepted tokens; the host reads no value.

        Args:
            num_accepted_tokens: of the requests of the batch.
            state_indices: [N], the slots that were verified; below FIRST_SLOT: padding.
            query_start_loc: [N + 1], offsets of their tokens.
            request_indices: [N], their places in the batch; None: the first N.
            block_table: [batch, blocks], with prefix caching: a slot for each block of tokens. The state after the
                accepted tokens, and the one at a boundary that these cross, go to the slots of their blocks.
            num_computed_tokens: [batch], before this step.
            mamba_block_size: tokens of a block.

        Raises:
            ValueError: a block has fewer tokens than a request may have in a step.
        """
        N, aligned = state_indices.shape[0], block_table is not None
        if N == 0:
            return
        if mamba_block_size is not None and mamba_block_size < self._tokens:
            raise ValueError(
                f"the block size of KDA states must be at least {self._tokens}, the tokens of a request in a step with "
                f"drafts, got {mamba_block_size}: pass a larger --mamba-block-size"
            )
        self._make_plan(
            num_accepted_tokens, state_indices, query_start_loc, request_indices, block_table, num_computed_tokens,
            mamba_block_size,
        )  # fmt: skip
        self._move_inputs(state_indices, aligned)
        accepted, last, until_boundary, boundary = self._plan[:, :N]
        last = last.where(last >= FIRST_SLOT, NO_SLOT)
        # A boundary at the end has the slot of the last state, which may be the one that is read.
        boundary = boundary.where((boundary >= FIRST_SLOT) & (boundary != last), NO_SLOT)
        initial = state_indices if aligned else None
        for layer in self.layers:
            core, state = layer.core, layer.pools()[1]
            of_call: dict[str, Any] = dict(update_indices=core.rows[:N], initial_indices=initial)
            if aligned:
                kda_commit(state, core.updates, until_boundary, state_indices=boundary, **of_call)
            kda_commit(state, core.updates, accepted, state_indices=last, **of_call)

    def _make_plan(
        self, num_accepted: Tensor, slots: Tensor, offsets: Tensor, requests: Tensor | None, blocks: Tensor | None,
        computed: Tensor | None, block_size: int | None,
    ) -> None:  # fmt: skip
        """Write the plan by vLLM's kernel, which bounds what was accepted by the tokens of each request."""
        accepted, last, until_boundary, boundary = self._plan
        of_blocks = (0, 0) if blocks is None else blocks.stride()
        self._kernels._prepare_commit_plan_kernel[(slots.shape[0],)](
            num_accepted_ptr=num_accepted, request_indices_ptr=requests, state_indices_ptr=slots,
            query_start_loc_ptr=offsets, block_table_ptr=blocks, num_computed_ptr=computed, commit_lens_ptr=accepted,
            final_state_indices_ptr=last, boundary_state_indices_ptr=boundary,
            boundary_recovery_lens_ptr=until_boundary, null_block_id=self._kernels.NULL_BLOCK_ID,
            mamba_block_size=block_size or 1, block_table_width=1 if blocks is None else blocks.shape[1],
            stride_num_accepted=num_accepted.stride(0),
            stride_request_indices=0 if requests is None else requests.stride(0),
            stride_state_indices=slots.stride(0), stride_query_start_loc=offsets.stride(0),
            stride_block_table_row=of_blocks[0], stride_block_table_col=of_blocks[1],
            stride_num_computed=0 if computed is None else computed.stride(0), SPEC_QUERY_LEN=self._tokens, num_warps=1,
        )  # fmt: skip

    def _move_inputs(self, slots: Tensor, aligned: bool) -> None:
        """Move the inputs before the next token to the front of the convolutions' states, by vLLM's kernel."""
        (accepted, last, until_boundary, boundary), conv = self._plan, self._convs[0]
        addresses, *strides = self._table
        kept = self.layers[0].conv_size - 1
        self._kernels._compact_conv_state_kernel[(-(-conv.shape[1] // CHANNELS), slots.shape[0], len(self.layers))](
            conv_state_ref_ptr=conv, conv_state_base_addrs_ptr=addresses, conv_state_block_strides_ptr=strides[0],
            conv_state_dim_strides_ptr=strides[1], conv_state_token_strides_ptr=strides[2], state_indices_ptr=slots,
            commit_lens_ptr=accepted, final_state_indices_ptr=last, boundary_state_indices_ptr=boundary,
            boundary_recovery_lens_ptr=until_boundary, null_block_id=self._kernels.NULL_BLOCK_ID,
            conv_dim=conv.shape[1], conv_history_len=kept, stride_state_indices=slots.stride(0), BLOCK_D=CHANNELS,
            BLOCK_HISTORY=1 << (kept - 1).bit_length(), ALIGN_MODE=aligned, num_warps=4,
        )  # fmt: skip
