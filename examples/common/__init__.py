"""Helpers of the examples: text, settings, checkpoints, reports and errors on the command line."""
