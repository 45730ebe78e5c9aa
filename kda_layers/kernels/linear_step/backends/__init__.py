"""The backends of linear_step: one file each, found by listing this folder."""
