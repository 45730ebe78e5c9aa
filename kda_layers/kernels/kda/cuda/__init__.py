"""Our CUDA kernels: a folder for each pass, with a source (.cu) and a launcher (.py) for each kernel."""
