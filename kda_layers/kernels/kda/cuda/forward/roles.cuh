// Which chunks a CTA scans or prepares, and how they reach the scan, where CTAs either scan or prepare (two_roles.cu).
//
// The CTAs that scan come first: p.groups CTA groups, each with one tile after the other. Chunks are prepared in the order in
// which they are scanned: first the first chunk of every group, then the second one of every group.
// CTA i of the n that prepare takes every n-th of them.
//
// Where sequences are cut into segments, a sequence's last one is not scanned: its chunks are prepared after all others.
//
// With STRETCH each of these groups has one tile and leads: it scans the state without outputs, in less time for each chunk, and
// hands it over at the start of every STRETCH chunks. p.followers groups come next. They take these stretches in turn, and
// scan them again for the outputs.
#pragma once
#include "pooled.cuh"

// With SAVES, the other way round: those that scan come last. Then a block waits only for blocks before it, which a GPU
// starts first, and no launch waits until all of them can run.
DEVICE int scanning_blocks(const ForwardParams& p) { return (p.groups + (STRETCH ? p.followers : 0)) * SLICES; }
DEVICE int preparing_blocks(const ForwardParams& p) { return gridDim.x - scanning_blocks(p); }
DEVICE int first_scanning(const ForwardParams& p) { return SAVES ? preparing_blocks(p) : 0; }
DEVICE bool is_scanning(const ForwardParams& p) {
    return SAVES ? int(blockIdx.x) >= first_scanning(p) : int(blockIdx.x) < scanning_blocks(p);
}
DEVICE int scanning_group(const ForwardParams& p) { return (blockIdx.x - first_scanning(p)) / SLICES; }
DEVICE bool is_leading(const ForwardParams& p) { return STRETCH && scanning_group(p) < p.groups; }
// Of this CTA among those that prepare.
DEVICE int preparing_index(const ForwardParams& p) { return blockIdx.x - (SAVES ? 0 : scanning_blocks(p)); }
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

// Index of a chunk of sequences of one length in tensors with a row for each chunk.
DEVICE i64 kept_index(const ForwardParams& p, const WorkTile& tile, int chunk) {
    return (i64(tile.sequence) * ((p.T + CHUNK - 1) / CHUNK) + tile.skipped + chunk) * p.HV + tile.head;
}

// ---------------------------------------------------------------- the tiles of a CTA group

// With sequences of one length, the chunks of all tiles, one tile after the other, are divided into equally long runs, one
// for each group. A group scans its run from the last tile to the first. A tile that two runs share is thus the first of one
// and the last of the other: the group that begins it hands its state to the group that ends it. No run is shorter than a
// tile, so the beginning is scanned before the end is reached (McNaughton's rule for preemptive schedules).
// Transitions of segments are not shared: their runs consist of whole tiles.
struct Runs {
    u32 chunks;         // of a tile
    u32 least, longer;  // chunks of a run, at least; runs that have one unit more
    u32 unit;           // chunks

    explicit DEVICE Runs(const ForwardParams& p) {
        chunks = chunks_of_tile(p), unit = SEGMENTS ? chunks : 1;
        const u32 units = scanned_tiles(p) * chunks / unit;
        least = units / p.groups, longer = units - least * p.groups, least *= unit;
    }
    DEVICE u32 start(u32 group) const { return group * least + min(group, longer) * unit; }
};

// The tiles of a CTA group's run, one after the other; of one that leads, the chunks before the last stretch.
struct PlainTiles {
    u32 chunks, run;  // of a tile; the run's start
    int index;
    u32 first, end;  // chunks of the tile that are in the run

