"""The seams between transformers and this package: all listed, all there, and words where one is gone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

import kda_layers
from kda_layers.modeling import seams
from kda_layers.modeling.inputs.arguments import OLD_NAMES, rename_cache
from kda_layers.versions import installed, release
from tests.modeling.common import same
from tests.modeling.models import OURS, SWAPPED, build, ids

PACKAGE = Path(kda_layers.__file__).parent
LISTED = (*seams.NAMES.values(), *seams.OVERRIDDEN, *seams.OF_TRAINER, *seams.OF_ENGINE)


@pytest.mark.parametrize("seam", LISTED, ids=str)
def test_transformers_has_every_seam_of_its_versions(seam: seams.Seam) -> None:
    if release(seam.first) <= installed("transformers")[:2]:
        seams.owner(seam)


def test_an_older_engine_is_refused() -> None:
    if installed("transformers")[:2] < release(seams.OF_ENGINE[0].first):
        with pytest.raises(ImportError, match=f"transformers {seams.OF_ENGINE[0].first} to"):
            kda_layers.serving.enable_continuous_batching()
    else:
        seams.check(seams.OF_ENGINE)


def test_seams_are_as_new_as_the_tests() -> None:
    """A list that was not read for a version that the tests have passed with fails here."""
    newest = kda_layers.versions.tested("transformers")[-1]
    assert {seam.last for seam in LISTED} == {".".join(newest.split(".")[:2])}


def deep_imports(path: Path) -> list[str]:
    """Return the imports of names below the top of transformers that run with the program."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and getattr(test.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node not in typing_only
            and (node.module or "").startswith("transformers.")
        ):
            found.append(str(node.module))
        if isinstance(node, ast.Import) and node not in typing_only:
            found += [alias.name for alias in node.names if alias.name.startswith("transformers.")]
    return found


def test_no_other_file_imports_deep_names() -> None:
    """Families name the modelling files of their own model, which they are about."""
    others = {
        path.relative_to(PACKAGE).as_posix(): [name for name in deep_imports(path) if ".models." not in name]
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: names for path, names in others.items() if names} == {}


def test_a_seam_that_is_gone_is_named_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.masking_utils.create_causal_mask")
    monkeypatch.delitem(vars(seams), "create_causal_mask", raising=False)
    with pytest.raises(ImportError, match=r"uses transformers\.masking_utils\.create_causal_mask, seen in .* lacks"):
        from kda_layers.modeling.seams import create_causal_mask  # noqa: F401
    monkeypatch.delattr("transformers.GenerationMixin._prepare_cache_for_generation")
    with pytest.raises(ImportError, match=rf"_prepare_cache_for_generation.*transformers {transformers.__version__}"):
        seams.check(seams.OVERRIDDEN)


@pytest.mark.parametrize("name", ["cache", *OLD_NAMES])
@pytest.mark.parametrize("kind", [*OURS, *SWAPPED])
def test_the_cache_goes_by_any_of_its_names(kind: str, name: str) -> None:
    m, tokens = build(kind), ids(1, 9)
    cache = DynamicCache(config=m.config)
    with torch.no_grad():
        whole = m(tokens).logits
        first = m(tokens[:, :5], **{name: cache})
        second = m(tokens[:, 5:], **{name: cache})
    assert first[seams.CACHE] is second[seams.CACHE] is cache
    assert cache.get_seq_length() == 9
    same([second.logits], [whole[:, 5:]])


def test_two_caches_are_refused() -> None:
    one, other = object(), object()
    with pytest.raises(TypeError, match="cache and past_key_values are names of one argument, got two caches"):
        rename_cache({"cache": one, "past_key_values": other})
    assert rename_cache({"cache": None, "past_key_values": one, "x": 1}) == {"cache": one, "x": 1}
    assert rename_cache({"cache_params": one}, "past_key_values") == {"past_key_values": one}


OPERATOR_AND_LAYER = """
import sys
{prepare}
import torch, kda_layers
from kda_layers.kernels import fla_api
q, k, v, g = (torch.randn(1, 9, 2, 16) for _ in range(4))
beta = torch.rand(1, 9, 2)
assert kda_layers.kda(q, k, v, g, beta, lower_bound=-5.0).o.shape == v.shape
assert fla_api.chunk_kda(q, k, v, -g.abs(), beta)[0].shape == v.shape
layer = kda_layers.KimiDeltaAttention(32, 2, 16)
layer(torch.randn(1, 9, 32)).sum().backward()
assert layer.A_log.grad is not None and layer.dt_bias.std() > 0
for name in ("KDAForCausalLM", "swap_attention"):
    try:
        getattr(kda_layers, name)
    except ImportError as error:
        assert str(error).startswith(name + " of kda_layers needs transformers 5.17 or newer, got {got}"), error
    else:
        raise AssertionError(name)
print("imported:", "transformers" in sys.modules)
"""
WITHOUT = "sys.modules['transformers'] = None"
HIDDEN = """
import importlib.metadata as m
version = m.version
def hidden(name):
    if name == "transformers":
        {answer}
    return version(name)
m.version = hidden
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "got"), [("raise m.PackageNotFoundError(name)", "none"), ("return '5.16.2'", "5.16.2")]
)
def test_operator_and_layer_work_without_transformers(answer: str, got: str) -> None:
    prepare = HIDDEN.format(answer=answer) + WITHOUT
    code = OPERATOR_AND_LAYER.format(prepare=prepare, got=got)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "warned"), [("5.99.0", 1), ("6.0.0.dev0", 1), ("5.17.3", 0)])
def test_an_untested_version_warns_once(version: str, warned: int) -> None:
    answer = HIDDEN.format(answer=f"return {version!r}")
    code = f"""{answer}
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import kda_layers
    import kda_layers.kernels
found = [str(w.message) for w in caught if "was tested with transformers" in str(w.message)]
assert len(found) == {warned}, found
assert all("transformers 5.17" in m and {version!r} in m for m in found), found
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_what_is_no_cache_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cache must be a Cache of transformers, .* got tuple"):
        build("kda")(ids(1, 3), past_key_values=((torch.ones(1), torch.ones(1)),))
