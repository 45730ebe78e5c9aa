"""transformers' ModelTesterMixin on every case: `python -m pytest tools/transformers_suite`, see its documentation."""

from __future__ import annotations

import inspect
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers.models.auto import modeling_auto
from transformers.models.kimi_linear import configuration_kimi_linear

from tools.transformers_suite import sources
from tools.transformers_suite.cases import CASES, Case

common = sources.load("test_modeling_common")
configuration = sources.load("test_configuration_common")
training = sources.load("test_training_mixin")
ModelTesterMixin: Any = common.ModelTesterMixin
TrainingTesterMixin: Any = training.TrainingTesterMixin


class ModelTester:
    """Configurations, inputs and sizes of a model, as transformers' tests ask for them."""

    batch_size, seq_length, is_training = 13, 7, True

    def __init__(self, case: Case):
        self.get_config = case.config
        self.causal_lm_class = case.models[-1]
        config = case.config()
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.num_attention_heads, self.vocab_size = config.num_attention_heads, config.vocab_size

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        input_ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids).tril()}


class Suite(ModelTesterMixin, TrainingTesterMixin):
    """The tests of one case."""

    case: Case
    model_tester: Any = None

    def setUp(self) -> None:
        if reason := self.case.skips.get(self._testMethodName):
            self.skipTest(reason)
        self.all_model_classes = self.case.models
        self.model_tester = ModelTester(self.case)
        self.has_attentions = set(self.case.config().layer_types) != {"linear_attention"}

    def test_config(self) -> None:
        configuration.ConfigTester(self, config_class=self.case.config_class, hidden_size=32).run_common_tests()

    def test_can_init_all_missing_weights(self) -> None:
        """As it is, for code of a recent year only, which the test looks for in the configuration's file."""
        recent = SimpleNamespace(**vars(inspect) | {"getfile": lambda _: configuration_kimi_linear.__file__})
        with mock.patch.object(common, "inspect", recent):
            super().test_can_init_all_missing_weights()

    def test_attention_outputs(self) -> None:
        """In place of theirs, which expects attention weights of every layer: of the softmax layers only."""
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model = model_class._from_config(config, attn_implementation="eager").to(common.torch_device).eval()
            inputs = self._prepare_for_class(inputs, model_class)
            with torch.no_grad():
                plain = model(**inputs)
                both = model(**inputs, output_attentions=True, output_hidden_states=True)
                model.config.output_attentions = True
                configured = model(**inputs)
            assert plain.attentions is None
            for outputs in (both, configured):
                shapes = [tuple(weights.shape) for weights in outputs.attentions]
                n, t = self.model_tester.batch_size, self.model_tester.seq_length
                assert shapes == [(n, config.num_attention_heads, t, t)] * self.has_attentions
            assert len(both) == len(plain) + 2


def suite_of(case: Case) -> type:
    """The tests of a case, which transformers' tables of names, by which the tests know a model's kind, then have."""
    modeling_auto.MODEL_MAPPING_NAMES[case.config_class.model_type] = case.models[0].__name__
    bases: tuple[type, ...] = (Suite, unittest.TestCase)
    if case.models[-1].can_generate():
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.config_class.model_type] = case.models[-1].__name__
        bases = (Suite, common.GenerationTesterMixin, unittest.TestCase)
    return type(case.name, bases, case.attributes | {"case": case, "__module__": __name__})


globals().update({f"Test{case.name}": suite_of(case) for case in CASES})
