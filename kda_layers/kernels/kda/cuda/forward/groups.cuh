// Which chunks a CTA prepares, and how they reach the scan, where every CTA does both (forward.cu): CTA count % SLICES of a
// CTA group prepares chunk `count` of the group's work tiles, and all of them scan it.
#pragma once
#include "shared.cuh"

// A chunk of a work tile of this CTA group; uniform in a warp.
struct Cursor {
    int index, chunk;
    WorkTile tile;
    i64 keys;       // offset of the tile's first token in q and k
    int first_row;  // the tile's first row in per-chunk tensors, set if `has_rows`
    bool has_rows = KEEPS;

    DEVICE bool valid(const ForwardParams& p) const { return index < p.tiles; }
    DEVICE void start(Lane lane, const ForwardParams& p, int first) {
        index = cta_group(), chunk = first;
        if (valid(p)) enter(lane, p);
        skip(lane, p, 0);
    }
    // Advance, to the next tile where this one ends.
    DEVICE void skip(Lane lane, const ForwardParams& p, int chunks) {
        chunk += chunks;
        while (valid(p) && chunk >= tile.chunks()) {
            chunk -= tile.chunks(), index += cta_groups();
            if (valid(p)) enter(lane, p);
        }
    }
    DEVICE void enter(Lane lane, const ForwardParams& p) {
        tile = work_tile(p, index);
        if (is_none(tile)) index = p.tiles;
        keys = keys_of(p, tile);
        if (has_rows) first_row = chunks_before(lane, p, tile.sequence, ALL) + tile.skipped;
    }
};

// Number of chunks of all work tiles of this CTA group. Executed by a full warp, a lane for every 32nd tile: one after the
// other, the offsets of many short sequences would be waited for.
DEVICE u32 chunks_of_cta_group(Lane lane, const ForwardParams& p) {
    u32 all = 0;
    for (int index = cta_group() + lane.id * cta_groups(); index < p.tiles; index += 32 * cta_groups()) {
        const WorkTile tile = work_tile(p, index);
        if (is_none(tile)) break;
        all += tile.chunks();
    }
    for (int mask = 1; mask < 32; mask *= 2) all += shuffle_xor(all, mask);
    return all;
}

// ---------------------------------------------------------------- the ring of prepared chunks

// Chunk `count` is prepared into slot count % RING of the group's ring, or, if all chunks are kept, into the chunk's own
// row; every CTA copies it from there (stage.cuh).
DEVICE Stage ring_at(const ForwardParams& p, const Cursor& at, u32 count) {
    if constexpr (KEEPS) return {p.prepared + (i64(at.first_row + at.chunk) * p.HV + at.tile.head) * STAGE_BYTES};
    return {p.ring + (i64(cta_group()) * RING + count % RING) * STAGE_BYTES};
}
// The place of a chunk's T' in fp16, null in all CTAs but the one that stores it.
DEVICE unsigned char* T_fp16_place(const ForwardParams& p, const Cursor& at, u32 count) {
    if (!T_FP16 || int(count % SLICES) != slice()) return nullptr;
    return p.T_fp16 + (i64(at.first_row + at.chunk) * p.HV + at.tile.head) * SQUARE;
}
// Counters of a CTA: chunks that it has prepared, and chunks that have arrived in its shared memory. Counters that are
// polled together share a cache line.
DEVICE u32* prepared(const ForwardParams& p, int slice) { return p.progress + cta_group() * 64 + slice; }
DEVICE u32* consumed(const ForwardParams& p, int slice) { return prepared(p, slice) + 32; }

// Wait until the previous chunk in the ring's slot has arrived in every CTA. Executed by a full warp.
DEVICE void wait_for_slot(Lane lane, const ForwardParams& p, u32 count) {
    if (lane.id < SLICES) {
        while (read_counter(consumed(p, lane.id)) <= count - RING) back_off();
    }
    warp_sync();
}

// Wait until more than `ready` consecutive chunks have been prepared; return their number. Executed by a full warp.
DEVICE u32 wait_for_chunks(Lane lane, const ForwardParams& p, u32 ready) {
    for (;;) {
        u32 next = lane.id < SLICES ? read_counter(prepared(p, lane.id)) * SLICES + lane.id
                                    : ~0u;  // the CTA's first missing chunk
        for (int mask = 1; mask < 32; mask *= 2) next = min(next, shuffle_xor(next, mask));
        if (next > ready) {
            fence_gpu();
            warp_sync();  // lane 0 alone starts the copies: it needs what every lane has acquired
            return next;
        }
        back_off();
    }
}

// ---------------------------------------------------------------- what the preparing warps ask for

constexpr int STRIDE = SHARED_CHUNKS ? SLICES : 1;  // between two chunks that a CTA prepares

DEVICE Stage place_of(const ForwardParams& p, const Shared& shared, const Cursor& at, u32 count) {
    return SHARED_CHUNKS ? ring_at(p, at, count) : shared.stage(count);
}

// Executed by a full warp.
DEVICE void wait_for_free_place(Lane lane, const ForwardParams& p, const Shared& shared, u32 count) {
    if (RECYCLES && count >= RING) wait_for_slot(lane, p, count);
    if (!SHARED_CHUNKS) {
        for (int part = 0; part < PARTS; part++) wait_for_release(shared, part, count);
    }
}

// Tell the scan that a chunk is prepared. Executed by one thread.
DEVICE void publish(const ForwardParams& p, const Shared& shared, u32 count) {
    if (SHARED_CHUNKS) red_add_release(prepared(p, slice()), 1);
    for (int part = 0; !SHARED_CHUNKS && part < PARTS; part++) mbarrier_arrive(shared.full(part, count));
}

DEVICE void wait_for_room(const Shared& shared, u32 iteration) { mbarrier_wait(shared.placed(), iteration & 1); }
// Finding the row of a saved chunk takes registers that loading ahead needs.
DEVICE Stage room(const ForwardParams& p, const Shared& shared, const Cursor& at, u32 count, u32) {
    return SAVES ? Stage{*shared.place()} : place_of(p, shared, at, count);
}
