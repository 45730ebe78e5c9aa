// The warps that bring v to the scan by columns (scan_columns.cuh) and take its outputs.
#pragma once
#include "scan_columns.cuh"

DEVICE void give_values(Lane lane, const Rows& v, const ScanShared& shared, u32 count) {
    Rows::each(lane, [&](int i, int token, int piece) {
        *reinterpret_cast<uint4*>(shared.values(count) + token_at(token, piece)) = v.x[i];
    });
    signal(lane, shared.full(count));
}

// A warp's outputs of a chunk, or its V'.
struct OutputRows : Rows {
    DEVICE void take(Lane lane, const unsigned char* from) {
        each(lane, [&](int i, int token, int piece) {
            x[i] = *reinterpret_cast<const uint4*>(from + token_at(token, piece));
        });
    }
    DEVICE void take(Lane lane, const unsigned char* from, const float (&scale)[4]) {
        take(lane, from);
        each(lane, [&](int i, int, int) {
            if constexpr (SCALES_LATE) {
                const u32 by = Io::pack(scale[i], scale[i]);
                x[i] = make_uint4(Io::multiply(x[i].x, by), Io::multiply(x[i].y, by), Io::multiply(x[i].z, by),
                                  Io::multiply(x[i].w, by));
            }
        });
    }
    DEVICE void store(Lane lane, u16* to, i64 stride, int tokens) const {
        each(lane, [&](int i, int token, int piece) {
            if (token < tokens) store_once(to + token * stride + 8 * piece, x[i]);
        });
    }
};

// Bring a warp's rows of v into L2.
DEVICE void prefetch_rows(Lane lane, const u16* from, i64 stride, int tokens) {
    constexpr int LINES = BV / 64;  // of 128 bytes in a row
    const int token = 16 * lane.warp + lane.id / LINES;
    if (lane.id < 16 * LINES && token < tokens) prefetch(from + token * stride + lane.id % LINES * 64);
}

// Read a chunk's scale, which the scanning warps have waited for, unless it is a tile's first.
DEVICE void take_scale(Lane lane, float (&scale)[4], const ScanShared& shared, u32 count) {
    if constexpr (SCALES_LATE) {
        wait_for(shared, OUTPUT, count);
        Rows::each(lane, [&](int i, int token, int) { scale[i] = shared.stage(count).scale()[token]; });
        release(lane, shared, OUTPUT, count);
    }
}

// Wait until the scanning warps have signalled for the `move`th time that they have stored o of a chunk.
template <class Shared> DEVICE void wait_for_move(const Shared& shared, u32 move) {
    mbarrier_wait(shared.moved(move), move / Shared::VALUES & 1);
}

// When the scanning warps have stored o of a chunk, they have read v of the next one.
DEVICE void move_rows(Lane lane, const ForwardParams& p, const ScanShared& shared) {
    const i64 stride = i64(p.HV) * V, step = CHUNK * stride;
    const i64 value_stride = POOLED ? p.value_row : stride, value_step = CHUNK * value_stride;
    u32 count = 0;
    PlainTiles tiles;
    for (tiles.start(p, scanning_group(p)); tiles.valid(p); tiles.skip(p)) {
        const WorkTile tile = tiles.at(p);
        const int chunks = tiles.in_run(), before = tiles.first * CHUNK, tokens = tile.length - before;
        const bool is_zero = POOLED && is_padding(p, tile);
        i64 at = tile.row(p, before) * V + slice() * BV, from = at;
        if constexpr (POOLED) from = pooled_values(p, tile, before);
        const auto values = [&](int i) { return p.v + from + i * value_step; };
        Rows next;
        for (int i = 0; i < AHEAD; i++) prefetch_rows(lane, values(i), value_stride, tokens - i * CHUNK);
        for (int i = 0; i < min(chunks, 3); i++) {
            next.load(lane, values(i), value_stride, tokens - i * CHUNK);
            if (i < 2) give_values(lane, next, shared, count + i);
        }
        float scale[4];
        take_scale(lane, scale, shared, count);
        for (int i = 0; i < chunks; i++, count++, at += step, from += value_step) {
            wait_for_move(shared, count);
            OutputRows o;
            o.take(lane, shared.outputs(count), scale);
            if (is_zero) o = {};
            if (i + 2 < chunks) give_values(lane, next, shared, count + 2);
            if (i + 1 < chunks) take_scale(lane, scale, shared, count + 1);
            if (i + 3 < chunks) next.load(lane, values(3), value_stride, tokens - (i + 3) * CHUNK);
            prefetch_rows(lane, values(AHEAD), value_stride, tokens - (i + AHEAD) * CHUNK);
            o.store(lane, p.o + at, stride, tokens - i * CHUNK);
        }
    }
}

// Across tiles, which may have few chunks. When the scanning warps have stored o of a chunk, they have read its v, so the v of
// the second chunk after it can take its place.
//
// With SAVES its place has V' then, and there is only one: the v of the second chunk follows when the first one's was read,
// which the scanning warps tell before all else. They wait for `all_taken` before they store what belongs to the last chunk.
DEVICE void move_rows_across_tiles(Lane lane, const ForwardParams& p, const ScanShared& shared) {
    const i64 stride = i64(p.HV) * V, value_stride = POOLED ? p.value_row : stride;
    GroupChunks at, loaded, prefetched;
    at.start(p, scanning_group(p));
    if (!at.valid(p)) return;
    loaded = prefetched = at;
    const auto prefetch = [&] {
        if (!prefetched.valid(p)) return;
        prefetch_rows(lane, p.v + prefetched.value_row(p), value_stride, prefetched.tokens());
        prefetched.skip(p);
    };
    for (int i = 0; i < AHEAD; i++) prefetch();
    Rows next;
    u32 loads = 0;
    const auto load = [&] {
        if (!loaded.valid(p)) return;
        next.load(lane, p.v + loaded.value_row(p), value_stride, loaded.tokens());
        loaded.skip(p), loads++;
    };
    const auto give = [&](u32 count) {
        if (count < loads) give_values(lane, next, shared, count);
        else if (SAVES && count == loads) signal(lane, shared.all_taken());
    };
    for (u32 i = 0; i < 3; i++) {
        load();
        if (SAVES && i == 1) mbarrier_wait(shared.moved(0), 0);
        if (i < 2) give(i);
    }
    float scale[4];
    take_scale(lane, scale, shared, 0);
    bool is_zero = false;  // the outputs of the tile
    for (u32 count = 0; at.valid(p); count++, at.skip(p)) {
        if (POOLED && at.chunk == 0) is_zero = is_padding(p, at.at());
        wait_for_move(shared, count + SAVES);
        OutputRows o, errors;
        o.take(lane, shared.outputs(count), scale);
        if (is_zero) o = {};
        if constexpr (SAVES) errors.take(lane, shared.values(count));
        give(count + 2);
        if (count + 1 < loads) take_scale(lane, scale, shared, count + 1);
        load();
        prefetch();
        o.store(lane, p.o + at.row(p), stride, at.tokens());
        if constexpr (SAVES) errors.store(lane, p.errors + at.row(p), stride, at.tokens());
    }
}
