"""Two processes that share a model's heads compute what one process with the full model does.

The two processes of a module-wide fixture run every case once and leave their results in files. The tests compare
both ranks with one process in fp64: agreement of the ranks shows nothing, as sums over ranks are the same on both.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import kda_layers
from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from kda_layers.modeling.checks import is_dtensor
from kda_layers.modeling.layer import forward as forward_module
from kda_layers.modeling.layer import weights
from kda_layers.modeling.layer.cache import KDACacheLayer
from kda_layers.modeling.parallel.tensor_parallel import check_heads
from tests.kernels.cases import FP64, error
from tests.modeling import captures, stock_models
from tests.modeling.models import STOCK, TINY, TINY_STOCK, build, generate, ids, left_padded
from tests.processes import once, run_two

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RANKS = 2
EVEN = dict(vocab_size=30)  # transformers 5.17 shards the head of such vocabularies only
FULL_RANK = dict(linear_gate_rank=0, linear_output_gate_bias=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name of tests.modeling.models, and fields
    "kda": ("kda", dict(linear_output_gate_bias=True)),
    "hybrid": ("hybrid", {}),
    "grouped": ("grouped", dict(linear_output_gate_bias=True)),
    "full rank": ("grouped", FULL_RANK),
    "mixed ranks": ("grouped", dict(linear_gate_rank=0, linear_decay_rank=3, linear_learned_rate=False)),
    "head_decay": ("head_decay", {}),
    "softplus_tied": ("softplus_tied", {}),
    "key_bias": ("key_bias", {}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}
every_case = pytest.mark.parametrize("case", CASES)
# Of two numbers that the ranks do not divide, one is an error of its own: H divides HV.
REFUSED: dict[str, dict[str, Any]] = {
    "H": dict(linear_num_heads=1, linear_num_value_heads=2),
    "HV": dict(linear_num_heads=3, linear_num_value_heads=3),
    "softmax": dict(num_attention_heads=4, num_key_value_heads=1, full_attention_interval=2),
}
LIMIT = 1e-12  # relative error of whole tensors in fp64


# ---------------------------------------------------------------- what one process and two compute


def parallel(path: Path, auto: Any = AutoModelForCausalLM, plan: Any = "auto") -> Any:
    """The model of a checkpoint, its heads shared by the processes, in fp64."""
    return auto.from_pretrained(
        path, dtype=FP64, distributed_config=DistributedConfig(tp_size=RANKS, tp_plan=plan)
    ).double().eval()  # fmt: skip


def alone(path: Path, auto: Any = AutoModelForCausalLM) -> Any:
    """The same model in one process."""
    return auto.from_pretrained(path, dtype=FP64).double().eval()


def gathered(t: Any) -> Any:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def trained(model: Any, passes: int = 1, **inputs: Any) -> dict[str, Tensor]:
    """Logits, loss and the whole gradient of every parameter."""
    inputs = inputs or dict(input_ids=ids(2, 70))  # more than a chunk of 64 tokens
    model.train()
    model.zero_grad()
    for _ in range(passes):
        out = model(**inputs, labels=inputs["input_ids"], skip_logits=False)
        out.loss.backward()
    model.eval()
    gradients = {n: gathered(p.grad) for n, p in model.named_parameters()}
    assert all(g is not None for g in gradients.values())
    return {"logits": out.logits.detach(), "loss": out.loss.detach()} | gradients


@contextlib.contextmanager
def norm_weight_read() -> Iterator[None]:
    """The output norm as on a GPU: a function that reads its weight and does not call its module."""

    def fused(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *_: Any, **__: Any) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * torch.sigmoid(gate)

    with mock.patch.object(forward_module, "gated_rms_norm", fused):
        yield


@contextlib.contextmanager
def norm_module_called() -> Iterator[None]:
    """The output norm as on a CPU: its module is called."""

    def plain(x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Any, *_: Any, **__: Any) -> Tensor:
        return plain(x, gate)

    with mock.patch.object(forward_module, "gated_rms_norm", plain):
        yield


def checkpointed(model: Any) -> dict[str, Tensor]:
    """`trained` with the layers' forward run again in the backward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    result = trained(model)
    model.gradient_checkpointing_disable()
    return result


