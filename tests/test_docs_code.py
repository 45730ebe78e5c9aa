"""The Python of README and of every page of docs runs as written, with nothing installed but what the page names."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests import doc_pages
from tools import docs, kernel_package

ROOT = Path(__file__).parents[1]
# tests/test_serve.py runs its blocks: they start a server, and ask it.
SERVES = "docs/tutorials/serve.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if docs.RUNS not in path.relative_to(ROOT).parents
}
WITH_CODE = {name: text for name, text in PAGES.items() if "```python" in text and name != SERVES}

# What must fail, beside what may run, to show that the test can.
OTHERS = {
    "fails: a name of nowhere.md": "```python\nmodel.generate()\n```\n",
    "fails: not installed.md": "```python\nimport accelerate\n```\n",
    "fails: one of its processes.md": (
        '```python title="In each of 2 processes"\nimport os\nassert os.environ["RANK"] == "0"\n```\n'
    ),
    "runs: in order.md": (
        '```python\nx = 1\n```\n\n```python title="Needs a GPU"\nx = 0\n```\n\n```python\nassert x\n```\n'
    ),
    "runs: named by the page.md": "`pip install accelerate`\n\n```python\nimport accelerate\n```\n",
}


def give(folder: Path) -> None:
    """Make what pages say is there: README's checkpoints, and the kernel that hub_kernel.md builds first."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM, LlamaConfig, LlamaForCausalLM

    size: dict[str, Any] = dict(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    kimi = KimiLinearConfig(
        **size, linear_num_heads=2, linear_head_dim=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8, mlp_layer_types=["dense"] * 4, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    KimiLinearForCausalLM(kimi).save_pretrained(folder / "path" / "to" / "kimi-linear")
    LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(folder / "path" / "to" / "llama")
    kernel_package.build(folder / "build")


@pytest.mark.slow
def test_pages_run_as_written(tmp_path: Path) -> None:
    """In order, from the top, and print what they say; all pages in one test, as they share what takes longest."""
    pages = WITH_CODE | OTHERS
    assert {"README.md", "docs/guides/caches.md", "docs/guides/swap.md", "docs/guides/training.md"} <= pages.keys()
    give(tmp_path / "given")
    groups: dict[frozenset[str], dict[str, str]] = defaultdict(dict)
    for name, text in pages.items():
        groups[frozenset(doc_pages.installs(text))][name] = text
    wrong = {}
    for i, (wanted, group) in enumerate(groups.items()):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "given").symlink_to(tmp_path / "given")
        for name, found in doc_pages.run(group, wanted, folder).items():
            if found["error"]:
                wrong[name] = found["error"]
                continue
            code = "\n".join(block.code for block in doc_pages.blocks(group[name]) if not block.needs)
            printed, said = found["printed"].splitlines(), doc_pages.said(code)
            assert len(said) == code.count("print("), f"{name}: a print does not say what it prints"
            if len(printed) != len(said) or not all(map(str.startswith, printed, said)):
                wrong[name] = f"{name}: says {said}, prints {printed}"
    expected = {name for name in OTHERS if name.startswith("fails")}
    assert wrong.keys() == expected, "\n\n".join(text for name, text in wrong.items() if name not in expected)
    assert "NameError" in wrong["fails: a name of nowhere.md"]
    assert "No module named 'accelerate'" in wrong["fails: not installed.md"]


@pytest.mark.parametrize("name", WITH_CODE)
def test_every_block_is_seen_and_few_are_not_run(name: str) -> None:
    found = doc_pages.blocks(WITH_CODE[name])
    assert len(found) == WITH_CODE[name].count("```python")
    left_out = [block for block in found if block.needs]
    assert len(left_out) <= max(1, len(found) // 3), [block.needs for block in left_out]


def test_requirements_of_a_page() -> None:
    named = doc_pages.installs("`pip install '.[plot]'`, or `pip install -U accelerate`")
    assert named == {".", ".[plot]", "accelerate"}
    wanted = doc_pages.requirements(named)
    assert "accelerate" in wanted
    assert any(name.startswith("matplotlib") for name in wanted)
    there = doc_pages.installed(doc_pages.requirements({"."}))
    assert {"torch", "transformers", "numpy"} <= there.keys()
    assert not {"accelerate", "pytest", "peft"} & there.keys()