    DEVICE bool valid(const ForwardParams&) const { return first < end; }
    DEVICE void start(const ForwardParams& p, int group) {
        const Runs runs(p);
        chunks = runs.chunks, run = runs.start(group);
        take(runs.start(group + 1));
    }
    DEVICE void skip(const ForwardParams&) { take(index * chunks + first); }
    // The last tile of the run's chunks before `last`.
    DEVICE void take(u32 last) {
        index = (last - 1) / chunks;
        const u32 start = index * chunks;
        first = max(run, start) - start, end = last > run ? last - start : 0;
#if STRETCH
        if (end > 0) end = (chunks - 1) / STRETCH * STRETCH;
#endif
    }
    DEVICE int in_run() const { return end - first; }  // chunks
    DEVICE int before_run() const { return first; }
    DEVICE bool begins() const { return first == 0; }
    DEVICE bool ends() const { return end == chunks; }
    DEVICE WorkTile at(const ForwardParams& p) const { return work_tile(p, scanned_tile(p, index)); }
    // Index of the tile's state.
    DEVICE i64 state(const ForwardParams&) const { return index; }
    // The group whose ring holds the chunks, whether the next tile's is another, and the index in that group of a chunk of the
    // tile that is chunk `count` of this CTA.
    DEVICE int group(const ForwardParams& p) const { return scanning_group(p); }
    static DEVICE constexpr bool changes_group() { return false; }
    static DEVICE u32 in_group(u32, u32 count) { return count; }
    // The group that hands over the state before the part, and how many it has handed over before.
    DEVICE int handed_by(const ForwardParams& p) const { return scanning_group(p) - 1; }
    static DEVICE constexpr u32 handed_before() { return 0; }
};

#if STRETCH
// The stretches of a CTA group that follows, one after the other.
struct Stretches {
    u32 chunks, item;  // of a tile; index among all stretches
    int index;
    u32 first, end;  // chunks of the tile that are in the stretch

    DEVICE bool valid(const ForwardParams&) const { return first < end; }
    DEVICE void start(const ForwardParams& p, int group) {
        chunks = chunks_of_tile(p), item = group - p.groups;
        find(p);
    }
    DEVICE void skip(const ForwardParams& p) {
        item += p.followers;
        find(p);
    }
    DEVICE void find(const ForwardParams& p) {
        const u32 stretch = item / p.groups;
        index = item - stretch * p.groups, first = stretch * STRETCH, end = min(first + STRETCH, chunks);
    }
    DEVICE int in_run() const { return end - first; }
    DEVICE int before_run() const { return first; }
    // False also for the first, as the final state may be stored where the initial one is, before that has been read.
    static DEVICE constexpr bool begins() { return false; }
    DEVICE bool ends() const { return end == chunks; }
    DEVICE WorkTile at(const ForwardParams& p) const { return work_tile(p, index); }
    DEVICE i64 state(const ForwardParams&) const { return index; }
    DEVICE int group(const ForwardParams&) const { return index; }
    static DEVICE constexpr bool changes_group() { return true; }
    static DEVICE u32 in_group(u32 chunk, u32) { return chunk; }
    DEVICE int handed_by(const ForwardParams&) const { return index; }
    DEVICE u32 handed_before() const { return first / STRETCH; }
};
#endif

// Packed sequences, which may have no chunks. Look one tile ahead, to hide the latency of two dependent loads: a sequence's
// index (order.cu), then its offsets.
struct PackedTiles {
    int index;
    WorkTile tile, next;
    int first_row;  // of the tile in tensors with a row for each chunk, if KEEPS

    DEVICE bool valid(const ForwardParams&) const { return tile.sequence >= 0; }
    DEVICE void start(const ForwardParams& p, int group) {
        index = group, tile = find(p, index), next = find(p, index + p.groups);
        if (KEEPS) first_row = 0, pass_sequences(p, 0);
    }
    DEVICE void skip(const ForwardParams& p) {
        const int before = tile.sequence;
        index += p.groups, tile = next, next = find(p, index + p.groups);
        if (KEEPS) pass_sequences(p, before);
    }
    // Count the chunks of the sequences from `first` to the tile's.
    DEVICE void pass_sequences(const ForwardParams& p, int first) {
        for (int i = first; i < tile.sequence; i++)
            first_row += (offset_of(p, i + 1) - offset_of(p, i) + CHUNK - 1) / CHUNK;
    }
    DEVICE WorkTile at(const ForwardParams&) const { return tile; }
    DEVICE int in_run() const { return tile.chunks(); }
    static DEVICE constexpr int before_run() { return 0; }
    static DEVICE constexpr bool begins() { return true; }
    static DEVICE constexpr bool ends() { return true; }
    DEVICE i64 state(const ForwardParams& p) const { return i64(tile.sequence) * p.HV + tile.head; }
    DEVICE i64 kept(const ForwardParams& p, int chunk) const { return i64(first_row + chunk) * p.HV + tile.head; }
    static DEVICE WorkTile find(const ForwardParams& p, int index) {
        if (index < p.tiles) return work_tile(p, index);
        WorkTile none = {};
        none.sequence = -1;
        return none;
    }
};

