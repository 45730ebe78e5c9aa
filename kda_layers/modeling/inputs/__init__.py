"""What a model reads of a call: packing, masks, offsets, keywords and the cache by any of its names."""
