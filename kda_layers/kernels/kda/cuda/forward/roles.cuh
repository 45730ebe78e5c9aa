// Which chunks a CTA prepares, and how they reach the scan, where CTAs either scan or prepare (few_heads.cu).
//
// The CTAs that scan come first: p.groups CTA groups, each with one tile after the other, tile t with group t % p.groups. All
// sequences have the same length. Chunks are prepared in the order in which they are scanned: of the tiles that are scanned
// at the same time first all first chunks, then all second ones. CTA i of the n that prepare takes every n-th of them.
#pragma once
#include "shared.cuh"

DEVICE int scanning_blocks(const ForwardParams& p) { return p.groups * SLICES; }
DEVICE u32 chunks_of_tile(const ForwardParams& p) { return (in_chunks(p, p.T) + CHUNK - 1) / CHUNK; }

// A chunk that this CTA prepares; uniform in a warp.
struct Cursor {
    int item, index, chunk, group;
    u32 count;  // chunks that the CTA group scans before
    WorkTile tile;
    i64 keys;  // offset of the tile's first token in q and k

    DEVICE bool valid(const ForwardParams& p) const { return index < p.tiles; }
    DEVICE void start(Lane, const ForwardParams& p, int) {
        item = blockIdx.x - scanning_blocks(p);
        find(p);
    }
    DEVICE void skip(Lane, const ForwardParams& p, int) {
        item += gridDim.x - scanning_blocks(p);
        find(p);
    }
    DEVICE void find(const ForwardParams& p) {
        const u32 chunks = chunks_of_tile(p), side_by_side = p.groups * chunks, round = u32(item) / side_by_side;
        const int first = round * p.groups, width = min(p.groups, p.tiles - first);
        const u32 place = u32(item) - round * side_by_side;
        index = p.tiles;
        if (width <= 0 || place >= width * chunks) return;
        chunk = place / width, group = place - chunk * width, index = first + group, count = round * chunks + chunk;
        tile = work_tile(p, index);
        keys = (i64(tile.first) * p.H + tile.head / p.group) * K;
    }
};

// ---------------------------------------------------------------- the rings of prepared chunks

// Place of a channel's gamma: a lane of the scan reads four at once, of the channels of its accumulators.
DEVICE int gamma_at(int channel) { return channel / 16 * 16 + channel / 2 % 4 * 4 + channel / 8 % 2 * 2 + channel % 2; }

// Each CTA group has a ring of p.places places for prepared chunks. Its counters: how often each place has been filled, and,
// on a cache line of their own, how many chunks have arrived in the shared memory of each CTA.
DEVICE Stage ring_at(const ForwardParams& p, int group, u32 count) {
    return {p.ring + (i64(group) * p.places + count % p.places) * STAGE_BYTES};
}
DEVICE u32* filled(const ForwardParams& p, int group, u32 count) {
    return p.progress + group * ((p.places + 31) / 32 * 32 + 32) + count % p.places;
}
DEVICE u32* landed(const ForwardParams& p, int group, int slice) {
    return p.progress + (group + 1) * ((p.places + 31) / 32 * 32 + 32) - 32 + slice;
}

// Wait until the previous chunk in the ring's place has arrived in every CTA of the group. Executed by a full warp.
DEVICE void wait_for_place(Lane lane, const ForwardParams& p, int group, u32 count) {
    if (lane.id < SLICES && count >= p.places) {
        while (read_counter(landed(p, group, lane.id)) <= count - p.places) back_off();
    }
    warp_sync();
}

// Wait until chunk `count` has been prepared; return the number of consecutive chunks that have. Executed by a full warp.
DEVICE u32 wait_for_chunks(Lane lane, const ForwardParams& p, int group, u32 count) {
    for (;;) {
        const u32 own = count + lane.id;
        u32 missing = read_counter(filled(p, group, own)) > own / p.places ? count + 32 : own;
        for (int mask = 1; mask < 32; mask *= 2) missing = min(missing, shuffle_xor(missing, mask));
        if (missing > count) {
            fence_gpu();
            warp_sync();  // lane 0 alone starts the copies: it needs what every lane has acquired
            return missing;
        }
        back_off();
    }
}

// ---------------------------------------------------------------- what the preparing warps ask for

constexpr int STRIDE = 1;

DEVICE Stage place_of(const ForwardParams& p, const Shared&, const Cursor& at, u32) {
    return ring_at(p, at.group, at.count);
}
DEVICE unsigned char* fine_place(const ForwardParams&, const Cursor&, u32) { return nullptr; }

// Executed by a full warp.
DEVICE void wait_for_free_place(Lane lane, const ForwardParams& p, const Shared&, const Cursor& at, u32) {
    wait_for_place(lane, p, at.group, at.count);
}

// Tell the scan that a chunk is prepared. Executed by one thread.
DEVICE void publish(const ForwardParams& p, const Shared&, const Cursor& at, u32) {
    red_add_release(filled(p, at.group, at.count), 1);
}
