// What the parts of chunk.cu share: parameters, work items, and the plan of shared memory.
#pragma once
#include "gates.cuh"

// Chosen by the build: K, V (128 or 64), BV (columns a block), CLUSTER (blocks that a prepared chunk is copied to at
// once, a divisor of V / BV; 0: each block prepares for itself), IO (Bf16 or Fp16), GATE (see gates.cuh), G_WIDE (1
// where gate logits are fp32), WARPGROUPS (1: products of a warpgroup, on sm_90a).
using Io = IO;
#if G_WIDE
using Logit = float;
#else
using Logit = u16;
#endif
constexpr int CHUNK = 64;
constexpr int STAGES = 2;
constexpr int SLICES = V / BV;
constexpr int PREPARE_WARPS = K / 16, INVERTERS = 3;
constexpr int THREADS = 32 * (PREPARE_WARPS + 4 + 1 + INVERTERS);  // 4 scan, 1 fetches
constexpr bool SHARED_CHUNKS = CLUSTER > 0;
constexpr int RANKS = SHARED_CHUNKS ? CLUSTER : 1;
constexpr u32 RING = 3 * SLICES;  // prepared chunks in global memory, for each unit
static_assert(SLICES % RANKS == 0, "blocks of a cluster have one head");

struct ChunkParams {
    const u16 *q, *k;           // [B, T, H, K]
    const u16* v;               // [B, T, HV, V]
    const void* g;              // [B, T, HV, K]
    const void* beta;           // [B, T, HV]
    const float *A_log, *dt_bias;  // [HV], [HV, K], or null
    const float* initial_state; // [N, HV, V, K], or null
    const void* cu_seqlens;     // [N + 1], or null
    u16* o;                     // [B, T, HV, V]
    float* final_state;         // [N, HV, V, K], or null
    float* checkpoints;         // [B, T / 64, HV, V, K], or null
    unsigned char* ring;        // RING * STAGE_BYTES for each unit, or null without shared chunks
    u32* progress;              // [units][2][32] zeros, the same
    int T, H, HV, group, items; // group = HV / H, items = N * HV; B * T < 2^31
    int wide_offsets;           // cu_seqlens is int64
    int beta_activation, beta_wide, qk_l2norm;
    float lower_bound, scale;
};

enum Barrier { PREPARED = 1, INVERTING, MERGING, SCANNING, TOKENS };  // TOKENS + b: the warps of 16 tokens

// ---------------------------------------------------------------- work

// A unit is SLICES blocks, which together serve one item after the other.
DEVICE int slice() { return blockIdx.x % SLICES; }
DEVICE int unit() { return blockIdx.x / SLICES; }
DEVICE int units() { return gridDim.x / SLICES; }

// One (sequence, value head).
struct Item {
    int first;        // its first token among B * T
    int length;       // tokens
    int sequence, head;
    i64 keys;         // where its first token's q and k begin

    DEVICE int chunks() const { return (length + CHUNK - 1) / CHUNK; }
    DEVICE i64 row(const ChunkParams& p, int token) const { return i64(first + token) * p.HV + head; }
    DEVICE i64 state(const ChunkParams& p, int column) const { return ((i64(sequence) * p.HV + head) * V + column) * K; }
    DEVICE const float* initial_state(const ChunkParams& p, int column) const {
        return p.initial_state ? p.initial_state + state(p, column) : nullptr;
    }
    DEVICE float* final_state(const ChunkParams& p, int column) const { return p.final_state + state(p, column); }
};

DEVICE int offset_of(const ChunkParams& p, int sequence) {
    return p.wide_offsets ? int(static_cast<const i64*>(p.cu_seqlens)[sequence]) : static_cast<const int*>(p.cu_seqlens)[sequence];
}

DEVICE Item item_of(const ChunkParams& p, int index) {
    Item item;
    item.sequence = index / p.HV, item.head = index % p.HV;
    item.first = item.sequence * p.T, item.length = p.T;
    if (p.cu_seqlens) {
        item.first = offset_of(p, item.sequence);
        item.length = offset_of(p, item.sequence + 1) - item.first;
    }
    item.keys = (i64(item.first) * p.H + item.head / p.group) * K;
    return item;
}

