"""Cross entropy of a linear layer's outputs, without keeping them; plain PyTorch and, on a GPU, one Triton kernel."""
