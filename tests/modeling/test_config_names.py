"""Unknown and misspelt fields of configurations, and values outside their range."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from kda_layers import KDAConfig, KimiDeltaAttention, convert_attention
from kda_layers.kernels.deprecation import OLD_KEYWORDS
from kda_layers.modeling.models import configuration_kda
from kda_layers.modeling.models.configuration_variants import KDALlamaConfig, KDAMistralConfig, KDAQwen3Config

CONFIGS = (KDAConfig, KDALlamaConfig, KDAQwen3Config, KDAMistralConfig)
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration_kda, "_warned", set())


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "kda_layers"]


@every_config
def test_arguments_of_the_layer_are_no_fields(config: type[PreTrainedConfig]) -> None:
    with pytest.raises(TypeError, match=r"gate_activation \(use linear_gate_activation\), num_heads \(use linear_num"):
        config(gate_activation="softplus", num_heads=8, lower_bound=-1.0)


@every_config
def test_every_argument_of_the_layer_is_a_field_or_has_one(config: type[PreTrainedConfig]) -> None:
    parameters = inspect.signature(KimiDeltaAttention).parameters
    arguments = set(parameters) - {"unknown"}
    only = {"layer_idx", "backend", "output_activation"}
    assert config().layer_arguments().keys() == arguments - only
    old = OLD_KEYWORDS["KimiDeltaAttention"]
    assert set(old.values()) <= arguments
    for name in (arguments | old.keys()) - config.__dataclass_fields__.keys():
        if old.get(name) == "rms_norm_eps":
            config(**{name: None})  # other models' name: transformers' tests set it on any configuration and save that
            continue
        field = f"linear_{old.get(name, name)}"
        assert name in only or field in config.__dataclass_fields__
        hint = "an argument of KimiDeltaAttention only" if name in only else f"use {field}"
        with pytest.raises(TypeError, match=rf"{config.__name__} has no field {name} \({hint}\)"):
            config(**{name: None})


@pytest.mark.parametrize(("old", "new"), OLD_KEYWORDS["KimiDeltaAttention"].items())
def test_the_layer_takes_the_keywords_of_version_0_1(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{old} of KimiDeltaAttention is deprecated: use {new}") as got:
        layer = KimiDeltaAttention(16, 2, 8, **{old: 4})
    assert [warning.filename for warning in got] == [__file__]
    assert str(layer) == str(KimiDeltaAttention(16, 2, 8, **{new: 4}))
    assert str(layer) != str(KimiDeltaAttention(16, 2, 8, **{new: 2}))
    with pytest.raises(TypeError, match=new), pytest.warns(DeprecationWarning, match=old):
        KimiDeltaAttention(16, 2, 8, **{old: 4, new: 4})


@every_config
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("linear_num_head", "linear_num_heads"),
        ("linear_num_key_heads", "linear_num_heads"),  # Qwen3-Next's
        ("linear_conv_kernel_size", "linear_conv_kernel_dim"),
        ("linear_rank", "one of linear_num_heads, .*linear_gate_rank"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("rms_norm_epsilon", "rms_norm_eps"),
        ("layer_type", "layer_types"),
        ("expand_v", r"the field of value_head_dim = head_dim \* expand_v"),
    ],
)
def test_misspelt_fields(config: type[PreTrainedConfig], name: str, field: str) -> None:
    with pytest.raises(TypeError, match=rf"{config.__name__} has no field {name} \(use {field}"):
        config(**{name: 2})
    with pytest.raises(TypeError, match=name):
        AutoConfig.for_model(config.model_type, **{name: 2})


@every_config
def test_other_unknown_fields_are_kept_and_warned_of_once(
    config: type[PreTrainedConfig], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    made = [config(note="kept") for _ in range(2)]
    assert [c.note for c in made] == ["kept", "kept"]
    assert ours(caplog) == [f"{config.__name__} has no field note: it is kept, but no layer reads it"]
    made[0].save_pretrained(tmp_path)
    loaded, unused = AutoConfig.from_pretrained(tmp_path, other=3, use_cache=False, return_unused_kwargs=True)
    assert (loaded.note, loaded.use_cache, unused) == ("kept", False, {"other": 3})
    config(other=3)
    assert len(ours(caplog)) == 2


# What from_pretrained, from_dict, checkpoints of transformers 4 and quantisers put into a configuration.
TRANSFORMERS: dict[str, Any] = dict(
    tie_encoder_decoder=False,
    id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1}, num_labels=2, problem_type="regression",
    torch_dtype="bfloat16", architectures=["X"], auto_map={"AutoConfig": "x.Y"}, transformers_version="4.57.0",
    attn_implementation="sdpa", _attn_implementation_autoset=True, _name_or_path="a/b", name_or_path="a/b",
    return_dict=True, output_hidden_states=False, output_attentions=False, chunk_size_feed_forward=0,
    is_encoder_decoder=False, tokenizer_class="LlamaTokenizer", quantization_config={"quant_method": "x"},
    converted_from="a/b", _commit_hash="0", max_length=20, do_sample=True, temperature=0.7, num_beams=2, sep_token_id=3,
    image_token_id=7, tie_word_embeddings=True, keys_to_ignore_at_inference=["past_key_values"],
)  # fmt: skip


@every_config
def test_what_transformers_knows_passes(config: type[PreTrainedConfig], caplog: pytest.LogCaptureFixture) -> None:
    for name, value in TRANSFORMERS.items():
        assert config(**{name: value}).model_type == config.model_type
    if config is not KDAConfig:
        scaled = config(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0})
        assert scaled.rope_parameters["rope_theta"] == 5e5
    assert ours(caplog) == []


@every_config
def test_round_trips_warn_of_nothing(
    config: type[PreTrainedConfig], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    made = config(num_hidden_layers=4, torch_dtype="bfloat16", num_labels=3, attn_implementation="eager")
    made.converted_from = "a/b"
    made.save_pretrained(tmp_path)
    for again in (
        config.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa", num_labels=3),
        config.from_dict(made.to_dict()),
        config(**made.to_dict()),
        config(**json.loads(made.to_json_string(use_diff=False))),
    ):
        assert type(again) is config
        assert again.to_dict() | {"_name_or_path": ""} == made.to_dict() | {"_name_or_path": ""}
    assert ours(caplog) == []


def test_unknown_fields_of_a_stock_model_stay_there(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint's extras, whatever their name, neither stop a conversion nor reach the new configuration."""

    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(**sizes, num_heads=2, note="stock", rope_theta=5e5)
    rope = dict(config.rope_parameters)
    new = convert_attention(transformers.LlamaForCausalLM(config), [0])
    assert not hasattr(new.config, "num_heads")
    assert not hasattr(new.config, "note")
    assert new.config.rope_parameters == config.rope_parameters == rope
    assert new.config.rope_parameters is not config.rope_parameters
    assert [m for m in ours(caplog) if not m.startswith("swap_attention returns a new")] == []


@every_config
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rms_norm_eps=-1e-6), "rms_norm_eps must be finite and 0 or more, got -1e-06"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps must be finite and 0 or more, got nan"),
        (dict(rms_norm_eps=float("inf")), "rms_norm_eps must be finite and 0 or more, got inf"),
        (dict(initializer_range=-0.02), "(?s)initializer_range.* must be .*, got -0.02"),  # Llama's checks it itself
        (dict(attention_dropout=7), r"attention_dropout must be in \[0, 1\], got 7"),
        (dict(attention_dropout=-0.1), r"attention_dropout must be in \[0, 1\], got -0.1"),
        (dict(attention_dropout=float("nan")), r"attention_dropout must be in \[0, 1\], got nan"),
    ],
    ids=str,
)
def test_values_out_of_range(config: type[PreTrainedConfig], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        config(**fields)
