"""A captured training step is the eager step, bit for bit: on a tape on the CPU, and in a CUDA graph on a GPU."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils

from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.modeling.cuda_graphs import training_step
from kda_layers.training import CapturedStep
from tests.kernels.cases import DEVICES
from tests.modeling import models
from tests.modeling.taped_graphs import TapedGraphs
from tests.processes import one_process

VOCAB, WARMUP = 61, 2
on_cuda = pytest.param("cuda", marks=pytest.mark.gpu)
CONFIG = dict(
    vocab_size=VOCAB, num_hidden_layers=2, linear_num_heads=2, num_attention_heads=2, use_cache=False,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu":
        monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
    yield request.param
    gc.collect()


needs_cuda = pytest.mark.parametrize("device", [on_cuda], indirect=True)


class Net(nn.Module):
    """Something of everything: an embedding, dropout, and buffers that a step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(VOCAB, 16), nn.Linear(16, 32)
        self.norm, self.dropout, self.head = nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, VOCAB)
        self.calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor, scale: float = 1.0) -> Any:
        self.calls += 1
        x = self.norm(self.linear(self.embedding(input_ids)).flatten(0, 1))
        logits = self.head(self.dropout(x.relu()))
        return SimpleNamespace(loss=scale * nn.functional.cross_entropy(logits, labels.flatten()))


def kda_model(device: str) -> Any:
    """On a GPU as its kernels want it: the plain operator, which copies from the host, cannot be captured."""
    width, dtype = (128, torch.bfloat16) if device == "cuda" else (16, torch.float32)
    sizes = dict(hidden_size=2 * width, intermediate_size=3 * width, linear_head_dim=width)
    return KDAForCausalLM(KDAConfig(**CONFIG, **sizes)).to(dtype)


