"""`kda_layers.explain` of a model: each path of each kind of call, and every reason against it."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import kda_layers
from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from kda_layers.__main__ import main
from kda_layers.modeling import explanation
from kda_layers.modeling.cuda_graphs import decoding
from kda_layers.modeling.layer import fast_paths, fused_sums, weights
from kda_layers.modeling.layer.fast_paths import Call, Reason, fast_path
from kda_layers.modeling.models import modeling_kda
from kda_layers.modeling.models.modeling_kda import SPLIT_KEYS
from tests.modeling.models import build as build_of_every_kind

SIZES = dict(vocab_size=32, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1)
LOOP = "loop of `generate` on the device"
CAPTURE, STEP = "decode steps of `generate` in a CUDA graph", "decode step of a decoder layer by few launches"
KERNEL, MERGED = "decode step by one kernel", "one GEMM for projections of the same input"
NORM, SHARED = "norm fused with the addition before it", "projections with one gradient of their input"
LOSS = "loss by chunks of tokens"


def build(dtype: torch.dtype = torch.bfloat16, **fields: Any) -> KDAForCausalLM:
    torch.manual_seed(0)
    return KDAForCausalLM(KDAConfig(**SIZES | dict(num_hidden_layers=2) | fields)).to(dtype).eval()


@pytest.fixture(autouse=True)
def _a_cpu_counts_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is left are the reasons that the model gives."""
    for module in (decoding, weights, fused_sums, modeling_kda, fast_paths):
        monkeypatch.setattr(module, "DEVICES", ("cpu",))


def read(text: str) -> dict[str, dict[str, list[tuple[str, list[str]]]]]:
    """{kind of call: {path: [(its verdict and modules, the reasons)]}} of an explanation."""
    found: dict[str, dict[str, list[tuple[str, list[str]]]]] = {}
    for line in text.splitlines()[1:]:
        if not line.startswith(" "):
            call = found.setdefault(line.partition(":")[0], {})
        elif not line.startswith("    "):
            name, _, verdict = line.strip().partition(": ")
            reasons: list[str] = []
            call.setdefault(name, []).append((verdict, reasons))
        else:
            reasons.append(line.strip())
    return found


def against(call: str, path: str, model: nn.Module, **generation: Any) -> list[str]:
    """Every reason against a path, over all modules."""
    return [r for _, reasons in read(kda_layers.explain(model, **generation))[call][path] for r in reasons]


def test_each_kind_of_call_names_its_paths() -> None:
    found = read(kda_layers.explain(build()))
    assert set(found) == {"prefill", "decode", "training"}
    assert {NORM, MERGED} <= set(found["prefill"])
    assert {LOOP, STEP, KERNEL, NORM, MERGED} <= set(found["decode"])
    assert CAPTURE not in found["decode"], "nothing asks for it where the loop is on the device"
    assert {LOSS, NORM, SHARED} <= set(found["training"])
    assert all(any(path.startswith("kda runs on eager") for path in paths) for paths in found.values())
    assert found["decode"][STEP] == [("taken (model.layers.0-1)", [])]
    assert found["training"][LOSS] == [("taken (the model)", [])]


def hooked(model: KDAForCausalLM) -> nn.Module:
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    return model


def with_adapter(model: KDAForCausalLM) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).base_model.model


def quantised(model: KDAForCausalLM) -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def offloaded(model: KDAForCausalLM) -> nn.Module:
    import accelerate

    accelerate.cpu_offload(model, execution_device="cpu")
    return model


