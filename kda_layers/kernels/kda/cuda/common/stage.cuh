// Shared by the forward and the reverse scan: work tiles, the layout of a prepared chunk, and its copy to shared
// memory.
#pragma once
#include "chunk.cuh"

// Chosen by the build: K, V (128 or 64), BV (columns of V per CTA), CLUSTER (CTAs that one multicast of a prepared
// chunk reaches, a divisor of SLICES; 0: no bulk copies), IO (Bf16 or Fp16), HAS_WGMMA (1 on sm_90a), and where sequences
// are cut into segments SEGMENTS, SEGMENT_TOKENS and SEGMENT_TILES (segments.cu).
#ifndef LAST_TOKENS  // the decode kernel computes up to so many tokens after a sequence's full chunks (last_tokens.py)
#define LAST_TOKENS 0
#endif
#ifndef T_FP16  // T' is kept in fp16 as well, and the reverse scan multiplies by that
#define T_FP16 0
#endif
#ifndef SEGMENTS
#define SEGMENTS 0
#define SEGMENT_TOKENS 1
#define SEGMENT_TILES 1
#endif
enum Segments { WHOLE_SEQUENCES, TRANSITIONS, LAST_SCAN, REVERSE };
constexpr int SLICES = (SEGMENTS == TRANSITIONS ? 2 : 1) * V / BV;
constexpr int RANKS = CLUSTER > 0 ? CLUSTER : 1;
static_assert(SLICES % RANKS == 0, "the CTAs of a cluster must serve one head");

// ---------------------------------------------------------------- work

// A CTA group is SLICES CTAs that process the same work tiles, each its slice of V; of a transition, of V and then of K.
DEVICE int slice() { return blockIdx.x % SLICES; }
DEVICE int cta_group() { return blockIdx.x / SLICES; }
DEVICE int cta_groups() { return gridDim.x / SLICES; }

// One (sequence, value head), or one segment of it.
struct WorkTile {
    int first;   // index of its first token among B * T
    int length;  // tokens
    int sequence, head;
    int segment;  // of its sequence
    int skipped;  // chunks of its sequence before it
    bool last;    // it ends where its sequence does

    DEVICE int chunks() const { return (length + CHUNK - 1) / CHUNK; }
    template <class Params> DEVICE i64 row(const Params& p, int token) const {
        return i64(first + token) * p.HV + head;
    }
};

// True behind the tiles of the last listed sequence (order.cu).
DEVICE bool is_none(const WorkTile& tile) { return LAST_TOKENS && tile.sequence < 0; }

// Offset of a column of V of matrix `index` in [., V, K]; a work tile's state has the tile's index.
DEVICE i64 state_at(i64 index, int column) { return (index * V + column) * K; }

// Tokens of a sequence that are in chunks.
template <class Params> DEVICE int in_chunks(const Params& p, int length) {
#if LAST_TOKENS
    if (p.last_tokens && (length & CHUNK - 1) <= LAST_TOKENS) length &= -CHUNK;
#endif
    return length;
}

template <class Params> DEVICE bool is_cut(const Params& p, int length) { return length >= p.cut_from; }

// The packed sequence that is cut and has `index` others that are cut before it, or -1. Executed by a full warp.
template <class Params> DEVICE int cut_sequence(Lane lane, const Params& p, int index) {
    const int sequences = p.tiles / p.HV / (SEGMENTS ? p.segments : 1);
    for (int first = 0; first < sequences; first += 32) {
        const int mine = first + lane.id;
        const bool cut = mine < sequences && is_cut(p, in_chunks(p, offset_of(p, mine + 1) - offset_of(p, mine)));
        const u32 all = ballot(cut), before = count_ones(all & (1u << lane.id) - 1);
        const u32 found = ballot(cut && before == index);
        if (found) return first + count_ones(found - 1);
        index -= count_ones(all);
    }
    return -1;
}

// Packed sequences that may be cut are launched in segments and whole, as their lengths are known on the GPU alone: if none is
// cut, the launches in segments have nothing to do, else the other. Executed by full warps.
template <class Params> DEVICE bool is_idle(Lane lane, const Params& p) {
    if (!p.cu_seqlens || !p.cut_from) return false;
    return (cut_sequence(lane, p, 0) < 0) == (SEGMENTS != WHOLE_SEQUENCES);
}

// Tokens of a segment of a sequence that is cut: a power of two, so many that heads and segments of the sequence are about
// SEGMENT_TILES; this depends on the sequence alone, never on its batch.
template <class Params> DEVICE i64 segment_tokens(const Params& p, int length) {
    i64 tokens = SEGMENT_TOKENS;
    while (tokens * SEGMENT_TILES < i64(length) * p.HV) tokens *= 2;
    return tokens;
}

