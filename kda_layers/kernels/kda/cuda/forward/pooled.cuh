// What engines ask for (POOLED): the state of a work tile is in a slot of a pool, one boundary state of each sequence is
// stored, and rows of tokens have strides.
#pragma once
#include "shared.cuh"

DEVICE i64 index_of(const void* indices, int int64, int n) {
    return int64 ? static_cast<const i64*>(indices)[n] : static_cast<const int*>(indices)[n];
}

// The state [V, K] of a work tile from a column of V on, read and overwritten; null if there is none.
DEVICE float* pooled_state(const ForwardParams& p, const WorkTile& tile, int column = 0) {
    const u64 slot = p.slots ? index_of(p.slots, p.int64_slots, tile.sequence) : tile.sequence;
    if (!p.final_state || slot >= u64(p.slot_count)) return nullptr;
    return p.final_state + slot * p.slot_stride + (tile.head * V + column) * K;
}

// Offset in v of a token of a work tile.
DEVICE i64 pooled_values(const ForwardParams& p, const WorkTile& tile, int token) {
    return i64(tile.first + token) * p.value_row + tile.head * V + slice() * BV;
}

// True if a sequence has no slot: its outputs are zero.
DEVICE bool is_padding(const ForwardParams& p, const WorkTile& tile) { return p.slots && !pooled_state(p, tile); }

// Tokens after which a work tile's state is stored as a checkpoint; NEVER; or PADDING.
constexpr int NEVER = -1, PADDING = -2;
DEVICE int stop_of(const ForwardParams& p, const WorkTile& tile) {
    if (is_padding(p, tile)) return PADDING;
    const i64 stop = p.stops ? index_of(p.stops, p.int64_stops, tile.sequence) : NEVER;
    return stop < 0 || stop > tile.length || stop % CHUNK ? NEVER : int(stop);
}
