// Which chunks a CTA prepares, and how they reach the scan, where CTAs either scan or prepare (few_heads.cu).
//
// The CTAs that scan come first: p.groups CTA groups, each with one tile after the other, tile t with group t % p.groups. All
// sequences have the same length. Chunks are prepared in the order in which they are scanned: of the tiles that are scanned
// at the same time first all first chunks, then all second ones. CTA i of the n that prepare takes every n-th of them.
//
// Where sequences are cut into segments, a sequence's last one is not scanned: its chunks are prepared after all others.
#pragma once
#include "shared.cuh"

DEVICE int scanning_blocks(const ForwardParams& p) { return p.groups * SLICES; }
DEVICE u32 chunks_of_sequence(const ForwardParams& p) { return (in_chunks(p, p.T) + CHUNK - 1) / CHUNK; }

// The tiles that are scanned, the chunks of each, and the index of its work tile.
DEVICE int scanned_tiles(const ForwardParams& p) {
    return SEGMENTS ? p.tiles / p.segments * (p.segments - 1) : p.tiles;
}
DEVICE u32 chunks_of_tile(const ForwardParams& p) {
    return SEGMENTS ? segment_tokens(p, in_chunks(p, p.T)) / CHUNK : chunks_of_sequence(p);
}
DEVICE int scanned_tile(const ForwardParams& p, int t) {
    return SEGMENTS ? t + t / ((p.segments - 1) * p.HV) * p.HV : t;
}

// The next chunk that this CTA prepares; uniform in a warp.
struct Search {
    int item, index, chunk, group;  // no group if it is not scanned
    u32 count;                      // chunks that the CTA group scans before
    WorkTile tile;
    i64 keys;  // offset of the tile's first token in q and k

    DEVICE bool valid(const ForwardParams& p) const { return index < p.tiles; }
    DEVICE void start(const ForwardParams& p) {
        item = blockIdx.x - scanning_blocks(p);
        find(p);
    }
    DEVICE void skip(const ForwardParams& p) {
        item += gridDim.x - scanning_blocks(p);
        find(p);
    }
    DEVICE void find(const ForwardParams& p) {
        const u32 chunks = chunks_of_tile(p), side_by_side = p.groups * chunks, round = u32(item) / side_by_side;
        const int first = round * p.groups, width = min(p.groups, scanned_tiles(p) - first);
        const u32 place = u32(item) - round * side_by_side;
        index = p.tiles;
        if (width <= 0 || place >= width * chunks) {
            if (!SEGMENTS) return;
            find_last(p, u32(item) - scanned_tiles(p) * chunks, chunks_of_sequence(p) - (p.segments - 1) * chunks);
            if (!valid(p)) return;
        } else {
            chunk = place / width, group = place - chunk * width, count = round * chunks + chunk;
            index = scanned_tile(p, first + group);
        }
        tile = work_tile(p, index);
        keys = (i64(tile.first) * p.H + tile.head / p.group) * K;
    }
    // Chunk `place` of all sequences' last segments, of `chunks` each.
    DEVICE void find_last(const ForwardParams& p, u32 place, u32 chunks) {
        const int t = place / chunks;
        chunk = place - t * chunks, group = -1, count = 0;
        index = t + (t / p.HV + 1) * (p.segments - 1) * p.HV;
    }
};

// ---------------------------------------------------------------- prepared chunks

// Each CTA group has p.places places for prepared chunks, used in turn: of a ring in global memory, or, if all chunks are
// kept, the rows of its chunks, so many that none is used twice. Its counters: how often each place has been filled, and, on
// a cache line of their own, how many chunks of a ring have arrived in the shared memory of each CTA.
DEVICE i64 kept_row(const ForwardParams& p, const WorkTile& tile, int chunk) {
    return (i64(tile.sequence) * ((p.T + CHUNK - 1) / CHUNK) + tile.skipped + chunk) * p.HV + tile.head;
}
DEVICE Stage kept_at(const ForwardParams& p, const WorkTile& tile, int chunk) {
    return {p.prepared + kept_row(p, tile, chunk) * STAGE_BYTES};
}
DEVICE Stage ring_at(const ForwardParams& p, int group, u32 count) {
    return {p.ring + (i64(group) * p.places + count % p.places) * STAGE_BYTES};
}
// The first chunk of a tile that is scanned; the next ones are p.HV rows apart.
DEVICE Stage first_kept(const ForwardParams& p, int tile) {
    return KEEPS ? kept_at(p, work_tile(p, scanned_tile(p, tile)), 0) : Stage{};
}
DEVICE u32* filled(const ForwardParams& p, int group, u32 count) {
    return p.progress + group * ((p.places + 31) / 32 * 32 + 32) + count % p.places;
}
DEVICE u32* landed(const ForwardParams& p, int group, int slice) {
    return p.progress + (group + 1) * ((p.places + 31) / 32 * 32 + 32) - 32 + slice;
}

// Wait until the previous chunk in the place has arrived in every CTA of the group. Executed by a full warp.
DEVICE void wait_for_place(Lane lane, const ForwardParams& p, int group, u32 count) {
    if (!KEEPS && lane.id < SLICES && count >= p.places) {
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

// A task as the preparing warps see it.
struct Cursor {
    i64 keys;
    WorkTile tile;
    static constexpr int chunk = 0;

    explicit DEVICE Cursor(const Task& task) : keys(task.keys) {
        tile.first = task.first, tile.length = task.left, tile.head = task.head;
    }
    DEVICE bool valid(const ForwardParams&) const { return tile.length > 0; }
};

DEVICE void wait_for_room(const Shared& shared, u32 iteration) { shared.tasks().wait_for(Tasks::PLACED, iteration); }
DEVICE Stage room(const ForwardParams&, const Shared& shared, const Cursor&, u32, u32 iteration) {
    return {shared.tasks()[iteration].place};
}
