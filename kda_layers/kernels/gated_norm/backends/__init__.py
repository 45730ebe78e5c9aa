"""The backends of gated_norm: one file each, found by listing this folder."""