def build(device: str, kind: str = "net", lr: float = 1e-2, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its capturable optimizer, always the same."""
    torch.manual_seed(0)
    model = (Net() if kind == "net" else kda_model(device)).to(device).train()
    return model, adamw(model, lr, **options)


def adamw(model: nn.Module, lr: float = 1e-2, as_tensor: bool = True, **options: Any) -> torch.optim.Optimizer:
    """AdamW with two groups. Its learning rate is a tensor, as in a captured step."""
    parameters = list(model.parameters())
    rate = torch.tensor(lr, device=parameters[0].device) if as_tensor else lr
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    return torch.optim.AdamW(groups, **{"lr": rate, "fused": True, "capturable": True} | options)


def batch(seed: int, device: str, rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator).to(device)
    return dict(input_ids=tokens[:, :-1].clone(), labels=tokens[:, 1:].clone())


def eager_step(model: Any, optimizer: torch.optim.Optimizer, batches: Any, max_norm: float | None = None) -> Any:
    """The step written out; returns its loss and the norm of its gradients."""
    optimizer.zero_grad()
    total, norm = torch.zeros((), device=next(model.parameters()).device), None
    for b in batches:
        loss = model(**b).loss / len(batches)
        loss.backward()
        total += loss.detach()
    if max_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return total, norm


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a step changes, besides the random state."""
    found = {name: t.detach().clone() for name, t in model.state_dict().items()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": t.clone() for key, t in optimizer.state[p].items()}
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    return [name for name in want if not torch.equal(got[name], want[name])]


def check_same_steps(got: list[dict[str, Tensor]], want: list[dict[str, Tensor]]) -> None:
    """Raise an AssertionError that tells the first step that differs, and by how much."""
    for n, (g, w) in enumerate(zip(got, want, strict=True)):
        off = {name: (g[name].double() - w[name].double()).abs().max().item() for name in differing(g, w)}
        assert not off, f"step {n}: largest differences {off}"


def random_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def reseed(device: str) -> None:
    torch.manual_seed(5)


# ---------------------------------------------------------------- bit for bit


def linear(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)


@pytest.mark.parametrize("kind", ["net", "kda"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("schedule", [None, linear, cosine], ids=["constant", "linear", "cosine"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param(dict(fused=False, foreach=True), marks=pytest.mark.slow)], ids=["fused", "foreach"]
)
def test_ten_steps_are_the_eager_ones(
    options: dict[str, Any], schedule: Any, max_norm: float | None, accumulate: int, kind: str, device: str
) -> None:
    """Losses, norms, gradients, parameters, buffers, optimizer state and random numbers, from the first step on."""
    if device == "cpu" and options:
        pytest.skip("torch's foreach optimizers are capturable on GPUs only")
    results = []
    for captured in (False, True):
        model, optimizer = build(device, kind, **options)
        scheduler = schedule and schedule(optimizer)
        step = CapturedStep(model, optimizer, max_norm=max_norm, warmup=WARMUP) if captured else None
        reseed(device)
        found = []
        for n in range(10):
            batches = [batch(10 * n + i, device) for i in range(accumulate)]
            if step is None:
                loss, norm = eager_step(model, optimizer, batches, max_norm)
            else:
                loss = step(*batches)
                norm = None if step.grad_norm is None else step.grad_norm.clone()
                assert step.captured == (n >= WARMUP)
            found.append(contents(model, optimizer) | {f"{k}.grad": g for k, g in gradients(model).items()})
            found[-1] |= {"loss": loss} | ({} if norm is None else {"norm": norm})
            if scheduler:
                scheduler.step()
        results.append((found, random_state(device)))
    (want, want_random), (got, got_random) = results
    check_same_steps(got, want)
    assert torch.equal(got_random, want_random)
    assert differing(want[9], want[8])
    if max_norm == 0.05:
        assert all(found["norm"] > max_norm for found in want), "nothing was clipped"


@pytest.mark.compiles
@needs_cuda
def test_a_compiled_optimizer(device: str) -> None:
    """The optimizer's step of torch.compile: a schedule's learning rates reach it, too."""
    torch._dynamo.reset()
    results = []
    for captured in (False, True):
        model, optimizer = build(device, fused=False, foreach=True)
        scheduler = linear(optimizer)
        optimizer.step = torch.compile(optimizer.step)
        step = CapturedStep(model, optimizer, max_norm=0.05, warmup=WARMUP) if captured else None
        reseed(device)
        found = []
        for n in range(6):
            loss = step(batch(n, device)) if step else eager_step(model, optimizer, [batch(n, device)], 0.05)[0]
            found.append(contents(model, optimizer) | {"loss": loss})
            scheduler.step()
        results.append(found)
    check_same_steps(results[1], results[0])


def test_python_runs_until_the_capture_only(device: str) -> None:
    model, optimizer = build(device)
    step = CapturedStep(model, optimizer, warmup=WARMUP)
    losses = [step(batch(n, device)) for n in range(8)]
    assert model.calls == WARMUP + 1
    assert len({loss.data_ptr() for loss in losses}) == 8, "losses stay what they were"
    assert len(set(torch.stack(losses).tolist())) == 8
    assert not losses[-1].requires_grad


def test_assigned_learning_rates_are_followed(device: str) -> None:
    """A number or another tensor in a param group, as a loop of one's own or load_state_dict leaves it there."""
    results = []
    for captured in (False, True):
        model, optimizer = build(device, lr=1e-3)
        reseed(device)
        step = CapturedStep(model, optimizer, warmup=1) if captured else None
        found = []
        for n in range(6):
            for i, group in enumerate(optimizer.param_groups):
                rate = torch.tensor(0.001 * (n + 1) + 0.01 * i)
                group["lr"] = rate.item() if step and n % 2 else rate.to(device if n % 3 else "cpu")
            if step is None:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"].to(device)
                loss, _ = eager_step(model, optimizer, [batch(n, device)])
            else:
                loss = step(batch(n, device))
            found.append(contents(model, optimizer) | {"loss": loss, "random": random_state(device)})
        results.append(found)
    check_same_steps(results[1], results[0])


def test_numbers_of_a_scheduler_are_read_as_fp32_tensors(device: str) -> None:
    """The optimizer's groups keep what they hold."""
    results = []
    for captured in (False, True):
        model, _ = build(device)
        optimizer = adamw(model, lr=0.5) if not captured else adamw(model, lr=0.5, as_tensor=False)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # exact in fp32
        reseed(device)
        step = CapturedStep(model, optimizer, warmup=1) if captured else None
        found = []
        for n in range(4):
            loss = step(batch(n, device)) if step else eager_step(model, optimizer, [batch(n, device)])[0]
            found.append(contents(model, optimizer) | {"loss": loss, "random": random_state(device)})
            scheduler.step()
        results.append(found)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5**5] * 2
    check_same_steps(results[1], results[0])


def test_a_learning_rate_that_groups_share(device: str) -> None:
    results = []
    for captured in (False, True):
        model, optimizer = build(device)
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first is second
        reseed(device)
        step = CapturedStep(model, optimizer, warmup=1) if captured else None
        for n in range(4):
            first.fill_(0.01 * (n + 1))
            step(batch(n, device)) if step else eager_step(model, optimizer, [batch(n, device)])
        results.append(contents(model, optimizer))
    assert differing(results[1], results[0]) == []


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_may_be_dropped_between_steps(set_to_none: bool, device: str) -> None:
    results = []
    for drop in (False, True):
        model, optimizer = build(device)
        step = CapturedStep(model, optimizer, max_norm=1.0, warmup=1)
        reseed(device)
        for n in range(5):
            step(batch(n, device))
            if drop:
                optimizer.zero_grad(set_to_none=set_to_none)
        results.append(contents(model, optimizer))
    assert differing(results[1], results[0]) == []


def test_gradients_from_before_the_first_step_do_not_count(device: str) -> None:
    results = []
    for before in (False, True):
        model, optimizer = build(device)
        if before:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        reseed(device)
        step = CapturedStep(model, optimizer, warmup=1)
        for n in range(3):
            step(batch(n, device))
        results.append(contents(model, optimizer))
    assert differing(results[1], results[0]) == []


def test_one_step_for_each_shape(device: str) -> None:
    """Several graphs may share a model and an optimizer."""
    results = []
    for captured in (False, True):
        model, optimizer = build(device)
        scheduler = linear(optimizer)
        steps = {length: CapturedStep(model, optimizer, warmup=1) for length in (5, 9)} if captured else {}
        reseed(device)
        for n in range(8):
            length = (5, 9)[n % 2]
            b = batch(n, device, length=length)
            steps[length](b) if steps else eager_step(model, optimizer, [b])
            scheduler.step()
        results.append(contents(model, optimizer))
    assert differing(results[1], results[0]) == []


def test_evaluation_between_steps(device: str) -> None:
    """It changes nothing, and the first inference on a GPU does not move weights that a graph reads."""
    results = []
    for evaluate in (False, True):
        model, optimizer = build(device, "kda")
        step = CapturedStep(model, optimizer, warmup=1)
        for n in range(5):
            step(batch(n, device))
            if evaluate:
                model.eval()
                tokens = batch(n, device)["input_ids"]
                model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=True)
                model.train()
        results.append(contents(model, optimizer))
    assert differing(results[1], results[0]) == []
    holders = [m for m in model.modules() if hasattr(m, "merged_weights")]
    assert holders
    assert all(m.merged_weights.fixed for m in holders)
    assert all(m.factors.fixed for m in holders if hasattr(m, "factors"))


def test_a_checkpoint_continues_eagerly_and_captured(device: str) -> None:
    model, optimizer = build(device)
    step = CapturedStep(model, optimizer, warmup=1)
    for n in range(3):
        step(batch(n, device))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    results = []
    for captured in (True, False):
        again, its_optimizer = build(device)
        again.load_state_dict(saved[0])
        next_step = CapturedStep(again, its_optimizer, warmup=1) if captured else None
        its_optimizer.load_state_dict(copy.deepcopy(saved[1]))  # which takes tensors as they are
        reseed(device)
        for n in range(3, 6):
            next_step(batch(n, device)) if next_step else eager_step(again, its_optimizer, [batch(n, device)])
        results.append(contents(again, its_optimizer))
    reseed(device)
    for n in range(3, 6):
        step(batch(n, device))
    assert differing(contents(model, optimizer), results[0]) == []
    assert differing(results[1], results[0]) == []


def test_gradient_checkpointing(device: str) -> None:
    results = []
    for captured in (False, True):
        model, optimizer = build(device, "kda")
        model.gradient_checkpointing_enable(dict(use_reentrant=False, preserve_rng_state=False))
        step = CapturedStep(model, optimizer, warmup=1) if captured else None
        for n in range(4):
            step(batch(n, device)) if step else eager_step(model, optimizer, [batch(n, device)])
        results.append(contents(model, optimizer))
    assert differing(results[1], results[0]) == []


@pytest.mark.parametrize("around", [False, True], ids=["in loss_of", "around the loop"])
def test_autocast(around: bool, device: str) -> None:
    """Weights are cast again in every step and after it, also inside of an autocast that has cached them."""
    results = []
    for captured in (False, True):
        model, optimizer = build(device)

        def loss_of(model: Any = model, **b: Any) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return 2 * model(**b).loss

        reseed(device)
        step, losses = CapturedStep(model, optimizer, loss_of=loss_of, warmup=1), list[Tensor]()
        with torch.autocast(device, torch.bfloat16) if around and captured else contextlib.nullcontext():
            for n in range(4):
                if captured:
                    step(batch(n, device))
                else:
                    optimizer.zero_grad()
                    loss_of(**batch(n, device)).backward()
                    optimizer.step()
                model.eval()
                with contextlib.nullcontext() if around and captured else torch.autocast(device, torch.bfloat16):
                    losses.append(model(**batch(50, device)).loss.detach())
                model.train()
        results.append(contents(model, optimizer) | {"evaluated": torch.stack(losses)})
    assert differing(results[1], results[0]) == []


# ---------------------------------------------------------------- errors of calls


def trained(device: str, calls: int = 3, **options: Any) -> tuple[Any, Any, CapturedStep]:
    model, optimizer = build(device)
    step = CapturedStep(model, optimizer, warmup=1, **options)
    for n in range(calls):
        step(batch(n, device))
    return model, optimizer, step


@pytest.mark.parametrize("calls", [1, 3], ids=["before the capture", "after"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: [], ValueError, "batches must be 1 as in the first call, got 0"),
        (lambda b: [b, b], ValueError, "batches must be 1 as in the first call, got 2"),
        (lambda b: [b["labels"]], TypeError, r"batches\[0\] must be a mapping, such as .*, got Tensor"),
        (lambda b: [{"labels": b["labels"]}], ValueError, r"batches\[0\] must hold input_ids, labels .*, got labels"),
        (
            lambda b: [b | {"labels": b["labels"][:2]}], ValueError,
            r"batches\[0\]\['labels'\] must be a int64 tensor of shape \[3, 9\] on .* got .* \[2, 9\].*Drop or pad",
        ),
        (lambda b: [b | {"labels": b["labels"].int()}], ValueError, "must be a int64 tensor .*, got a int32 tensor"),
        (lambda b: [b | {"labels": b["labels"].to("meta")}], ValueError, "got a int64 tensor .* on meta"),
        (lambda b: [b | {"labels": 3}], ValueError, "must be a int64 tensor .*, got 3"),
    ],
    ids=["none", "two", "tensor", "missing", "shape", "dtype", "device", "constant"],
)  # fmt: skip
def test_other_batches_are_refused_and_change_nothing(
    change: Any, error: type[Exception], message: str, calls: int, device: str
) -> None:
    model, optimizer, step = trained(device, calls)
    before = contents(model, optimizer)
    with pytest.raises(error, match=message):
        step(*change(batch(9, device)))
    assert differing(contents(model, optimizer), before) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: [], ValueError, "batches must be at least one, got none"),
        (lambda b: [[b]], TypeError, r"batches\[0\] must be a mapping, such as .*, got list"),
        (
            lambda b: [b | {"scale": [1.0]}],
            TypeError,
            r"batches\[0\]\['scale'\] must be a tensor, a number, .* got list",
        ),
        (lambda b: [b | {"labels": b["labels"].to("meta")}], ValueError, "must be on .* as the model, got meta"),
    ],
    ids=["none", "list", "item", "device"],
)
def test_first_batches_that_cannot_be_held(change: Any, error: type[Exception], message: str, device: str) -> None:
    model, optimizer = build(device)
    step = CapturedStep(model, optimizer, warmup=1)
    with pytest.raises(error, match=message):
        step(*change(batch(0, device)))
    for n in range(3):  # another first call is not bound by the one that failed
        step(batch(n, device, rows=4))


