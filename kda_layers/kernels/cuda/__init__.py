"""CUDA C++ kernels: their sources (*.cu, *.cuh), the compiling of them at first use, and launching."""
