"""Weights side by side: the same values, the same parameters, and no buffer that is out of date."""

from __future__ import annotations

import copy
import gc
import io
import pathlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import DynamicCache

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from kda_layers.modeling.layer import weights
from kda_layers.modeling.layer.fast_paths import TENSOR_PARALLEL
from kda_layers.modeling.layer.weights import MergedWeights
from kda_layers.modeling.models.modeling_kda import KDAMLP

SIZES = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=16, intermediate_size=64,
    num_attention_heads=2, full_attention_interval=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "DEVICES", ("cpu",))


def linears(*outputs: int, width: int = 8) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(width, n, bias=False) for n in outputs]


def laid(*outputs: int) -> tuple[list[nn.Linear], MergedWeights, Tensor]:
    """Linear layers, and their weights after they were laid side by side."""
    layers, joint = linears(*outputs), MergedWeights()
    whole = joint.weight(layers)
    assert whole is not None
    return layers, joint, whole


def rows(layers: list[nn.Linear]) -> Tensor:
    return torch.cat([layer.weight.detach() for layer in layers])


def mlp() -> KDAMLP:
    torch.manual_seed(0)
    return KDAMLP(KDAConfig(**SIZES))


def model() -> KDAForCausalLM:
    torch.manual_seed(0)
    return KDAForCausalLM(KDAConfig(**SIZES)).eval()


def buffers_of(m: nn.Module) -> list[MergedWeights]:
    return [found for module in m.modules() if isinstance(found := vars(module).get("merged_weights"), MergedWeights)]


def infer(m: nn.Module, x: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return m(torch.randn(3, 32, generator=torch.Generator().manual_seed(1)) if x is None else x)


# ---------------------------------------------------------------- what laying changes, and what it does not


def test_the_parameters_stay_what_they_are() -> None:
    layers = linears(3, 5, 1)
    parameters, values = [layer.weight for layer in layers], rows(layers)
    joint = MergedWeights()
    whole = joint.weight(layers)
    assert whole is not None
    assert torch.equal(whole, values)
    assert not whole.requires_grad
    assert all(layer.weight is p and p.requires_grad and p.is_leaf for layer, p in zip(layers, parameters, strict=True))
    assert [layer.weight.data_ptr() for layer in layers] == [whole[n:].data_ptr() for n in (0, 3, 8)]
    assert joint.weight(layers) is whole


def test_an_optimizer_step_writes_to_the_buffer() -> None:
    layers, joint, whole = laid(3, 5)
    optimizer = torch.optim.AdamW([layer.weight for layer in layers], lr=0.1)
    before = whole.clone()
    for _ in range(2):
        sum(layer(torch.ones(2, 8)).square().sum() for layer in layers).backward()
        optimizer.step()
    assert joint.weight(layers) is whole
    assert torch.equal(whole, rows(layers))
    assert (whole != before).all()


def test_a_gradient_of_a_forward_before_laying_is_right() -> None:
    layers, x = linears(3, 5), torch.randn(2, 8, requires_grad=True)
    (want,) = torch.autograd.grad(sum(layer(x).sum() for layer in layers), x)
    loss, joint = sum(layer(x).sum() for layer in layers), MergedWeights()
    joint.weight(layers)  # not while the graph holds the weights
    assert torch.equal(torch.autograd.grad(loss, x)[0], want)
    assert joint.weight(layers) is not None


def test_memory_that_another_tensor_holds_stays() -> None:
    layers, joint = linears(3, 5), MergedWeights()
    held = layers[1].weight.detach()
    assert joint.weight(layers) is None
    assert held.data_ptr() == layers[1].weight.data_ptr()
    del held
    assert joint.weight(layers) is not None


FSDP2 = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from kda_layers.modeling.layer import weights

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
ids = torch.arange(12).view(2, 6)


def losses(devices):
    weights.DEVICES, found = devices, []
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(vocab_size=13, hidden_size=16, num_hidden_layers=2, linear_num_heads=1,
                                     linear_head_dim=8, head_dim=8, num_attention_heads=2))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        with torch.no_grad():
            found.append(model.eval()(ids, labels=ids).loss.item())
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


print(losses(("cpu",)) == losses(()), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_shards_that_fsdp2_gathers() -> None:
    """FSDP2 keeps a parameter and gathers into memory of its own: an evaluation must not move that."""
    done = subprocess.run([sys.executable, "-c", FSDP2], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


def test_loading_writes_to_the_buffer() -> None:
    m = mlp()
    infer(m)
    whole, other = m.merged_weights.whole, {n: torch.randn_like(p) for n, p in m.named_parameters()}
    m.load_state_dict(other)
    assert m.merged_weights.weight((m.gate_proj, m.up_proj)) is whole
    assert torch.equal(whole, torch.cat((other["gate_proj.weight"], other["up_proj.weight"])))


def test_the_state_dict_is_what_it_was() -> None:
    m = model()
    before = {n: t.clone() for n, t in m.state_dict().items()}
    m.generate(torch.zeros(1, 3, dtype=torch.long), max_new_tokens=3)
    assert any(joint.whole is not None for joint in buffers_of(m))
    after = m.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[n], t) and after[n].shape == t.shape for n, t in before.items())
    assert not [n for n, _ in m.named_buffers() if "merged_weights" in n]