def test_constants_are_part_of_the_step(device: str) -> None:
    model, optimizer = build(device)
    step = CapturedStep(model, optimizer, warmup=1)
    for n in range(3):
        step(batch(n, device) | {"scale": 2.0})
    with pytest.raises(ValueError, match=r"\['scale'\] must be 2.0 as in the first call, got 3.0.*as tensors"):
        step(batch(3, device) | {"scale": 3.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, o: m.eval(), "model.training must be True as in the captured step, got False"),
        (lambda m, o: o.param_groups[1].update(weight_decay=0.5), r"param_groups\[1\]\['weight_decay'\] must be 0.01"),
        (lambda m, o: o.param_groups[0].update(betas=(0.5, 0.9)), r"param_groups\[0\]\['betas'\] must be \(0.9, 0.999"),
        (lambda m, o: o.load_state_dict(o.state_dict()), "optimizer.load_state_dict was called after the capture"),
        (lambda m, o: o.add_param_group({"params": nn.Parameter(torch.ones(1))}), "must have the 2 param groups"),
        (
            lambda m, o: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(1))),
            r"the number of optimizer.param_groups\[0\]\['params'\] must be 2",
        ),
        (lambda m, o: setattr(m.head.bias, "data", m.head.bias.data.clone()), "head.bias of the model has moved"),
    ],
    ids=["eval", "weight_decay", "betas", "load_state_dict", "add_param_group", "parameter", "moved"],
)  # fmt: skip
def test_changes_that_a_graph_would_not_see(change: Any, message: str, device: str) -> None:
    model, optimizer, step = trained(device)
    change(model, optimizer)
    before = contents(model, optimizer)
    with pytest.raises(RuntimeError, match=f"{message}.*build another CapturedStep"):
        step(batch(9, device))
    assert differing(contents(model, optimizer), before) == []


