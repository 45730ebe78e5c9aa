"""One file for each family of transformers models, with nothing of the others."""
