"""transformers' own models with our KDA layers: in place, or converted."""
