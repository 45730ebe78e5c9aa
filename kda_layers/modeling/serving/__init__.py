"""Continuous batching by transformers' engine, and its server."""
