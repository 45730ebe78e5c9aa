// The gradients of everything but v and the states, parallel over chunks: from what the forward saved (S, V') and what
// the reverse scan left (dS, bX), to q, k, gates and beta. Formulas: docs/internals/kernels/backward.md.
//
// A CTA processes chunks of one key head, and for each the value heads of its group, whose gradients of q and k it
// sums. A warp has 16 channels of half of the tokens, so that decays and sums over 16 tokens stay within it. The next
// work tile's operands are copied while this one is computed.
//
// Begins beside the reverse scan, where that leaves multiprocessors idle: a CTA takes work tiles in the order in which the scan
// leaves their chunks, one more whenever it begins one, and waits for each. The scan's blocks have all begun, or ended, before
// this kernel begins, so none of its own can keep them from running.
#if HEAD_GATES
#include "head_chunk.cuh"
#else
#include "channel_chunk.cuh"
#endif
#include "beta_gradients.cuh"
#include "near_zero_beta.cuh"

// d_q and d_k after a group's last value head, from shared memory.
DEVICE void store_keys(Place place, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    if (tile.last(p)) {
        i64 keys = tile.key_row(p) * K, stride = i64(p.H) * K;
        store_rows(place, p.d_q + keys, shared.q(), stride, tile.chunk.tokens);
        store_rows(place, p.d_k + keys, shared.k(), stride, tile.chunk.tokens);
    }
}

// Wait until the reverse scan has left a work tile's inputs; by one warp.
DEVICE void wait_for_scan(Lane lane, const GradientsParams& p, const WorkTile& tile) {
    constexpr int SLICES = V / 64;  // CTAs that scan a head
    if (!p.scanned || !tile.valid()) return;
    const u32* scanned = p.scanned + (tile.chunk.sequence * p.HV + tile.head(p)) * SLICES + lane.id % SLICES;
    while (int(read_counter(scanned)) <= tile.chunk.behind) back_off();
    fence_gpu();
    warp_sync();
}

// Find the next work tile; by one warp.
DEVICE void find_next(Lane lane, const GradientsParams& p, const Shared& shared) {
    ChunkFinder finder = shared.finder();
    const WorkTile tile = shared.tile();
    const int taken = shared.taken();
    warp_sync();  // all lanes have read what all of them write
    const WorkTile next = tile.last(p) ? WorkTile::of(lane, p, taken, finder) : tile.of_next_head();
    shared.next() = next, shared.finder() = finder;
    wait_for_scan(lane, p, next);
}

// Store a work tile, go on to the next one, and copy its tokens: what a thread copies replaces what it has stored.
DEVICE void finish_tile(const GradientsParams& p, const Shared& shared) {
    const WorkTile tile = shared.tile(), next = shared.next();
    // The warps that store no sums of the gates finish the betas of a block each. They load the next work tile's before
    // the barrier, and before the copies, behind whose requests the load would wait.
    const HalfLane lane = HalfLane::of_thread();
    const int b = lane.warp - (CHANNEL_WARPS - BLOCKS), token = 16 * b + lane.id % 16;
    const bool has_betas = lane.half == HALVES - 1 && b >= 0;
    LoadedBeta beta = {0};
    if (has_betas) beta = LoadedBeta::load(p, next, token);
#if HEAD_GATES
    const bool has_gates = lane.half == 0 && lane.warp == 0;
    HeadLogits logits;
    if (has_gates) logits.load(lane, p, next);
#endif
    block_sync();
    int taken;
    if (threadIdx.x == 0) {
        if (next.first()) taken = atomic_add(p.taken, 1);
        shared.tile() = next;
    }
    if (has_betas) {
        finish_betas(lane, p, shared, tile, b);
        warp_sync();
        shared.betas()[token].y = beta.value(p);
    }
    const Place place = Place::of_thread();
#if HEAD_GATES
    if (has_gates) finish_head_gates(lane, p, shared, tile, next, logits);
#else
    store_gates(place, p, shared, tile);
#endif
    store_keys(place, p, shared, tile);
    if (next.valid()) copy_tokens(place, p, shared, next);
    cp_async_commit();
    if (threadIdx.x == 0 && next.first()) shared.taken() = taken;
}

extern "C" __global__ void __launch_bounds__(THREADS, 128 / K)
    kda_gradients(const __grid_constant__ GradientsParams p) {
    const Shared shared{shared_memory()};
    HalfLane lane = HalfLane::of_thread();
    const WorkTile &tile = shared.tile(), &next = shared.next();
    if (!p.scanned) wait_for_earlier_kernels();
    launch_dependents();
    if (threadIdx.x < 32) {
        ChunkFinder finder = {0, 0};
        const int taken = broadcast(lane.id == 0 ? atomic_add(p.taken, 2) : 0);
        const WorkTile first = WorkTile::of(lane, p, taken, finder);
        shared.tile() = first, shared.finder() = finder, shared.taken() = taken + 1;
        wait_for_scan(lane, p, first);
    }
    block_sync();
    if (tile.valid()) {
        const Place place = Place::of_thread();
        copy_inputs<0, INPUT_SHARES>(place, p, shared, tile), cp_async_commit();
#if HEAD_GATES
        HeadLogits logits;
        if (threadIdx.x < 32)
            logits.load(lane, p, tile), logits.store(lane, shared), copy_parameters(lane, p, shared, tile);
#endif
        copy_tokens(place, p, shared, tile), cp_async_commit();
        if (threadIdx.x < CHUNK) shared.betas()[threadIdx.x].y = LoadedBeta::load(p, tile, threadIdx.x).value(p);
    }
    for (;;) {
        cp_async_wait<1>();
        fence_proxy_async_shared();
        block_sync();
        if (!broadcast(tile.valid())) break;
        lane.opt_barrier();
        if (threadIdx.x < 32) find_next(lane, p, shared);
        if (p.beta_activation == PRECOMPUTED) near_zero_beta_gradients(lane, p, shared, tile);
        lane.opt_barrier();
        chunk_gradients(lane, p, shared, tile, next);
        finish_tile(p, shared);
    }
    wait_for_earlier_kernels();  // those after this one wait for it alone
}