// Where the first checkpoint of an item lies.
DEVICE float* checkpoints_of(const ChunkParams& p, const Item& item, int column) {
    if (!p.checkpoints) return nullptr;
    int row = item.sequence * (p.T / CHUNK);
    if (p.cu_seqlens) {
        row = 0;
        for (int i = 0; i < item.sequence; i++) row += (offset_of(p, i + 1) - offset_of(p, i)) / CHUNK;
    }
    return p.checkpoints + ((i64(row) * p.HV + item.head) * V + column) * K;
}

// A chunk of an item of this unit.
struct Cursor {
    int index, chunk;
    Item item;

    DEVICE bool valid(const ChunkParams& p) const { return index < p.items; }
    DEVICE void start(const ChunkParams& p, int first) {
        index = unit(), chunk = first;
        if (valid(p)) item = item_of(p, index);
        skip(p, 0);
    }
    // Forward, from item to item.
    DEVICE void skip(const ChunkParams& p, int chunks) {
        chunk += chunks;
        while (valid(p) && chunk >= item.chunks()) {
            chunk -= item.chunks(), index += units();
            if (valid(p)) item = item_of(p, index);
        }
    }
};

// The number of chunks that this unit has to walk.
DEVICE u32 chunks_of_unit(const ChunkParams& p) {
    u32 all = 0;
    for (int index = unit(); index < p.items; index += units()) {
        int length = p.T;
        if (p.cu_seqlens) length = offset_of(p, index / p.HV + 1) - offset_of(p, index / p.HV);
        all += (length + CHUNK - 1) / CHUNK;
    }
    return all;
}

// ---------------------------------------------------------------- a prepared chunk

// Matrices of 16-bit numbers lie in 8 x 8 blocks of 128 bytes, 8 numbers of a row side by side: block (i, j) of a matrix
// with `columns` blocks side by side.
DEVICE constexpr int block_at(int i, int j, int columns) { return (i * columns + j) * 128; }

// In three parts that come and go by themselves: what V' is made of, what the state is updated with, what the output
// is made of.
enum Part { ERRORS, UPDATE, OUTPUT, PARTS };

constexpr int MATRIX = CHUNK * K * 2, SQUARE = CHUNK * CHUNK * 2;  // bytes
constexpr int AT_T = MATRIX, AT_KR = AT_T + SQUARE, AT_GAMMA = AT_KR + MATRIX;
constexpr int AT_QG = AT_GAMMA + K * 4, AT_AQK = AT_QG + MATRIX, AT_SCALE = AT_AQK + SQUARE;
constexpr int STAGE_BYTES = AT_SCALE + CHUNK * 4;
DEVICE constexpr int part_at(int part) { return part == ERRORS ? 0 : part == UPDATE ? AT_KR : part == OUTPUT ? AT_QG : STAGE_BYTES; }
DEVICE constexpr int part_bytes(int part) { return part_at(part + 1) - part_at(part); }

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

// ---------------------------------------------------------------- shared memory

struct Shared {
    unsigned char* base;
    // prepared chunks; operands of the scan; what the preparing warps exchange; barriers
    static constexpr int AT_STATE = STAGES * STAGE_BYTES;
    static constexpr int AT_RESIDUALS = AT_STATE + BV * K * 2;
    static constexpr int AT_ERRORS = AT_RESIDUALS + BV * CHUNK * 2;
    static constexpr int AT_COLUMNS = AT_ERRORS + BV * CHUNK * 2;
    static constexpr int AT_DECAYS = AT_COLUMNS + 2 * CHUNK * K * 2;
    static constexpr int AT_SCALES = AT_DECAYS + 2 * 4 * K * 4;
    static constexpr int AT_BETA = AT_SCALES + 2 * CHUNK * 4;
    static constexpr int TRIANGLE = 10 * 1024;  // 16 x 16 blocks, [2][32] lanes of four numbers each
    static constexpr int AT_SUMS_OF_L = AT_BETA + INVERTERS * CHUNK * 4;
    static constexpr int AT_COLUMNS_OF_T = AT_SUMS_OF_L + K / 64 * TRIANGLE;
    static constexpr int AT_SUMS = AT_COLUMNS_OF_T + 6 * 512;
    static constexpr int AT_LOGITS = AT_SUMS + PREPARE_WARPS * 16 * 16;
    static constexpr int AT_BIAS = AT_LOGITS + (G_WIDE ? 0 : CHUNK * K * 2);
    static constexpr int AT_BARRIERS = AT_BIAS + PREPARE_WARPS * 256;
    static constexpr int BYTES = AT_BARRIERS + (2 * PARTS * STAGES + 4) * 8;

