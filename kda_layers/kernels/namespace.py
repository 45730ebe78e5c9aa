"""The name under which this copy of the kernels is known to torch, which two copies in one process must not share.

A Hub kernel has this file with a name of its own (tools/kernel_package.py).
"""

NAMESPACE = "kda_layers"  # of torch.ops, and of the objects that autograd's threads inherit
