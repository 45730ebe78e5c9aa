"""Language models with KDA layers: configuration, model, checkpoints that load without this package imported."""
