"""Our CUDA kernels: a folder for each pass, in which a kernel is a source (.cu) and its launcher (.py)."""