// Reduce a tile, which has its full sequence, to its segment.
template <class Params> DEVICE void take_segment(WorkTile& tile, const Params& p) {
    if (!is_cut(p, tile.length)) {
        tile.last = tile.segment == 0;
        if (!tile.last) tile.length = 0;
        return;
    }
    const i64 tokens = segment_tokens(p, tile.length);
    const i64 before = tokens * tile.segment, left = tile.length - before;
    tile.first += int(before), tile.skipped = int(before / CHUNK), tile.last = 0 < left && left <= tokens;
    tile.length = int(max(min(left, tokens), i64(0)));
}
template <class Params> DEVICE WorkTile work_tile(const Params& p, int index) {
    WorkTile tile;
    tile.sequence = index / p.HV, tile.head = index % p.HV, tile.segment = tile.skipped = 0, tile.last = true;
    if constexpr (SEGMENTS) tile.segment = tile.sequence % p.segments, tile.sequence /= p.segments;
    tile.first = tile.sequence * p.T, tile.length = p.T;
    if (p.cu_seqlens) {
#if LAST_TOKENS
        if (p.order) tile.sequence = p.order[tile.sequence];
        if (tile.sequence < 0) return tile.length = 0, tile;
#endif
        tile.first = offset_of(p, tile.sequence);
        tile.length = offset_of(p, tile.sequence + 1) - tile.first;
    }
    tile.length = in_chunks(p, tile.length);
    if constexpr (SEGMENTS) take_segment(tile, p);
    return tile;
}

// Number of chunks in earlier sequences, the sequence's first row in per-chunk tensors: ALL chunks, or only WHOLE ones,
// as in checkpoints. Executed by a full warp.
enum Chunks { WHOLE, ALL };
template <class Params> DEVICE int chunks_before(Lane lane, const Params& p, int sequence, Chunks which) {
    const int more = which == ALL ? CHUNK - 1 : 0;
    if (!p.cu_seqlens) return sequence * ((p.T + more) / CHUNK);
    u32 sum = 0;
    #pragma unroll 1
    for (int i = lane.id; i < sequence; i += 32) sum += (offset_of(p, i + 1) - offset_of(p, i) + more) / CHUNK;
    for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
    return sum;
}

// The row of a tile whose sequence is cut in tensors that have rows for such tiles alone. Executed by a full warp.
template <class Params> DEVICE i64 segment_row(Lane lane, const Params& p, const WorkTile& tile) {
    u32 before = tile.sequence;
    if (p.cu_seqlens) {
        before = 0;
        #pragma unroll 1
        for (int i = lane.id; i < tile.sequence; i += 32)
            before += is_cut(p, in_chunks(p, offset_of(p, i + 1) - offset_of(p, i)));
        for (int mask = 1; mask < 32; mask *= 2) before += shuffle_xor(before, mask);
    }
    return (i64(before) * p.segments + tile.segment) * p.HV + tile.head;
}
// True if a tile is one of several segments of its sequence.
template <class Params> DEVICE bool of_cut_sequence(const Params& p, const WorkTile& tile) {
    return tile.segment > 0 || !tile.last;
}

// ---------------------------------------------------------------- a prepared chunk

// Three independently pipelined parts: operands of V', of the state's update, and of the output.
enum Part { ERRORS, UPDATE, OUTPUT, PARTS };

constexpr int MATRIX = CHUNK * K * 2, SQUARE = CHUNK * CHUNK * 2;  // bytes
constexpr int AT_T = MATRIX, AT_KR = AT_T + SQUARE, AT_GAMMA = AT_KR + MATRIX;
constexpr int AT_QG = AT_GAMMA + K * 4, AT_AQK = AT_QG + MATRIX, AT_SCALE = AT_AQK + SQUARE;
constexpr int STAGE_BYTES = AT_SCALE + CHUNK * 4;
DEVICE constexpr int part_at(int part) {
    return part == ERRORS ? 0 : part == UPDATE ? AT_KR : part == OUTPUT ? AT_QG : STAGE_BYTES;
}
DEVICE constexpr int part_bytes(int part) { return part_at(part + 1) - part_at(part); }

// T' in fp16 (T_FP16) has the layout of T', times 2^T_FP16_SHIFT: diagonals down to 2^-22 have 11 bits, entries up to 255 do not
// overflow.
constexpr int T_FP16_SHIFT = 8;