#if PACKED
using Tiles = PackedTiles;
#elif STRETCH
using Tiles = Stretches;
#else
using Tiles = PlainTiles;
#endif

// The chunks of a CTA group, one after the other.
struct GroupChunks {
    Tiles tiles;
    int chunk;  // of those of the tile in the run
#if !PACKED
    WorkTile tile;  // kept, as to find it takes divisions
#endif

    DEVICE bool valid(const ForwardParams& p) const { return tiles.valid(p); }
    DEVICE void start(const ForwardParams& p, int group) {
        tiles.start(p, group), find(p), chunk = -1;
        skip(p);
    }
    DEVICE void skip(const ForwardParams& p) {
        for (chunk++; valid(p) && chunk >= tiles.in_run(); chunk = 0) tiles.skip(p), find(p);
    }
#if PACKED
    DEVICE void find(const ForwardParams&) {}
    DEVICE const WorkTile& at() const { return tiles.tile; }
    DEVICE i64 kept(const ForwardParams& p) const { return tiles.kept(p, chunk); }
#else
    DEVICE void find(const ForwardParams& p) {
        if (valid(p)) tile = tiles.at(p);
    }
    DEVICE const WorkTile& at() const { return tile; }
    DEVICE i64 kept(const ForwardParams& p) const { return kept_index(p, tile, of_tile()); }
#endif
    DEVICE int of_tile() const { return tiles.before_run() + chunk; }
    // Offsets of its first token in o and in v.
    DEVICE i64 row(const ForwardParams& p) const { return at().row(p, of_tile() * CHUNK) * V + slice() * BV; }
    DEVICE i64 value_row(const ForwardParams& p) const {
        if constexpr (POOLED) return pooled_values(p, at(), of_tile() * CHUNK);
        return row(p);
    }
    DEVICE int tokens() const { return at().length - of_tile() * CHUNK; }  // from the chunk's start on
};

// Number of chunks of this CTA group, which does not lead. Executed by a full warp: a lane for every 32nd packed tile.
DEVICE u32 chunks_of_group(Lane lane, const ForwardParams& p) {
#if PACKED
    u32 all = 0;
    for (int index = scanning_group(p) + lane.id * p.groups; index < p.tiles; index += 32 * p.groups)
        all += max(work_tile(p, index).chunks(), 0);
    for (int mask = 1; mask < 32; mask *= 2) all += shuffle_xor(all, mask);
    return all;
#else
    const Runs runs(p);
#if STRETCH
    const u32 stretches = (runs.chunks + STRETCH - 1) / STRETCH, follower = scanning_group(p) - p.groups;
    const auto taken = [&](u32 items) { return (max(items, follower) - follower + p.followers - 1) / p.followers; };
    const u32 all = taken(stretches * p.groups), last = all - taken((stretches - 1) * p.groups);
    return all * STRETCH - last * (stretches * STRETCH - runs.chunks);
#endif
    return runs.start(scanning_group(p) + 1) - runs.start(scanning_group(p));
#endif
}

// ---------------------------------------------------------------- the chunks of a CTA that prepares