def test_autocast_around_some_calls_only(device: str) -> None:
    _, _, step = trained(device)
    with torch.autocast(device, torch.bfloat16), pytest.raises(RuntimeError, match="autocast must be None as in the"):
        step(batch(9, device))


def test_loading_weights_in_place_after_the_capture(device: str) -> None:
    model, optimizer, step = trained(device)
    other, _ = build(device)
    model.load_state_dict(other.state_dict())
    want = contents(model, optimizer)
    reseed(device)
    step(batch(4, device))
    assert {"embedding.weight", "head.bias", "norm.running_mean"} <= {*differing(contents(model, optimizer), want)}


class Reads(Net):
    """Waits for the device in its forward."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        out = super().forward(input_ids, labels)
        return out if out.loss.item() < 1e9 else None


def test_a_step_that_reads_a_tensor_is_explained_and_training_goes_on(device: str) -> None:
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Reads().to(device)
        optimizer = adamw(model)
        step = CapturedStep(model, optimizer, warmup=2)
        reseed(device)
        for n in range(4):
            if captured and n == 2:
                for _ in range(2):
                    with pytest.raises(
                        RuntimeError, match=r"(?s)step of Reads cannot be captured.*no \.item\(\).*sync_de"
                    ):
                        step(batch(n, device))
                    assert not step.captured
            if captured and n < 2:
                step(batch(n, device))
            else:
                eager_step(model, optimizer, [batch(n, device)])
        results.append((contents(model, optimizer), random_state(device)))
    assert differing(results[1][0], results[0][0]) == []
    assert torch.equal(results[1][1], results[0][1])


class Replaces(Net):
    """Has a buffer that its forward makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.seen = self.seen + 1
        return super().forward(input_ids, labels)


