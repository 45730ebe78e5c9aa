"""torch.compile, export, several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parity.calls import Refusal, calls_of
from tests.parity.subjects import OURS, Subject, assert_close, greedy, logits
from tests.parity.training import first_loss
from tests.processes import one_process

call = calls_of("Compiling, exporting, distributing")
NO_KEYS = Refusal(
    "'LinearAttentionLayer' object has no attribute 'keys'",
    "transformers' recipe keeps keys and values of every layer, and KDA layers have none; `DynamoExporter` serves",
)

TWO_DTYPES = Refusal(
    "FSDP expects uniform original parameter dtype",
    "A_log and dt_bias stay in fp32, and a shard has one dtype: load in fp32 and give "
    "`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`",
)


@call('`torch.compile(model, fullgraph=True, backend="aot_eager")`', heavy=True)
def compiled(on: Subject) -> Any:
    m = torch.compile(on.model(), fullgraph=True, backend="aot_eager")
    assert_close(logits(m, on.tokens(), use_cache=False), logits(on.shared, on.tokens()))


@call("`model.compile()`, then `generate` with a static cache", heavy=True)
def compiled_generate(on: Subject) -> Any:
    from transformers import CompileConfig

    m, options = on.model(), CompileConfig(backend="aot_eager", fullgraph=False, mode=None)
    options._compile_all_devices = True  # on a CPU, transformers compiles for tests alone
    out = greedy(m, on.tokens(), cache_implementation="static", compile_config=options)
    assert torch.equal(out, greedy(on.shared, on.tokens()))


@call("a compiled training step", heavy=True)
def compiled_step(on: Subject) -> Any:
    m = on.model().train()
    step = torch.compile(lambda ids: m(ids, labels=ids, use_cache=False).loss, backend="aot_eager")
    loss = step(on.tokens()["input_ids"])
    loss.backward()
    assert abs(float(loss) - first_loss(on)) < 1e-3
    return bool(m.lm_head.weight.grad.isfinite().all())


@call("`torch.export.export(model, ...)`", heavy=True)
def exported(on: Subject) -> Any:
    inputs = on.tokens() | dict(use_cache=False)
    program = torch.export.export(on.model(), (), inputs, strict=False)
    assert_close(program.module()(**inputs).logits, logits(on.shared, on.tokens()))


@call("`DynamoExporter().export(model, inputs)`", heavy=True)
def dynamo_exporter(on: Subject) -> Any:
    from transformers.exporters import DynamoConfig, DynamoExporter

    program = DynamoExporter().export(on.model(), on.tokens(), config=DynamoConfig())
    run = (
        program.module() if isinstance(program, torch.export.ExportedProgram) else program
    )  # as transformers 5.17 does
    assert_close(run(**on.tokens()).logits, logits(on.shared, on.tokens()))


@call("`DynamoExporter().export_for_generation(model, inputs)`", heavy=True)
def export_for_generation(on: Subject) -> Any:
    from transformers.exporters import DynamoConfig, DynamoExporter

    found = DynamoExporter().export_for_generation(on.model(), on.tokens(), config=DynamoConfig())
    return sorted(getattr(found, "components", found))  # a dict before transformers 5.23


@call("`TorchExportableModuleForDecoderOnlyLM` (ExecuTorch)", heavy=True, refused=dict.fromkeys(OURS, NO_KEYS))
def executorch(on: Subject) -> Any:
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    m = on.model()
    m.generation_config.update(
        use_cache=True, cache_implementation="static", cache_config=dict(batch_size=1, max_cache_len=32, device="cpu")
    )
    ids = on.tokens()["input_ids"][:, :1]
    program = TorchExportableModuleForDecoderOnlyLM(m, batch_size=1, max_cache_len=32, device="cpu").export(
        input_ids=ids, cache_position=torch.zeros(1, dtype=torch.long)
    )
    out = program.module()(input_ids=ids, cache_position=torch.zeros(1, dtype=torch.long))
    assert_close(out, logits(on.shared, dict(input_ids=ids)))


# ---------------------------------------------------------------- processes


def loss_and_gradient(m: Any, ids: Tensor) -> tuple[float, Tensor]:
    """Return the loss, and the gradient of the head."""
    loss = m(input_ids=ids, labels=ids).loss
    loss.backward()
    grad = next(p.grad for n, p in m.named_parameters() if n.endswith("lm_head.weight"))
    return float(loss), (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float()


def shard(m: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in m.model.layers:
        fully_shard(layer, **options)
    return fully_shard(m, **options)


@call("`DistributedDataParallel(model)`")
def ddp(on: Subject) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    ids = on.tokens()["input_ids"]
    with one_process():
        found = loss_and_gradient(
            DistributedDataParallel(on.model().train(), find_unused_parameters=on.name == "kimi"), ids
        )
    expected = loss_and_gradient(on.model().train(), ids)
    assert abs(found[0] - expected[0]) < 1e-4
    assert_close(found[1], expected[1])


@call("FSDP2: `fully_shard(model)`, a step, the gathered checkpoint")
def fsdp2(on: Subject) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    ids = on.tokens()["input_ids"]
    with one_process():
        m = shard(on.model().train())
        found = loss_and_gradient(m, ids)
        torch.optim.AdamW(m.parameters(), lr=3e-3).step()
        again = float(m(input_ids=ids, labels=ids).loss)
        weights = get_model_state_dict(m, options=StateDictOptions(full_state_dict=True))
    expected = loss_and_gradient(on.model().train(), ids)
    assert_close(found[1], expected[1])
    assert again < found[0]
    fresh = on.build(seed=2).train()
    fresh.load_state_dict(weights)
    assert abs(float(fresh(input_ids=ids, labels=ids).loss) - again) < 1e-3


@call("FSDP2 with `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`")
def fsdp2_mixed(on: Subject) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    ids = on.tokens()["input_ids"]
    with one_process():
        m = shard(on.model().train(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        loss, grad = loss_and_gradient(m, ids)
    assert abs(loss - first_loss(on)) < 0.2
    return bool(grad.isfinite().all())


@call("FSDP2 of a model loaded in bf16", refused=dict.fromkeys(OURS, TWO_DTYPES))
def fsdp2_bf16(on: Subject) -> Any:
    ids = on.tokens()["input_ids"]
    with one_process():
        m = shard(on.load(dtype=torch.bfloat16).train())
        loss, grad = loss_and_gradient(m, ids)
    assert abs(loss - first_loss(on)) < 0.2
    return bool(grad.isfinite().all())
