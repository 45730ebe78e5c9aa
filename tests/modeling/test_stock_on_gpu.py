"""Swapped models, drafts and learned key biases on a GPU, at the width that its kernels are made for.

test_swap_stock.py and test_speculative.py run there too, with narrow heads, which other backends serve.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import is_flash_attn_2_available

from kda_layers import KDAConfig, KDAForCausalLM, swap_attention, use_backend
from kda_layers.kernels.kda.contract import default_problem
from kda_layers.serving import enable_continuous_batching, enable_speculative_decoding
from tests.kernels.cases import BF16, FP64, budget, error, serve
from tests.modeling.stock_models import (
    FAMILIES,
    GATED_DELTA_FAMILIES,
    KDA_FAMILIES,
    MIXING,
    build,
    cast,
    every_family,
    with_oracle,
)
from tests.modeling.test_speculative import check_ties

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
every_fused_backend = pytest.mark.parametrize("backend", ["sm90", "fla"])
LENGTHS = (70, 9, 41)  # of rows that are padded or packed


@pytest.fixture
def served(backend: str, required_backends: frozenset[str]) -> str:
    """The backend, where it serves whole sequences and steps of models; else a skip that names the reason."""
    problem = default_problem(DEVICE)
    for needed in (replace(problem, needs_grad=True), replace(problem, decode=True, has_state=True)):
        serve(backend, needed, required_backends)
    return backend


def wide(family: str) -> Any:
    """A stock model in bf16 on the GPU with heads of 128 in linear attention, without a router's jumps."""
    widths = {"doge": (), "bailing_hybrid": ("head_dim",)}
    widths |= dict.fromkeys(GATED_DELTA_FAMILIES, ("linear_key_head_dim", "linear_value_head_dim"))
    head = dict.fromkeys(widths.get(family, ("linear_head_dim",)), 128)
    return cast(build(family, dense=family != "doge", **head), BF16).to(DEVICE)


def swapped(stock: Any) -> Any:
    model = copy.deepcopy(stock)
    swap_attention(model)
    return model


def tokens(*shape: int, high: int = 80) -> Tensor:
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def results(model: Any, trains: bool = True) -> dict[str, Tensor]:
    """Logits, and, if it trains, the gradients of all parameters as one vector."""
    ids = tokens(2, 150)
    model.zero_grad()
    with torch.set_grad_enabled(trains):
        out = model(ids, labels=ids, use_cache=False)
    if not trains:
        return {"logits": out.logits}
    out.loss.backward()
    grads = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return {"logits": out.logits.detach(), "gradients": torch.cat(grads)}


def compare(stock: Any, trains: bool = True) -> None:
    """Fails unless a swapped model is about as close to the definition in fp64 as the stock model."""
    truth, of_stock, of_swapped = (results(m, trains) for m in (with_oracle(stock), stock, swapped(stock)))
    for name, t in truth.items():
        assert error(of_swapped[name], t) <= budget(error(of_stock[name], t), BF16), name


@every_fused_backend
@every_family
def test_swapped_models(family: str, served: str) -> None:
    with use_backend(served):
        compare(wide(family))


def test_swapped_doge() -> None:
    compare(wide("doge"))


def trains_on_fla(family: str) -> bool:
    """False where flash-linear-attention refuses: gated delta nets on Hopper with Triton 3.4 to 3.7.0 (issue 640)."""
    refused = Version("3.4") <= Version(importlib.metadata.version("triton")) < Version("3.7.1")
    return family not in GATED_DELTA_FAMILIES or not refused or torch.cuda.get_device_capability()[0] != 9


@pytest.mark.compiles
@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="flash-linear-attention is not installed")
def test_stock_models_on_flash_linear_attention() -> None:
    """In a process of its own, where transformers finds the package: elsewhere in these tests it is hidden."""
    code = f"""
from benchmarks.timing import take_first_configurations
take_first_configurations()
from tests.modeling import test_stock_on_gpu as tests
for family in {FAMILIES}:
    tests.compare(tests.wide(family), tests.trains_on_fla(family))
from fla.ops.kda import chunk_kda
import inspect
from transformers.models.kimi_linear import modeling_kimi_linear
stock = modeling_kimi_linear.chunk_kimi_delta_attention
assert chunk_kda in inspect.getclosurevars(stock).nonlocals.values(), "transformers did not pick the package's kernel"
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]


@every_fused_backend
@every_family
@torch.no_grad()
def test_padded_and_packed_rows(family: str, served: str) -> None:
    """Each row's logits are as close to the definition as those of the stock model on that row alone."""
    stock = wide(family)
    model, exact = swapped(stock), with_oracle(stock)
    rows = [tokens(1, n) for n in LENGTHS]
    most = max(LENGTHS)
    ids = torch.cat([torch.nn.functional.pad(r, (most - r.shape[1], 0)) for r in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (most - r.shape[1], 0)) for r in rows])
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in LENGTHS])[None]
    with use_backend(served):
        padded = model(ids, attention_mask=mask, use_cache=False).logits
        found = [[padded[i, most - n :] for i, n in enumerate(LENGTHS)]]
        if family not in MIXING:  # packed sequences are refused
            packed = model(torch.cat(rows, 1), position_ids=positions, use_cache=False).logits[0]
            found.append(list(packed.split(LENGTHS)))
    for i, row in enumerate(rows):
        truth = exact(row, use_cache=False).logits[0]
        limit = budget(error(stock(row, use_cache=False).logits[0], truth), BF16)
        assert all(error(got[i], truth) <= limit for got in found)