// The next chunk that this CTA prepares, of sequences of one length; uniform in a warp.
struct PlainSearch {
    int item, index, chunk, group;  // no group if it is not scanned
    u32 count;                      // chunks that the CTA group scans before
    WorkTile tile;
    i64 keys;  // offset of the tile's first token in q and k

    DEVICE bool valid(const ForwardParams& p) const { return index < p.tiles; }
    DEVICE i64 kept(const ForwardParams& p) const { return kept_index(p, tile, chunk); }
    DEVICE void start(Lane, const ForwardParams& p) {
        item = preparing_index(p);
        find(p);
    }
    DEVICE void skip(Lane, const ForwardParams& p) {
        item += preparing_blocks(p);
        find(p);
    }
    DEVICE void find(const ForwardParams& p) {
        const Runs runs(p);
        const u32 scanned = p.groups * runs.least + runs.longer * runs.unit;
        if (u32(item) < scanned) find_scanned(p, runs);
        else if (SEGMENTS) find_last(p, item - scanned, chunks_of_sequence(p) - (p.segments - 1) * runs.chunks);
        else index = p.tiles;
        if (!valid(p)) return;
        tile = work_tile(p, index);
        keys = keys_of(p, tile);
    }
    DEVICE void find_scanned(const ForwardParams& p, const Runs& runs) {
        count = u32(item) / p.groups, group = item - count * p.groups;
        if (count >= runs.least) {  // the rest of the longer runs
            const u32 place = item - p.groups * runs.least;
            count = place / runs.longer, group = place - count * runs.longer, count += runs.least;
        }
        const u32 start = runs.start(group), last = runs.start(group + 1), tiles = last / runs.chunks;
        const u32 shared = last - tiles * runs.chunks;  // of the first tile
        u32 t = tiles;
        chunk = count;
        if (count >= shared) {
            const u32 scanned = (count - shared) / runs.chunks;
            t = tiles - 1 - scanned, chunk = count - shared - scanned * runs.chunks;
            chunk += max(start, t * runs.chunks) - t * runs.chunks;
        }
        index = scanned_tile(p, t);
    }
    // Chunk `place` of all sequences' last segments, of `chunks` each.
    DEVICE void find_last(const ForwardParams& p, u32 place, u32 chunks) {
        const int t = place / chunks;
        chunk = place - t * chunks, group = -1, count = 0;
        index = t + (t / p.HV + 1) * (p.segments - 1) * p.HV;
    }
};

// The next chunk that this CTA prepares, of sequences of any lengths. Executed by a full warp: each lane follows a CTA group,
// so there are at most 32.
struct PackedSearch {
    int chunk, group;
    u32 count;  // chunks that the CTA group scans before
    WorkTile tile;
    i64 keys;  // offset of the tile's first token in q and k

    PackedTiles tiles;  // of the lane's group
    u32 end;            // chunks of the group through its tile
    int offset;         // chunks `count` of lower groups that are before the next one to prepare
    bool found;
    int first_row;  // of its tile, if KEEPS

    DEVICE bool valid(const ForwardParams&) const { return found; }
    DEVICE i64 kept(const ForwardParams& p) const { return i64(first_row + chunk) * p.HV + tile.head; }
    DEVICE void start(Lane lane, const ForwardParams& p) {
        tiles.start(p, lane.id < p.groups ? lane.id : p.tiles);
        end = max(tiles.tile.chunks(), 0), count = 0, offset = preparing_index(p);
        find(lane, p);
    }
    DEVICE void skip(Lane lane, const ForwardParams& p) {
        offset += preparing_blocks(p);
        find(lane, p);
    }
    DEVICE void find(Lane lane, const ForwardParams& p) {
        for (;; count++) {
            // max: decreasing offsets are an error, but must not hang
            while (tiles.valid(p) && end <= count) tiles.skip(p), end += max(tiles.tile.chunks(), 0);
            const u32 scanned = ballot(tiles.valid(p));  // groups that scan a chunk `count`
            found = scanned != 0;
            if (!found) return;
            if (offset < count_ones(scanned)) return take(lane, p, scanned);
            offset -= count_ones(scanned);
        }
    }
    DEVICE void take(Lane lane, const ForwardParams& p, u32 scanned) {
        const bool is_next = tiles.valid(p) && count_ones(scanned & (1u << lane.id) - 1) == offset;
        group = count_ones(ballot(is_next) - 1);
        tile.first = broadcast(tiles.tile.first, group), tile.length = broadcast(tiles.tile.length, group);
        tile.head = broadcast(tiles.tile.head, group);
        if (KEEPS) first_row = broadcast(tiles.first_row, group);
        chunk = broadcast(int(count - end) + tiles.tile.chunks(), group);
        keys = keys_of(p, tile);
    }
};

