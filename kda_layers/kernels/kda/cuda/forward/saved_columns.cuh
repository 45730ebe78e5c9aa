// What the scan by columns (scan_columns.cuh) saves for the backward (SAVES): V' and the state at each chunk's start, both as
// operands of MMAs, rounded. Prepared chunks are there already, each in a row of its own.
//
// Beside three prepared chunks there is room for one state and for the rows of two chunks: one has v and then V', the other o.
// So the scanning warps read the next v before they give V', also where the next chunk is another tile's, and the moving warps
// take V' and o before they bring the v after that. Nothing waits for them then but the last chunk, which reads no next v.
// One more warp copies the state, by bulk stores, which occupy no warp while they run.
#pragma once
#include "columns.cuh"
#include "shared.cuh"

static_assert(HAS_WGMMA, "fence_proxy_async_shared, which bulk stores need, does nothing without wgmma");

// Give the state at the start of chunk `count`.
DEVICE void give_state(Lane lane, const u32 (&S)[K / 16][4], const ScanShared& shared, u32 count) {
    if (count > 0) mbarrier_wait(shared.state_taken(), count - 1 & 1);
    const int column = 16 * lane.warp + lane.id % 16;
    u16* const row = reinterpret_cast<u16*>(shared.state()) + column * K;
    #pragma unroll
    for (int s = 0; s < K / 16; s++) stmatrix_x4(row + saved_at(column, 2 * s + lane.id / 16), S[s]);
    signal(lane, shared.state_there());
}

// Give V' to the moving warps, in the place of the chunk's v.
DEVICE void give_errors(Lane lane, const Tokens& E, const ScanShared& shared, u32 count) {
    #pragma unroll
    for (int s = 0; s < CHUNK / 16; s++)
        stmatrix_x4_trans(operand_row(lane, shared.values(count), s), E[s][0], E[s][1], E[s][2], E[s][3]);
}

// The warp that stores states. The scanning warps' writes are made visible to bulk copies here, where nobody waits for it.
DEVICE void store_states(Lane lane, const ForwardParams& p, const ScanShared& shared) {
    GroupChunks at;
    u32 count = 0;
    for (at.start(p, scanning_group(p)); at.valid(p); at.skip(p), count++) {
        u16* const to = p.states + state_at(at.kept(p), slice() * BV);
        mbarrier_wait(shared.state_there(), count & 1);
        fence_proxy_async_shared();
        if (lane.id == 0) cp_async_bulk_store(to, shared.state(), BV * K * 2);
        cp_async_bulk_commit();
        cp_async_bulk_wait_read<0>();
        signal(lane, shared.state_taken());
    }
}
