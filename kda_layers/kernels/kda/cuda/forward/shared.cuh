// Shared by the roles of the forward's warps: parameters, and the plan of shared memory.
#pragma once
#include "ForwardParams.h"
#include "gates.cuh"
#include "stage.cuh"
#include "task.cuh"

// Chosen by the build, in addition to stage.cuh's: GATE and HEAD_GATES (see gates.cuh), G_FP32 (1: gate logits are fp32),
// SAVES (1: save what the backward reads), POOLED (1: for engines: states in slots of a pool, one boundary state of each
// sequence, rows of tokens with strides), BLOCK_ROLES (1: blocks either scan or prepare, see two_roles.cu), with that
// PACKED (1: sequences have any lengths), CHECKPOINTS (1: store the state after each whole chunk) and STRETCH (chunks after
// which CTAs that scan states alone hand them to CTAs that follow with the outputs, see roles.cuh; 0: every CTA does both).
// If CLUSTER is 0, each CTA prepares all chunks for itself.
#ifndef BLOCK_ROLES
#define BLOCK_ROLES 0
#endif
#ifndef PACKED
#define PACKED 0
#endif
#ifndef CHECKPOINTS
#define CHECKPOINTS 0
#endif
#ifndef STRETCH
#define STRETCH 0
#endif
constexpr int STAGES = SEGMENTS == LAST_SCAN ? 3 : 2;
constexpr int PREPARE_WARPS = K / 16, INVERTERS = 3;
constexpr int THREADS = 32 * (PREPARE_WARPS + 4 + 1 + INVERTERS);  // 4 warps scan, 1 fetches
constexpr bool SHARED_CHUNKS = CLUSTER > 0;
constexpr u32 RING = 3 * SLICES;  // prepared chunks in global memory, per CTA group
constexpr bool PREPARES = SEGMENTS != LAST_SCAN;
constexpr bool KEEPS = SAVES || SEGMENTS;           // each prepared chunk has a row of its own
constexpr bool LANE_ORDER = BLOCK_ROLES && !KEEPS;  // of gamma, see gamma_at
static_assert(!PACKED || BLOCK_ROLES && !SEGMENTS);
static_assert(!POOLED || !SAVES && !SEGMENTS);
static_assert(!STRETCH || BLOCK_ROLES && !PACKED && !CHECKPOINTS && !SEGMENTS);
// Pieces of 16 bytes that shared memory has for 8 logits of the next chunk. With BLOCK_ROLES there is room for q, k and any
// logits of channels, otherwise only for logits of 16 bits.
constexpr int LOGIT_PIECES = HEAD_GATES || G_FP32 && !BLOCK_ROLES ? 0 : G_FP32 ? 2 : 1;
constexpr bool RECYCLES = SHARED_CHUNKS && !KEEPS;  // slots of the ring

enum Barrier { PREPARED = 1, INVERTING, MERGING, SCANNING, TOKENS };  // TOKENS + b: the warps of 16 tokens

// Place of a channel's gamma: a lane of the scan reads four at once, of the channels of its accumulators.
DEVICE int gamma_at(int channel) { return channel / 16 * 16 + channel / 2 % 4 * 4 + channel / 8 % 2 * 2 + channel % 2; }

// True if the decode kernel computes a sequence's last tokens.
DEVICE bool has_last_tokens(const ForwardParams& p, int sequence) {
    const int length = p.cu_seqlens ? offset_of(p, sequence + 1) - offset_of(p, sequence) : p.T;
    return in_chunks(p, length) < length;
}

// Of tokens in q and k: their stride, and the offset of a work tile's first one.
DEVICE int key_row(const ForwardParams& p) { return POOLED ? p.key_row : p.H * K; }
DEVICE i64 keys_of(const ForwardParams& p, const WorkTile& tile) {
    if constexpr (POOLED) return i64(tile.first) * p.key_row + tile.head / p.group * K;
    return (i64(tile.first) * p.H + tile.head / p.group) * K;
}

// The index of a tile's head among those of all sequences.
DEVICE int head_of(const ForwardParams& p, const WorkTile& tile) { return tile.sequence * p.HV + tile.head; }

// ---------------------------------------------------------------- shared memory