def test_a_replaced_buffer_is_named(device: str) -> None:
    model = Replaces().to(device)
    step = CapturedStep(model, adamw(model), warmup=1)
    step(batch(0, device))
    with pytest.raises(RuntimeError, match="its forward replaced seen: write to them with copy_"):
        step(batch(1, device))


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (lambda **b: torch.ones(2, requires_grad=True), r"one element and a gradient, got shape \[2\]"),
        (lambda **b: torch.ones(()), r"one element and a gradient, got shape \[\]"),
        (lambda **b: 3.0, "one element and a gradient, got float"),
    ],
)
def test_losses_that_are_none(loss_of: Any, message: str, device: str) -> None:
    model, optimizer = build(device)
    with pytest.raises(ValueError, match=message):
        CapturedStep(model, optimizer, loss_of=loss_of)(batch(0, device))


def test_a_model_without_labels(device: str) -> None:
    model, optimizer = build(device, "kda")
    with pytest.raises(ValueError, match="what KDAForCausalLM computes its loss from, such as labels, got input_ids"):
        CapturedStep(model, optimizer)({"input_ids": batch(0, device)["input_ids"]})


# ---------------------------------------------------------------- errors of the constructor


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="model must be on a CUDA device, got cpu: move it there"):
        CapturedStep(*build("cpu"))


