"""flash-linear-attention: its package and kernels, and its interface over our operator."""
