"""flash-linear-attention's kernels: what is installed, and which of them are used."""
