// The transition of a segment (transitions.cuh), by a scan with columns of V as rows of every MMA (scan_columns.cuh): the first
// V / BV CTAs of a group scan v from the state 0, for B, the others no values from rows of I, for F.
#pragma once
#include "moving_columns.cuh"

// The warp's rows of I.
DEVICE void set_identity(Lane lane, State& state, int first) {
    state.each(lane, [&](float& a, float& b, int at) {
        const int row = first + at / K, column = at % K;
        a = row == column ? 1.f : 0.f, b = row == column + 1 ? 1.f : 0.f;
    });
}

DEVICE void scan_transitions(Lane lane, const ForwardParams& p, const ScanShared& shared) {
    constexpr int STEPS = K / 16;
    const Operand first_rows = operand(shared.stage(0).base, K * 16);
    const Operand first_T = operand(shared.stage(0).T(), CHUNK * 16);
    const Operand first_Kr = mn_major_operand(shared.stage(0).Kr(), K * 16);
    Place at = {0, 0, 0};
    PlainTiles tiles;
    for (tiles.start(p, scanning_group(p)); tiles.valid(p); tiles.skip(p)) {
        Carried x;
        x.state.load(lane, nullptr);
        if (!has_values()) set_identity(lane, x.state, slice() % (V / BV) * BV + 16 * lane.warp);
        as_operand<K>(x.S, x.state.S);
        enter(lane, x, shared, at, false);
        for (int left = tiles.in_run(); left > 0; left--) {
            const Place next = at.next();
            const Operand rows = operand_at(first_rows, at.bytes()), T = operand_at(first_T, at.bytes());
            Sums<CHUNK> W;  // R, then V'
            Tokens E;       // V', rounded
            fence_operand(x.state.S);
            wgmma_fence();
            multiply_rows<STEPS, 0, STEPS, true>(W, x.S, rows);
            if (opt_barrier(left) > 0) x.state.decay(x.gamma);  // always; a branch keeps it behind these MMAs
            wgmma_wait<0>();
            const bool next_there = compute_errors(E, W, x.v, T, shared, next);
            multiply_tokens<K>(x.state.S, E, operand_at(first_Kr, at.bytes()));
            wgmma_wait<0>();
            fence_operand(x.state.S);
            as_operand<K>(x.S, x.state.S);
            release(lane, shared, ERRORS, at);
            release(lane, shared, UPDATE, at);
            if (left > 1) enter(lane, x, shared, next, next_there);
            if (has_values()) signal(lane, shared.moved(at.count));
            at = next;
        }
        const i64 row = segment_row(lane, p, tiles.at(p));
        x.state.store(lane, p.transitions + (row * (V + K) + slice() * BV + 16 * lane.warp) * K);
    }
}

// Start to copy a chunk's v.
DEVICE void copy_values(Lane lane, const u16* from, i64 stride, const ScanShared& shared, u32 count) {
    from += (16 * lane.warp + lane.id / Rows::PIECES) * stride + lane.id % Rows::PIECES * 8;
    Rows::each(lane, [&](int, int token, int piece) {
        cp_async_16(shared.values(count) + token_at(token, piece), from, true);
        from += Rows::TOKENS * stride;
    });
}

// Two chunks are on their way while the scanning warps have one and the next. When they tell that a chunk is done, they
// have read v of the next one.
DEVICE void move_values(Lane lane, const ForwardParams& p, const ScanShared& shared) {
    constexpr int UNDER_WAY = 2;
    const i64 stride = i64(p.HV) * V, step = CHUNK * stride;
    u32 count = 0;
    PlainTiles tiles;
    for (tiles.start(p, scanning_group(p)); tiles.valid(p); tiles.skip(p)) {
        const int chunks = tiles.in_run();
        const u16* from = p.v + tiles.at(p).row(p, 0) * V + slice() * BV;
        for (int i = 0; i < AHEAD; i++) prefetch_rows(lane, from + i * step, stride, i < chunks ? CHUNK : 0);
        for (int i = 0; i < chunks + UNDER_WAY; i++, from += step) {
            if (i < chunks) {
                const u32 before = count + i - VALUES;
                if (count + i >= VALUES) mbarrier_wait(shared.moved(before), before / VALUES & 1);
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
