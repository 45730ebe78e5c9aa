"""The KDA layer, its cache, language models made of it, and transformers' models with it."""

from kda_layers.modeling import old_paths as old_paths
