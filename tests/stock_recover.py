"""Run vLLM's own metadata and kernels of RecoverSSM with our layer on the CPU, by Triton's interpreter.

    python -m tests.stock_recover FOLDER MODE

FOLDER has the unpacked wheel; MODE is that of the cache, none or align. Raises unless outputs and states are those of
each request's accepted tokens in fp64.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from triton.runtime.interpreter import InterpreterBuilder

from kda_layers.engines import vllm_recover
from tests import stock_engines, stock_vllm_layers
from tests.kernels.emulated_layer_step import first_choice

ATTENTION = "vllm.v1.attention.backends"
REAL = vllm_recover.METADATA, vllm_recover.KERNELS, f"{ATTENTION}.gdn_attn", f"{ATTENTION}.recoverssm_metadata"
BLOCK = 4  # tokens


class Generic:
    """AttentionMetadataBuilder, reduced to what it keeps."""

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __init__(self, spec: Any, layer_names: list[str], config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = spec, layer_names, config, device

    def _init_reorder_batch_threshold(self, *_: Any) -> None: ...


class Spec:
    """MambaSpec."""

    block_size, num_speculative_blocks, prefill_checkpoint_alignment, num_prefill_checkpoint_blocks = BLOCK, 0, None, 0

    def __init__(self, mode: str) -> None:
        self.mamba_cache_mode = mode


class Config(SimpleNamespace):
    """VllmConfig, whose other options are absent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def prepare(folder: Path, mode: str) -> Config:
    c = stock_vllm_layers.MOST_REQUESTS
    config = Config(
        scheduler_config=SimpleNamespace(max_num_seqs=c), num_speculative_tokens=2, use_v2_model_runner=True,
        speculative_config=SimpleNamespace(num_speculative_tokens=2), additional_config={},
        cache_config=Config(use_kda_recoverssm=True, mamba_cache_mode=mode),
        compilation_config=Config(cudagraph_mode=stock_engines.Nothing(), static_forward_context={}),
    )  # fmt: skip
    builder = SimpleNamespace(build=lambda *_: None)
    stock_engines.REAL = REAL  # type: ignore[assignment]
    stock_engines.STAND_INS |= {
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.model_executor.layers.mamba.checkpoint": {
            "MambaPrefillCheckpointExporter": stock_vllm_layers.Exporter,
            "MambaPrefillCheckpointBuilder": lambda *_, **__: builder,
        },
        f"{ATTENTION}.utils": {"NULL_BLOCK_ID": 0, "compute_causal_conv1d_metadata": lambda *_, **__: (None,) * 3},
        "vllm.v1.attention.backend": {"AttentionBackend": object, "AttentionMetadataBuilder": Generic},
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": {
            "_resolve_gdn_prefill_backend": lambda _: ("auto", "triton")
        },
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": lambda x, dtype=None, device=None, **_: torch.as_tensor(x, dtype=dtype)
        },
        "vllm.v1.kv_cache_interface": {"MambaSpec": Spec},
    }
    sys.meta_path.insert(0, stock_engines.Wheel(folder))
    return config


def masks_are_bool() -> None:
    """Let the interpreter load and store by masks that it has broadcast to int8."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return mask

    InterpreterBuilder.create_masked_load = lambda self, at, mask, *rest: load(self, at, as_bool(mask), *rest)
    InterpreterBuilder.create_masked_store = lambda self, at, x, mask, *rest: store(self, at, x, as_bool(mask), *rest)


def main(folder: str, mode: str) -> None:
    config = prepare(Path(folder), mode)
    for name in REAL:
        __import__(name)
    masks_are_bool()
    from tests import test_engine_layers as ours

    c = stock_vllm_layers.Config("k3", bound=-5.0, drafts=2, recovers=True)
    with first_choice() if not torch.cuda.is_available() else contextlib.nullcontext():
        engine, layer, pools = ours.layer_of(c)
        config.compilation_config.static_forward_context[layer.prefix] = layer
        step(config, mode, engine, layer, pools, ours)


def step(config: Config, mode: str, engine: Any, layer: Any, pools: Any, ours: Any) -> None:
    """Run drafts, a prompt's part, a decoded token without drafts, and a prompt's last token; commit."""
    builder = layer.get_attn_backend().get_builder_cls()(
        Spec(mode), [layer.prefix], config, torch.device("cpu")
    )  # fmt: skip
    lengths, slots, computed = (3, 3, 1, 1), (1, 3, 4, 5), torch.tensor([6, 9, 5, 2])
    offsets = torch.tensor([0, 3, 6, 7, 8], dtype=torch.int32)
    blocks = torch.zeros(4, 4, dtype=torch.int32)
    last = (computed + torch.tensor(lengths) - 1) // BLOCK if mode == "align" else torch.zeros(4, dtype=torch.long)
    blocks[torch.arange(4), last] = torch.tensor(slots, dtype=torch.int32)
    if mode == "align":
        blocks[0, 1] = 2  # the block that ends within the drafts
        builder.mamba_aligned_state_indices = torch.tensor(slots, dtype=torch.int32)[:, None]
    common = SimpleNamespace(
        query_start_loc=offsets, query_start_loc_cpu=offsets, block_table_tensor=blocks, num_reqs=4,
        num_actual_tokens=8, seq_lens=computed + torch.tensor(lengths),
        is_prefilling=torch.tensor([False, True, False, True]),
        compute_num_computed_tokens=lambda: computed.int(),
    )  # fmt: skip
    m = builder.build(
        0, common, num_accepted_tokens=torch.ones(4, dtype=torch.int32),
        num_decode_draft_tokens_cpu=torch.tensor([2, -1, -1, -1]),
    )  # fmt: skip
    assert (m.num_spec_decodes, m.num_prefills) == (2, 2)
    x = ours.hidden(layer.config, 8)
    got = engine.step(layer, m, x)
    with torch.inference_mode():
        done = m.commit_recoverssm_state(torch.tensor([3, 0, 1, 1], dtype=torch.int32))
    assert (done is not None) == (mode == "align")
    for slot, start, length in zip(slots, offsets[:-1].tolist(), lengths, strict=True):
        part = slice(start, start + length)
        conv, state = pools.before[0][slot][:, :3], pools.before[1][slot]
        ours.check(layer, x[part], got[part], conv, state, (pools.channels[slot], pools.state[slot]))
    if mode == "align":
        conv, state = pools.before[0][1][:, :3], pools.before[1][1]
        ours.check(layer, x[:2], got[:2], conv, state, (pools.channels[2], pools.state[2]))
    else:
        assert torch.equal(pools.state[2], pools.before[1][2])


if __name__ == "__main__":
    main(*sys.argv[1:])
