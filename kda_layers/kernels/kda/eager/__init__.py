"""Chunked KDA in plain PyTorch: the parts of the `eager` backend."""