CASES: dict[str, tuple[Any, str, str, str]] = {  # change -> kind of call, path, a reason
    "hook": (hooked, "decode", MERGED, "model.layers.1.self_attn.q_proj has forward hooks: remove them"),
    "LoRA": (
        with_adapter, "training", SHARED,
        "model.layers.0.self_attn.q_proj is a peft.tuners.lora.layer.Linear, not a Linear: merge the adapter",
    ),
    "quantised weights": (quantised, "decode", LOOP, "is quantised or sharded, with parameters of Int8Tensor"),
    "quantised head": (quantised, "training", LOSS, "lm_head has a weight of Int8Tensor"),
    "offloading": (offloaded, "decode", MERGED, "has a replaced forward, as of accelerate's offloading"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_the_model_is_changed_by(name: str) -> None:
    change, call, path, reason = CASES[name]
    assert not any(reason in r for r in against(call, path, build()))
    assert any(reason in r for r in against(call, path, change(build())))


def test_autocast() -> None:
    model, reason = build(torch.float32), "runs under autocast: load the model in bfloat16 instead"
    paths = (("decode", STEP), ("decode", KERNEL), ("decode", MERGED), ("training", SHARED), ("prefill", NORM))
    assert not any(reason in against(call, path, model) for call, path in paths)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(reason in against(call, path, model) for call, path in paths)


def test_fp32() -> None:
    assert "is computed in float32: load the model in bfloat16" in against("training", SHARED, build(torch.float32))
    assert against("training", SHARED, build()) == []


def test_widths_that_kernels_lack() -> None:
    """K = 96."""
    (reason,) = against("decode", KERNEL, build(linear_head_dim=96))
    assert "widths are K = 96 and V = 96, needs both 128 or both 64" in reason
    assert "widths are K = 96" in kda_layers.explain(build(linear_head_dim=96)).split("decode:")[0]


def test_torch_compile() -> None:
    model = build()
    model.compile()
    for compiled in (model, torch.compile(build())):
        text = kda_layers.explain(compiled)
        assert text.splitlines()[0] == "KDAForCausalLM on cpu, bfloat16, compiled"
        assert "is traced by torch.compile, to which addresses of parameters are constants" in text
    reason = "is compiled (torch.compile): generate captures by itself: leave out model.compile()"
    assert reason in against("decode", CAPTURE, model)


def test_a_hybrid() -> None:
    model = build(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    decode = read(kda_layers.explain(model))["decode"]
    assert [verdict for verdict, _ in decode[STEP]] == [
        "taken (model.layers.0,2)", "not taken, its modules one by one instead (model.layers.1,3)",
    ]  # fmt: skip
    assert decode[STEP][1][1] == ["has a KDASoftmaxAttention for its attention"]
    assert [where for verdict, _ in decode[SPLIT_KEYS.name] for where in verdict.split()[-1:]] == [
        "(model.layers.1,3.self_attn)"
    ]
    biased = build(full_attention_interval=2, attention_bias="key")  # whose attention has a kernel of its own
    assert SPLIT_KEYS.name not in read(kda_layers.explain(biased))["decode"]


def test_options_of_generate() -> None:
    """The loop on the device, and where a step is asked for more than its tokens, captured steps."""
    model, beams = build(), "copies its cache at every step, for its beams: generate(..., num_beams=1)"
    scores = dict(output_scores=True, return_dict_in_generate=True)
    for options in ({}, dict(cache_implementation="static"), dict(do_sample=True, top_p=0.9, repetition_penalty=1.2)):
        assert against("decode", LOOP, model, **options) == []
    assert against("decode", LOOP, model, **scores) == ["returns what each step computes (output_scores)"]
    assert against("decode", CAPTURE, model, **scores) == []
    assert against("decode", CAPTURE, model, num_beams=2) == [beams]
    wants = dict(no_repeat_ngram_size=2, max_time=1.0)
    assert against("decode", LOOP, model, **wants) == [
        "has NoRepeatNGramLogitsProcessor for logits_processor", "has MaxTimeCriteria for stopping_criteria"
    ]  # fmt: skip
    assert against("decode", LOOP, model, num_beams=2) == ["decodes by beam_search"]
    assert against("decode", LOOP, model, prompt_lookup_num_tokens=3) == ["decodes by assisted_generation"]
    assert against("decode", LOOP, model, stop_strings=["a"]) == ["has stop strings"]
    assert against("decode", LOOP, model, disable_compile=True) == ["has disable_compile=True"]
    quantised = against("decode", LOOP, model, cache_implementation="quantized")
    assert quantised == ["has cache_implementation='quantized', whose tensors move between steps"]


def test_caches_that_grow() -> None:
    """Softmax layers get buffers in the loop on the device, but for sliding windows."""
    hybrid = build(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    grows = "has a cache that grows: generate(..., cache_implementation='static')"
    scores = dict(output_scores=True, return_dict_in_generate=True)
    assert against("decode", LOOP, hybrid) == []
    assert against("decode", CAPTURE, hybrid, **scores) == [grows]
    assert against("decode", CAPTURE, hybrid, cache_implementation="static", **scores) == []
    windows = build_of_every_kind("windows")
    moves = "has a cache of DynamicSlidingWindowLayer, whose tensors move between steps"
    assert moves in against("decode", LOOP, windows)


def test_training_with_a_loss_of_its_own() -> None:
    model = build()
    model.loss_function = lambda **_: None
    assert against("training", LOSS, model) == ["has a loss function of its own: leave model.loss_function as it is"]


def test_a_layer_without_a_model() -> None:
    text = kda_layers.explain(KimiDeltaAttention(64, 2, 64))
    assert text.startswith("KimiDeltaAttention on cpu, float32\n")
    assert KERNEL in read(text)["decode"]
    layer = KimiDeltaAttention(64, 2, 64).to(torch.bfloat16)  # A_log and dt_bias stay in fp32
    assert kda_layers.explain(layer).startswith("KimiDeltaAttention on cpu, bfloat16\n")


def test_a_swapped_stock_model() -> None:
    from tests.modeling.stock_models import build as stock

    model = stock("kimi_linear")
    kda_layers.swap_attention(model)
    text = kda_layers.explain(model)
    assert KERNEL in read(text)["decode"]
    assert against("decode", LOOP, model) == []
    kda_layers.restore_attention(model)
    text = kda_layers.explain(model)
    assert "generate and the loss of KimiLinearForCausalLM are its own: decode steps are not captured" in text
    kda_layers.swap_attention(model, layers=[0])
    assert against("decode", LOOP, model) == [
        "model.layers.2.self_attn is a KDA layer of transformers: kda_layers.swap_attention(model)"
    ]  # fmt: skip


def test_a_swapped_model_whose_masks_are_its_own() -> None:
    from tests.modeling.stock_models import build as stock

    model = stock("glm5_next")
    kda_layers.swap_attention(model)
    found = against("decode", LOOP, model)
    assert "has a configuration of several models, for which no masks are made here" in found


def test_what_cannot_be_explained() -> None:
    with pytest.raises(TypeError, match=r"expected a model, a layer, the Problem of an operator or None, got list"):
        kda_layers.explain([])
    with pytest.raises(TypeError, match=r"options must be arguments of KDAForCausalLM.generate, got num_beam, T"):
        kda_layers.explain(build(), num_beam=2, T=64)
    with pytest.raises(TypeError, match=r"left out for a KimiDeltaAttention, which has no generate, got num_beams"):
        kda_layers.explain(KimiDeltaAttention(64, 2, 64), num_beams=2)


def test_a_gpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why its kernels refuse is said for every kind of call."""
    backend = explanation.KDA.backend("sm90")
    monkeypatch.setattr(type(backend), "unsupported", lambda self, problem: ["NVRTC cannot be loaded"])
    text = kda_layers.explain(build())
    assert text.count("sm90 refuses: NVRTC cannot be loaded") == 3


def test_fsdp2() -> None:
    """Parameters that torch shards are of another type."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = build()
        for layer in model.model.layers:
            fully_shard(layer)
        assert "model.layers.0.mlp.gate_proj has a weight of DTensor" in against("training", SHARED, model)
        assert "is quantised or sharded, with parameters of DTensor" in against("decode", CAPTURE, model)
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def lines() -> Iterator[list[str]]:
    """Collect the lines of the log."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler()
    fast_paths.logger.addHandler(handler)
    try:
        yield found
    finally:
        fast_paths.logger.removeHandler(handler)


def test_one_line_for_the_first_reason_that_the_user_can_change() -> None:
    @fast_path("a path", instead="what is slow")
    def PATH(call: Any, changeable: bool) -> Iterator[Reason]:
        yield Reason("is hooked", "remove the hook" if changeable else "")

    call = Call(torch.zeros(1, 1, 1))
    with lines() as found:
        assert not PATH.serves(call, False)
        assert found == []
        assert not PATH.serves(call, True)
        assert not PATH.serves(call, True)
    said = "a path: what is slow runs instead, as is hooked: remove the hook. kda_layers.explain(model) says where"
    assert found == [f"{said}; this is said once"]


def test_a_decode_step_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer looks for its kernel once, found or not."""
    model, asked = build(), list[object]()
    kernel = modeling_kda.KDAAttention.plan_step
    monkeypatch.setattr(
        modeling_kda.KDAAttention, "plan_step", lambda self, *args: asked.append(self) or kernel(self, *args)
    )
    with torch.no_grad():
        past = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
        asked.clear()
        model(torch.tensor([[4]]), past_key_values=past)
    assert len(asked) == len(set(map(id, asked))) == 2


def test_explanations_and_calls_agree() -> None:
    """A path that is explained to be taken is taken: the same generators answer both."""
    model = copy.deepcopy(build())
    hooked(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    laid = [m.merged_weights.whole is not None for m in (model.model.layers[0].mlp, model.model.layers[1].mlp)]
    verdicts = [verdict for verdict, _ in read(kda_layers.explain(model))["prefill"][MERGED]]
    assert laid == [True, True]
    assert verdicts == ["taken (model.layers.0-1.mlp)"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "no/such/folder"), "no/such/folder"),
        (("--precompile", "explain", "no/such/folder"), "explain takes a folder alone, without --precompile"),
    ],
)
def test_the_command_refuses(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kda_layers", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code not in (0, None)
    assert said in capsys.readouterr().err


def test_the_command(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "kda_layers", "explain", tmp_path], capture_output=True, text=True, check=True
    )
    assert re.match(r"KDAForCausalLM on \w+", run.stdout)
    assert {"prefill", "decode", "training"} <= set(read(run.stdout))
