// y[block * stride + i] = factor * x[i] + (rank of the block in its cluster), through the end of its dynamic memory.
#include "ptx.cuh"

struct Params {
    const float* x;
    float* y;
    i64 stride;
    int n;
    float factor;
};

extern "C" __global__ void scale(const __grid_constant__ Params p) {
    float* last = reinterpret_cast<float*>(shared_memory() + SHARED) - blockDim.x;
    last[threadIdx.x] = p.factor * p.x[threadIdx.x];
    __syncthreads();
    int rank = 0;
#if __CUDA_ARCH__ >= 900
    cluster_sync();
    rank = cluster_rank();
#endif
    if (threadIdx.x < p.n) p.y[blockIdx.x * p.stride + threadIdx.x] = last[threadIdx.x] + rank;
}