def test_results_are_those_of_separate_products() -> None:
    m = mlp().double()
    x = torch.randn(3, 32, dtype=torch.float64)
    want = nn.functional.silu(m.gate_proj(x)) * m.up_proj(x)
    torch.testing.assert_close(infer(m, x), m.down_proj(want).detach())
    assert m.merged_weights.whole is not None


# ---------------------------------------------------------------- where a buffer would be out of date


def replace_parameter(m: KDAMLP) -> None:
    m.up_proj.weight = nn.Parameter(torch.randn_like(m.up_proj.weight))


def replace_data(m: KDAMLP) -> None:
    m.up_proj.weight.data = torch.randn_like(m.up_proj.weight)


def assign(m: KDAMLP) -> None:
    m.load_state_dict({n: torch.randn_like(p) for n, p in m.named_parameters()}, assign=True)


def double_and_back(m: KDAMLP) -> None:
    m.double().float()


def replace_layer(m: KDAMLP) -> None:
    m.gate_proj = nn.Linear(32, 64, bias=False)


def add_hook(m: KDAMLP) -> None:
    m.gate_proj.register_forward_hook(lambda module, args, out: out + 1)


def add_pre_hook(m: KDAMLP) -> None:
    m.up_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def replace_forward(m: KDAMLP) -> None:
    forward = m.up_proj.forward
    m.up_proj.forward = lambda x: forward(x) * 3  # type: ignore[method-assign]


def add_bias(m: KDAMLP) -> None:
    m.up_proj.bias = nn.Parameter(torch.randn(64))


def prune_weight(m: KDAMLP) -> None:
    prune.random_unstructured(m.up_proj, "weight", 0.5)


def parametrize(m: KDAMLP) -> None:
    nn.utils.parametrizations.weight_norm(m.gate_proj)
    with torch.no_grad():
        m.gate_proj.parametrizations.weight.original0.mul_(2)


def flatten(m: KDAMLP) -> None:
    nn.utils.vector_to_parameters(torch.randn(sum(p.numel() for p in m.parameters())), m.parameters())


def inject_lora(m: KDAMLP) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["gate_proj"], init_lora_weights=False), m)


def merge_lora(m: KDAMLP) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.LoraModel(
        m, {"default": peft.LoraConfig(target_modules=["gate_proj", "down_proj"], init_lora_weights=False)}, "default"
    )
    tuned.merge_and_unload()


CHANGES = [
    replace_parameter, replace_data, assign, double_and_back, replace_layer, add_hook, add_pre_hook, replace_forward,
    add_bias, prune_weight, parametrize, flatten, inject_lora, merge_lora,
]  # fmt: skip
on_every_change = pytest.mark.parametrize("change", CHANGES, ids=[c.__name__ for c in CHANGES])


@on_every_change
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled after"])
def test_a_change_is_seen(change: Any, compiled: bool) -> None:
    m, before = mlp(), mlp()
    infer(m)
    assert m.merged_weights.whole is not None
    torch.manual_seed(2)
    change(m)
    torch._dynamo.reset()
    got = infer(torch.compile(m, backend="eager", fullgraph=change is not inject_lora) if compiled else m)
    m.merged_weights.weight = lambda layers: None  # type: ignore[method-assign]
    torch._dynamo.reset()
    torch.testing.assert_close(got, infer(m))
    if change not in (double_and_back,):
        assert not torch.allclose(got, infer(before), atol=1e-3)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "change", [replace_parameter, assign, double_and_back, replace_layer], ids=lambda c: c.__name__
)
def test_compiled_code_is_guarded(change: Any) -> None:
    """Code that was compiled with the buffer is not used after the parameters have been replaced."""
    m = mlp()
    infer(m)
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes].count(torch._C._nn.linear))
        return graph.forward

    compiled = torch.compile(m, backend=backend, fullgraph=True)
    torch.testing.assert_close(infer(compiled), infer(m))
    assert graphs == [2]
    with torch.no_grad():
        m.gate_proj.weight.mul_(2)
    torch.testing.assert_close(infer(compiled), infer(m))
    assert graphs == [2]
    change(m)
    got = infer(compiled)
    m.merged_weights.forget()
    torch._dynamo.reset()
    torch.testing.assert_close(got, infer(m))


