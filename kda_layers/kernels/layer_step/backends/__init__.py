"""The backends of layer_step: one file each, found by listing this folder."""