def clipped(model: Any) -> dict[str, Tensor]:
    """`trained` with clipped gradients: torch does not clip DTensors and other tensors in one call."""
    result = trained(model)
    kinds = [[p for p in model.parameters() if is_dtensor(p) == sharded] for sharded in (True, False)]
    norms = [gathered(get_total_norm([p.grad for p in kind])) for kind in kinds if kind]
    norm = torch.stack(norms).norm()
    for kind in kinds:
        clip_grads_with_norm_(kind, 0.1, norm)
    return result | {"norm": norm} | {n: gathered(p.grad) for n, p in model.named_parameters()}


def packed(model: Any) -> dict[str, Tensor]:
    return trained(model, input_ids=ids(1, 70), cu_seqlens=torch.tensor([0, 5, 69, 70]))


def within(context: Callable[[], Any]) -> Callable[[Any], dict[str, Tensor]]:
    def run(model: Any) -> dict[str, Tensor]:
        with context():
            return trained(model)

    return run


TRAINED: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "norm's weight read": within(norm_weight_read),
    "norm's module called": within(norm_module_called),
    "two passes": lambda model: trained(model, passes=2),
    "gradient checkpointing": checkpointed,
    "packed": packed,
    "clipped": clipped,
}
PROMPTS = [ids(9, seed=2), ids(4, seed=3)]


def padded(model: Any) -> Tensor:
    tokens, mask = left_padded(PROMPTS)
    return generate(model, tokens, attention_mask=mask)


GENERATED: dict[str, Callable[[Any, Any], Tensor]] = {  # of the model and a draft
    "dynamic cache": lambda model, draft: generate(model, ids(2, 9)),
    "static cache": lambda model, draft: generate(model, ids(2, 9), cache_implementation="static"),
    "padded": lambda model, draft: padded(model),
    "prompt lookup": lambda model, draft: generate(model, PROMPTS[0][None].repeat(1, 2), prompt_lookup_num_tokens=3),
    "draft": lambda model, draft: generate(model, ids(1, 9), assistant_model=draft),
}


def captured(model: Any, cache: str | None = None) -> tuple[Tensor, int]:
    """Tokens of a `generate` whose steps replay a tape in the place of a CUDA graph, and the number of captures."""
    with pytest.MonkeyPatch.context() as patch:
        for _ in captures.use_graphs("cpu", patch):
            counted = captures.Captures(patch)
            return generate(model, ids(2, 9), cache_implementation=cache), counted.made
    raise AssertionError("unreachable")


def merged(model: Any) -> dict[str, Any]:
    """Logits and tokens by merged weights, as on a GPU, and the layers that have them."""
    model._apply(lambda t: t.clone())  # on a CPU, shards of a loaded model are parts of the file's memory
    with mock.patch.object(weights, "DEVICES", ("cpu",)), torch.no_grad():
        holders = {name: m for name, m in model.named_modules() if hasattr(m, "merged_weights")}
        for m in holders.values():
            m.merged_weights.weight(m._inputs())  # no kernel of the CPU asks a KDA layer for them
        found = [name for name, m in holders.items() if m.merged_weights.parts]
        result = dict(layers=found, logits=model(ids(2, 70)).logits, tokens=generate(model, ids(2, 9)))
        assert all(m.merged_weights._is_in_place() for m in holders.values())
        return result | {"explained": kda_layers.explain(model)}