def test_a_functional_call_uses_what_it_is_given() -> None:
    m = mlp()
    infer(m)
    whole = m.merged_weights.whole
    other = {n: torch.randn_like(p) for n, p in m.named_parameters()}
    x = torch.randn(2, 32)
    with torch.no_grad():
        got = torch.func.functional_call(m, other, x)
    want = mlp()
    want.load_state_dict(other)
    torch.testing.assert_close(got, want(x).detach())
    infer(m)
    again = m.merged_weights.whole
    assert again is not None  # the parameters are where they were, and so is the buffer
    assert again.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickled(m)], ids=["deepcopy", "pickle"])
def test_copies(way: Any) -> None:
    m = mlp()
    want = infer(m)
    new = way(m)
    assert new.merged_weights is not m.merged_weights
    assert new.merged_weights.whole is None
    assert torch.equal(infer(new), want)
    assert new.merged_weights.whole is not None
    with torch.no_grad():
        new.gate_proj.weight.zero_()
    assert not infer(new).any()
    assert torch.equal(infer(m), want)


def pickled(m: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_moving_a_module_releases_the_buffer() -> None:
    """`to` without an effect leaves it; a move drops it, and so does a new parameter."""
    m = mlp()
    infer(m)
    whole = m.merged_weights.whole
    m.to("cpu")
    m.float()
    assert m.merged_weights.whole is whole
    m.half()
    assert m.merged_weights.whole is None
    m.float()
    infer(m)
    assert m.merged_weights.whole is not None
    m.to_empty(device="meta")
    assert m.merged_weights.whole is None


# ---------------------------------------------------------------- where nothing is laid


def test_layers_that_are_more_than_a_product() -> None:
    other = linears(3, 5)
    with torch.inference_mode():
        inside = linears(3, 5)
    mixed = [linears(3)[0], linears(5)[0].double()]
    tied = linears(3, 3)
    tied[1].weight = tied[0].weight
    frozen_rows = linears(3, 5)
    store = torch.randn(9, 8)
    for layer, part in zip(frozen_rows, (store[:3], store[4:9]), strict=True):
        layer.weight.data = part
    hooked = linears(3, 5)
    hooked[0].register_forward_hook(lambda *args: None)
    for layers in (inside, mixed, tied, frozen_rows, hooked, [other[0], nn.Linear(8, 5)], [other[0], nn.Identity()]):
        addresses = [p.data_ptr() for layer in layers for p in layer.parameters()]
        joint = MergedWeights()
        for _ in range(2):
            assert joint.weight(layers) is None
        assert [p.data_ptr() for layer in layers for p in layer.parameters()] == addresses
    assert MergedWeights().weight(other) is not None


def test_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "DEVICES", ("cuda",))
    assert MergedWeights().weight(linears(3, 5)) is None


