"""A package, so that pytest puts the repository's root on sys.path and not this folder: `tests/kernels` would then be
found as the package `kernels`, which transformers looks for."""
