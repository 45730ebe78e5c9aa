"""Runs the tests that transformers has for all of its models on the models of this package."""