    DEVICE Stage stage(u32 count) const { return {base + (count % STAGES) * STAGE_BYTES}; }
    DEVICE unsigned char* state() const { return base + AT_STATE; }          // S: [BV, K]
    DEVICE unsigned char* residuals() const { return base + AT_RESIDUALS; }  // v - Kg S: [BV, 64]
    DEVICE unsigned char* errors() const { return base + AT_ERRORS; }        // V': [BV, 64]
    // of two chunks, so that warps may be one apart
    DEVICE uint4* columns(u32 turn) const { return reinterpret_cast<uint4*>(base + AT_COLUMNS + turn % 2 * CHUNK * K * 2); }  // [warp][4][32]
    DEVICE float* decays(u32 turn) const { return reinterpret_cast<float*>(base + AT_DECAYS + turn % 2 * 4 * K * 4); }        // [4 blocks][K]
    DEVICE float* scale(u32 turn) const { return reinterpret_cast<float*>(base + AT_SCALES + turn % 2 * CHUNK * 4); }        // [64], of outputs
    DEVICE float* beta(int inverter) const { return reinterpret_cast<float*>(base + AT_BETA + inverter * CHUNK * 4); }        // [64]
    DEVICE float4* sums_of_L(int half, int row, int column) const { return in_triangle(AT_SUMS_OF_L + half * TRIANGLE, row, column); }
    // Where the same two warps have put their columns of the chunk before, which are of no more use.
    DEVICE float4* sums_of_A(u32 turn, int row, int column) const { return reinterpret_cast<float4*>(columns(turn + 1)) + (4 * row + column) * 64; }
    DEVICE float4* in_triangle(int at, int row, int column) const {
        return reinterpret_cast<float4*>(base + at) + (row * (row + 1) / 2 + column) * 64;
    }
    DEVICE uint4* columns_of_T() const { return reinterpret_cast<uint4*>(base + AT_COLUMNS_OF_T); }  // [6][32]
    DEVICE uint4* logits(int warp) const { return reinterpret_cast<uint4*>(base + AT_LOGITS) + warp * 128; }  // [4][32]
    DEVICE float* bias(int warp) const { return reinterpret_cast<float*>(base + AT_BIAS) + warp * 64; }
    DEVICE float4* sums() const { return reinterpret_cast<float4*>(base + AT_SUMS); }                // [warp][16 tokens]

    DEVICE u64* barriers() const { return reinterpret_cast<u64*>(base + AT_BARRIERS); }
    DEVICE u64* full(int part, u32 count) const { return barriers() + part * STAGES + count % STAGES; }
    DEVICE u64* empty(int part, u32 count) const { return full(part, count) + PARTS * STAGES; }
    DEVICE u64* summed() const { return barriers() + 2 * PARTS * STAGES; }  // L of a chunk
    DEVICE u64* inverted() const { return summed() + 1; }
    DEVICE u64* written() const { return summed() + 2; }
    DEVICE u64* placed() const { return summed() + 3; }  // there is room for a chunk

    // warps of a block that release a part
    static DEVICE constexpr int releases(int part) { return part == OUTPUT ? 4 : 1; }

    DEVICE void init_barriers() const {
        for (int part = 0; part < PARTS; part++) {
            for (u32 i = 0; i < STAGES; i++) {
                mbarrier_init(full(part, i), 1);
                mbarrier_init(empty(part, i), RANKS * releases(part));
            }
        }
        mbarrier_init(summed(), PREPARE_WARPS);
        mbarrier_init(inverted(), INVERTERS);
        mbarrier_init(written(), PREPARE_WARPS + INVERTERS);
        mbarrier_init(placed(), 1);
#if __CUDA_ARCH__ >= 900
        mbarrier_init_fence();
#endif
    }
};

