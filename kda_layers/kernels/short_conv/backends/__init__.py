"""The backends of short_conv: one file each, found by listing this folder."""
