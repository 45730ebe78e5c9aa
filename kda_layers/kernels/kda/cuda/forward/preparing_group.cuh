// The warps that prepare in a block that scans, too (forward.cu).
#pragma once
#include "prepare.cuh"

// The gates of a work tile's head.
DEVICE Gates<GATE> load_gates(Lane lane, const ForwardParams& p, const Shared& shared, const WorkTile& tile) {
    const Gates<GATE> gates(p.A_log ? exp2_fast(p.A_log[tile.head] * LOG2_E) : 1.f, p.lower_bound);
    const float* from = HEAD_GATES ? p.dt_bias + tile.head : p.dt_bias + tile.head * K + 64 * (lane.warp % HALVES);
    float* to = shared.bias(lane.warp);
    warp_sync();
    #pragma unroll
    for (int i = lane.id; i < 64; i += 32) to[i] = p.dt_bias ? gates.bias(from[HEAD_GATES ? 0 : i]) : 0.f;
    warp_sync();
    return gates;
}

DEVICE void prepare(Lane lane, const ForwardParams& p, const Shared& shared) {
    Cursor at;
    at.has_rows = KEEPS && !SAVES;  // of saved chunks the inverters know the place
    at.start(lane, p, slice() % STRIDE);
    if (!at.valid(p)) return;
    Raw raw;
    fetch_inputs(lane, raw, p, shared, at);
    Gates<GATE> gates = load_gates(lane, p, shared, at.tile);
    if (LOADS_AHEAD) load_raw(lane, raw, p, shared, at);
    u32 iteration = 0;
    for (u32 count = slice() % STRIDE; at.valid(p); count += STRIDE, iteration++) {
        Cursor next = at;
        next.skip(lane, p, STRIDE);
        if (!LOADS_AHEAD) load_raw(lane, raw, p, shared, at);
        prepare_chunk(lane, p, shared, gates, raw, at, next, count, iteration);
        arrive_by_warp(lane, shared.written());
        if (next.valid(p) && next.index != at.index) gates = load_gates(lane, p, shared, next.tile);
        at = next;
    }
}

// Wait until the chunk's slot is free. Executed by a full warp.
DEVICE void make_room(Lane lane, const ForwardParams& p, const Shared& shared, const Cursor& at, u32 count) {
    wait_for_free_place(lane, p, shared, count);
    if (lane.id != 0) return;
    if (SAVES) *shared.place() = place_of(p, shared, at, count).base;
    mbarrier_arrive(shared.placed());
}

// The warps that invert. Inverter 0 finishes first and reserves the next slot; the last inverter publishes the chunk,
// so that only one warp waits for the writes to become visible.
DEVICE void invert_chunks(Lane lane, const ForwardParams& p, const Shared& shared) {
    const bool last = lane.warp == INVERTERS - 1;
    float* beta = shared.beta(lane.warp);
    Cursor at;
    at.start(lane, p, slice() % STRIDE);
    u32 iteration = 0;
    for (u32 count = slice() % STRIDE; at.valid(p); count += STRIDE, iteration++, at.skip(lane, p, STRIDE)) {
        warp_sync();
        load_write_strengths(lane, beta, p, at);
        if (lane.warp == 0) make_room(lane, p, shared, at, count);
        mbarrier_wait(shared.summed(), iteration & 1);
        warp_sync();
        invert_chunk(lane, shared, place_of(p, shared, at, count), T_fp16_place(p, at, count), beta);
        arrive_by_warp(lane, shared.inverted());
        arrive_by_warp(lane, shared.written());
        if (!last) continue;
        mbarrier_wait(shared.written(), iteration & 1);
        if (lane.id == 0) publish(p, shared, count);
        warp_sync();
    }
}
