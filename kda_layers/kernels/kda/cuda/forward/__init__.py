"""The forward over whole sequences."""
