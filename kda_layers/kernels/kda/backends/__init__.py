"""Backends, found by listing this folder: each module below defines one as `BACKEND`."""