@pytest.fixture
def _process_group() -> Iterator[None]:
    with one_process():
        yield


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("kind", ["DataParallel", "DistributedDataParallel", "FSDPModule"])
def test_parallel_models_are_refused(kind: str) -> None:
    model, _ = build("cpu")
    if kind == "FSDPModule":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        path = ""
    else:
        model, path = nn.Sequential(getattr(nn.parallel, kind)(model)), " at 0"
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True, fused=True)
    with pytest.raises(ValueError, match=f"model must not be parallel, got {kind}{path}: take its steps eagerly"):
        CapturedStep(model, optimizer)


@pytest.mark.usefixtures("_process_group")
def test_sharded_parameters_are_refused() -> None:
    model, _ = build("cpu")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.tensor.parallel.parallelize_module(
        model.head, mesh, torch.distributed.tensor.parallel.ColwiseParallel()
    )
    with pytest.raises(ValueError, match=r"got shards \(a DTensor\) at head.weight"):
        CapturedStep(model, torch.optim.AdamW(model.parameters(), capturable=True, fused=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda m, o: dict(model=m.forward), TypeError, "model must be a torch.nn.Module, got method"),
        (lambda m, o: dict(optimizer=torch.amp.GradScaler("cpu")), TypeError, "optimizer must be a torch.optim.Optim"),
        (
            lambda m, o: dict(optimizer=torch.optim.AdamW(m.parameters(), fused=True)), ValueError,
            r"must be capturable, got AdamW with param_groups\[0\]\['capturable'\] False: build .*capturable=True",
        ),
        (lambda m, o: dict(optimizer=torch.optim.SGD(m.parameters())), ValueError, "got SGD with .* missing"),
        (lambda m, o: dict(loss_of=3), TypeError, "loss_of must be a function or None, got int"),
        (lambda m, o: dict(max_norm="1"), TypeError, "max_norm must be a number or None, got str"),
        (lambda m, o: dict(max_norm=0.0), ValueError, "max_norm must be more than 0, got 0.0"),
        (lambda m, o: dict(max_norm=float("nan")), ValueError, "max_norm must be more than 0, got nan"),
        (lambda m, o: dict(warmup=0), ValueError, "warmup must be at least 1, got 0"),
        (lambda m, o: dict(warmup=1.5), TypeError, "warmup must be an integer, got 1.5"),
        (lambda m, o: dict(model=nn.Linear(2, 2, device="meta")), ValueError, "on one device, got cpu, meta"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_captured(
    arguments: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
    model, optimizer = build("cpu")
    with pytest.raises(error, match=message):
        CapturedStep(**dict(model=model, optimizer=optimizer) | arguments(model, optimizer))


def test_a_model_on_a_cpu_is_named_before_its_optimizer() -> None:
    model, _ = build("cpu")
    with pytest.raises(ValueError, match="model must be on a CUDA device, got cpu: move it there before the optimizer"):
        CapturedStep(model, torch.optim.AdamW(model.parameters()))


# ---------------------------------------------------------------- on a GPU alone


@needs_cuda
@pytest.mark.parametrize("kind", ["net", "kda"])
def test_a_captured_call_does_not_wait_for_the_gpu(kind: str, device: str) -> None:
    model, optimizer = build(device, kind)
    step = CapturedStep(model, optimizer, max_norm=1.0, warmup=WARMUP)
    batches = [batch(n, device) for n in range(6)]
    for b in batches[:3]:
        step(b)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for b in batches[3:]:
            step(b)
            optimizer.param_groups[0]["lr"] = 1e-3
    finally:
        torch.cuda.set_sync_debug_mode("default")


class LateCapture(torch.cuda.CUDAGraph):
    """A graph whose stream is behind, as on a GPU that other processes keep busy, when a capture begins."""

    def capture_begin(self, *args: Any, **options: Any) -> None:
        torch.cuda._sleep(1_000_000_000)  # clock cycles, half a second
        super().capture_begin(*args, **options)


@needs_cuda
def test_the_first_replay_draws_what_an_eager_step_draws(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch resets the offset of random numbers on the stream of the capture, and sets it on that of the replay."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", LateCapture)
    results = []
    for captured in (False, True):
        model, optimizer = build(device)
        step = CapturedStep(model, optimizer, warmup=1) if captured else None
        reseed(device)
        found = []
        for n in range(3):
            loss = step(batch(n, device)) if step else eager_step(model, optimizer, [batch(n, device)])[0]
            found.append(contents(model, optimizer) | {"loss": loss})
        results.append(found)
    check_same_steps(results[1], results[0])


@pytest.mark.compiles
@needs_cuda
def test_a_compiled_model(device: str) -> None:
    """Compiled once, so that both runs have the configurations that Inductor found fastest."""
    torch._dynamo.reset()
    model, _ = build(device, "kda")
    first, compiled = copy.deepcopy(model.state_dict()), torch.compile(model, fullgraph=True, dynamic=False)
    results = []
    for captured in (False, True):
        model.load_state_dict(first)
        optimizer = adamw(model)
        step = CapturedStep(compiled, optimizer, max_norm=1.0) if captured else None
        losses = []
        for n in range(10):
            b = batch(n, device)
            losses.append(step(b) if step else eager_step(compiled, optimizer, [b], 1.0)[0])
        results.append(contents(model, optimizer) | {"losses": torch.stack(losses)})
    assert differing(results[1], results[0]) == []


@needs_cuda
def test_memory_does_not_grow(device: str) -> None:
    model, optimizer = build(device, "kda")
    step = CapturedStep(model, optimizer, max_norm=1.0)
    batches = [batch(n, device) for n in range(20)]
    for b in batches[:5]:
        step(b)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for b in batches[5:]:
        step(b)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    ("kind", "length", "masked"), [("hybrid", 9, set()), ("windows", 3, set()), ("windows", 9, {"sliding_attention"})]
)
def test_softmax_layers_have_no_mask_in_a_capture(
    kind: str, length: int, masked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a graph is captured, transformers would make one, and SDPA take another kernel than in an eager step."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    model, seen = models.build(kind).train(), set[str]()
    softmax = set(model.config.layer_types) - {"linear_attention"}

    def note(kind: str) -> Any:
        return lambda _, args, kwargs: seen.update({kind} - ({kind} if kwargs["attention_mask"] is None else set()))

    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        if kind in softmax:
            layer.self_attn.register_forward_pre_hook(note(kind), with_kwargs=True)
    tokens = models.ids(2, length)
    model(tokens, use_cache=False)
    assert seen == masked
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, 0] = 0
    model(tokens, attention_mask=mask, use_cache=False)
    assert seen == softmax
    seen.clear()
    model.set_attn_implementation("eager")  # which knows of no causal mask of its own
    model(tokens, use_cache=False)
    assert seen == softmax