struct Stage {
    unsigned char* base;
    DEVICE unsigned char* Kg() const { return base; }                                  // e^G k: [64, K]
    DEVICE unsigned char* T() const { return base + AT_T; }                            // (I + N)^-1 beta: [64, 64]
    DEVICE unsigned char* Kr() const { return base + AT_KR; }                          // e^{G_C - G} k, like Kg
    DEVICE float* gamma() const { return reinterpret_cast<float*>(base + AT_GAMMA); }  // e^{G_C}: [K]
    DEVICE unsigned char* Qg() const { return base + AT_QG; }                          // e^G q, like Kg
    DEVICE unsigned char* Aqk() const { return base + AT_AQK; }                        // like T
    DEVICE float* scale() const { return reinterpret_cast<float*>(base + AT_SCALE); }  // of each token's output: [64]
};

// ---------------------------------------------------------------- copies to shared memory

// CTA count % RANKS of a cluster copies chunk `count` of its CTA group, part by part, to stage count % STAGES of all
// CTAs of the cluster. A kernel's Shared has the stages and, for each part of a stage, the mbarriers `full` and
// `empty`.

template <class Shared> DEVICE void init_part_barriers(const Shared& shared) {
    for (int part = 0; part < PARTS; part++) {
        for (u32 i = 0; i < Shared::STAGES; i++) {
            mbarrier_init(shared.full(part, i), 1);
            mbarrier_init(shared.empty(part, i), RANKS * Shared::releases(part));
        }
    }
}

// Expect the bytes of a part; by one thread of each CTA, after the stage's previous copy has completed.
template <class Shared> DEVICE void expect(const Shared& shared, int part, u32 count) {
#if __CUDA_ARCH__ >= 900
    mbarrier_arrive_expect_tx(shared.full(part, count), part_bytes(part));
#endif
}

template <class Shared> DEVICE void wait_for(const Shared& shared, int part, u32 count) {
    mbarrier_wait(shared.full(part, count), (count / Shared::STAGES) & 1);
}

// Release a part of a stage to the CTA that copies its next chunk, chunk `next`.
DEVICE void release_at(Lane lane, u64* empty, u32 next) {
    warp_sync();
    if (lane.id != 0) return;
#if __CUDA_ARCH__ >= 900
    if constexpr (RANKS > 1) {
        mbarrier_arrive_cluster(empty, next % RANKS);
        return;
    }
#endif
    mbarrier_arrive(empty);
}

// Release a part of chunk `count`.
template <class Shared> DEVICE void release(Lane lane, const Shared& shared, int part, u32 count) {
    release_at(lane, shared.empty(part, count), count + Shared::STAGES);
}

// Wait until all warps have released the stage that a part of chunk `count` is copied to.
template <class Shared> DEVICE void wait_for_release(const Shared& shared, int part, u32 count) {
    // Chunks between two copies by one CTA to one stage: the least common multiple of STAGES and RANKS.
    constexpr u32 STAGES = Shared::STAGES, PERIOD = STAGES % RANKS == 0   ? STAGES
                                                    : RANKS % STAGES == 0 ? RANKS
                                                                          : STAGES * RANKS;
    if (count >= STAGES)
        mbarrier_wait(shared.empty(part, count), (count / PERIOD - (count % PERIOD < STAGES ? 1 : 0)) & 1);
}

// Copy a part of a prepared chunk if this CTA is the one to do so; by one thread of each CTA, for every chunk in order.
// T: what to copy in the place of T', unless null.
template <class Shared>
DEVICE void fetch(const Stage& from, const Shared& shared, int part, u32 count, const unsigned char* T = nullptr) {
#if __CUDA_ARCH__ >= 900
    if (int(count % RANKS) != slice() % RANKS) return;
    wait_for_release(shared, part, count);
    const int bytes = part_bytes(part) - (T && part == ERRORS ? SQUARE : 0);  // T' is the last of its part
    unsigned char* to = shared.stage(count).base;
    u64* full = shared.full(part, count);
    cp_async_bulk_multicast(to + part_at(part), from.base + part_at(part), bytes, full, (1 << RANKS) - 1);
    if (T && part == ERRORS) cp_async_bulk_multicast(to + AT_T, T, SQUARE, full, (1 << RANKS) - 1);
#endif
}

// After mbarriers are initialised, and before exit, as another CTA may still arrive at this one's barriers.
DEVICE void block_or_cluster_sync(int threads) {
#if __CUDA_ARCH__ >= 900
    if constexpr (RANKS > 1) {
        cluster_sync();
        return;
    }
#endif
    barrier_sync(0, threads);
}
