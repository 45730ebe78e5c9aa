"""Parameters, their dtypes and devices."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity.calls import Refusal, calls_of
from tests.parity.loading import assert_same
from tests.parity.subjects import SHORT, TEXT, TINY, Subject, assert_close, greedy, logits, scratch

call = calls_of("Weights, dtypes, devices")
EXPERTS = "transformers' grouped experts"
EAGER = '`model.set_experts_implementation("eager")` serves'
NO_META = Refusal("Expected inputs of BF16 type", f"{EXPERTS} take only bf16 on the meta device")


@call("`num_parameters()`, `get_memory_footprint()`")
def num_parameters(on: Subject) -> Any:
    m = on.shared
    total = sum(p.numel() for p in m.parameters())
    assert m.num_parameters() == m.num_parameters(only_trainable=True) == total
    assert m.num_parameters(exclude_embeddings=True) == total - m.get_input_embeddings().weight.numel()
    return m.get_memory_footprint() >= 4 * total


@call("`resize_token_embeddings(n)`")
def resize_token_embeddings(on: Subject) -> Any:
    m = on.model()
    m.resize_token_embeddings(64)
    inputs = on.tokens()
    assert_close(logits(m, inputs)[..., : TINY["vocab_size"]], logits(on.shared, inputs))
    m.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    again = on.load(on.save(m))
    return m.config.vocab_size, m.lm_head.weight.shape, logits(again, inputs).shape, greedy(m.eval(), inputs).shape


@call("`get_input_embeddings()`, `set_input_embeddings()`, `get_output_embeddings()`")
def embeddings(on: Subject) -> Any:
    m = on.model()
    new = torch.nn.Embedding(*m.get_input_embeddings().weight.shape)
    m.set_input_embeddings(new)
    assert m.get_input_embeddings() is new
    assert m.get_output_embeddings() is m.lm_head
    return logits(m, on.tokens()).shape


@call(
    "`tie_word_embeddings=True`: tied, saved once, tied again",
    absent=dict(kimi="transformers' Kimi-Linear does not tie its embeddings"),
)
def tied(on: Subject) -> Any:
    m = on.build(tie_word_embeddings=True)
    again = on.load(on.save(m))
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert_close(logits(again, on.tokens()), logits(m, on.tokens()), 0)
    untied = on.build(tie_word_embeddings=False)
    return untied.num_parameters() - m.num_parameters()


@call("`model.to(torch.bfloat16)`, `.half()`, `.float()`")
def to_dtype(on: Subject) -> Any:
    m, dtypes = on.model(), []
    for cast in (m.bfloat16, m.half, lambda: m.to(torch.float16), m.float):
        out = logits(cast(), on.tokens())
        assert out.isfinite().all()
        dtypes.append((m.dtype, out.dtype))
    return dtypes


@call("`model.double()`", refused=dict(kimi=Refusal("matrix, got Double", f"{EXPERTS} have no fp64; {EAGER}")))
def to_double(on: Subject) -> Any:
    out = logits(on.model().double(), on.tokens())
    assert_close(out.float(), logits(on.shared, on.tokens()))
    return out.dtype


@call("`torch.autocast`, forward, backward and generate")
def autocast(on: Subject) -> Any:
    m, inputs = on.model().train(), on.tokens()
    with torch.autocast("cpu", torch.bfloat16):
        out = m(**inputs, labels=inputs["input_ids"])
        tokens = greedy(m.eval(), inputs)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in m.parameters() if p.grad is not None)
    return out.loss.dtype, tokens.shape, {p.grad.dtype for p in m.parameters() if p.grad is not None}


@call('`with torch.device("meta")`, a forward on meta tensors', refused=dict(kimi=NO_META))
def meta_device(on: Subject) -> Any:
    stock = on.shared
    with torch.device("meta"):
        m = type(stock)(stock.config)
    m = on.swapped(m)
    out = m(torch.zeros(2, 7, dtype=torch.long, device="meta"))
    return out.logits.device.type, out.logits.shape, all(p.is_meta for p in m.parameters())


@call('`model.to("meta")`, a forward and a loss on meta tensors', refused=dict(kimi=NO_META))
def to_meta(on: Subject) -> Any:
    ids = torch.zeros(2, 7, dtype=torch.long, device="meta")
    out = on.model().to("meta").train()(ids, labels=ids)
    return out.loss.device.type, out.loss.shape


@call("`init_empty_weights()` and `load_checkpoint_and_dispatch`")
def init_empty_weights(on: Subject) -> Any:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    folder, stock = scratch(), on.shared
    torch.save(stock.state_dict(), folder / "pytorch_model.bin")
    with init_empty_weights():
        m = type(stock)(stock.config)
    m = load_checkpoint_and_dispatch(on.swapped(m), str(folder / "pytorch_model.bin"), device_map={"": "cpu"})
    assert_same(on, m)


@call("`infer_auto_device_map` and `dispatch_model` with layers on the disk")
def dispatch_to_disk(on: Subject) -> Any:
    from accelerate import dispatch_model, infer_auto_device_map

    m = on.model()
    found = infer_auto_device_map(m, no_split_module_classes=m._no_split_modules)
    places = {name: "cpu" for name, _ in m.named_children()} | {"model": "cpu"}
    del places["model"]
    places |= {f"model.{name}": "cpu" for name, _ in m.model.named_children() if name != "layers"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(TINY["num_hidden_layers"])}
    m = dispatch_model(m, places, main_device="cpu", offload_dir=str(scratch()))
    assert_same(on, m)
    assert torch.equal(greedy(m, on.tokens(TEXT, SHORT)), greedy(on.shared, on.tokens(TEXT, SHORT)))
    return set(found.values())


@call('`from_pretrained(folder, device_map={..., "model.layers.1": "disk"}, offload_folder=...)`')
def offload_folder(on: Subject) -> Any:
    names = [name for name, _ in on.shared.model.named_children() if name != "layers"]
    places = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(TINY["num_hidden_layers"])}
    m = on.load(device_map=places, offload_folder=str(scratch()))
    assert_same(on, m)
    return greedy(m, on.tokens()).shape


@call("`accelerate.cpu_offload(model)`")
def cpu_offload(on: Subject) -> Any:
    from accelerate import cpu_offload

    m = cpu_offload(on.model(), execution_device="cpu")
    assert_same(on, m)
    assert torch.equal(greedy(m, on.tokens()), greedy(on.shared, on.tokens()))


@call("`requires_grad_(False)` but for some layers")
def frozen(on: Subject) -> Any:
    m, inputs = on.model().train().requires_grad_(False), on.tokens()
    m.model.layers[-1].requires_grad_(True)
    m(**inputs, labels=inputs["input_ids"]).loss.backward()
    with_grad = {name for name, p in m.named_parameters() if p.grad is not None}
    assert with_grad
    return {name.split("layers.")[-1][0] for name in with_grad}


@call("`module.register_forward_hook` on layers")
def forward_hooks(on: Subject) -> Any:
    m, seen = on.model(), []
    for layer in m.model.layers:
        layer.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
    inputs = on.tokens(TEXT, SHORT)
    logits(m, inputs)
    return [tuple(t.shape) for t in seen]


@call("`torch.func.functional_call(model, parameters, ...)`")
def functional_call(on: Subject) -> Any:
    inputs, other = on.tokens(), on.build(seed=2)
    with torch.no_grad():
        out = torch.func.functional_call(on.shared, other.state_dict(), kwargs=inputs)
    assert_close(out.logits, logits(other, inputs))


@call("`AveragedModel(model)`: an average of the weights")
def averaged_model(on: Subject) -> Any:
    average = torch.optim.swa_utils.AveragedModel(on.model())
    average.update_parameters(on.shared)
    average.update_parameters(on.shared)
    assert_same(on, average.module)
