"""Compile CUDA C++ kernels at first use and launch them; headers that all operators share (*.cuh)."""