@every_fused_backend
@pytest.mark.parametrize("name", ["hybrid", *FAMILIES])
def test_prompt_lookup_is_greedy_but_for_ties(name: str, served: str) -> None:
    torch.manual_seed(1)
    if name == "hybrid":
        config = KDAConfig(
            vocab_size=9, hidden_size=64, num_hidden_layers=3, linear_num_heads=2, linear_head_dim=128,
            num_attention_heads=2, full_attention_interval=3, initializer_range=0.3, bos_token_id=None,
            eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        model: Any = KDAForCausalLM(config).to(DEVICE, BF16).eval()
    else:
        model = swapped(wide(name))
        enable_speculative_decoding(model)
        model.generation_config.suppress_tokens = [0, 1, 2, *range(9, 97)]
    new, prompt, calls = 24, tokens(1, 20, high=9), []
    model.register_forward_hook(lambda *_: calls.append(1))
    options: dict[str, Any] = dict(max_new_tokens=new, do_sample=False)
    with use_backend(served):
        greedy = model.generate(prompt, **options)
        calls.clear()
        got = model.generate(prompt, **options, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
        assert len(calls) < new, "no guess was right"
        check_ties(model, greedy, got, 20)


def test_a_hybrid_with_a_key_bias() -> None:
    """Logits and gradients in bf16 on the GPU against fp64 on the CPU; decoding token by token against all at once."""
    torch.manual_seed(0)
    config = KDAConfig(
        vocab_size=97, hidden_size=256, num_hidden_layers=4, linear_num_heads=2, linear_head_dim=128,
        num_attention_heads=2, intermediate_size=256, full_attention_interval=2, attention_bias="key",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = KDAForCausalLM(config).to(DEVICE, BF16).eval()
    exact = copy.deepcopy(model).to("cpu", FP64)
    plain = copy.deepcopy(model)
    ids = tokens(2, 150)
    got = results(model)
    out = exact(ids.cpu(), labels=ids.cpu(), use_cache=False)
    out.loss.backward()
    grads = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    with use_backend("eager"):
        yardstick = results(plain)
    for name, t in (("logits", out.logits.detach()), ("gradients", grads)):
        assert error(got[name].cpu(), t) <= budget(error(yardstick[name].cpu(), t), BF16), name
    with torch.no_grad():
        step = model(ids[:, :100], use_cache=True)
        for t in range(100, 110):
            step = model(ids[:, t : t + 1], past_key_values=step.past_key_values)
            limit = budget(error(yardstick["logits"][:, t].cpu(), out.logits[:, t].detach()), BF16)
            assert error(step.logits[:, -1].cpu(), out.logits[:, t].detach()) <= limit


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("family", [family for family in KDA_FAMILIES if family != "glm5_next"])
def test_continuous_batching(family: str, attention: str) -> None:
    """Tokens of `generate`, but for ties, from pages of latents; flash attention runs in CUDA graphs."""
    try:
        enable_continuous_batching()
    except ImportError as reason:
        pytest.skip(str(reason))
    from transformers import ContinuousBatchingConfig

    if attention != "sdpa" and not is_flash_attn_2_available():
        pytest.skip("needs flash-attn")
    model = swapped(wide(family))
    given = [tokens(1, length) for length in (20, 1, 5, 300, 70)]
    greedy = [model.generate(ids, max_new_tokens=24, do_sample=False) for ids in given]
    model.set_attn_implementation(attention)
    outputs = model.generate_batch(
        [ids[0].tolist() for ids in given],
        GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=-1),
        ContinuousBatchingConfig(page_size=16, num_blocks=400, max_batch_tokens=128, auto_switch_to_flash=False),
    )
    for ids, want, out in zip(given, greedy, outputs.values(), strict=True):
        assert out.error is None
        got = torch.tensor([ids[0].tolist() + out.generated_tokens], device=DEVICE)
        check_ties(model, want, got, ids.shape[1])