def test_with_gradients_or_autocast() -> None:
    m, x = mlp(), torch.randn(2, 32)
    m(x).sum().backward()
    assert all(p.grad is not None for p in m.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert infer(m, x).dtype == torch.bfloat16
    assert m.merged_weights.whole is None


def test_parameters_stay_where_a_graph_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a CUDA graph has captured, a training step too; what was laid before may go on."""
    m, before = mlp(), mlp()
    infer(before)
    addresses = [p.data_ptr() for p in m.parameters()]
    with monkeypatch.context() as capture:
        capture.setattr(weights, "is_capturing", lambda device: True)
        m(torch.randn(2, 32)).sum().backward()
        infer(before)
    infer(m)
    assert [p.data_ptr() for p in m.parameters()] == addresses
    assert m.merged_weights.whole is None
    assert before.merged_weights.whole is not None


# ---------------------------------------------------------------- files


def test_saving_after_laying(tmp_path: pathlib.Path) -> None:
    """Each tensor is written once and alone, whatever writes it."""
    m = model()
    want = {n: t.clone() for n, t in m.state_dict().items()}
    ids = torch.arange(6)[None]
    tokens = m.generate(ids, max_new_tokens=4, do_sample=False)
    assert any(joint.whole is not None for joint in buffers_of(m))
    m.save_pretrained(tmp_path / "pretrained")
    loaded = KDAForCausalLM.from_pretrained(tmp_path / "pretrained").eval()
    with safe_open(tmp_path / "pretrained" / "model.safetensors", "pt") as file:
        sizes = sum(file.get_tensor(n).nbytes for n in file.keys())  # noqa: SIM118
    assert sizes == sum(t.nbytes for n, t in want.items() if n != "lm_head.weight" or not m.config.tie_word_embeddings)
    clean_state_dict_for_safetensors = pytest.importorskip("accelerate.utils").clean_state_dict_for_safetensors
    save_model(m, str(tmp_path / "model.safetensors"))
    torch.save(m.state_dict(), tmp_path / "model.pt")
    cleaned = clean_state_dict_for_safetensors(dict(m.state_dict()))
    untied = {n: t for n, t in want.items() if n in cleaned}
    assert want.keys() - cleaned.keys() <= {"lm_head.weight", "model.embed_tokens.weight"}
    assert all(torch.equal(cleaned[n], t) for n, t in untied.items())
    for got in (loaded.state_dict(), m.state_dict(), torch.load(tmp_path / "model.pt")):
        assert all(torch.equal(got[n], t) for n, t in want.items())
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    assigned = model()
    assigned.load_state_dict(torch.load(tmp_path / "model.pt"), assign=True)
    assert torch.equal(assigned.generate(ids, max_new_tokens=4, do_sample=False), tokens)


def test_lora_on_a_model_that_has_generated() -> None:
    """Generation with adapters, merged and unloaded, follows the weights."""
    peft = pytest.importorskip("peft")
    m, fresh = model(), model()
    ids = torch.arange(6)[None]
    options = dict(target_modules=["q_proj", "gate_proj", "g_a_proj"], init_lora_weights=False)
    m.generate(ids, max_new_tokens=2)
    results = []
    for each in (m, fresh):
        torch.manual_seed(3)
        tuned = peft.get_peft_model(each, peft.LoraConfig(**options)).eval()
        with torch.no_grad():
            adapted = tuned(input_ids=ids).logits
            merged = tuned.merge_and_unload()
            results.append((adapted, merged(input_ids=ids).logits))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(results[0][0], results[0][1], atol=1e-4, rtol=1e-4)


def test_a_shard_is_recognised_until_something_is_replaced() -> None:
    """One local layer of a "colwise" one; another forward, parameter or shard is seen."""
    shard = pytest.importorskip("torch.distributed.tensor").Shard
    layer = nn.Linear(4, 6, bias=False)

    def share(rows: int) -> nn.Parameter:
        p: Any = nn.Parameter(torch.randn(6, 4))
        p.placements, p._local_tensor = (shard(0),), torch.randn(rows, 4)
        return p

    def forward_of(owner: nn.Module, dim: int) -> Callable[..., Any]:
        style = SimpleNamespace(use_local_output=True, output_layouts=shard(dim))

        def forward(x: Tensor, module: nn.Module = owner) -> Any:  # refers to its module, as transformers' do
            return style

        forward.__module__ = TENSOR_PARALLEL
        return forward

    layer.weight, layer.__dict__["forward"] = share(3), forward_of(layer, -1)
    with torch.no_grad():
        local = weights.as_local(layer)
        assert local is not layer
        assert weights.as_local(layer) is local
        assert local.weight is layer.weight._local_tensor
        layer.weight._local_tensor = torch.randn(3, 4)
        assert weights.as_local(layer).weight is layer.weight._local_tensor
        layer.weight = share(2)
        assert weights.as_local(layer).weight is layer.weight._local_tensor
        assert weights.as_local(layer).out_features == 2
        layer.__dict__["forward"] = forward_of(layer, 0)  # gathers its outputs
        assert weights.as_local(layer) is layer
    layer.__dict__["forward"] = forward_of(layer, -1)
    assert weights.as_local(layer) is layer, "with gradients, the layer itself is called"
    held = weakref.ref(layer)
    del layer, local
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("decay_rank", [16, 0])
def test_a_prompt_on_a_cache_is_projected_by_one_product(decay_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, 2, 16, decay_rank=decay_rank, gate_rank=decay_rank, layer_idx=0).eval()
    x, whole = torch.randn(2, 7, 32), layer.merged_weights.weight(layer._inputs())
    assert whole is not None
    cache = DynamicCache(config=KDAConfig(**SIZES))
    weights_of_products: list[Any] = []
    linear = nn.functional.linear

    def noted(x: Tensor, weight: Tensor, *bias: Any) -> Tensor:
        weights_of_products.append(weight)
        return linear(x, weight, *bias)

    with torch.no_grad():
        apart = layer(x)
        monkeypatch.setattr(nn.functional, "linear", noted)
        together = layer(x, cache=cache)
    assert any(weight is whole for weight in weights_of_products)
    assert not any(layer.q_proj.weight is weight for weight in weights_of_products)
    rounding = 4 * torch.finfo(torch.float32).eps * apart.abs().max()
    torch.testing.assert_close(together, apart, rtol=0, atol=float(rounding))
    recorded: list[Any] = []
    monkeypatch.setattr(MergedWeights, "products", lambda *_: recorded.append(1))
    assert layer(x).requires_grad
    assert not recorded
