"""Inputs of a model's call: packing, masks, offsets, keywords and the cache by any of its names."""
