// Forward over sequences that are cut into segments: long sequences of few heads, whose chunks few CTAs would scan one after
// the other. Exact for any decays: a segment maps the state S0 before it to S0 F + B.
//
//     kda_forward         prepares all chunks, each into a row of its own, and scans all segments at once for F and B
//                         (forward.cu, transitions.cuh); or by blocks of two roles kda_forward_two_roles
//                         (two_roles.cu, state_columns.cuh)
//     kda_join_segments   S0 of each segment from that of the segment before, in fp32
//     kda_scan_segments   scans all segments at once from their S0, over the prepared chunks, for the outputs
//
// Chosen by the build, in addition to shared.cuh's: SEGMENTS (TRANSITIONS for the first kernel, LAST_SCAN for the others),
// SEGMENT_TOKENS (of the shortest segment) and SEGMENT_TILES (see take_segment).
#include "join.cuh"
#include "scan.cuh"

constexpr int LAST_SCAN_THREADS = 32 * 5;  // 4 warps scan, 1 fetches

extern "C" __global__ void __launch_bounds__(LAST_SCAN_THREADS, 1)
    kda_scan_segments(const __grid_constant__ ForwardParams p) {
    const Shared shared{shared_memory()};
    const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
    if (is_idle(lane, p)) return;
    if (threadIdx.x == 0) shared.init_barriers();
    block_or_cluster_sync(LAST_SCAN_THREADS);
    if (lane.warp < 4) scan(lane, p, shared);
    else fetch_chunks(lane, p, shared);
    block_or_cluster_sync(LAST_SCAN_THREADS);
}

extern "C" __global__ void __launch_bounds__(JOIN_THREADS, 1)
    kda_join_segments(const __grid_constant__ ForwardParams p) {
    const Join at = Join::of_thread(p);
    if (at.segments == 0) return;
    float s[2][4] = {};
    if (p.initial_state) at.load(s, p.initial_state + state_at(i64(at.sequence) * p.HV + at.head, 0));
    const i64 stride = p.HV * ((V + K) * K);
    const float* transition = p.transitions + at.row * ((V + K) * K);
    at.join<false>(s, at.segments - 1, {p.starts + state_at(at.row, 0), state_at(p.HV, 0)},
                   {transition + V * K, stride}, {transition, stride});
}
