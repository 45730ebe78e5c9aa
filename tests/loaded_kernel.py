"""Checks of the built Hub kernel in a process that cannot import kda_layers: `run` starts it.

A check is a function of this file without arguments that raises if it fails. A process runs the checks of one group:
`operator` needs no transformers, `layer` puts the whole layer in place of the stock one, `functions` the two functions
that transformers looks up by itself, and `cuda` runs the CUDA kernels on a GPU, which the others do not see.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
REPOSITORY = "org/kda-layers"
GROUPS: dict[str, list[Callable[[], None]]] = {"operator": [], "layer": [], "functions": [], "cuda": []}
T = 130  # two chunks of 64 tokens and a rest


def run(group: str, first: Path, second: Path) -> dict[str, str]:
    """Return {name: "" or a traceback} of the checks of a group, from a process that loads the kernels built there."""
    environment = os.environ | {
        "LOCAL_KERNELS": f"{REPOSITORY}={first}",  # so transformers' lookups load it, too
        "SECOND_KERNEL": str(second),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if group != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "tests.loaded_kernel", group]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(group: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a function to a group."""

    def add(f: Callable[[], None]) -> Callable[[], None]:
        GROUPS[group].append(f)
        return f

    return add


def main() -> None:
    """Run the checks of the group that the command names, and print what failed as JSON."""
    sys.modules["kda_layers"] = None  # type: ignore[assignment]  # an import of it raises
    sys.modules["fla"] = None  # type: ignore[assignment]  # with which stock models fail on a CPU
    torch.manual_seed(0)
    failed = {}
    for f in GROUPS[sys.argv[1]]:
        try:
            f()
            failed[f.__name__] = ""
        except Exception:
            failed[f.__name__] = traceback.format_exc()
    assert sys.modules["kda_layers"] is None
    print(json.dumps(failed))


@cache
def first() -> Any:
    from kernels import get_local_kernel

    return get_local_kernel(Path(os.environ["LOCAL_KERNELS"].partition("=")[2]))


@cache
def second() -> Any:
    from kernels import get_local_kernel

    return get_local_kernel(Path(os.environ["SECOND_KERNEL"]))


