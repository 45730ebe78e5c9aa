"""Files that save_pretrained adds for others: code for loading without an import, and a model card."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from kda_layers import KDAConfig, KDAForCausalLM, KDAModel
from kda_layers.modeling.models import hub
from kda_layers.modeling.models.configuration_variants import KDALlamaConfig
from kda_layers.modeling.models.variant import KDALlamaForCausalLM

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = dict(
    vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
KDA = SIZES | dict(linear_num_heads=2, linear_head_dim=8, full_attention_interval=4)
CONFIG = "modeling_kda_layers.KDAConfig"
IDS = torch.arange(1, 21).view(2, 10)


def make(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = KDAForCausalLM(KDAConfig(**KDA)) if kind == "kda" else KDALlamaForCausalLM(KDALlamaConfig(**SIZES))
    return model.eval()


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "kda_layers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def fresh(script: str, tmp_path: Path, *, importable: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new process with a cache of its own for code from checkpoints."""
    if not importable:
        script = ABSENT + script
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL,
        check=False, timeout=120,
    )  # fmt: skip


LOAD = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
assert "kda_layers" not in sys.modules
path, out = {path!r}, {out!r}
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
ids = torch.arange(1, 21).view(2, 10)
logits = model(ids).logits.detach()
tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
hidden = AutoModel.from_pretrained(path, trust_remote_code=True)(ids).last_hidden_state
model.save_pretrained(out)
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
assert torch.equal(again(ids).logits, logits)
torch.save([logits, tokens, hidden.detach()], out + "/results.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kda", "kda_llama"])
def test_a_process_without_the_import_loads_it_with_trust_remote_code(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    path, out = str(tmp_path / "model"), str(tmp_path / "again")
    model.save_pretrained(path, max_shard_size="20KB")
    assert len(list(Path(path).glob("*.safetensors"))) > 1
    run = fresh(LOAD.format(path=path, out=out), tmp_path)
    assert run.returncode == 0, run.stderr
    logits, tokens, hidden = torch.load(out + "/results.pt")
    torch.testing.assert_close(logits, model(IDS).logits, rtol=0, atol=0)
    assert torch.equal(tokens, model.generate(IDS, max_new_tokens=5, do_sample=False))
    torch.testing.assert_close(hidden, model.model(IDS).last_hidden_state, rtol=0, atol=0)
    # What was loaded so and saved again is loaded by the import as well.
    again = AutoModelForCausalLM.from_pretrained(out)
    assert type(again) is type(model)
    assert torch.equal(again(IDS).logits, logits)
    assert (Path(out) / hub.CODE).read_text() == (Path(path) / hub.CODE).read_text()


# Modules that the code of version 0.1 imports: configuration, models.
PATHS_OF_0_1 = {
    "kda": ("configuration_kda", "modeling_kda"),
    "kda_llama": ("configuration_variants", "families.llama"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PATHS_OF_0_1)
def test_code_of_version_0_1_still_loads(kind: str, tmp_path: Path) -> None:
    model, path, out = make(kind), tmp_path / "model", tmp_path / "again"
    model.save_pretrained(path)
    code = (path / hub.CODE).read_text()
    new = "kda_layers" if kind == "kda" else "kda_layers.checkpoints"
    for name, old in zip(("PackageConfig", "Package(?:Model|ForCausalLM)"), PATHS_OF_0_1[kind], strict=True):
        code = re.sub(f"from {new} import (.* as {name})", rf"from kda_layers.modeling.{old} import \1", code)
    assert all(f"from kda_layers.modeling.{old} import" in code for old in PATHS_OF_0_1[kind])
    (path / hub.CODE).write_text(code)
    run = fresh(LOAD.format(path=str(path), out=str(out)), tmp_path)
    assert run.returncode == 0, run.stderr
    assert torch.equal(torch.load(out / "results.pt")[0], model(IDS).logits)


@pytest.mark.parametrize("old", hub.MOVED)
def test_modules_that_older_checkpoints_import_have_the_names_of_the_new_ones(old: str) -> None:
    moved = importlib.import_module(f"kda_layers.modeling.{old}")
    module = importlib.import_module(f"kda_layers.modeling.{hub.MOVED[old]}")
    names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    assert names
    assert all(hasattr(moved, name) for name in names)
    with pytest.raises(AttributeError, match="no_such_name"):
        moved.no_such_name  # noqa: B018


UNLOADABLE = """
from transformers import AutoModelForCausalLM
for trust in (False, True):
    try:
        AutoModelForCausalLM.from_pretrained({path!r}, trust_remote_code=trust)
    except Exception as error:
        print(repr(error))
"""


def test_a_missing_package_and_missing_trust_are_explained(tmp_path: Path) -> None:
    make("kda").save_pretrained(tmp_path / "model")
    run = fresh(UNLOADABLE.format(path=str(tmp_path / "model")), tmp_path, importable=False)
    assert run.returncode == 0, run.stderr
    untrusted, missing = run.stdout.splitlines()
    assert "trust_remote_code=True" in untrusted
    assert missing.startswith("ImportError('this checkpoint needs kda_layers, which is on no package index: run")
    assert "pip install kda_layers" not in missing, "transformers names whatever has that name on PyPI"


@pytest.mark.parametrize("kind", ["kda", "kda_llama"])
@pytest.mark.parametrize("trust", [None, True, False])
def test_where_the_package_is_imported_its_own_classes_serve(kind: str, trust: bool | None, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
    assert type(loaded) is type(model)
    assert type(loaded.config) is type(model.config)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_configuration_alone_names_the_code_too(tmp_path: Path) -> None:
    KDAConfig(**KDA).save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", hub.CODE]
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": CONFIG,
        "AutoModel": "modeling_kda_layers.KDAModel",
        "AutoModelForCausalLM": "modeling_kda_layers.KDAForCausalLM",
    }


def test_entries_of_other_code_stay(tmp_path: Path) -> None:
    config = KDAConfig(**KDA)
    tokenizer = ["tokens.Tokenizer", None]
    config.auto_map = {"AutoTokenizer": tokenizer, "AutoModelForCausalLM": "own.Model", "AutoConfig": f"a/b--{CONFIG}"}
    config.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoTokenizer"] == tokenizer
    assert auto_map["AutoModelForCausalLM"] == "own.Model"
    assert auto_map["AutoConfig"] == CONFIG


def test_no_text_names_a_package_that_anybody_may_register() -> None:
    """kda_layers is on no index: whoever registers the name would run code wherever such a text is followed."""
    texts = [path for name in ("kda_layers", "examples", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    assert len(texts) > 50
    install = re.compile(r"pip install .{0,9}kda.layers|kda.layers\[")
    assert not [str(path) for path in texts if install.search(path.read_text(encoding="utf-8"))]


# The file of version 0.1, which has no digest.
UNSIGNED = '''"""Loads this checkpoint with trust_remote_code=True. All code is in the package: `pip install it`."""

from kda_layers.modeling.configuration_kda import KDAConfig as PackageConfig
'''


@pytest.mark.parametrize("before", ["kda_llama", "unsigned"])
def test_code_of_ours_is_replaced(before: str, tmp_path: Path) -> None:
    if before == "unsigned":
        (tmp_path / hub.CODE).write_text(UNSIGNED)
    else:
        make(before).save_pretrained(tmp_path)
    make("kda").save_pretrained(tmp_path)
    make("kda").save_pretrained(tmp_path / "new")
    assert (tmp_path / hub.CODE).read_bytes() == (tmp_path / "new" / hub.CODE).read_bytes()


@pytest.mark.parametrize("before", [b"import my_own\n", b"", b"# caf\xe9\n", "edited"])
def test_code_that_is_not_ours_stays(before: bytes | str, tmp_path: Path) -> None:
    model = make("kda")
    if isinstance(before, str):
        model.save_pretrained(tmp_path)
        before = (tmp_path / hub.CODE).read_bytes().replace(b"That of", b"My own, from")
    (tmp_path / hub.CODE).write_bytes(before)
    model.config.auto_map = {"AutoConfig": CONFIG}
    with pytest.warns(UserWarning, match=f"{hub.CODE} is not as kda_layers writes it and stays, as does") as caught:
        model.save_pretrained(tmp_path)
    assert len(caught) == 1
    assert (tmp_path / hub.CODE).read_bytes() == before
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {"AutoConfig": CONFIG}
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", [hub.CODE, hub.CARD])
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    model, folder, elsewhere = make("kda"), tmp_path / "model", tmp_path / "elsewhere"
    model.save_pretrained(elsewhere)
    (elsewhere / name).rename(tmp_path / "target")
    ours = (tmp_path / "target").read_bytes()
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "target")
    model.to(torch.bfloat16).save_pretrained(folder)
    assert not (folder / name).is_symlink()
    assert (tmp_path / "target").read_bytes() == ours
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "nowhere")
    model.save_pretrained(folder)
    assert not (folder / name).is_symlink()
    assert not (tmp_path / "nowhere").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


# ---------------------------------------------------------------- the card


def card_of(folder: Path) -> str:
    return (folder / hub.CARD).read_text()


def test_the_card_says_what_the_model_is(tmp_path: Path) -> None:
    model = make("kda").to(torch.bfloat16)
    model.config.converted_from = "someone/a-llama"
    model.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    parameters = sum(p.numel() for p in model.parameters())
    for fact in (
        "pipeline_tag: text-generation", "KDAForCausalLM", "| model type | kda_lm |", f"{parameters:,}",
        "4: 3 KDA, 1 full attention", "lower_bound -5", "| dtype | bfloat16 |", "| converted from | someone/a-llama |",
        f"torch {torch.__version__}", "`pip install .` in a copy of its source", "with `trust_remote_code=True` too",
    ):  # fmt: skip
        assert fact in card, fact
    assert "$" not in card


@pytest.mark.parametrize(
    "origin",
    [
        "someone/a |\n\n# Heading", "a/b\n", "[a](https://example.org)", "<img src=x>", "`code`", "a|b", "a/b/c", "",
        "---\nlicense: mit\n---", {"a": "b"}, "someone/" + "a" * 97, "https://example.org",
    ],
    ids=str,
)  # fmt: skip
def test_markup_in_the_configuration_does_not_reach_the_card(origin: Any) -> None:
    model = make("kda")
    plain = hub.model_card(model)
    model.config.model_type = "kda_lm |\n\n# Heading"
    assert hub.model_card(model) == plain
    model.config.converted_from = origin
    row = "| converted from | what `converted_from` in config.json names |\n"
    assert hub.model_card(model).replace(row, "") == plain
    assert (row in hub.model_card(model)) == bool(origin)


def test_a_base_model_generates_no_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    KDAModel(KDAConfig(**KDA)).save_pretrained(tmp_path)
    assert "pipeline_tag" not in card_of(tmp_path)
    assert "AutoModel.from_pretrained" in card_of(tmp_path)


@pytest.mark.parametrize("before", [b"# Mine\n", b"", b"# Caf\xe9\n", "edited"])
def test_a_card_that_is_not_ours_stays(before: bytes | str, tmp_path: Path) -> None:
    model = make("kda")
    if isinstance(before, str):
        model.save_pretrained(tmp_path)
        before = card_of(tmp_path).replace("Not stated", "Trained on a book").encode()
    (tmp_path / hub.CARD).write_bytes(before)
    model.save_pretrained(tmp_path)
    assert (tmp_path / hub.CARD).read_bytes() == before


def test_our_own_card_follows_the_model(tmp_path: Path) -> None:
    model = make("kda")
    model.save_pretrained(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert "bfloat16" in card_of(tmp_path)


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    make("kda").save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_trainer_checkpoints_have_code_but_no_card(tmp_path: Path) -> None:
    model: PreTrainedModel = make("kda").train()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_only_model=True
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in IDS])
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    assert (checkpoint / hub.CODE).exists()
    assert not (checkpoint / hub.CARD).exists()
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
    trainer.save_model()
    assert "KDAForCausalLM" in card_of(tmp_path)
    trainer.create_model_card()  # Trainer's own card replaces ours, not the other way round
    theirs = card_of(tmp_path)
    trainer.save_model()
    assert card_of(tmp_path) == theirs


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ("l", "1: all KDA"),
        ("llll", "4: all KDA"),
        ("ff", "2: all full attention"),
        ("lllf" * 3, "12: 3 KDA, 1 full attention, 3 times"),
        ("llfl", "4: 2 KDA, 1 full attention, 1 KDA"),
        ("ls", "2: 1 KDA, 1 sliding attention"),
    ],
)
def test_layer_pattern(types: str, words: str) -> None:
    names = {"l": "linear_attention", "f": "full_attention", "s": "sliding_attention"}
    assert hub.layer_pattern([names[t] for t in types]) == words
