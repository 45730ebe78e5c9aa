"""Softmax attention with a differentiable additive bias."""
