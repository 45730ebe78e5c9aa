"""CUDA graphs of decode steps and training steps."""
