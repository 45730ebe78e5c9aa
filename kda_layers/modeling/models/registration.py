"""Registration of our models in transformers: Auto classes, other heads, and the tables that go by names."""

from __future__ import annotations

import sys
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kda_layers.modeling.models.hybrid import HybridForCausalLM, HybridPreTrainedModel
from kda_layers.modeling.seams import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    publish,
)

HEADS: dict[Any, type] = {
    AutoModelForSequenceClassification: GenericForSequenceClassification,
    AutoModelForTokenClassification: GenericForTokenClassification,
    AutoModelForQuestionAnswering: GenericForQuestionAnswering,
}


def register(causal_lm: type[HybridForCausalLM]) -> None:
    """Register a language model, its base model and models with other heads with transformers.

    Its name goes into the table by which transformers' Trainer recognises models whose labels are shifted: with label
    smoothing, another model would be trained to repeat the current token.

    The models with other heads are made here: KDAForCausalLM gets KDAForSequenceClassification and so on, as names of
    its module. They load checkpoints of the language model, whose head they leave out, and follow transformers' rules:
    a sequence is classified by its last token that is not config.pad_token_id.
    """
    config: Any = causal_lm.config_class
    AutoModel.register(config, causal_lm.model_class, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = causal_lm.__name__
    pretrained = [base for base in causal_lm.__bases__ if base is not HybridForCausalLM]
    if not any(issubclass(base, HybridPreTrainedModel) for base in pretrained):
        pretrained.insert(0, HybridPreTrainedModel)
    for auto, generic in HEADS.items():
        name = causal_lm.__name__.replace("ForCausalLM", generic.__name__.removeprefix("Generic"))
        doc = f"`{causal_lm.model_class.__name__}` with transformers' {generic.__name__}."
        attributes = dict(config_class=config, __module__=causal_lm.__module__, __doc__=doc)
        head = type(name, (generic, *pretrained), attributes)
        setattr(sys.modules[causal_lm.__module__], name, head)  # where pickle finds it
        auto.register(config, head, exist_ok=True)
    publish(causal_lm)
