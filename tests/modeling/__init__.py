"""Tests of kda_layers.modeling."""
