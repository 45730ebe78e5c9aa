"""The backends of biased_attention: one file each, found by listing this folder."""
