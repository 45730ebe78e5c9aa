// Which chunks a CTA prepares, and how they reach the scan, where CTAs either scan or prepare (few_heads.cu).
//
// The CTAs that scan come first: p.groups CTA groups, each with one tile after the other, tile t with group t % p.groups. All
// sequences have the same length. Chunks are prepared in the order in which they are scanned: of the tiles that are scanned
// at the same time first all first chunks, then all second ones. CTA i of the n that prepare takes every n-th of them.
//
// Where sequences are cut into segments, a sequence's last segment is not scanned: its chunks are prepared last.
#pragma once
#include "shared.cuh"

constexpr bool LANE_ORDER = !SEGMENTS;  // of gamma, see gamma_at

DEVICE int scanning_blocks(const ForwardParams& p) { return p.groups * SLICES; }
DEVICE u32 chunks_of_sequence(const ForwardParams& p) { return (in_chunks(p, p.T) + CHUNK - 1) / CHUNK; }

// Tiles that are scanned, the chunks of each, and the index of the work tile.
#if SEGMENTS
DEVICE int scanned_tiles(const ForwardParams& p) { return p.tiles / p.segments * (p.segments - 1); }
DEVICE u32 chunks_of_tile(const ForwardParams& p) { return segment_tokens(p, in_chunks(p, p.T)) / CHUNK; }
DEVICE int scanned_tile(const ForwardParams& p, int t) {
    const int of_sequence = (p.segments - 1) * p.HV;
    return t + t / of_sequence * p.HV;
}
#else
DEVICE int scanned_tiles(const ForwardParams& p) { return p.tiles; }
DEVICE u32 chunks_of_tile(const ForwardParams& p) { return chunks_of_sequence(p); }
DEVICE int scanned_tile(const ForwardParams&, int t) { return t; }
#endif

// A chunk that this CTA prepares; uniform in a warp.
struct Cursor {
    int item, index, chunk, group;  // no group if it is not scanned
    u32 count;                      // chunks that the CTA group scans before
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
        const int first = round * p.groups, width = min(p.groups, scanned_tiles(p) - first);
        const u32 place = u32(item) - round * side_by_side;
        index = p.tiles;
        if (width > 0 && place < width * chunks) {
            chunk = place / width, group = place - chunk * width, count = round * chunks + chunk;
            index = scanned_tile(p, first + group);
        } else if (SEGMENTS) {
            find_last(p, u32(item) - scanned_tiles(p) * chunks, chunks_of_sequence(p) - (p.segments - 1) * chunks);
        }
        if (!valid(p)) return;
        tile = work_tile(p, index);
        keys = (i64(tile.first) * p.H + tile.head / p.group) * K;
    }
    // Chunk `place` of the sequences' last segments, which have `chunks` each.
    DEVICE void find_last(const ForwardParams& p, u32 place, u32 chunks) {
        const int t = place / chunks, sequence = t / p.HV;
        chunk = place - t * chunks, group = -1;
        if (t < p.tiles / p.segments) index = t + (sequence + 1) * (p.segments - 1) * p.HV;
    }
};

// ---------------------------------------------------------------- prepared chunks

// Place of a channel's gamma: a lane of the scan reads four at once, of the channels of its accumulators.
DEVICE int gamma_at(int channel) { return channel / 16 * 16 + channel / 2 % 4 * 4 + channel / 8 % 2 * 2 + channel % 2; }

#if SEGMENTS
// Every chunk has a row of its own, and each that is scanned a counter, p.places for each CTA group.
DEVICE Stage prepared_at(const ForwardParams& p, const WorkTile& tile, int chunk) {
    const i64 row = i64(tile.sequence) * ((p.T + CHUNK - 1) / CHUNK) + tile.skipped + chunk;
    return {p.prepared + (row * p.HV + tile.head) * STAGE_BYTES};
}
DEVICE Stage scanned_at(const ForwardParams& p, int group, u32 count) {
    const u32 chunks = chunks_of_tile(p), round = count / chunks;
    return prepared_at(p, work_tile(p, scanned_tile(p, round * p.groups + group)), count - round * chunks);
}
DEVICE u32* filled(const ForwardParams& p, int group, u32 count) { return p.progress + group * p.places + count; }
DEVICE bool is_filled(const ForwardParams& p, int group, u32 count) { return read_counter(filled(p, group, count)); }
DEVICE void tell_landed(const ForwardParams&, int, u32) {}
#else
// Each CTA group has a ring of p.places places for prepared chunks. Its counters: how often each place has been filled, and,
// on a cache line of their own, how many chunks have arrived in the shared memory of each CTA.
DEVICE Stage ring_at(const ForwardParams& p, int group, u32 count) {
    return {p.ring + (i64(group) * p.places + count % p.places) * STAGE_BYTES};
}
DEVICE Stage scanned_at(const ForwardParams& p, int group, u32 count) { return ring_at(p, group, count); }
DEVICE u32* filled(const ForwardParams& p, int group, u32 count) {
    return p.progress + group * ((p.places + 31) / 32 * 32 + 32) + count % p.places;
}
DEVICE u32* landed(const ForwardParams& p, int group, int slice) {
    return p.progress + (group + 1) * ((p.places + 31) / 32 * 32 + 32) - 32 + slice;
}

// Tell that `count` chunks of a group have arrived in this CTA.
DEVICE void tell_landed(const ForwardParams& p, int group, u32 count) {
    write_counter(landed(p, group, slice()), count);
}

// Wait until the previous chunk in the ring's place has arrived in every CTA of the group. Executed by a full warp.
DEVICE void wait_for_place(Lane lane, const ForwardParams& p, int group, u32 count) {
    if (lane.id < SLICES && count >= p.places) {
        while (read_counter(landed(p, group, lane.id)) <= count - p.places) back_off();
    }
    warp_sync();
}

DEVICE bool is_filled(const ForwardParams& p, int group, u32 count) {
    return read_counter(filled(p, group, count)) > count / p.places;
}
#endif

// Wait until chunk `count` has been prepared; return the number of consecutive chunks that have. Executed by a full warp.
DEVICE u32 wait_for_chunks(Lane lane, const ForwardParams& p, int group, u32 count) {
    for (;;) {
        const u32 own = count + lane.id;
        u32 missing = is_filled(p, group, own) ? count + 32 : own;
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
#if SEGMENTS
    return prepared_at(p, at.tile, at.chunk);
#else
    return ring_at(p, at.group, at.count);
#endif
}
// The place of a chunk's T' in fp16.
DEVICE unsigned char* fine_place(const ForwardParams& p, const Cursor& at, u32) {
    if (!FINE) return nullptr;
    return p.fine + (i64(at.tile.sequence) * ((p.T + CHUNK - 1) / CHUNK) + at.tile.skipped + at.chunk) * p.HV * SQUARE +
           i64(at.tile.head) * SQUARE;
}

// Executed by a full warp.
DEVICE void wait_for_free_place(Lane lane, const ForwardParams& p, const Shared&, const Cursor& at, u32) {
#if !SEGMENTS
    wait_for_place(lane, p, at.group, at.count);
#endif
}

// Tell the scan that a chunk is prepared. Executed by one thread.
DEVICE void publish(const ForwardParams& p, const Shared&, const Cursor& at, u32) {
    if (at.group >= 0) red_add_release(filled(p, at.group, at.count), 1);
}
