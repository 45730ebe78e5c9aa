// Shared by the roles of forward.cu: parameters, the order of chunks, and the plan of shared memory.
#pragma once
#include "ForwardParams.h"
#include "gates.cuh"
#include "stage.cuh"

// Chosen by the build, in addition to stage.cuh's: GATE (see gates.cuh), G_FP32 (1: gate logits are fp32), SAVES (1:
// save what the backward reads), POOLED (1: for engines: states in slots of a pool, one boundary state of each sequence,
// rows of tokens with strides). If CLUSTER is 0, each CTA prepares all chunks for itself.
constexpr int STAGES = SEGMENTS == WALK ? 3 : 2;
constexpr int PREPARE_WARPS = K / 16, INVERTERS = 3;
constexpr int THREADS = 32 * (PREPARE_WARPS + 4 + 1 + INVERTERS);  // 4 warps scan, 1 fetches
constexpr bool SHARED_CHUNKS = CLUSTER > 0;
constexpr u32 RING = 3 * SLICES;  // prepared chunks in global memory, per CTA group
constexpr bool PREPARES = SEGMENTS != WALK;
constexpr bool KEEPS = SAVES || SEGMENTS;           // each prepared chunk has a row of its own
constexpr bool RECYCLES = SHARED_CHUNKS && !KEEPS;  // slots of the ring

enum Barrier { PREPARED = 1, INVERTING, MERGING, SCANNING, TOKENS };  // TOKENS + b: the warps of 16 tokens

// ---------------------------------------------------------------- work

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
        if constexpr (POOLED) keys = i64(tile.first) * p.key_row + tile.head / p.group * K;
        else keys = (i64(tile.first) * p.H + tile.head / p.group) * K;
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

// ---------------------------------------------------------------- shared memory

struct Shared {
    static constexpr int STAGES = ::STAGES;
    unsigned char* base;
    // prepared chunks; operands of the scan; what the preparing warps exchange; barriers
    static constexpr int AT_STATE = STAGES * STAGE_BYTES;
    static constexpr int AT_RESIDUALS = AT_STATE + BV * K * 2;
    static constexpr int AT_ERRORS = AT_RESIDUALS + BV * CHUNK * 2;
    static constexpr int AT_COLUMNS = AT_ERRORS + BV * CHUNK * 2;
    static constexpr int AT_DECAYS = AT_COLUMNS + 2 * CHUNK * K * 2;
    static constexpr int AT_SCALES = AT_DECAYS + 2 * 4 * K * 4;
    static constexpr int AT_BETA = AT_SCALES + 2 * CHUNK * 4;
    static constexpr int TRIANGLE = 10 * 1024;  // 16 x 16 blocks, [2][32] lanes, four elements each
    static constexpr int AT_SUMS_OF_L = AT_BETA + INVERTERS * CHUNK * 4;
    static constexpr int AT_COLUMNS_OF_T = AT_SUMS_OF_L + K / 64 * TRIANGLE;
    static constexpr int AT_SUMS = AT_COLUMNS_OF_T + 6 * 512;
    static constexpr int AT_LOGITS = AT_SUMS + PREPARE_WARPS * 16 * 16;
    static constexpr int AT_BIAS = AT_LOGITS + (G_FP32 ? 0 : CHUNK * K * 2);
    static constexpr int AT_BARRIERS = PREPARES ? AT_BIAS + PREPARE_WARPS * 256 : AT_COLUMNS;
    static constexpr int BYTES = AT_BARRIERS + (2 * PARTS * STAGES + 5) * 8;

