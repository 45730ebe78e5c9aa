"""The loss of a training step, computed by chunks: every model, options of the loss, where logits are there."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from kda_layers.kernels.fused import linear_cross_entropy as op
from kda_layers.modeling.models.loss import SkippedLogits
from kda_layers.modeling.seams import BaseModelOutputWithPast, CausalLMOutputWithPast
from tests.kernels.cases import BF16, FP32, FP64, ROUNDOFF, budget, error
from tests.modeling.models import build, every_model, ids
from tests.processes import one_process

Results = dict[str, Tensor]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 tokens in fp32."""
    monkeypatch.setattr(op, "CHUNK_BYTES", 64 * 29 * 4)


def skipped(out: Any) -> bool:
    """True if the logits have not been computed."""
    return isinstance(dict(out.items()).get("logits"), SkippedLogits)


def step(m: Any, tokens: Tensor, labels: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None, Results]:
    m.zero_grad()
    out = m(tokens, labels=labels, use_cache=False, **arguments)
    out.loss.backward()
    logits = None if skipped(out) else out.logits
    return out.loss.detach(), logits, {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


def labels_of(tokens: Tensor) -> Tensor:
    labels = tokens.clone()
    labels[0, :4] = labels[1, -3:] = -100
    return labels


def check_step(m: Any, tokens: Tensor, labels: Tensor, **arguments: Any) -> None:
    """Loss and gradients of a model in fp32: within twice the error of the loss on logits, against fp64."""
    wide = copy.deepcopy(m).double()
    loss, logits, gradients = step(m, tokens, labels, **arguments)
    assert logits is None
    plain_loss, plain_logits, plain_gradients = step(m, tokens, labels, skip_logits=False, **arguments)
    assert plain_logits is not None
    true_loss, _, truth = step(wide, tokens, labels, **arguments)
    assert error(loss, true_loss) <= budget(error(plain_loss, true_loss), FP32)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        assert error(gradient, truth[name]) <= budget(error(plain_gradients[name], truth[name]), FP32), name


@every_model
def test_a_training_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model, with tied weights as well; gradients of several chunks accumulate."""
    monkeypatch.setattr(op, "CHUNK_BYTES", 29 * 8 * 4)
    tokens = ids(2, 21)
    check_step(build(name, FP32).train(), tokens, labels_of(tokens))


@pytest.mark.parametrize(
    "how", ["num_items_in_batch", "its tensor", "of one element", "ignore_index", "shift_labels", "packed", "no labels"]
)
def test_options_of_the_loss(how: str) -> None:
    """All that ForCausalLMLoss reads: the same result as from logits, and what fp64 logits give."""
    m, tokens = build("kda").train(), ids(2, 21)
    labels, arguments = labels_of(tokens), {}
    if how == "num_items_in_batch":
        arguments = dict(num_items_in_batch=7)
    if how == "its tensor":
        arguments = dict(num_items_in_batch=torch.tensor(7))
    if how == "of one element":  # torch's DataParallel scatters such
        arguments = dict(num_items_in_batch=torch.tensor([7]))
    if how == "ignore_index":
        labels, arguments = tokens, dict(ignore_index=3)
    if how == "shift_labels":
        arguments = dict(shift_labels=tokens.roll(2, 1))
    if how == "packed":
        tokens, labels = tokens.view(1, -1), labels.view(1, -1)
        arguments = dict(cu_seqlens=torch.tensor([0, 5, 42]))
    if how == "no labels":
        labels = torch.full_like(labels, -100)
    got = m(tokens, labels=labels, use_cache=False, **arguments)
    want = m(tokens, labels=labels, use_cache=False, skip_logits=False, **arguments)
    assert skipped(got)
    assert got.loss.shape == want.loss.shape
    torch.testing.assert_close(got.loss.float(), want.loss, rtol=2**-20, atol=0, equal_nan=how == "no labels")
    target = arguments.get("shift_labels", labels.roll(-1, 1))
    if how != "shift_labels":
        target[:, -1] = arguments.get("ignore_index", -100)
    flat = want.logits.flatten(0, 1), target.flatten(), None, None, arguments.get("ignore_index", -100)
    exact = cross_entropy(*flat, reduction="sum" if "num_items_in_batch" in arguments else "mean")
    exact = exact / arguments.get("num_items_in_batch", 1)
    torch.testing.assert_close(got.loss, exact, rtol=1e-12, atol=0, equal_nan=True)


def test_logits_where_they_are_asked_for() -> None:
    """Training skips them by default; the keyword, and the model's attribute for code that passes none, decide."""
    m, tokens = build("kda").train(), ids(2, 9)
    whole = m(tokens).logits
    assert skipped(m(tokens, labels=tokens))
    assert torch.equal(m(tokens, labels=tokens, skip_logits=False).logits, whole)
    assert skipped(m.eval()(tokens, labels=tokens, skip_logits=True))
    assert torch.equal(m(tokens, labels=tokens).logits, whole)
    with torch.no_grad():
        assert torch.equal(m.train()(tokens, labels=tokens).logits, whole)
        assert skipped(m(tokens, labels=tokens, skip_logits=True))
    m.skip_logits = False
    assert torch.equal(m(tokens, labels=tokens).logits, whole)
    assert skipped(m(tokens, labels=tokens, skip_logits=True))
    m.skip_logits = True
    assert skipped(m.eval()(tokens, labels=tokens))
    assert torch.equal(m(tokens).logits, whole)
    assert m(tokens, logits_to_keep=2).logits.shape[1] == 2
    loss, logits = m(tokens, labels=tokens, skip_logits=False, return_dict=False)[:2]
    assert loss.ndim == 0
    assert torch.equal(logits, whole)


WAYS_TO_READ: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda out: out.logits,
    "item": lambda out: out["logits"],
    "get": lambda out: out.get("logits"),
    "index": lambda out: out[1],
    "slice": lambda out: out[1:][0],
    "tuple": lambda out: out.to_tuple()[1],
    "cast by accelerate": lambda out: importlib.import_module("accelerate.utils").convert_to_fp32(out).logits,
    "mapped as a tree": lambda out: tree_map(lambda x: x, out).logits,
    "gathered": lambda out: type(out)([(key, out[key]) for key in out]).logits,
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_skipped_logits_are_computed_when_somebody_reads_them(way: str, compiled: bool) -> None:
    """With the gradients of the output with logits, for a z-loss or a distillation loss; even after a metric."""
    m, tokens = build("hybrid", FP64).train(), ids(2, 9)  # in fp32 the order of sums tells
    if way == "cast by accelerate":
        pytest.importorskip("accelerate")
    run = torch.compile(m, backend="aot_eager", fullgraph=True) if compiled else m
    gradients = []
    for arguments in ({}, dict(skip_logits=False)):
        m.zero_grad()
        out = run(tokens, labels=tokens, use_cache=False, **arguments)
        with torch.no_grad():
            assert out.logits.argmax(-1).shape == tokens.shape
        logits = WAYS_TO_READ[way](out)
        assert logits.shape == (2, 9, 29)
        (out["loss"] + logits.logsumexp(-1).square().mean()).backward()
        gradients.append({n: p.grad for n, p in m.named_parameters()})
    torch.testing.assert_close(*gradients)


def test_a_lazy_output_is_an_output() -> None:
    """A lazy output has the keys and fields of one with logits; once computed, these are kept with their gradient."""
    m, tokens = build("kda", FP32).train(), ids(2, 9)
    out, want = m(tokens, labels=tokens), m(tokens, labels=tokens, skip_logits=False)
    assert isinstance(out, CausalLMOutputWithPast)
    assert list(out) == list(want) == ["loss", "logits"]
    torch.testing.assert_close((out[0], out["loss"]), (want.loss, want.loss))
    assert skipped(out)
    assert out.get("hidden_states", 7) == 7
    with torch.no_grad():
        assert torch.equal(out.logits, want.logits)
    assert skipped(out)
    assert out.logits is out.logits is out[1] is dict(out.items())["logits"]
    assert torch.equal(m(tokens, labels=tokens, return_dict=False)[1], want.logits)
    with torch.no_grad():
        copied = copy.deepcopy(m(tokens, labels=tokens, skip_logits=True))
    assert torch.equal(copied.logits, want.logits)


def test_a_lazy_output_keeps_nothing_alive() -> None:
    m, tokens = build("kda").train(), ids(2, 9)
    out = m(tokens, labels=tokens)
    hidden = weakref.ref(dict(out.items())["logits"]._hidden)
    loss = out.loss
    gc.disable()
    try:
        del out
        loss.backward()
        del loss
        assert hidden() is None
    finally:
        gc.enable()


def test_logits_of_weights_that_have_changed_are_refused() -> None:
    m, tokens = build("kda", FP32).train(), ids(2, 9)
    out = m(tokens, labels=tokens)
    out.loss.backward()
    torch.optim.SGD(m.parameters(), 1e-2).step()
    with pytest.raises(RuntimeError, match=r"weights of the head have changed: .*skip_logits=False"):
        out.logits  # noqa: B018


def test_logits_read_after_autocast_are_those_of_autocast() -> None:
    m, tokens = build("kda", FP32).train(), ids(2, 9)
    with torch.autocast("cpu", BF16):
        out, want = m(tokens, labels=tokens), m(tokens, labels=tokens, skip_logits=False)
    assert torch.equal(out.logits, want.logits)
    assert out.logits.dtype == BF16


def test_skipping_what_is_asked_for_is_refused() -> None:
    m, tokens = build("kda").train(), ids(2, 9)
    with pytest.raises(ValueError, match=r"skip_logits must be False or None .*got labels=None"):
        m(tokens, skip_logits=True)
    with pytest.raises(ValueError, match="got logits_to_keep=3"):
        m(tokens, labels=tokens, logits_to_keep=3, skip_logits=True)


def doubled(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return 2 * cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def with_smoothing(logits: Tensor, labels: Tensor, vocab_size: int, smoothing: float = 0.0, **_: Any) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing)


class Adapter(nn.Linear):
    """A head that is more than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True).cos() * torch.arange(self.out_features)


@pytest.mark.parametrize(
    "how", ["loss function", "its option", "bias", "subclass", "hook", "pre-hook", "backward hook", "forward"]
)
def test_the_loss_on_logits_serves_the_rest(how: str) -> None:
    """Whatever the chunked loss would miss: the loss is that of a model in evaluation, and logits are there."""
    m, tokens, arguments = build("kda"), ids(2, 9), {}
    called: list[int] = []
    head = m.lm_head
    if how == "loss function":
        m.loss_function = doubled
    if how == "its option":
        m.loss_function, arguments = with_smoothing, dict(smoothing=0.3)
    if how == "bias":
        head.bias = nn.Parameter(torch.randn(29, dtype=FP64))
    if how == "subclass":
        head.__class__ = Adapter
    if how == "hook":
        head.register_forward_hook(lambda module, inputs, out: called.append(1) or out.sin())  # type: ignore[func-returns-value]
    if how == "pre-hook":
        head.register_forward_pre_hook(lambda module, inputs: called.append(1) or (inputs[0].sin(),))  # type: ignore[func-returns-value]
    if how == "backward hook":
        head.register_full_backward_hook(lambda *_: called.append(1))
    if how == "forward":
        head.forward = lambda x: nn.functional.linear(x, head.weight).sin()
    want = m(tokens, labels=tokens, **arguments)
    for skip_logits in (None, True):
        got = m.train()(tokens, labels=tokens, use_cache=False, skip_logits=skip_logits, **arguments)
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.logits, want.logits)
    got.loss.backward()
    if "hook" in how:
        assert called


def test_lora_on_the_head() -> None:
    peft = pytest.importorskip("peft")
    m, tokens = build("kda", FP32).train(), ids(2, 9)
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(m, config).train()
    out = adapted(tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    torch.testing.assert_close(out.loss, doubled(out.logits, tokens, 29) / 2)
    assert adapted.base_model.model.lm_head.lora_A["default"].weight.grad.any()


def test_lora_in_the_body() -> None:
    """The head is frozen and plain: no logits, and no gradient of the head."""
    peft = pytest.importorskip("peft")
    m, tokens = build("kda", FP32).train(), ids(2, 9)
    adapted = peft.get_peft_model(m, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).train()
    loss, logits, got = step(adapted, tokens, tokens)
    assert logits is None
    want_loss, _, want = step(adapted, tokens, tokens, skip_logits=False)
    torch.testing.assert_close(loss, want_loss)
    assert got.keys() == want.keys()
    assert all("lora" in n for n in got)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("how", ["grad", "jvp"])
def test_transforms_use_the_loss_on_logits(how: str) -> None:
    """Transform the head alone: KDA layers refuse transforms."""
    m, tokens = build("kda"), ids(2, 9)
    hidden = m.model(tokens).last_hidden_state.detach()
    m.model.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden)
    weights = {"lm_head.weight": m.lm_head.weight.detach()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(m.train(), values, (tokens,), dict(labels=tokens)).loss  # type: ignore[no-any-return]

    if how == "grad":
        got = torch.func.grad(loss)(weights)["lm_head.weight"]
        m(tokens, labels=tokens).loss.backward()
        assert error(got, m.lm_head.weight.grad) <= 2 * ROUNDOFF[FP32]  # transformers computes losses in fp32
    else:
        value, change = torch.func.jvp(loss, (weights,), (weights,))
        assert value.isfinite()
        assert change != 0


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled(autocast: bool, small_chunks: None, counter: CompileCounterWithBackend) -> None:
    """One graph for all lengths, whatever the number of chunks; loss and gradients are those of the calls."""
    m = build("kda", FP32).train()
    compiled = torch.compile(m, fullgraph=True, dynamic=True, backend=counter)
    with torch.autocast("cpu", BF16, enabled=autocast):
        for length in (40, 200, 301):
            tokens = ids(2, length)
            want_loss, _, want = step(m, tokens, labels_of(tokens))
            m.zero_grad()
            out = compiled(tokens, labels=labels_of(tokens), use_cache=False)
            assert skipped(out)
            out.loss.backward()
            torch.testing.assert_close(out.loss, want_loss)
            for name, p in m.named_parameters():
                assert error(p.grad, want[name]) <= 4 * ROUNDOFF[BF16 if autocast else FP32], name
    assert counter.frame_count == 1


def test_autocast(small_chunks: None) -> None:
    """Products in bf16, gradients in fp32: the head's gradient is not rounded to bf16."""
    m, tokens = build("kda", FP32).train(), ids(2, 200)
    true_loss, _, truth = step(copy.deepcopy(m).double(), tokens, tokens)
    with torch.autocast("cpu", BF16):
        loss, logits, got = step(m, tokens, tokens)
        plain_loss, _, want = step(m, tokens, tokens, skip_logits=False)
    assert logits is None
    assert error(loss, true_loss) <= budget(error(plain_loss, true_loss), FP32)
    for name, t in truth.items():
        assert got[name].dtype == FP32
        assert error(got[name], t) <= budget(error(want[name], t), BF16), name
    head = got["lm_head.weight"]
    assert not torch.equal(head, head.bfloat16().float())


def test_ddp() -> None:
    """Gradients reach DDP's buckets; the loss can be scaled in place, as Trainer does."""
    m, tokens = build("softplus_tied", FP32).train(), ids(2, 21)
    _, _, want = step(m, tokens, tokens)
    m.zero_grad()

    def check(parallel: DistributedDataParallel) -> None:
        m.zero_grad()
        out = parallel(tokens, labels=tokens, use_cache=False)
        assert skipped(out)
        loss = out.loss
        loss *= 2
        loss.backward()
        for name, p in m.named_parameters():
            torch.testing.assert_close(p.grad, 2 * want[name])
        m.zero_grad()
        out = parallel(tokens, labels=tokens, use_cache=False)
        (out.loss + out.logits.logsumexp(-1).mean()).backward()

    with one_process():
        for options in ({}, dict(find_unused_parameters=True), dict(static_graph=True)):
            check(DistributedDataParallel(m, **options))


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged: steps with gradient accumulation have the losses of the loss on logits, and metrics get logits."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [dict(input_ids=row, labels=label) for row, label in zip(ids(12, 15), labels_of(ids(12, 15)), strict=True)]
    histories, shapes, computed = [], [], []
    compute = SkippedLogits.compute
    monkeypatch.setattr(SkippedLogits, "compute", lambda self: computed.append(1) or compute(self))  # type: ignore[func-returns-value]

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {}

    for skip_logits in (None, False):
        m = build("kda", FP32)
        m.skip_logits = skip_logits
        options = TrainingArguments(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-2, disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = Trainer(m, options, train_dataset=rows, eval_dataset=rows[:4], compute_metrics=metrics)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 3
        histories.append([*losses, trainer.evaluate()["eval_loss"]])
    assert histories[0] == pytest.approx(histories[1], rel=1e-4)
    assert shapes == [(4, 15, 29)] * 2
    assert not computed, "Trainer read logits that it does not need"


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_whose_loss_reads_logits(bf16: bool, tmp_path: Path) -> None:
    """As those of TRL do, for the accuracy and the entropy of a step; with bf16, accelerate casts the outputs."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    class WithEntropy(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean()
            return (loss, outputs) if return_outputs else loss

    rows, states = [dict(input_ids=row, labels=row) for row in ids(8, 15)], []
    for skip_logits in (None, False):
        m = build("hybrid", FP32)
        m.skip_logits = skip_logits
        options = TrainingArguments(
            tmp_path, per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True, save_strategy="no",
            learning_rate=1e-2, disable_tqdm=True, seed=3, bf16=bf16, optim="sgd",
        )  # fmt: skip
        WithEntropy(m, options, train_dataset=rows).train()
        states.append(m.state_dict())
    for name, p in states[0].items():
        torch.testing.assert_close(p, states[1][name], rtol=0, atol=2e-3 if bf16 else 1e-5)
