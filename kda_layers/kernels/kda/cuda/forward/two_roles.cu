// Forward by blocks of two roles: with few heads the chain of chunks is the limit, and with many a block that does both does
// both more slowly, so some blocks do nothing but scan, and the others nothing but prepare. The same results, bit by bit, as
// forward.cu but where bf16 underflows or overflows (scan_columns.cuh).
//
// A preparing block turns its chunks into the operands of the scan (preparing_block.cuh), into a ring in global memory that
// stays in L2. A CTA group of SLICES scanning blocks, a cluster, serves one (sequence, value head) after the other
// (scan_columns.cuh). All blocks must be resident, as they wait for each other, but for SAVES.
//
// With STRETCH, for few heads, these groups lead: they scan the state without outputs, since a chunk with outputs takes 1.4
// times as long. Two or three times as many groups at most follow and compute the outputs (roles.cuh, state_columns.cuh).
//
// With SAVES every chunk has a row of its own in global memory instead, and the scan also saves V' and the state at each
// chunk's start (saved_columns.cuh).
//
// Of long sequences that are cut into segments (segments.cu), the scan computes their transitions
// (state_columns.cuh).
#include "state_columns.cuh"
#include "copying_columns.cuh"
#include "preparing_block.cuh"

constexpr int BLOCK_THREADS = (SEGMENTS == TRANSITIONS ? 4 : 3) * 128;
static_assert(PREPARE_WARPS <= 8 && 8 + INVERTERS < 12 && SCAN_THREADS <= BLOCK_THREADS);

// Registers per thread by role, where the arch has setmaxnreg; three warpgroups share 504, four 512.
enum Role { PREPARE, INVERT, SCAN, MOVE, COPY, NONE };
template <int role> DEVICE void registers() {
#if HAS_SETMAXNREG
    constexpr bool transitions = SEGMENTS == TRANSITIONS;
    if constexpr (role == PREPARE) setmaxnreg_inc<transitions ? 192 : PACKED && !SAVES ? 208 : 200>();
    if constexpr (role == INVERT) setmaxnreg_dec<PACKED && !SAVES ? 88 : 104>();
    if constexpr (role == SCAN) setmaxnreg_inc<transitions ? 208 : 240>();
    if constexpr (role == MOVE && transitions) setmaxnreg_dec<64>();
    if constexpr (role == MOVE && !transitions) setmaxnreg_inc<192>();
    if constexpr (role == COPY) setmaxnreg_dec<transitions ? 32 : 72>();
    if constexpr (role == NONE) setmaxnreg_dec<24>();
#endif
}

// Where chunks are saved, or states are in slots, ptxas recomputes the lane, for which it spills. It does not look through
// a shuffle; one before a role's registers are there would spill, too.
DEVICE void hold(Lane& lane) {
    if (!SAVES && !POOLED) return;
    const u32 thread = read_thread_index();
    lane = {int(thread / 32), int(thread % 32)};
}

// True in a block that scans states without outputs.
DEVICE bool scans_states(const ForwardParams& p) { return SEGMENTS == TRANSITIONS || is_leading(p); }

DEVICE void scan_block(Lane lane, const ForwardParams& p) {
    const bool alone = scans_states(p);
    const ScanShared shared{shared_memory()};
    const StateShared of_states{shared_memory()};
    if (lane.warp < WARPS) {
        registers<SCAN>();
        if (PACKED && SAVES) hold(lane);  // else it would spill
        if (alone) scan_states(lane, p, of_states);
        else if constexpr (SEGMENTS != TRANSITIONS) scan_columns(lane, p, shared);
    } else if (lane.warp < WARPS + MOVERS) {
        registers<MOVE>();
        hold(lane);
        const Lane moving = {lane.warp - WARPS, lane.id};
        if (alone) {
            if (has_values()) move_values(moving, p, of_states);
        } else if constexpr (PACKED || SAVES || STRETCH) {
            move_rows_across_tiles(moving, p, shared);
        } else if constexpr (SEGMENTS != TRANSITIONS) {
            move_rows(moving, p, shared);
        }
    } else {
        registers<COPY>();
        if (lane.warp == WARPS + MOVERS) {
            if (alone) fetch_chunks<PlainTiles>(lane, p, of_states);
            else if constexpr (SEGMENTS != TRANSITIONS) fetch_chunks<Tiles>(lane, p, shared);
        }
        if (lane.warp == WARPS + MOVERS + 1) {
#if SAVES
            if (!alone) store_states(lane, p, shared);
#endif
#if STRETCH
            if (alone) publish_states(lane, p, of_states);
#endif
        }
    }
}

DEVICE void prepare_block(Lane lane, const ForwardParams& p) {
    const Shared shared{shared_memory()};
    if (lane.warp < 8) {
        registers<PREPARE>();
        // Later tokens have more earlier blocks to multiply with: balances the work of the SM's four sub-partitions.
        const int pair = lane.warp / HALVES;
        if (lane.warp < PREPARE_WARPS) prepare({(pair ^ pair / 2) * HALVES + lane.warp % HALVES, lane.id}, p, shared);
    } else if (lane.warp < 12) {
        registers<INVERT>();
        hold(lane);
        if (lane.warp < 8 + INVERTERS) invert_chunks({lane.warp - 8, lane.id}, p, shared);
        else give_tasks(lane, p, shared);
    } else {
        registers<NONE>();
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    kda_forward_two_roles(const __grid_constant__ ForwardParams p) {
    const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
    const bool scans = is_scanning(p);
    if (PACKED && !POOLED && is_idle(lane, p)) return;
    if (threadIdx.x == 0) {
        if (scans && scans_states(p)) StateShared{shared_memory()}.init_barriers();
        else if (scans) ScanShared{shared_memory()}.init_barriers();
        else Shared{shared_memory()}.init_barriers();
    }
#if SAVES
    // Through shared memory: what a shuffle returns is not known to be uniform, and branches on it serialise all wgmma
    if (scans && !scans_states(p) && lane.warp == 1) {
        const u32 chunks = chunks_of_group(lane, p);
        if (lane.id == 0) *ScanShared{shared_memory()}.chunks() = chunks;
    }
#endif
    block_or_cluster_sync(BLOCK_THREADS);
    // The shuffle keeps ptxas from recomputing the lane, which spills with wgmma; without wgmma, holding it spills
    const u32 thread = PACKED && HAS_WGMMA && !SAVES && !POOLED ? read_thread_index() % 512 : threadIdx.x;
    if (scans) scan_block({int(thread / 32), int(thread % 32)}, p);
    else prepare_block(lane, p);
    block_or_cluster_sync(BLOCK_THREADS);
}
