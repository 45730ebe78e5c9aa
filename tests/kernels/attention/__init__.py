"""Tests of kda_layers.kernels; `cases` holds what they share."""
