"""`load_pretrained` takes what `AutoModelForCausalLM.from_pretrained` takes, and loads the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, KimiLinearForCausalLM

from kda_layers import load_pretrained
from tests.kernels.cases import BF16, FP32
from tests.modeling.stock_models import FAMILIES, build, swapped_layers_of

REPOSITORY = "someone/kimi"
REVISIONS = {"main": "a" * 40, "old": "b" * 40}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    build("kimi_linear").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the Hub that holds two revisions of a repository, which differ in weights and configuration."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / f"models--{REPOSITORY.replace('/', '--')}"
    for seed, (revision, commit) in enumerate(REVISIONS.items()):
        build("kimi_linear", seed=seed, rms_norm_eps=10.0 ** -(5 + seed)).save_pretrained(
            repository / "snapshots" / commit
        )
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    return cache


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 20)[None]).logits


def assert_like(ours: Any, stock: Any) -> None:
    """The same class, weights and configuration, but with swapped layers."""
    assert ours.stock is type(stock)
    weights = stock.state_dict()
    assert ours.state_dict().keys() == weights.keys()
    assert all(torch.equal(t, weights[n]) for n, t in ours.state_dict().items())
    assert ours.config.to_dict() == stock.config.to_dict()
    assert all(type(layer).__name__.startswith("Fast") for layer in swapped_layers_of(ours).values())
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-5)


def edited(checkpoint: Path, folder: Path, **fields: Any) -> Path:
    """A copy of the checkpoint with other fields in config.json, without those that are None."""
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_subfolder(checkpoint: Path) -> None:
    where = dict(subfolder=checkpoint.name)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint.parent, **where)
    assert_like(load_pretrained(checkpoint.parent, **where), stock)


@pytest.mark.parametrize("revision", [None, *REVISIONS, REVISIONS["old"]])
def test_revisions_of_a_repository(revision: str | None, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and configuration are of the same one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    where = dict(cache_dir=hub, local_files_only=True) | ({} if revision is None else dict(revision=revision))
    ours = load_pretrained(REPOSITORY, **where)
    assert_like(ours, AutoModelForCausalLM.from_pretrained(REPOSITORY, **where))
    assert ours.config.rms_norm_eps == (1e-5 if revision in (None, "main") else 1e-6)


def test_the_token_reaches_configuration_and_weights(checkpoint: Path) -> None:
    given: dict[str, Any] = {}

    def recorded(name: str, method: Any) -> Any:
        def call(cls: type, *args: Any, **kwargs: Any) -> Any:
            given[name] = kwargs.get("token")
            return method(cls, *args, **kwargs)

        return classmethod(call)

    with (
        mock.patch.object(AutoConfig, "from_pretrained", recorded("config", AutoConfig.from_pretrained.__func__)),
        mock.patch.object(
            KimiLinearForCausalLM,
            "from_pretrained",
            recorded("weights", KimiLinearForCausalLM.from_pretrained.__func__),
        ),
    ):
        load_pretrained(checkpoint, token="hf_secret")
    assert given == {"config": "hf_secret", "weights": "hf_secret"}


def test_fields_of_the_configuration(checkpoint: Path) -> None:
    fields: dict[str, Any] = dict(use_cache=False, rms_norm_eps=1e-2, dtype=FP32)
    ours = load_pretrained(checkpoint, **fields)
    assert_like(ours, AutoModelForCausalLM.from_pretrained(checkpoint, **fields))
    assert (ours.config.use_cache, ours.config.rms_norm_eps) == (False, 1e-2)
    config = AutoConfig.from_pretrained(checkpoint, use_cache=False)
    assert not load_pretrained(checkpoint, config=config).config.use_cache
    for load in (load_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_field'"):
            load(checkpoint, no_such_field=1)


def test_loading_info(checkpoint: Path) -> None:
    ours, info = load_pretrained(checkpoint, output_loading_info=True)
    stock, wanted = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert_like(ours, stock)
    assert info == wanted
    assert not info["missing_keys"]


@pytest.mark.parametrize("architectures", [["BailingMoeV3ForCausalLM"], ["LlamaForCausalLM"], [], None], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_that_transformers_does_not_know(
    family: str, architectures: list[str] | None, tmp_path: Path
) -> None:
    """As in the published files of Ling: the type decides."""
    model = build(family)
    model.save_pretrained(tmp_path / "saved")
    ours = load_pretrained(edited(tmp_path / "saved", tmp_path / "edited", architectures=architectures))
    assert ours.stock is type(model)
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-4, atol=1e-5)


def test_a_base_model_is_loaded_as_one(checkpoint: Path, tmp_path: Path) -> None:
    ours = load_pretrained(edited(checkpoint, tmp_path / "base", architectures=["KimiLinearModel"]))
    assert type(ours) is transformers.KimiLinearModel
    assert all(type(layer).__name__.startswith("Fast") for layer in swapped_layers_of(ours).values())


def test_code_of_the_checkpoint_is_not_run(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published files name their own modelling code; loading them with transformers' classes needs no consent."""
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    folder = edited(checkpoint, tmp_path / "published", auto_map=code, architectures=["XForCausalLM"])
    assert load_pretrained(folder).stock is KimiLinearForCausalLM
    assert not [record for record in caplog.records if record.name == "kda_layers"]
    with caplog.at_level("WARNING", logger="kda_layers"):
        assert load_pretrained(folder, trust_remote_code=True).stock is KimiLinearForCausalLM
    assert "trust_remote_code=True is ignored" in caplog.text


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_folder_of_adapters(dtype: torch.dtype, checkpoint: Path, tmp_path: Path) -> None:
    """The base model is loaded with them, as AutoModelForCausalLM does, and swapped."""
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(0)
    targets = ["q_proj", "o_proj", "f_a_proj", "g_b_proj"]
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype=dtype)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert ours.stock is type(stock) is KimiLinearForCausalLM
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert any("lora_A" in n for n, _ in ours.named_parameters())
    gates = [p for n, p in ours.named_parameters() if n.endswith(("A_log", "dt_bias"))]
    assert {p.dtype for p in gates} == {FP32}
    if dtype == FP32:
        torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(logits(ours), logits(build("kimi_linear")), rtol=1e-2, atol=1e-2)
    prompt = torch.arange(3, 12)[None]
    assert ours.generate(prompt, max_new_tokens=4, do_sample=False).shape == (1, 13)
