"""The KDA layer, its cache, language models made of it, and transformers' models with it."""

from kda_layers import versions

if versions.has_transformers():
    from kda_layers.modeling.models import hub as hub  # makes the modules of older checkpoints importable
