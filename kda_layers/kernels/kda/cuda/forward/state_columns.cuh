// The scan by columns (scan_columns.cuh) of states alone.
//
// For the transition of a segment (transitions.cuh): the first V / BV CTAs of a group scan v from the state 0, for B, the others
// no values from rows of I, for F. With STRETCH for those that follow (roles.cuh).
#pragma once
#include "moving_columns.cuh"

using HalvedState = StateOf<Halves>;

// The warp's rows of I.
DEVICE void set_identity(Lane lane, HalvedState& state, int first) {
    state.each(lane, [&](float& a, float& b, int at) {
        const int row = first + at / K, column = at % K;
        a = row == column ? 1.f : 0.f, b = row == column + 1 ? 1.f : 0.f;
    });
}

#if STRETCH
// Store a state for those that follow, `before` states after the first.
DEVICE void give_state(Lane lane, HalvedState& state, const ForwardParams& p, u32 before, int column) {
    state.give(lane, handed_state(p, scanning_group(p), before) + state_at(0, column));
}

// Let the publishing warp know.
DEVICE void hand_over(Lane lane, const StateShared& shared, u32 before) {
    if (before > 0) mbarrier_wait(shared.state_taken(), before - 1 & 1);
    signal(lane, shared.state_there());
}

// The publishing warp: a release waits until 32 KB of stores are visible, longer than a chunk takes.
DEVICE void publish_states(Lane lane, const ForwardParams& p, const StateShared& shared) {
    PlainTiles tiles;
    tiles.start(p, scanning_group(p));
    for (u32 n = 0; n <= tiles.end / STRETCH; n++) {
        mbarrier_wait(shared.state_there(), n & 1);
        if (lane.id == 0) red_add_release(handed(p, scanning_group(p), slice()), WARPS);
        signal(lane, shared.state_taken());
    }
}
#endif

