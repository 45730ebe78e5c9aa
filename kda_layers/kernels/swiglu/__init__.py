"""Gated activation of an MLP: silu(gate) * up."""
