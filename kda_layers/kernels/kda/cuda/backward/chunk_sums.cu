// Sum the gradients of A_log and dt_bias over chunks. gradients.cu writes a row for each chunk; one kernel sums the rows
// of both, always in the same order.
//
// A CTA has 32 columns of one of the two, one to a lane. Warp w adds rows w, w + WARPS and so on; then the warps' sums
// are added in their order.
#define IO Bf16
#include "ChunkSumsParams.h"
#include "chunk.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS;

// The chunks of all sequences. Executed by a full warp.
DEVICE int count_chunks(Lane lane, const ChunkSumsParams& p) {
    if (!p.cu_seqlens) return p.rows;
    u32 sum = 0;
    #pragma unroll 1
    for (int i = lane.id; i < p.sequences; i += 32) sum += (offset_of(p, i + 1) - offset_of(p, i) + CHUNK - 1) / CHUNK;
    for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
    return int(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) kda_chunk_sums(const __grid_constant__ ChunkSumsParams p) {
    float* const sums = reinterpret_cast<float*>(shared_memory());  // [WARPS][32]
    const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
    const int of_rates = p.d_A_log ? (p.HV + 31) / 32 : 0, block = int(blockIdx.x);  // CTAs
    const bool rates = block < of_rates;
    const int width = rates ? p.HV : p.HV * p.K, column = 32 * (rates ? block : block - of_rates) + lane.id;
    const float* from = (rates ? p.A_log_parts : p.dt_bias_parts) + column;
    wait_for_earlier_kernels();
    const int rows = count_chunks(lane, p);
    float sum = 0.f;
    if (column < width) {
        #pragma unroll 8
        for (int row = lane.warp; row < rows; row += WARPS) sum += from[i64(row) * width];
    }
    sums[threadIdx.x] = sum;
    barrier_sync(0, THREADS);
    if (lane.warp > 0 || column >= width) return;
    float total = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[32 * w + lane.id];
    (rates ? p.d_A_log : p.d_dt_bias)[column] = total;
}
