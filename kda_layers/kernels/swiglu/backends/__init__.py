"""The backends of swiglu: one file each, found by listing this folder."""
