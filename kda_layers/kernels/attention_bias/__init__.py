"""Softmax attention with an additive bias, whose gradient is the whole sum over all that it is broadcast in."""
