// Forward over whole sequences: chunks of 64 tokens, prepared in parallel, scanned in order.
//
// A CTA group of SLICES CTAs serves one (sequence, value head) at a time, each CTA BV columns of V, whose states are
// independent. The preparing warps of a CTA turn q, k, g and beta of every SLICES-th chunk into the operands of the
// scan (prepare.cuh). Bulk copies bring them, through a ring in global memory that stays in L2, to the shared memory of
// every CTA of the group, where the scanning warps compute per chunk
//     V' = T' (v - Kg S)     O = scale (Qg S + Aqk V')     S = gamma S + Kr^T V'
// by wgmma where the arch has it, else by mma.sync (scan.cuh). Formulas and names: docs/internals/kernels/forward.md.
// Of long sequences of few heads that are cut into segments (segments.cu), the scan computes their transitions.
#include "transitions.cuh"
#include "preparing_group.cuh"

// Registers per thread by role, where the arch has setmaxnreg. At launch all roles have the same number, which is too
// few for preparing.
enum Role { PREPARE, SCAN, INVERT };
template <int role> DEVICE void registers() {
#if HAS_SETMAXNREG
    // The four warpgroups share 512; each form gets what it needs to avoid spills.
    constexpr bool small = HAS_WGMMA && BV == 16;
    constexpr int prepare = K == 64 ? 208 : SAVES && small ? 160 : 152;
    constexpr int scan = K == 64 ? 128 : HAS_WGMMA && !SAVES || small ? 104 : 120;
    constexpr int invert = K == 64 ? 128 : 512 - 2 * prepare - scan;
    if constexpr (role == PREPARE) setmaxnreg_inc<prepare>();
    if constexpr (role == SCAN) setmaxnreg_dec<scan>();
    if constexpr (role == INVERT) setmaxnreg_dec<invert>();
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda_forward(const __grid_constant__ ForwardParams p) {
    const Shared shared{shared_memory()};
    const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
    if (!POOLED && is_idle(lane, p)) return;
    if (threadIdx.x == 0) shared.init_barriers();
    launch_dependents();  // the backward's scan, after a recomputation
    block_or_cluster_sync(THREADS);
    if (lane.warp < PREPARE_WARPS) {
        registers<PREPARE>();
        // Later tokens have more earlier blocks to multiply with: balances the work of the SM's four sub-partitions.
        int pair = lane.warp / HALVES;
        prepare({(pair ^ pair / 2) * HALVES + lane.warp % HALVES, lane.id}, p, shared);
    } else if (lane.warp < PREPARE_WARPS + 4) {
        registers<SCAN>();
        const Lane scanning = {lane.warp - PREPARE_WARPS, lane.id};
        if constexpr (SEGMENTS == TRANSITIONS) scan_transitions(scanning, p, shared);
        else scan(scanning, p, shared);
    } else {
        registers<INVERT>();
        if (lane.warp < PREPARE_WARPS + 4 + INVERTERS)
            invert_chunks({lane.warp - PREPARE_WARPS - 4, lane.id}, p, shared);
        else fetch_chunks(lane, p, shared);
    }
    block_or_cluster_sync(THREADS);
}
