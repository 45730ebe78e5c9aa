"""Write the files beside a saved model: code that loads it without `import kda_layers`, and a model card."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import re
import secrets
import sys
import warnings
from pathlib import Path
from string import Template
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `import kda_layers` imports this module, but not transformers' modelling code
    from transformers import PreTrainedConfig, PreTrainedModel

CODE, CARD = "modeling_kda_layers.py", "README.md"
MARK = "written by kda_layers, "

# Imports are absolute, because transformers copies relatively imported files along with the code, and stand in a try
# block: outside of one, transformers tells the user to install the package that is named like a missing module, whoever
# registered it. Classes are subclassed, because transformers marks those that it loads from a checkpoint's folder.
# Module paths are part of the checkpoint format, so they are public ones.
CODE_TEMPLATE = Template('''\
"""Loads this checkpoint with trust_remote_code=True. All code is in the package kda_layers."""

try:
    from $module import $config as PackageConfig
    from $module import $base as PackageModel
    from $module import $causal_lm as PackageForCausalLM
except ModuleNotFoundError as error:
    if error.name != "kda_layers":
        raise
    raise ImportError(
        "this checkpoint needs kda_layers, which is on no package index: run `pip install .` in a copy of its source"
    ) from error


class $config(PackageConfig):
    """That of kda_layers."""


class $base(PackageModel):
    """That of kda_layers."""

    config_class = $config


class $causal_lm(PackageForCausalLM):
    """That of kda_layers."""

    config_class = $config
''')

# The code of version 0.1 begins with this and has no digest.
UNSIGNED = '"""Loads this checkpoint with trust_remote_code=True. All code is in the package: '

# Modules that the code of older checkpoints imports -> the one that has their names now, all below kda_layers.modeling.
# Newer code imports public modules, so no row is added; files of torch.save(model) are not covered.
MOVED = {
    "configuration_kda": "models.configuration_kda",
    "modeling_kda": "models.modeling_kda",
    "configuration_variants": "models.variant",
    **{
        f"{folder}{kind}": "models.variant"
        for folder in ("families.", "families.kda_", "swap.families.kda_")
        for kind in ("llama", "mistral", "qwen2", "qwen3")
    },
}


class MovedModule(ModuleType):
    """A module at its old path; imports the new one when a name of it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspect looks for __file__ and the like in every module
            raise AttributeError(name)
        package, _, old = self.__name__.partition(".modeling.")
        return getattr(importlib.import_module(f"{package}.modeling.{MOVED[old]}"), name)


sys.modules |= {path: MovedModule(path) for path in (f"kda_layers.modeling.{old}" for old in MOVED)}

CARD_TEMPLATE = Template("""\
---
library_name: transformers
tags: [kda, kimi-delta-attention, linear-attention]
$metadata---

# $title