DEVICE void block_or_cluster_sync() {
#if __CUDA_ARCH__ >= 900
    if constexpr (RANKS > 1) {
        cluster_sync();
        return;
    }
#endif
    barrier_sync(0, THREADS);
}

// ---------------------------------------------------------------- the way of a prepared chunk

// Chunk number `count` of a unit is prepared by its block count % SLICES, into place count % RING of the unit's ring, and
// copied, part by part, by block count % RANKS of every cluster to stage count % STAGES of the cluster's blocks.
DEVICE Stage ring_at(const ChunkParams& p, u32 count) {
    return {p.ring + (i64(unit()) * RING + count % RING) * STAGE_BYTES};
}
// Counters of a block: chunks that it has prepared; chunks that have arrived in its shared memory.
// Those that are waited for together share a line, others do not.
DEVICE u32* prepared(const ChunkParams& p, int slice) { return p.progress + unit() * 64 + slice; }
DEVICE u32* landed(const ChunkParams& p, int slice) { return prepared(p, slice) + 32; }

// Announce a copy; by one thread of each block, for the chunk whose copy follows the last that came.
DEVICE void expect(const Shared& shared, int part, u32 count) {
#if __CUDA_ARCH__ >= 900
    if (SHARED_CHUNKS) mbarrier_arrive_expecting(shared.full(part, count), part_bytes(part));
#endif
}

DEVICE void wait_for(const Shared& shared, int part, u32 count) {
    mbarrier_wait(shared.full(part, count), (count / STAGES) & 1);
}

// A warp is done with a part of chunk `count`: tell who brings the stage's next chunk.
DEVICE void release(const Shared& shared, int part, u32 count, int lane) {
    warp_sync();
    if (lane != 0) return;
#if __CUDA_ARCH__ >= 900
    if constexpr (RANKS > 1) {
        mbarrier_arrive_at(shared.empty(part, count), (count + STAGES) % RANKS);
        return;
    }
#endif
    mbarrier_arrive(shared.empty(part, count));
}

// Wait until all have released the stage that a part of chunk `count` goes to.
DEVICE void wait_for_release(const Shared& shared, int part, u32 count) {
    constexpr u32 PERIOD = RANKS > STAGES ? RANKS : STAGES;  // between two chunks that one block brings to one stage
    if (count >= STAGES) mbarrier_wait(shared.empty(part, count), (count / PERIOD - (count % PERIOD < STAGES ? 1 : 0)) & 1);
}

// Wait until the chunk that was in the ring's place before has arrived everywhere; by a whole warp.
DEVICE void wait_for_place(const ChunkParams& p, u32 count, int lane) {
    if (lane < SLICES) {
        while (read_counter(landed(p, lane)) <= count - RING) back_off();
    }
    warp_sync();
}

// Wait until more than `ready` chunks, from the first, have been prepared; their number. By a whole warp.
DEVICE u32 wait_for_chunks(const ChunkParams& p, u32 ready, int lane) {
    for (;;) {
        u32 next = lane < SLICES ? read_counter(prepared(p, lane)) * SLICES + lane : ~0u;  // first one missing
        for (int mask = 1; mask < 32; mask *= 2) next = min(next, shuffle_xor(next, mask));
        if (next > ready) {
            fence_gpu();
            return next;
        }
        back_off();
    }
}

// Copy a part of a prepared chunk if it is this block's turn; by one thread of each block, for every chunk in turn.
DEVICE void fetch(const ChunkParams& p, const Shared& shared, int part, u32 count, u32 all) {
#if __CUDA_ARCH__ >= 900
    if (count >= all || int(count % RANKS) != slice() % RANKS) return;
    wait_for_release(shared, part, count);
    fence_bulk_copies();
    bulk_copy_to_cluster(shared.stage(count).base + part_at(part), ring_at(p, count).base + part_at(part), part_bytes(part),
                         shared.full(part, count), (1 << RANKS) - 1);
#endif
}
