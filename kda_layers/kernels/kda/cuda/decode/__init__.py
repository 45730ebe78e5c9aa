"""Decoding: one or a few tokens of many sequences."""
