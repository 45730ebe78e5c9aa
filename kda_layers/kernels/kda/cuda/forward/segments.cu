// Forward over sequences that are cut into segments: long sequences of few heads, whose chunks few CTAs would scan one after
// the other. Exact for any decays: a segment maps the state S0 before it to S0 F + B.
//
//     kda_forward         prepares all chunks, each into a row of its own, and scans all segments at once for F and B
//                         (forward.cu, map_segments.cuh)
//     kda_join_segments   S0 of each segment from that of the segment before, in fp32
//     kda_walk_segments   scans all segments at once from their S0, over the prepared chunks, for the outputs
//
// Chosen by the build, in addition to shared.cuh's: SEGMENTS (MAPS for the first kernel, WALK for the others), SEGMENT_TOKENS
// (of the shortest segment) and SEGMENT_TILES (see take_segment).
#include "scan.cuh"

constexpr int WALK_THREADS = 32 * 5;  // 4 warps scan, 1 fetches
constexpr int JOIN_ROWS = 8;          // of a CTA, which has 2 K threads: a thread has half of them, of one column

extern "C" __global__ void __launch_bounds__(WALK_THREADS, 1)
    kda_walk_segments(const __grid_constant__ ForwardParams p) {
    const Shared shared{shared_memory()};
    const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
    if (threadIdx.x == 0) shared.init_barriers();
    block_or_cluster_sync(WALK_THREADS);
    if (lane.warp < 4) scan(lane, p, shared);
    else fetch_chunks(lane, p, shared);
    block_or_cluster_sync(WALK_THREADS);
}

// Grid: N * HV * V / JOIN_ROWS. Dynamic shared memory: [2][JOIN_ROWS][K] floats.
extern "C" __global__ void __launch_bounds__(2 * K) kda_join_segments(const __grid_constant__ ForwardParams p) {
    constexpr int BLOCKS = V / JOIN_ROWS, MINE = JOIN_ROWS / 2;
    float* shared = reinterpret_cast<float*>(shared_memory());
    const int head = blockIdx.x / BLOCKS % p.HV, sequence = blockIdx.x / BLOCKS / p.HV;
    const int column = threadIdx.x % K, first = threadIdx.x / K * MINE;
    const int place = (blockIdx.x % BLOCKS * JOIN_ROWS + first) * K + column;  // in [V, K]
    const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
    float s[MINE];
    #pragma unroll
    for (int r = 0; r < MINE; r++)
        s[r] = p.initial_state ? p.initial_state[state_at(i64(sequence) * p.HV + head, 0) + place + r * K] : 0.f;
    for (int segment = 0; segment < p.segments; segment++) {
        const WorkTile tile = work_tile(p, (sequence * p.segments + segment) * p.HV + head);
        if (!of_cut_sequence(p, tile)) break;
        const i64 row = segment_row(lane, p, tile);
        float* now = shared + (segment % 2 * JOIN_ROWS + first) * K;
        #pragma unroll
        for (int r = 0; r < MINE; r++) p.starts[state_at(row, 0) + place + r * K] = now[r * K + column] = s[r];
        if (tile.last) break;
        barrier_sync(0, 2 * K);
        const float* B = p.maps + row * ((V + K) * K);
        const float* F = B + V * K + column;
        #pragma unroll
        for (int r = 0; r < MINE; r++) s[r] = B[place + r * K];
        #pragma unroll 4
        for (int k = 0; k < K; k += 4) {
            float f[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) f[i] = F[(k + i) * K];
            #pragma unroll
            for (int r = 0; r < MINE; r++) {
                const float4 x = *reinterpret_cast<const float4*>(now + r * K + k);
                s[r] += x.x * f[0], s[r] += x.y * f[1], s[r] += x.z * f[2], s[r] += x.w * f[3];
            }
        }
    }
}
