"""transformers' exporter: programs of the prefill and of the decode step, whose cache is one of their inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_for_generation

from tests.modeling.models import OURS, SWAPPED, build, ids, of_models

pytestmark = pytest.mark.compiles

# Qwen4's indexer reads values, and so do the experts that the tests' Qwen3.5 and Lara Mini have, one after the other,
# for fp64.
NOT_EXPORTED = {"swapped qwen4_exp", "swapped qwen3_5_moe", "swapped lara_mini"}
CACHES = {"dynamic": None, "static": GenerationConfig(cache_implementation="static", max_new_tokens=4)}


@pytest.mark.slow
@of_models([name for name in (*OURS, *SWAPPED) if name not in NOT_EXPORTED])
@pytest.mark.parametrize("cache", CACHES)
def test_exported_programs_compute_what_the_model_does(name: str, cache: str) -> None:
    m, tokens = build(name), ids(2, 6)
    inputs = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    options: dict[str, Any] = dict(generation_config=CACHES[cache])
    exported: Any = DynamoExporter().export_for_generation(m, inputs, config=DynamoConfig(), **options)
    parts = decompose_for_generation(m, inputs, **options)
    assert "decode" in parts
    for part, (module, arguments) in parts.items():
        with torch.no_grad():
            want = module(**copy.deepcopy(arguments))
        program = exported[part] if isinstance(exported, dict) else exported.components[part].program
        flags = {"use_cache", "return_dict"}  # become constants of the program
        given = {key: value for key, value in arguments.items() if key not in flags}
        got, want = tree_leaves(program.module()(**given)), tree_leaves(want)
        assert len(got) == len(want)
        if name == "windows":  # the exporter keeps all keys of a sliding window
            got, want = got[:1], want[:1]
        for g, w in zip(got, want, strict=True):  # of logits or hidden states and the cache
            torch.testing.assert_close(g, w)