# ---------------------------------------------------------------- the operator


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, g, beta, with different K and V."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, T, 2, n) for n in (16, 16, 32))
    g, beta = -torch.rand(2, T, 2, 16), torch.rand(2, T, 2)
    return [t.to(dtype).requires_grad_() for t in (q, k, v, g, beta)]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The definition, token by token, in the dtype of its inputs."""
    q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])  # [B, H, K, V]
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - seen))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(outputs, 1)


def operator(kernel: Any) -> Callable[..., Tensor]:
    return lambda *x: kernel.chunk_kda(*x, use_qk_l2norm_in_kernel=True)[0]


def results(f: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of a function of the inputs."""
    x = inputs(dtype)
    o = f(*x)
    return [o.detach(), *torch.autograd.grad((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum(), x)]


def assert_exact(f: Callable[..., Tensor]) -> None:
    """Output and gradients are no further from fp64 than twice the recurrence in fp32, and a rounding."""
    exact, plain = results(recurrence, torch.float64), results(recurrence, torch.float32)
    for got, expected, rounded in zip(results(f, torch.float32), exact, plain, strict=True):
        budget = 2 * (rounded - expected).abs().max() + torch.finfo(torch.float32).eps * expected.abs().max()
        assert (got - expected).abs().max() <= budget


@check("operator")
def no_library_but_torch_and_einops_is_needed() -> None:
    """The first check, as torch.compile imports others."""
    before = set(sys.modules)
    assert_exact(operator(first()))
    assert not {"transformers", "triton", "fla", "cuda"} & {name.split(".")[0] for name in set(sys.modules) - before}


@check("operator")
def forward_and_backward() -> None:
    assert_exact(operator(first()))


@check("operator")
def compiled_without_breaks() -> None:
    assert_exact(torch.compile(operator(first()), fullgraph=True, backend="aot_eager"))


@check("operator")
def decoding_continues_a_prefill() -> None:
    kernel, x = first(), [t.detach() for t in inputs()]
    options: dict[str, Any] = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    whole, final = kernel.chunk_kda(*x, **options)
    _, state = kernel.chunk_kda(*(t[:, : T - 1] for t in x), **options)
    o, state = kernel.fused_recurrent_kda(*(t[:, T - 1 :] for t in x), initial_state=state, **options)
    torch.testing.assert_close(o, whole[:, T - 1 :], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


@check("operator")
def it_explains_its_choice() -> None:
    assert first().explain().splitlines()[-1] == "chosen: eager"
    with first().use_backend("eager"):
        assert_exact(operator(first()))
    with pytest.raises(ValueError, match="q must have"):
        operator(first())(*(t[0] for t in inputs()))


@check("operator")
def two_builds_in_one_process() -> None:
    """The output of the second is twice that of the first (tests/test_hub_kernel.py)."""
    one, two = first(), second()
    assert one.__name__ != two.__name__
    assert hasattr(torch.ops, one.__name__)
    assert hasattr(torch.ops, two.__name__)
    assert_exact(operator(one))
    torch.testing.assert_close(operator(two)(*inputs()), 2 * operator(one)(*inputs()), rtol=0, atol=0)
    both = torch.compile(lambda *x: (operator(one)(*x), operator(two)(*x)), fullgraph=True, backend="aot_eager")
    o, doubled = both(*inputs())
    torch.testing.assert_close(doubled, 2 * o, rtol=0, atol=0)
    keys = {sys.modules[f"{k.__name__}.kernels.registry"].AUTOGRAD_KEY for k in (one, two)}
    assert len(keys) == 2, "a context of one would reach the backward of the other"


@check("operator")
def cuda_sources_compile_from_the_variant() -> None:
    """Each source once, into an empty cache; needs no GPU."""
    from kernels import get_local_kernel

    kernel = get_local_kernel(Path(os.environ["LOCAL_KERNELS"].partition("=")[2]) / "torch-cuda")
    folder = Path(kernel.__file__).parent
    toolchain, build = (import_module(f"{kernel.__name__}.kernels.cuda.{name}") for name in ("toolchain", "build"))
    variants = dict(toolchain.variants_for("sm_90a"))
    assert set(map(Path, variants)) == set(folder.rglob("*.cu"))
    with tempfile.TemporaryDirectory() as empty:
        os.environ["KDA_LAYERS_CACHE"] = empty
        for source, macros in variants.items():
            assert build.compile(source, macros, "sm_90a").code
        assert len(list(Path(empty).rglob("*.cubin"))) == len(variants)


@check("cuda")
def cuda_kernels_compile_on_their_first_call() -> None:
    """Into an empty cache, from the sources of the variant; then decode."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, T, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, beta = -torch.rand(2, T, 2, 128, device="cuda"), torch.rand(2, T, 2, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["KDA_LAYERS_CACHE"] = empty
        x = [t.requires_grad_() for t in (q, k, v, g, beta)]
        o = operator(first())(*x)
        grads = torch.autograd.grad(o.float().square().sum(), x)
        last = [t[:, T - 1 :].detach() for t in x]
        _, state = first().chunk_kda(*(t[:, : T - 1].detach() for t in x), **options)
        step, _ = first().fused_recurrent_kda(*last, initial_state=state, **options)
        sources = {p.name.partition("-")[0] for p in Path(empty).rglob("*.cubin")}
    assert {"forward", "reverse_scan", "gradients", "decode"} <= sources
    wide = [t.detach().double().requires_grad_() for t in x]
    exact = recurrence(*wide)
    expected = torch.autograd.grad(exact.square().sum(), wide)
    assert first().__name__.startswith("kda_layers_cuda")
    for got, want in zip((o, step, *grads), (exact, exact[:, T - 1 :], *expected), strict=True):
        assert (got - want).abs().max() <= 2e-2 * want.abs().max()


# ---------------------------------------------------------------- models

IDS = torch.randint(2, 97, (2, 70), generator=torch.Generator().manual_seed(2))


def repository(layer: str) -> Any:
    """A layer of the kernel. With `version=`, the library would ask the Hub which versions there are."""
    from kernels import LayerRepository

    return LayerRepository(REPOSITORY, layer_name=layer, revision="main")


@cache
def models() -> tuple[Any, Any, float]:
    """A tiny Kimi-Linear with a kernel, one in fp64 whose layers follow the definition, the error of the stock one."""
    from tests.modeling.stock_models import build, with_oracle

    model = build("kimi_linear", dense=True)
    exact = with_oracle(model)
    error = (logits(model) - logits(exact)).abs().max().item()  # before functions of all models are replaced
    with_layer(model) if sys.argv[1] == "layer" else with_functions(model)
    return model, exact, error


def with_layer(model: Any) -> None:
    """Through the library alone: transformers gives the layer no name."""
    from kernels import Mode, kernelize, register_kernel_mapping, replace_kernel_forward_from_hub
    from transformers.models.kimi_linear import modeling_kimi_linear as stock

    name = "KimiLinearDeltaAttention"
    replace_kernel_forward_from_hub(stock.KimiLinearDeltaAttention, name)
    register_kernel_mapping({name: {"cpu": repository(name)}}, inherit_mapping=False)
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
    layers = [layer.self_attn for layer in model.model.layers[::2]]
    assert all(layer.forward.__func__ is first().layers.KimiLinearDeltaAttention.forward for layer in layers)


def with_functions(model: Any) -> None:
    """Through transformers' own `kernelize` and the names that it gives the functions."""
    from kernels import register_kernel_mapping
    from transformers.integrations import hub_kernels
    from transformers.models.kimi_linear import modeling_kimi_linear as stock

    names = {"chunk_kda": "chunk_kimi_delta_attention", "fused_recurrent_kda": "recurrent_kimi_delta_attention"}
    mapping = {name: {"cpu": repository(layer)} for name, layer in names.items()}
    register_kernel_mapping(mapping, inherit_mapping=False)
    hub_kernels.kernelize(model)
    for layer in names.values():
        assert getattr(stock, layer).forward.__func__ is getattr(first().layers, layer).forward


def let_transformers_use_this_version() -> None:
    """Lower transformers' bound on the version of `kernels` to the one that is installed, before it is imported."""
    import kernels
    from transformers.utils import import_utils

    available = import_utils.is_kernels_available
    if not available():
        inspect.unwrap(available).__defaults__ = (kernels.__version__, "99")
        available.cache_clear()
    assert available()


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    return model(ids, use_cache=False, **kwargs).logits


def greedy(model: Any) -> Tensor:
    return model.generate(IDS[:, :20], max_new_tokens=8, do_sample=False)


@check("functions")
@check("layer")
def logits_are_as_exact_as_the_stock_ones() -> None:
    model, exact, error = models()
    assert (logits(model) - logits(exact)).abs().max() <= 2 * error


@check("functions")
@check("layer")
def generated_tokens() -> None:
    model, exact, _ = models()
    tokens = IDS[:, :20]
    for _ in range(8):
        tokens = torch.cat((tokens, logits(exact, tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(greedy(model), tokens)


@check("functions")
@check("layer")
def gradients() -> None:
    model, exact, _ = models()

    def of(m: Any) -> dict[str, Tensor]:
        m.train()
        loss = m(IDS, labels=IDS, use_cache=False).loss
        found = dict(zip(dict(m.named_parameters()), torch.autograd.grad(loss, list(m.parameters())), strict=True))
        m.eval()
        return found

    for (name, got), expected in zip(of(model).items(), of(exact).values(), strict=True):
        assert (got - expected).abs().max() <= 1e-4 * max(expected.abs().max(), 0.1), name


@check("functions")
def functions_refuse_what_the_convolution_has_mixed() -> None:
    whole = logits(models()[0], IDS[:1], cu_seq_lens_q=torch.tensor([0, IDS.shape[1]]))
    assert torch.equal(whole, logits(models()[0], IDS[:1]))  # one sequence is not mixed with another
    with pytest.raises(ValueError, match="cu_seq_lens_q must hold one sequence here, got 2"):
        logits(models()[0], IDS[:1], cu_seq_lens_q=torch.tensor([0, 30, 70]))


@check("functions")
def functions_in_other_dtypes() -> None:
    layers = first().layers
    for dtype, within in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        q, k, v, g, beta = (t.detach() for t in inputs(dtype))
        arguments = (q, k, v, g.float(), beta)  # transformers' decays are fp32 in any model
        o, state = layers.chunk_kimi_delta_attention()(
            *arguments, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        exact = recurrence(*(t.double() for t in arguments))
        assert (o.dtype, state.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
        assert (o - exact).abs().max() <= within
        # A cache holds its states in fp32.
        last = [t[:, :1] for t in arguments]
        o, _ = layers.recurrent_kimi_delta_attention()(*last, state.float(), True, use_qk_l2norm_in_kernel=True)
        assert o.dtype == dtype


@check("functions")
def the_guide_runs() -> None:
    """The last check of its group, as it replaces the whole layer, too."""
    folder = os.environ["LOCAL_KERNELS"].partition("=")[2]
    text = (ROOT / "docs" / "guides" / "hub_kernel.md").read_text().replace('Path("build")', f"Path({folder!r})")
    load, whole, functions = re.findall(r"```python[^\n]*\n(.*?)```", text, re.S)
    build, replace = whole.split("\n\nname = ")
    names: dict[str, Any] = {}
    exec(load, names)
    assert names["kernel"] is first()
    exec(build, names)
    model = names["model"].eval()
    expected = logits(model)
    layer, ours = model.model.layers[0].self_attn, first().layers.KimiLinearDeltaAttention.forward
    exec(f"name = {replace}", names)
    assert layer.forward.__func__ is ours
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    exec(functions, names)
    assert layer.forward.__func__ is not ours
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@check("layer")
def packed_sequences_are_as_alone() -> None:
    model, ends = models()[0], ((0, 30), (30, 70))
    row = IDS[:1]
    alone = torch.cat([logits(model, row[:, a:b]) for a, b in ends], 1)
    positions = torch.cat([torch.arange(b - a) for a, b in ends])[None]
    offsets, numbers = torch.tensor([0, 30, 70]), torch.repeat_interleave(torch.tensor([30, 40]))[None]
    for packing in (dict(cu_seq_lens_q=offsets), dict(cu_seqlens=offsets), dict(seq_idx=numbers)):
        torch.testing.assert_close(logits(model, row, position_ids=positions, **packing), alone, rtol=1e-5, atol=1e-5)
    changed = row.clone()
    changed[:, :30] = changed[:, :30].flip(1)
    kept = logits(model, changed, position_ids=positions, cu_seq_lens_q=offsets)[:, 30:]
    torch.testing.assert_close(kept, alone[:, 30:], rtol=1e-5, atol=1e-5)


@check("layer")
def padding_is_not_read() -> None:
    model = models()[0]
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    padded = logits(model, attention_mask=mask)
    torch.testing.assert_close(padded[:1, 9:], logits(model, IDS[:1, 9:]), rtol=1e-4, atol=1e-4)
    other = IDS.clone()
    other[0, :9] = 3
    assert torch.equal(logits(model, other, attention_mask=mask)[0, 9:], padded[0, 9:])
    with pytest.raises(ValueError, match="attention_mask must be None with cu_seqlens"):
        logits(model, IDS[:1], attention_mask=mask[:1], cu_seq_lens_q=torch.tensor([0, 30, 70]))


@check("layer")
def cached_steps_continue_in_any_pieces() -> None:
    from transformers import DynamicCache

    model = models()[0]
    cache, outputs = DynamicCache(config=model.config), []
    with torch.no_grad():
        for piece in IDS.split([40, 1, 1, 28], 1):
            outputs.append(model(piece, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(outputs, 1), logits(model), rtol=1e-4, atol=1e-4)


@check("layer")
def the_model_compiles_without_breaks() -> None:
    from transformers import DynamicCache

    model = models()[0]
    compiled = torch.compile(lambda ids, **k: model(ids, **k).logits, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        whole = compiled(IDS, use_cache=False)
    torch.testing.assert_close(whole, logits(model))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :69], past_key_values=cache)
        step = compiled(IDS[:, 69:], past_key_values=cache)
    torch.testing.assert_close(step, whole[:, 69:], rtol=1e-4, atol=1e-4)


@check("layer")
def offloaded_weights_are_loaded() -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model = models()[0]
    expected = logits(model)
    for layer in model.model.layers[::2]:
        cpu_offload(layer.self_attn, execution_device="cpu")
    assert model.model.layers[0].self_attn.forget_gate.dt_bias.is_meta
    torch.testing.assert_close(logits(model), expected)
    for layer in model.model.layers[::2]:
        remove_hook_from_submodules(layer.self_attn)
        layer.self_attn.forward = first().layers.KimiLinearDeltaAttention.forward.__get__(layer.self_attn)


@check("layer")
def layers_that_it_cannot_compute_are_refused() -> None:
    layer = copy.copy(models()[0].model.layers[0].self_attn)
    forward, x = first().layers.KimiLinearDeltaAttention.forward, torch.randn(1, 3, 32)
    layer.activation = "gelu"
    with pytest.raises(ValueError, match="the convolution's activation must be 'silu', got 'gelu'"):
        forward(layer, x)


if __name__ == "__main__":
    if sys.argv[1] == "functions":
        let_transformers_use_this_version()
    main()