#if PACKED
using Search = PackedSearch;
#else
using Search = PlainSearch;
#endif

// ---------------------------------------------------------------- prepared chunks

// Each CTA group has p.ring_slots slots for prepared chunks, used in turn: of a ring in global memory, or, if all chunks
// are kept, the rows of its chunks, so many that none is used twice. Its counters: how often each slot has been filled; how
// often a chunk of each slot has arrived in the shared memory of a CTA; and for each slice how many warps have handed over a
// state, of a tile that another group ends or of a stretch. These states are behind the ring: those of stretches in turn, so
// many that one is overwritten after its stretch has been read.
DEVICE Stage kept_at(const ForwardParams& p, i64 kept) { return {p.prepared + kept * STAGE_BYTES}; }
DEVICE Stage ring_at(const ForwardParams& p, int group, u32 count) {
    return {p.ring + (i64(group) * p.ring_slots + count % p.ring_slots) * STAGE_BYTES};
}
constexpr int READERS = STRETCH ? 2 * SLICES : SLICES;  // CTAs that read a chunk

// Counters of the slots, a multiple of a cache line.
DEVICE u32 slot_counters(const ForwardParams& p) { return (p.ring_slots + 31) / 32 * 32; }
DEVICE u32* counters(const ForwardParams& p, int group) { return p.progress + group * (2 * slot_counters(p) + 32); }
DEVICE u32* filled(const ForwardParams& p, int group, u32 count) { return counters(p, group) + count % p.ring_slots; }
DEVICE u32* arrived(const ForwardParams& p, int group, u32 count) { return filled(p, group, count) + slot_counters(p); }
DEVICE u32* handed(const ForwardParams& p, int group, int slice) {
    return counters(p, group) + 2 * slot_counters(p) + slice;
}
DEVICE float* handed_state(const ForwardParams& p, int group, u32 before) {
#if STRETCH
    const u32 states = p.ring_slots / STRETCH + 2;  // of a group
#else
    constexpr u32 states = 1;
#endif
    const i64 ring_bytes = KEEPS ? 0 : i64(p.groups) * p.ring_slots * STAGE_BYTES;
    return reinterpret_cast<float*>(p.ring + ring_bytes) + state_at(group * states + before % states, 0);
}

// Wait until the previous chunk in the slot has arrived in every CTA that reads it. Executed by a full warp.
DEVICE void wait_for_slot(Lane lane, const ForwardParams& p, int group, u32 count) {
    if (lane.id == 0 && count >= p.ring_slots) {
        while (read_counter(arrived(p, group, count)) < READERS * (count / p.ring_slots)) back_off();
    }
    warp_sync();
}

// Wait until chunk `count` has been prepared; return the number of consecutive chunks that have. Executed by a full warp.
DEVICE u32 wait_for_chunks(Lane lane, const ForwardParams& p, int group, u32 count) {
    for (;;) {
        const u32 own = count + lane.id;
        u32 missing = read_counter(filled(p, group, own)) > own / p.ring_slots ? count + 32 : own;
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

DEVICE void wait_for_room(const Shared& shared, u32 iteration) {
    if (!KEEPS) shared.tasks().wait_for(Tasks::PLACED, iteration);
}
DEVICE Stage room(const ForwardParams&, const Shared& shared, const Cursor&, u32, u32 iteration) {
    return {shared.tasks()[iteration].place};
}
