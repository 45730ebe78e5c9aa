"""flash-linear-attention's kernels: which version is installed, and which of its functions are used."""