// Round a half of a state to operand A.
DEVICE void round_half(Channels& to, int half, Sums<K / 2>& x) {
    fence_operand(x);
    #pragma unroll
    for (int i = 0; i < K / 8; i++)
        to[half * (K / 32) + i / 4][i % 4] = Io::pack(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}

// What a warp has at a chunk's start, where R has been computed.
struct Scanned : Carried<HalvedState> {
    Sums<CHUNK> W;  // R, then V'
};

// Start R of the next chunk with the first half of S, while the second half is computed. No MMA is in flight where the loop
// over chunks closes: ptxas would serialise all of them.
template <bool is_last> DEVICE void scan_chunk(Lane lane, const ForwardParams& p, const StateShared& shared,
                                               const ChunkOperands& first, Scanned& x, const Place<StateShared>& at,
                                               int left, int column) {
    constexpr int STEPS = K / 16, HALF = STEPS / 2;
    const Place<StateShared> next = at.next();
    const Operand next_rows = operand_at(first.rows, next.bytes()), Kr = operand_at(first.Kr, at.bytes());
    Tokens E;  // V', rounded
    subtract(x.v, x.W);
    fence_operand(x.state.low), fence_operand(x.state.high);
    wgmma_fence();
    multiply_rows<4, 0, 4, true>(x.W, x.v, operand_at(first.T, at.bytes()));
#if STRETCH
    if (at.count % STRETCH == 0) give_state(lane, x.state, p, at.count / STRETCH, column);
#endif
    if (opt_barrier(left) > 0) x.state.decay(x.gamma);  // always; a branch keeps it behind these MMAs
    wgmma_wait<0>();
    fence_operand(x.W);
    as_operand<CHUNK>(E, x.W);
    fence_operand(x.state.low), fence_operand(x.state.high);
    const bool next_there = is_last || mbarrier_test_wait(shared.full(next.stage), next.phase);
    wgmma_fence();
    multiply_tokens<K / 2, 0, 4, false, Io, K>(x.state.low, E, Kr);
    multiply_tokens<K / 2, 0, 4, false, Io, K>(x.state.high, E, operand_at(Kr, K / 2 * 16));
    wgmma_wait<1>();
    round_half(x.S, 0, x.state.low);
    if constexpr (!is_last) {
        if (!next_there) mbarrier_wait(shared.full(next.stage), next.phase);
        wgmma_fence();
        multiply_rows<STEPS, 0, HALF, true>(x.W, x.S, next_rows);
        wgmma_wait<1>();
        round_half(x.S, 1, x.state.high);
        wgmma_fence();
        multiply_rows<STEPS, HALF, STEPS>(x.W, x.S, next_rows);
    } else {
        wgmma_wait<0>();
        fence_operand(x.state.high);
    }
    release(lane, shared, ERRORS, at);
    release(lane, shared, UPDATE, at);
    if constexpr (!is_last) x.load(lane, shared, next);
    wgmma_wait<0>();
    fence_operand(x.W);
    if (has_values()) signal(lane, shared.moved(at.count));
#if STRETCH
    if (at.count % STRETCH == 0) hand_over(lane, shared, at.count / STRETCH);
#endif
}

DEVICE void scan_states(Lane lane, const ForwardParams& p, const StateShared& shared) {
    const ChunkOperands first(shared.stage(0));
    const int column = slice() * BV + 16 * lane.warp;
    Place<StateShared> at = {0, 0, 0};
    PlainTiles tiles;
    for (tiles.start(p, scanning_group(p)); tiles.valid(p); tiles.skip(p)) {
        Scanned x;
        if constexpr (STRETCH) begin_tile(lane, x.state, p, tiles, column);
        else x.state.load(lane, nullptr);
        if (!has_values()) set_identity(lane, x.state, slice() % (V / BV) * BV + 16 * lane.warp);
        round_half(x.S, 0, x.state.low), round_half(x.S, 1, x.state.high);
        mbarrier_wait(shared.full(at.stage), at.phase);
        wgmma_fence();
        multiply_rows<K / 16, 0, K / 16, true>(x.W, x.S, operand_at(first.rows, at.bytes()));
        x.load(lane, shared, at);
        wgmma_wait<0>();
        fence_operand(x.W);
        int left = tiles.in_run();
        for (; left > 1; left--, at = at.next()) scan_chunk<false>(lane, p, shared, first, x, at, left, column);
        scan_chunk<true>(lane, p, shared, first, x, at, left, column);
        at = at.next();
#if STRETCH
        give_state(lane, x.state, p, at.count / STRETCH, column);
        hand_over(lane, shared, at.count / STRETCH);
#else
        x.state.store(lane, p.transitions + (segment_row(lane, p, tiles.at(p)) * (V + K) + column) * K);
#endif
    }
}

// Start to copy a chunk's v.
DEVICE void copy_values(Lane lane, const u16* from, i64 stride, const StateShared& shared, u32 count) {
    from += (16 * lane.warp + lane.id / Rows::PIECES) * stride + lane.id % Rows::PIECES * 8;
    Rows::each(lane, [&](int, int token, int piece) {
        cp_async_16(shared.values(count) + token_at(token, piece), from, true);
        from += Rows::TOKENS * stride;
    });
}

// Two chunks are on their way while the scanning warps have one and the next. When they tell that a chunk is done, they
// have read v of the next one.
DEVICE void move_values(Lane lane, const ForwardParams& p, const StateShared& shared) {
    constexpr int UNDER_WAY = 2, VALUES = StateShared::VALUES;
    const i64 stride = POOLED ? p.value_row : i64(p.HV) * V, step = CHUNK * stride;
    u32 count = 0;
    PlainTiles tiles;
    for (tiles.start(p, scanning_group(p)); tiles.valid(p); tiles.skip(p)) {
        const int chunks = tiles.in_run();
        const WorkTile tile = tiles.at(p);
        const u16* from = p.v + slice() * BV;
        if constexpr (POOLED) from = p.v + pooled_values(p, tile, 0);
        else from += tile.row(p, 0) * V;
        for (int i = 0; i < AHEAD; i++) prefetch_rows(lane, from + i * step, stride, i < chunks ? CHUNK : 0);
        for (int i = 0; i < chunks + UNDER_WAY; i++, from += step) {
            if (i < chunks) {
                if (count + i >= VALUES) wait_for_move(shared, count + i - VALUES);
                copy_values(lane, from, stride, shared, count + i);
                prefetch_rows(lane, from + AHEAD * step, stride, i + AHEAD < chunks ? CHUNK : 0);
            }
            cp_async_commit();
            cp_async_wait<UNDER_WAY>();
            if (i >= UNDER_WAY) signal(lane, shared.full(count + i - UNDER_WAY));
        }
        count += chunks;
    }
}