    DEVICE Stage stage(u32 count) const { return {base + (count % STAGES) * STAGE_BYTES}; }
    DEVICE unsigned char* state() const { return base + AT_STATE; }          // S: [BV, K]
    DEVICE unsigned char* residuals() const { return base + AT_RESIDUALS; }  // v - Kg S: [BV, 64]
    DEVICE unsigned char* errors() const { return base + AT_ERRORS; }        // V': [BV, 64]
    // Double-buffered, so that warps may be one chunk apart
    DEVICE uint4* columns(u32 iteration) const {
        return reinterpret_cast<uint4*>(base + AT_COLUMNS + iteration % 2 * CHUNK * K * 2);
    }  // [warp][4][32]
    DEVICE float* decays(u32 iteration) const {
        return reinterpret_cast<float*>(base + AT_DECAYS + iteration % 2 * 4 * K * 4);
    }  // [4 blocks][K]
    DEVICE float* scale(u32 iteration) const {
        return reinterpret_cast<float*>(base + AT_SCALES + iteration % 2 * CHUNK * 4);
    }  // [64], of outputs
    DEVICE float* beta(int inverter) const {
        return reinterpret_cast<float*>(base + AT_BETA + inverter * CHUNK * 4);
    }  // [64]
    DEVICE float4* sums_of_L(int half, int row, int column) const {
        return in_triangle(AT_SUMS_OF_L + half * TRIANGLE, row, column);
    }
    // Reuses the columns that the same two warps wrote for the previous chunk.
    DEVICE float4* sums_of_A(u32 iteration, int row, int column) const {
        return reinterpret_cast<float4*>(columns(iteration + 1)) + (4 * row + column) * 64;
    }
    DEVICE float4* in_triangle(int at, int row, int column) const {
        return reinterpret_cast<float4*>(base + at) + (row * (row + 1) / 2 + column) * 64;
    }
    DEVICE uint4* columns_of_T() const { return reinterpret_cast<uint4*>(base + AT_COLUMNS_OF_T); }           // [6][32]
    DEVICE uint4* logits(int warp) const { return reinterpret_cast<uint4*>(base + AT_LOGITS) + warp * 128; }  // [4][32]
    DEVICE float* bias(int warp) const { return reinterpret_cast<float*>(base + AT_BIAS) + warp * 64; }
    DEVICE float4* sums() const { return reinterpret_cast<float4*>(base + AT_SUMS); }  // [warp][16 tokens]

    DEVICE u64* barriers() const { return reinterpret_cast<u64*>(base + AT_BARRIERS); }
    DEVICE u64* full(int part, u32 count) const { return barriers() + part * STAGES + count % STAGES; }
    DEVICE u64* empty(int part, u32 count) const { return full(part, count) + PARTS * STAGES; }
    DEVICE u64* summed() const { return barriers() + 2 * PARTS * STAGES; }  // L of a chunk
    DEVICE u64* inverted() const { return summed() + 1; }
    DEVICE u64* written() const { return summed() + 2; }
    DEVICE u64* placed() const { return summed() + 3; }  // the chunk's slot is free
    DEVICE unsigned char** place() const { return reinterpret_cast<unsigned char**>(summed() + 4); }

    // warps of a CTA that release a part
    static DEVICE constexpr int releases(int part) { return part == OUTPUT ? 4 : 1; }

    DEVICE void init_barriers() const {
        init_part_barriers(*this);
        mbarrier_init(summed(), PREPARE_WARPS);
        mbarrier_init(inverted(), INVERTERS);
        mbarrier_init(written(), PREPARE_WARPS + INVERTERS);
        mbarrier_init(placed(), 1);
#if __CUDA_ARCH__ >= 900
        fence_mbarrier_init();
#endif
    }
};

static_assert(Shared::BYTES == SHARED_BYTES, "the host's plan of shared memory");

// ---------------------------------------------------------------- the ring of prepared chunks

// CTA count % SLICES of a CTA group prepares chunk `count`, into slot count % RING of the group's ring, or, if all
// chunks are kept, into the chunk's own row; every CTA copies it from there (stage.cuh).
DEVICE Stage ring_at(const ForwardParams& p, const Cursor& at, u32 count) {
    if constexpr (KEEPS) return {p.prepared + (i64(at.first_row + at.chunk) * p.HV + at.tile.head) * STAGE_BYTES};
    return {p.ring + (i64(cta_group()) * RING + count % RING) * STAGE_BYTES};
}
// The place of a chunk's T' in fp16, null in all CTAs but the one that stores it.
DEVICE unsigned char* fine_place(const ForwardParams& p, const Cursor& at, u32 count) {
    if (!FINE || int(count % SLICES) != slice()) return nullptr;
    return p.fine + (i64(at.first_row + at.chunk) * p.HV + at.tile.head) * SQUARE;
}
// Counters of a CTA: chunks that it has prepared, and chunks that have arrived in its shared memory. Counters that are
// polled together share a cache line.
DEVICE u32* prepared(const ForwardParams& p, int slice) { return p.progress + cta_group() * 64 + slice; }
DEVICE u32* landed(const ForwardParams& p, int slice) { return prepared(p, slice) + 32; }

// Wait until the previous chunk in the ring's slot has arrived in every CTA. Executed by a full warp.
DEVICE void wait_for_place(Lane lane, const ForwardParams& p, u32 count) {
    if (lane.id < SLICES) {
        while (read_counter(landed(p, lane.id)) <= count - RING) back_off();
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