A model with layers of Kimi Delta Attention (KDA, [arXiv:2510.26692](https://arxiv.org/abs/2510.26692)): linear
attention whose state has one size, whatever the length of the text.

$facts

## Loading

The checkpoint needs the package kda_layers, with `trust_remote_code=True` too. No package index has it: run
`pip install .` in a copy of its source, then

```python
import kda_layers
from transformers import $auto_class

model = $auto_class.from_pretrained("path or name of this checkpoint")
```

or, without the first import, with `trust_remote_code=True`.

## Use, data, training, evaluation

Not stated: `save_pretrained` wrote this card, and the authors of the model have not added to it.
""")


def write_code(config: PreTrainedConfig, folder: Any) -> None:
    """Write the code that loads a checkpoint if kda_layers is installed but not imported, and name it in config.

    Call it before config.json is written. A configuration that was itself loaded by such code is left to transformers,
    which copies that code. A file of this name that someone else wrote or edited stays, and so does the auto_map, with
    a warning: an error after a training run would cost more than the missing code.

    Args:
        config: configuration of a model of this package; its auto_map is set, except entries that name other code.
        folder: folder of the checkpoint.
    """
    kind = type(config)
    if kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    base, causal_lm = MODEL_MAPPING[kind], MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    code = CODE_TEMPLATE.substitute(
        config=kind.__name__, base=base.__name__, causal_lm=causal_lm.__name__,
        module="kda_layers" if kind.model_type == "kda_lm" else "kda_layers.checkpoints",
    )  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not _write(Path(folder) / CODE, code, "# ", ""):
        warnings.warn(
            f"{Path(folder) / CODE} is not as kda_layers writes it and stays, as does auto_map in config.json: "
            "to load this model with trust_remote_code=True, give that file another name and save again",
            stacklevel=3,
        )
        return
    classes = {"AutoConfig": kind, "AutoModel": base, "AutoModelForCausalLM": causal_lm}
    stem = Path(CODE).stem
    others = {auto: ref for auto, ref in (getattr(config, "auto_map", None) or {}).items() if stem not in str(ref)}
    config.auto_map = {auto: f"{stem}.{cls.__name__}" for auto, cls in classes.items()} | others


def write_card(model: PreTrainedModel, folder: Any) -> None:
    """Write a model card into the folder of a checkpoint, except in the cases below.

    A card that someone wrote or edited stays: ours ends with a digest of itself, and only an unchanged one is
    replaced. Adapter weights get no card, nor do the `checkpoint-...` folders of a Trainer, which are for resuming; the
    model that it saves in the end gets one.
    """
    resumable = re.fullmatch(r"checkpoint-\d+", Path(folder).absolute().name)
    if not resumable and not getattr(model, "_hf_peft_config_loaded", False):
        _write(Path(folder) / CARD, model_card(model), "<!-- ", " -->")


def model_card(model: PreTrainedModel) -> str:
    """Return the card in Markdown: a table of configuration and parameters, how to load the model, versions."""
    facts, head = _facts(model), type(model).__name__.partition("For")[2]
    return CARD_TEMPLATE.substitute(
        title=f"{facts['architecture']}, {facts['parameters']} parameters",
        metadata="pipeline_tag: text-generation\n" if model.can_generate() else "",
        facts="\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]),
        auto_class=f"AutoModelFor{head}" if head else "AutoModel",
    )


def _facts(model: PreTrainedModel) -> dict[str, str]:
    config: Any = model.config
    gate = config.linear_gate_activation
    if config.linear_lower_bound is not None:
        gate += f" {config.linear_lower_bound:g}"
    facts = {
        "architecture": type(model).__name__,
        "model type": type(config).model_type,  # the instance's is read from config.json
        "layers": layer_pattern(config.layer_types),
        "KDA heads": f"{config.linear_num_heads} of queries and keys, {config.linear_head_dim} wide; "
        f"{config.linear_num_value_heads} of values, {config.linear_value_head_dim} wide",
        "KDA gate": gate,
        "width": f"{config.hidden_size}",
        "vocabulary": f"{config.vocab_size:,}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if origin := getattr(config, "converted_from", None):
        facts["converted from"] = _repository(str(origin))
    packages = (sys.modules[name] for name in ("kda_layers", "transformers", "torch"))
    facts["saved with"] = ", ".join(f"{package.__name__} {package.__version__}" for package in packages)
    return facts


def layer_pattern(layer_types: list[str]) -> str:
    """Describe layer types: ["linear_attention", "full_attention"] * 4 is "8: 1 KDA, 1 full attention, 4 times"."""
    n = len(layer_types)
    period = next(p for p in range(1, n + 1) if n % p == 0 and layer_types == layer_types[:p] * (n // p))
    if period == 1:
        return f"{n}: all {_name(layer_types[0])}"
    runs = ", ".join(f"{len(list(run))} {_name(kind)}" for kind, run in itertools.groupby(layer_types[:period]))
    return f"{n}: {runs}" + (f", {n // period} times" if period < n else "")


def _name(layer_type: str) -> str:
    return "KDA" if layer_type == "linear_attention" else layer_type.replace("_", " ")


def _repository(name: str) -> str:
    """Return a name from config.json, which is untrusted, for the card; a placeholder if it could hold markup."""
    part = "[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
    return name if re.fullmatch(f"({part}/)?{part}", name) else "what `converted_from` in config.json names"


def _write(path: Path, text: str, *comment: str) -> bool:
    """Write a signed file; return False if there is one that this package did not write or that was edited.

    The file is replaced atomically, and a link in its place is replaced, not followed.
    """
    if path.exists() and not _is_ours(path.read_text(encoding="utf-8", errors="replace"), *comment):
        return False
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with new.open("x", encoding="utf-8") as file:
            file.write(_signed(text, *comment))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return True


def _signed(text: str, opening: str, closing: str) -> str:
    """Return `text` with its digest in a comment between `opening` and `closing`."""
    return f"{text}\n{opening}{MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]}{closing}\n"


def _is_ours(text: str, opening: str, closing: str) -> bool:
    before, _, _ = text.rpartition(f"\n{opening}{MARK}")
    return text.startswith(UNSIGNED) or text == _signed(before, opening, closing)
