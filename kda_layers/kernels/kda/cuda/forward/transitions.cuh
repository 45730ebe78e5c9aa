// The transition of a segment, by the scanning warps: the state after it is S0 F + B, with S0 [V, K] the state before it. That of
// a sequence's last segment is not needed.
//
// The first V / BV CTAs of a group scan v from the state 0, which gives rows of B [V, K]. The others scan v = 0 from rows
// of I, which gives rows of F [K, K]. No outputs are computed; else this is the scan of scan.cuh.
#pragma once
#include "scan.cuh"

// Rows of I, for a CTA whose first row is `first`.
DEVICE void set_identity(Lane lane, State& state, int first) {
    const int place = first * K + State::place(lane);
    const int ahead =
        opt_barrier(place / K - place % K);  // of the lane's first row to its column; not held in registers
    state.each([&](float& x, int at) { x = ahead == at % K - at / K ? 1.f : 0.f; });
}

// R = Kg S.
DEVICE void multiply_keys(Columns& R, const Shared& shared, Operand keys, Operand state, u32 count) {
    wait_for(shared, ERRORS, count);
    wgmma_fence();
    multiply_rows<K / 16, true>(R, keys, state);
    wgmma_wait<0>();
    fence_operand(R);
}

// S += Kr^T V'.
DEVICE void update_state(State& state, Operand Kr, Operand errors) {
    wgmma_fence();
    #pragma unroll
    for (int m = 0; m < K / 64; m++) multiply_tokens(state.S[m], operand_at(Kr, m * 8 * 128), errors);
    wgmma_wait<0>();
    #pragma unroll
    for (int m = 0; m < K / 64; m++) fence_operand(state.S[m]);
}

DEVICE void scan_transitions(Lane lane, const ForwardParams& p, const Shared& shared) {
    constexpr int OF_V = V / BV;
    const bool has_values = slice() < OF_V;
    const int column = slice() % OF_V * BV, stride = p.HV * V;
    const Operand state_operand = operand(shared.state(), K * 16), residuals = operand(shared.residuals(), CHUNK * 16);
    const Operand errors = operand(shared.errors(), CHUNK * 16);
    const Operands first = Operands::of(shared.stage(0));
    u32 count = 0;
    for (int index = cta_group(); index < p.tiles; index += cta_groups()) {
        const WorkTile tile = work_tile(p, index);
        if (tile.last || tile.length == 0) continue;
        const u16* v = p.v + tile.row(p, 0) * V + column;
        State state;
        state.load(nullptr);
        if (!has_values) set_identity(lane, state, column);
        state.publish(lane, shared.state());
        operand_sync();
        Values next = {};
        if (has_values) next.load(lane, v, stride, tile.length);
        for (int left = tile.length; left > 0; left -= CHUNK, count++) {
            const Stage stage = shared.stage(count);
            const Values values = next;
            v += CHUNK * stride;
            if (has_values && left > CHUNK) next.load(lane, v, stride, left - CHUNK);
            const Operands chunk = first.at(count % STAGES * STAGE_BYTES);
            Columns R, E;
            u32 x[TILES][2];
            multiply_keys(R, shared, chunk.keys, state_operand, count);
            start_errors(lane, E, values, R, shared, operand_at(chunk.tokens, AT_T), residuals);
            finish_errors(lane, x, E, state, shared, stage, count);
            update_state(state, chunk.channels, errors);
            state.publish(lane, shared.state());
            operand_sync();
            if (lane.warp == 0) release(lane, shared, UPDATE, count);
        }
        const i64 row = segment_row(lane, p, tile);
        state.store(p.transitions + (row * (V + K) + slice() * BV) * K + State::place(lane));
    }
}
