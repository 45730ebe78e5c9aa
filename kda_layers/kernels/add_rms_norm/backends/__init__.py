"""The backends of add_rms_norm: one file each, found by listing this folder."""