struct Shared {
    static constexpr int STAGES = ::STAGES;
    unsigned char* base;
    // prepared chunks; operands of the scan; what the preparing warps exchange; barriers; with BLOCK_ROLES, tasks
    static constexpr int AT_STATE = BLOCK_ROLES ? 0 : STAGES * STAGE_BYTES;
    static constexpr int AT_RESIDUALS = AT_STATE + BV * K * 2;
    static constexpr int AT_ERRORS = AT_RESIDUALS + BV * CHUNK * 2;
    static constexpr int AT_COLUMNS = BLOCK_ROLES ? 0 : AT_ERRORS + BV * CHUNK * 2;
    static constexpr int AT_DECAYS = AT_COLUMNS + 2 * CHUNK * K * 2;
    static constexpr int AT_SCALES = AT_DECAYS + 2 * 4 * K * 4;
    static constexpr int AT_BETA = AT_SCALES + 2 * CHUNK * 4;
    static constexpr int TRIANGLE = 10 * 1024;  // 16 x 16 blocks, [2][32] lanes, four elements each
    static constexpr int AT_SUMS_OF_L = AT_BETA + INVERTERS * CHUNK * 4;
    static constexpr int AT_COLUMNS_OF_T = AT_SUMS_OF_L + K / 64 * TRIANGLE;
    static constexpr int AT_SUMS = AT_COLUMNS_OF_T + 6 * 512;
    static constexpr int KEY_ROWS = BLOCK_ROLES ? 8 : 0, INPUT_ROWS = KEY_ROWS + 4 * LOGIT_PIECES;
    static constexpr int AT_INPUTS = AT_SUMS + PREPARE_WARPS * 16 * 16;
    static constexpr int AT_BIAS = AT_INPUTS + PREPARE_WARPS * INPUT_ROWS * 32 * 16;
    static constexpr int AT_BARRIERS = PREPARES ? AT_BIAS + (BLOCK_ROLES ? 2 : 1) * PREPARE_WARPS * 256 : AT_COLUMNS;
    static constexpr int AT_TASKS = AT_BARRIERS + (2 * PARTS * STAGES + 5) * 8;
    static constexpr int BYTES = AT_TASKS + (BLOCK_ROLES ? Tasks::BYTES : 0);

    static_assert(AT_INPUTS % 128 == 0, "misaligned copies cost 6 % of packed calls");

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
    DEVICE uint4* columns_of_T() const { return reinterpret_cast<uint4*>(base + AT_COLUMNS_OF_T); }  // [6][32]
    // Of the next chunk: with BLOCK_ROLES [4] rows of q, then of k; [4][LOGIT_PIECES] rows of logits; a row is [32 lanes]
    DEVICE uint4* inputs(int warp) const { return reinterpret_cast<uint4*>(base + AT_INPUTS) + warp * INPUT_ROWS * 32; }
    DEVICE float* bias(int warp, u32 iteration = 0) const {
        return reinterpret_cast<float*>(base + AT_BIAS) + (int(iteration % 2) * PREPARE_WARPS + warp) * 64;
    }
    DEVICE float4* sums() const { return reinterpret_cast<float4*>(base + AT_SUMS); }  // [warp][16 tokens]

    DEVICE u64* barriers() const { return reinterpret_cast<u64*>(base + AT_BARRIERS); }
    DEVICE u64* full(int part, u32 count) const { return barriers() + part * STAGES + count % STAGES; }
    DEVICE u64* empty(int part, u32 count) const { return full(part, count) + PARTS * STAGES; }
    DEVICE u64* summed() const { return barriers() + 2 * PARTS * STAGES; }  // L of a chunk
    DEVICE u64* inverted() const { return summed() + 1; }
    // Without BLOCK_ROLES: Tasks has its own
    DEVICE u64* written() const { return summed() + 2; }
    DEVICE u64* placed() const { return summed() + 3; }  // the chunk's slot is free
    DEVICE unsigned char** place() const { return reinterpret_cast<unsigned char**>(summed() + 4); }
    DEVICE Tasks tasks() const { return {base + AT_TASKS}; }  // with BLOCK_ROLES

    // warps of a CTA that release a part
    static DEVICE constexpr int releases(int part) { return part == OUTPUT ? 4 : 1; }

    DEVICE void init_barriers() const {
        init_part_barriers(*this);
        mbarrier_init(summed(), PREPARE_WARPS);
        mbarrier_init(inverted(), INVERTERS);
        mbarrier_init(written(), PREPARE_WARPS + INVERTERS);
        mbarrier_init(placed(), 1);
        if (BLOCK_ROLES) tasks().init_barriers(PREPARE_WARPS + INVERTERS);
#if __CUDA_ARCH__ >= 900
        fence_mbarrier_init();
#endif
    }
};

static_assert(BLOCK_ROLES || Shared::BYTES == SHARED_BYTES, "the host's plan of shared memory");

// Which chunks a CTA prepares, and how they reach the scan.
#if BLOCK_ROLES
#include "roles.cuh"
#else
#include "groups.cuh"
#endif
