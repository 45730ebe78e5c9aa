// The forward over whole sequences: chunks of 64 tokens, prepared in parallel, walked in order.
//
// SLICES blocks serve one (sequence, value head) at a time, each block BV columns of V, whose states evolve
// independently. Some warps of a block prepare every SLICES-th chunk: they iteration q, k, g and beta into what the walk
// multiplies by (prepare.cuh). The result goes to a ring in global memory that stays in L2, and from there by bulk copies
// into every block's shared memory, where other warps walk: per chunk
//     V' = T' (v - Kg S)     O = scale (Qg S + Aqk V')     S = gamma S + Kr^T V'
// in products of a warpgroup where the arch has them, else by mma.sync (scan.cuh). Formulas and names:
// docs/kernels/forward.md.
#include "prepare.cuh"
#include "scan.cuh"

// Registers of a thread by role, where the arch can move them between warpgroups. All start with what THREADS threads can
// have at most, which is too few to prepare.
enum Role { PREPARE, SCAN, INVERT };
template <int role> DEVICE void registers() {
#if HAS_SETMAXNREG
    // Of four warpgroups' 512, as many as each form needs to spill nothing.
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
    if (threadIdx.x == 0) shared.init_barriers();
    block_or_cluster_sync(THREADS);
    if (lane.warp < PREPARE_WARPS) {
        registers<PREPARE>();
        // Later tokens have more blocks before them: those of a multiprocessor's quarter get the same work together.
        int pair = lane.warp / HALVES;
        prepare({(pair ^ pair / 2) * HALVES + lane.warp % HALVES, lane.id}, p, shared);
    } else if (lane.warp < PREPARE_WARPS + 4) {
        registers<SCAN>();
        scan({lane.warp - PREPARE_WARPS, lane.id}, p, shared);
    } else {
        registers<INVERT>();
        if (lane.warp < PREPARE_WARPS + 4 + INVERTERS) invert_chunks({lane.warp - PREPARE_WARPS - 4, lane.id}, p, shared);
        else fetch_chunks(lane, p, shared);
    }
    block_or_cluster_sync(THREADS);
}