def draft_of(path: Path) -> Any:
    """An unsharded model close to that of the checkpoint, whose guesses are often but not always right."""
    model = alone(path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * p.std(correction=0) * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


# ---------------------------------------------------------------- two processes


def work(folder: Path) -> None:
    """Run the cases in each of the two processes, in this order on both: collectives wait for the other one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for case in CASES:
        path = folder / case
        model = parallel(path)
        results[case] = {"trained": trained(model)}
        with torch.no_grad():
            results[case]["logits"] = model(ids(2, 70)).logits
        results[case]["local"] = {
            n: p.to_local().shape if hasattr(p, "to_local") else p.shape for n, p in model.named_parameters()
        }
        if case == "kda":
            # New models: hooks of parameters stay once a forward has set them.
            results["trained"] = {name: run(parallel(path)) for name, run in TRAINED.items()}
            results["after an error"] = after_an_error(model)
            attention = model.model.layers[0].self_attn
            results["refused export"] = message(kda_layers.checkpoints.export_kda_weights, attention, "kda_layers")
        results[case]["captured"] = {cache: captured(model, cache) for cache in (None, "static")}
        with cropped() as crops:
            results[case]["generated"] = {name: run(model, draft_of(path)) for name, run in GENERATED.items()}
        results[case]["merged"] = merged(model)
        results[case]["crops"], results[case]["cached"] = len(crops), cached_shapes(model)
        model.save_pretrained(folder / f"{case} saved")
    results["refused"] = {name: message(parallel, folder / name) for name in REFUSED}
    results |= stock(folder)
    torch.save(results, folder / f"{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # all is saved; the interpreter's end, with gloo's threads, was seen to hang now and then


def stock(folder: Path) -> dict[str, Any]:
    """Models of transformers under their own plans, before and after `swap_attention`."""
    results: dict[str, Any] = {}
    model = parallel(folder / "kimi_linear")
    for name in ("stock", "swapped"):
        if name == "swapped":
            kda_layers.swap_attention(model)
        results[name], results[f"{name} tokens"] = trained_stock(model), generate(model, ids(2, 9))
    glm = parallel(folder / "glm5_next", AutoModelForImageTextToText)
    results["glm5_next"] = message(kda_layers.swap_attention, glm)
    qwen = parallel(folder / "qwen3_next")
    results["qwen3_next"] = message(kda_layers.swap_attention, qwen)
    results["doge"] = message(kda_layers.swap_attention, parallel(folder / "doge"))
    results["convert"] = message(kda_layers.swap_attention, parallel(folder / "stock llama"), "all")
    if can_replicate():
        config = DistributedConfig(tp_plan={name: "replicate" for name in glm.tp_plan if ".self_attn." in name})
        whole = kda_layers.load_pretrained(folder / "glm5_next", dtype=FP64, distributed_config=config).double().eval()
        with torch.no_grad():
            results["glm5_next replicated"] = whole(ids(2, 70, high=90)).logits
        config = DistributedConfig(tp_plan={name: "replicate" for name in qwen.tp_plan if ".linear_attn." in name})
        whole = kda_layers.load_pretrained(folder / "qwen3_next", dtype=FP64, distributed_config=config).double().eval()
        with torch.no_grad():
            results["qwen3_next replicated"] = whole(ids(2, 70, high=90)).logits
    return results


def trained_stock(model: Any) -> dict[str, Tensor]:
    """`trained` for a model without skip_logits, some of whose parameters have no gradient."""
    model.zero_grad()
    out = model(input_ids=ids(2, 70), labels=ids(2, 70))
    out.loss.backward()
    gradients = {n: gathered(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach()} | gradients


def can_replicate() -> bool:
    """True if a plan of one's own changes rules of the model's; before, it replaced all of them."""
    return Version(transformers.__version__) >= Version("5.23")


def message(call: Callable[..., Any], *args: Any) -> str:
    """The text of the ValueError that a call raises."""
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def after_an_error(model: Any) -> tuple[str, bool]:
    """The error of a call that fails inside of a layer, and True if the layer then has its unsharded weights."""
    attention = model.model.layers[0].self_attn
    found = message(attention, torch.zeros(1, 3, TINY["hidden_size"], dtype=FP64), torch.ones(1, 2))
    parameters = [attention.conv1d.weight, attention.o_norm.weight, attention.A_log]
    return found, all(isinstance(p, torch.nn.Parameter) for p in parameters) and hasattr(parameters[-1], "to_local")


@contextlib.contextmanager
def cropped() -> Iterator[list[int]]:
    """Collect calls that take tokens back."""
    crops: list[int] = []
    crop = KDACacheLayer.crop

    def counted(self: Any, tokens_to_remove: int) -> None:
        crops.append(int(tokens_to_remove))
        crop(self, tokens_to_remove)

    with mock.patch.object(KDACacheLayer, "crop", counted):
        yield crops


def cached_shapes(model: Any) -> list[tuple[int, ...]]:
    """Shapes of the states of the first KDA layer in a cache."""
    with torch.no_grad():
        layers = model(ids(2, 9), use_cache=True).past_key_values.layers
    layer = layers[model.config.layer_types.index("linear_attention")]
    return [tuple(layer.conv_states[0].shape), tuple(layer.recurrent_states[0].shape)]


def make(folder: Path) -> None:
    """Checkpoints of all cases, and what two processes compute from them."""
    for case, (name, fields) in CASES.items():
        model = build(name, **EVEN, **fields)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "norm" in n:
                    p.uniform_(0.5, 1.5, generator=generator)
                elif n.endswith(("A_log", "bias")):
                    p.normal_(0, 0.3, generator=generator)
        model.save_pretrained(folder / case)
    for name, heads in REFUSED.items():
        KDAForCausalLM(KDAConfig(**(TINY | EVEN | heads))).save_pretrained(folder / name)
    for family in ("kimi_linear", "glm5_next", "qwen3_next", "doge"):
        model = stock_models.build(family, vocab_size=98, dense=True)
        model.save_pretrained(folder / family)
    config = STOCK["llama"][0](**(TINY_STOCK | EVEN))
    LlamaForCausalLM(config).save_pretrained(folder / "stock llama")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run_two("-m", __name__, str(folder), cwd=ROOT, PYTHONPATH=path, HF_HUB_OFFLINE="1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("accelerate")  # transformers' sharded loading needs it
    return once(tmp_path_factory, "tensor_parallel", make)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank computed."""
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    errors = {name: error(got[name], want[name]) for name in want}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= LIMIT, f"{worst}: {errors[worst]:.2g}, limit {LIMIT}"


# ---------------------------------------------------------------- models of this package


@every_case
def test_logits_loss_and_every_gradient(case: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    model = alone(folder / case)
    want = trained(model)
    with torch.no_grad():
        logits = model(ids(2, 70)).logits
    assert all(g.norm() > 0 for n, g in want.items() if not n.endswith("k_norm.bias"))
    for rank in ranks:
        compare(rank[case]["trained"], want)
        compare({"logits": rank[case]["logits"]}, {"logits": logits})


@every_case
def test_every_rank_holds_its_heads(case: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    """All of a KDA layer is sharded but its norm, convolution, and the first factors of its gates."""
    model = alone(folder / case)
    whole = ("norm.weight", "layernorm.weight", "conv1d.weight", "a_proj.weight", "q_norm.weight", "k_norm.weight")
    for rank in ranks:
        for n, p in model.named_parameters():
            local = rank[case]["local"][n]
            if n == "model.embed_tokens.weight":  # transformers 5.17 leaves it whole unless it is tied
                continue
            assert local.numel() == p.numel() // (1 if n.endswith(whole) else RANKS), n
        config = model.config
        conv, recurrent = rank[case]["cached"]
        K, V = config.linear_head_dim, config.linear_value_head_dim
        H, HV = config.linear_num_heads // RANKS, config.linear_num_value_heads // RANKS
        assert conv == (2, 2 * H * K + HV * V, config.linear_conv_kernel_dim)
        assert recurrent == (2, HV, V, K)


@every_case
@pytest.mark.parametrize("way", GENERATED)
def test_generate(case: str, way: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    want = GENERATED[way](alone(folder / case), draft_of(folder / case))
    for rank in ranks:
        assert torch.equal(rank[case]["generated"][way], want)
        assert rank[case]["crops"], "no draft was taken back"


@every_case
@pytest.mark.parametrize("cache", [None, "static"])
def test_captured_steps(case: str, cache: str | None, folder: Path, ranks: list[dict[str, Any]]) -> None:
    """Shards and exchanges are in the graph."""
    want = generate(alone(folder / case), ids(2, 9))
    for rank in ranks:
        tokens, captures = rank[case]["captured"][cache]
        assert torch.equal(tokens, want)
        assert captures > 0


@every_case
def test_merged_weights(case: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    """One product for the shards of projections of the same input; what is saved then is tested below."""
    model = alone(folder / case)
    with torch.no_grad():
        logits = model(ids(2, 70)).logits
    for rank in ranks:
        got = rank[case]["merged"]
        assert torch.equal(got["tokens"], generate(model, ids(2, 9)))
        compare({"logits": got["logits"]}, {"logits": logits})
        kinds = {kind for name in got["layers"] for kind in ("self_attn", "mlp") if name.endswith(kind)}
        assert ("self_attn" in kinds) == (case != "full rank")  # whose gate has a bias
        assert ("mlp" in kinds) == (model.config.model_type == "kda_lm")
        assert "one GEMM for projections of the same input: taken" in got["explained"]


@pytest.mark.parametrize("how", TRAINED)
def test_ways_to_train(how: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    want = TRAINED[how](alone(folder / "kda"))
    for rank in ranks:
        compare(rank["trained"][how], want)


@every_case
def test_whole_weights_are_saved(case: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    want, got = (alone(folder / name) for name in (case, f"{case} saved"))
    assert got.config.to_diff_dict().keys() - {"distributed_config"} == want.config.to_diff_dict().keys()
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name


def test_an_error_leaves_the_whole_weights(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found, whole = rank["after an error"]
        assert "attention_mask must have shape" in found
        assert whole


# ---------------------------------------------------------------- refusals


def test_refused_head_counts(ranks: list[dict[str, Any]]) -> None:
    kda = "linear_num_heads and linear_num_value_heads must be multiples of tp_size = 2, got"
    for rank in ranks:
        assert rank["refused"]["H"].startswith(f"{kda} 1 and 2: ")
        assert rank["refused"]["HV"].startswith(f"{kda} 3 and 3: ")
        assert rank["refused"]["HV"].endswith("Use a tp_size that divides 3")
        softmax = "num_attention_heads and num_key_value_heads must be multiples of tp_size = 2, got 4 and 1: "
        assert rank["refused"]["softmax"].startswith(softmax)


@pytest.mark.parametrize(("H", "HV", "accepted"), [(4, 8, (1, 2, 4)), (6, 6, (1, 2, 3, 6)), (1, 4, (1,))])
def test_accepted_head_counts(H: int, HV: int, accepted: tuple[int, ...]) -> None:
    layer = KimiDeltaAttention(8, H, 4, num_value_heads=HV)
    for ranks in range(1, 9):
        if ranks in accepted:
            check_heads(layer, ranks)
        else:
            with pytest.raises(ValueError, match=f"tp_size = {ranks}, got {H} and {HV}"):
                check_heads(layer, ranks)


def test_whole_layers_are_exported(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["refused export"].startswith("layer must have unsharded weights on every rank, got shards")


# ---------------------------------------------------------------- models of transformers


def test_swapped_layers_under_the_stock_plan(folder: Path, ranks: list[dict[str, Any]]) -> None:
    """Kimi-Linear's plan leaves attention whole: two processes compute what one does, stock and swapped."""
    model = alone(folder / "kimi_linear")
    found = {}
    for name in ("stock", "swapped"):
        if name == "swapped":
            kda_layers.swap_attention(model)
        found[name], tokens = trained_stock(model), generate(model, ids(2, 9))
        for rank in ranks:
            compare(rank[name], found[name])
            assert torch.equal(rank[f"{name} tokens"], tokens)
    assert error(found["swapped"]["logits"], found["stock"]["logits"]) < 1e-4  # the stock layer computes in fp32


def test_plans_that_shard_attention_otherwise(folder: Path, ranks: list[dict[str, Any]]) -> None:
    """GLM-5.3-Flash's rules for latent attention meet the o_proj of its KDA layers; Doge's cut v but not its bias."""
    for rank in ranks:
        assert "self_attn must have unsharded weights on every rank, got shards" in rank["glm5_next"]
        assert "at o_proj.weight: the plan of Glm5Next" in rank["glm5_next"]
        assert "linear_attn must have unsharded weights on every rank, got shards" in rank["qwen3_next"]
        assert "DistributedConfig(tp_plan={'...linear_attn.out_proj': 'replicate'})" in rank["qwen3_next"]
        assert "self_attn must have unsharded weights on every rank, got shards" in rank["doge"]
        assert rank["convert"].startswith("model must have unsharded weights on every rank, got shards")
    if can_replicate():
        for family, kind in (("glm5_next", AutoModelForImageTextToText), ("qwen3_next", AutoModelForCausalLM)):
            model = alone(folder / family, kind)
            kda_layers.swap_attention(model)
            with torch.no_grad():
                want = model(ids(2, 70, high=90)).logits
            for rank in ranks:
                compare({"logits": rank[f"{family} replicated"]}, {"logits": want})


if __name__ == "__main__":
    import tests.modeling.conftest  # noqa: F401  (stock models run without flash-linear-attention, which needs a GPU)

    work(Path(sys.argv[1]))
