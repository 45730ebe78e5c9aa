"""Backends, found by listing this folder: each module defines one as `BACKEND`, or several as `BACKENDS`."""
