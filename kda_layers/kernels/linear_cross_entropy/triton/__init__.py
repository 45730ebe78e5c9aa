"""The pointwise part of the loss as a Triton kernel."""
