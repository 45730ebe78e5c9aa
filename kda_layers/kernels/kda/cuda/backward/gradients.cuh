// Shared by the parts of gradients.cu: parameters, work tiles, the plan of shared memory, copies.
#pragma once
#include "GradientsParams.h"
#include "chunk.cuh"
#include "gates.cuh"

// Chosen by the build: K, V (128 or 64), IO (Bf16 or Fp16), GATE (see gates.cuh), G_FP32 (1: gate logits are fp32),
// HAS_WGMMA (1 on sm_90a).
constexpr int BLOCKS = CHUNK / 16;
constexpr int WARPS = K / 16, THREADS = 32 * WARPS;  // a warp has 16 channels
static_assert(K == V, "states are square");

// ---------------------------------------------------------------- work

// A chunk: its row in per-chunk tensors, its first token among B * T, and how many it has: 0 after the last chunk.
struct Chunk {
    int row, first, tokens;
};

// Sum over the lanes of a warp.
DEVICE int warp_sum(int x) {
    for (int mask = 1; mask < 32; mask *= 2) x += int(shuffle_xor(u32(x), mask));
    return x;
}

// Finds chunks by row; rows must not decrease from call to call.
struct ChunkFinder {
    int sequence, rows;  // packed: the sequences before `sequence` have `rows` chunks

    DEVICE Chunk find(Lane lane, const GradientsParams& p, int row) {  // executed by a full warp
        if (!p.cu_seqlens) {
            int each = (p.T + CHUNK - 1) / CHUNK, at = row % each * CHUNK;
            return {row, row / each * p.T + at, row < p.rows ? min(CHUNK, p.T - at) : 0};
        }
        for (; sequence < p.sequences; sequence += 32) {  // one sequence per lane
            int mine = sequence + lane.id, first = 0, length = 0;
            if (mine < p.sequences) first = offset_of(p, mine), length = offset_of(p, mine + 1) - first;
            int chunks = (length + CHUNK - 1) / CHUNK, before = rows, all = chunks;
            for (int mask = 1; mask < 32; mask *= 2) {
                int others = int(shuffle_xor(u32(all), mask));
                if (lane.id & mask) before += others;
                all += others;
            }
            if (row < rows + all) {
                bool here = row >= before && row < before + chunks;
                int at = (row - before) * CHUNK;
                return {row, warp_sum(here ? first + at : 0), warp_sum(here ? min(CHUNK, length - at) : 0)};
            }
            rows += all;
        }
        return {row, 0, 0};
    }
};

// A chunk of one value head. The value heads of one key head are consecutive.
struct WorkTile {
    int index, key_head, of_group;  // index: of chunk and key head
    Chunk chunk;

    DEVICE bool valid() const { return chunk.tokens > 0; }
    DEVICE int head(const GradientsParams& p) const { return key_head * p.group + of_group; }
    DEVICE bool first() const { return of_group == 0; }
    DEVICE bool last(const GradientsParams& p) const { return of_group == p.group - 1; }
    DEVICE i64 key_row(const GradientsParams& p) const {
        return i64(chunk.first) * p.H + key_head;
    }  // of the first token
    DEVICE i64 row(const GradientsParams& p) const { return i64(chunk.first) * p.HV + head(p); }
    DEVICE i64 chunk_row(const GradientsParams& p) const { return i64(chunk.row) * p.HV + head(p); }

    static DEVICE WorkTile of(Lane lane, const GradientsParams& p, int index, ChunkFinder& finder) {
        return {index, index % p.H, 0, finder.find(lane, p, index / p.H)};
    }
    DEVICE WorkTile next(Lane lane, const GradientsParams& p, ChunkFinder& finder) const {
        if (!last(p)) return {index, key_head, of_group + 1, chunk};
        return of(lane, p, index + int(gridDim.x), finder);
    }
};

// ---------------------------------------------------------------- shared memory

// Matrices are copied in row tiles of 16 rows, 16 bytes per thread.
constexpr int ROW_TILE_BYTES = 16 * K * 2;  // bytes
constexpr int KEYS = CHUNK * K * 2, VALUES = CHUNK * V * 2, STATE = V * K * 2;
constexpr int STATE_ROW_TILES = V / 16, TOKEN_ROW_TILES = CHUNK / 16;
constexpr int INPUT_ROW_TILES = 2 * STATE_ROW_TILES + 3 * TOKEN_ROW_TILES;  // operands of the MMAs
constexpr int BLOCK_ROW_TILES = 6;  // their results for 16 tokens replace this many
constexpr int INPUTS =
    (INPUT_ROW_TILES > BLOCKS * BLOCK_ROW_TILES ? INPUT_ROW_TILES : BLOCKS * BLOCK_ROW_TILES) * ROW_TILE_BYTES;
constexpr int FP32_ROW = K + 4;  // fp32 logits, padded against bank conflicts
constexpr int LOGITS = G_FP32 ? CHUNK * FP32_ROW * 4 : KEYS;
constexpr int TRIANGLE = 36 * 256;  // 8 x 8 blocks of fp32 of a lower triangle

struct Shared {
    unsigned char* base;
    // operands of the MMAs; other inputs; what the warps exchange
    static constexpr int AT_D_STATE = STATE;
    static constexpr int AT_D_V = AT_D_STATE + STATE;
    static constexpr int AT_D_O = AT_D_V + VALUES;
    static constexpr int AT_ERRORS = AT_D_O + VALUES;
    static constexpr int AT_Q = INPUTS;
    static constexpr int AT_K = AT_Q + KEYS;
    static constexpr int AT_G = AT_K + KEYS;
    static constexpr int AT_TRIANGLES = AT_G + LOGITS;
    static constexpr int AT_FACTORS = AT_TRIANGLES + 2 * TRIANGLE;
    static constexpr int AT_TOTALS = AT_FACTORS + WARPS * 6 * 512;
    static constexpr int AT_DIAGONAL = AT_TOTALS + BLOCKS * K * 4;
    static constexpr int AT_NORMS = AT_DIAGONAL + CHUNK * 4;
    static constexpr int AT_PARTS = AT_NORMS + 2 * CHUNK * 4;
    static constexpr int AT_SUMS = AT_PARTS + WARPS * CHUNK * 8;
    static constexpr int AT_RATES = AT_SUMS + CHUNK * 8;
    static constexpr int AT_BIAS = AT_RATES + 2 * WARPS * 4;
    static constexpr int AT_TILES = AT_BIAS + K * 4;
    static constexpr int AT_FINDER = AT_TILES + 2 * sizeof(WorkTile);
    static constexpr int BYTES = AT_FINDER + sizeof(ChunkFinder);

    DEVICE unsigned char* state() const { return base; }                 // S: [V, K]
    DEVICE unsigned char* d_state() const { return base + AT_D_STATE; }  // dS
    DEVICE unsigned char* errors() const { return base + AT_ERRORS; }    // V': [64, V]
    DEVICE unsigned char* d_v() const { return base + AT_D_V; }
    DEVICE unsigned char* d_o() const { return base + AT_D_O; }
    DEVICE unsigned char* q() const { return base + AT_Q; }  // [64, K] inputs, later their gradients
    DEVICE unsigned char* k() const { return base + AT_K; }
    DEVICE unsigned char* g() const { return base + AT_G; }  // likewise; if fp32, in rows of FP32_ROW
    DEVICE float* floats(int at) const { return reinterpret_cast<float*>(base + at); }
    // 8 x 8 blocks of dL or dAqk
    DEVICE float* dL(int i, int j) const { return floats(AT_TRIANGLES) + (i * (i + 1) / 2 + j) * 64; }
    DEVICE float* dA(int i, int j) const { return dL(i, j) + TRIANGLE / 4; }
    // Decays of a warp's channels in fp16 pairs: of block b from its start, b > 0, and to its end, b < 3
    DEVICE uint4* rise(int b, int warp) const {
        return reinterpret_cast<uint4*>(base + AT_FACTORS) + (warp * 6 + b - 1) * 32;
    }
    DEVICE uint4* fall(int b, int warp) const {
        return reinterpret_cast<uint4*>(base + AT_FACTORS) + (warp * 6 + b + 3) * 32;
    }
    // StateGradients of 8 tokens and a warp's channels, [lane]; they replace the MMAs' operands
    DEVICE float4* by_state(int which, int fragment, int warp) const {
        return reinterpret_cast<float4*>(base + fragment / 2 * BLOCK_ROW_TILES * ROW_TILE_BYTES) +
               ((which * WARPS + warp) * 2 + fragment % 2) * 32;
    }
    DEVICE float* totals(int b) const { return floats(AT_TOTALS) + b * K; }  // [K] decays of whole blocks
    DEVICE float* diagonal() const { return floats(AT_DIAGONAL); }           // of dAqk: [64]
    DEVICE float* q_norms() const { return floats(AT_NORMS); }               // 1 / |q|: [64]
    DEVICE float* k_norms() const { return q_norms() + CHUNK; }
    DEVICE float4* parts(int warp) const {
        return reinterpret_cast<float4*>(base + AT_PARTS) + warp * 32;
    }  // see sum_inner
    DEVICE float4* inner() const { return reinterpret_cast<float4*>(base + AT_SUMS); }
    DEVICE float* d_rates() const { return floats(AT_RATES); }  // [warp]
    // In shared memory, as all registers are in use.
    DEVICE float* rate(int warp) const { return d_rates() + WARPS + warp; }  // of the gates
    DEVICE float* bias() const { return floats(AT_BIAS); }                   // [K]
    DEVICE WorkTile& tile(int count) const { return reinterpret_cast<WorkTile*>(base + AT_TILES)[count % 2]; }
    DEVICE ChunkFinder& finder() const { return *reinterpret_cast<ChunkFinder*>(base + AT_FINDER); }
};

static_assert(Shared::BYTES == SHARED_BYTES, "the host's plan of shared memory");

// ---------------------------------------------------------------- copies

DEVICE void block_sync() { barrier_sync(0, THREADS); }

// Keeps addresses of copies from being held in registers.
DEVICE int thread() { return opt_barrier(threadIdx.x); }

// Copy a row tile, rows `stride` elements apart, into 8 x 8 blocks; rows from `valid` on become zeros.
DEVICE void copy_row_tile(unsigned char* to, const u16* from, i64 stride, int valid) {
    int at = thread(), row = at / K * 8 + at % 8;
    cp_async_16(to + 16 * at, from + row * stride + at / 8 % (K / 8) * 8, row < valid);
}

// A matrix of a chunk's tokens.
DEVICE void copy_rows(unsigned char* to, const u16* from, i64 stride, int valid) {
    #pragma unroll
    for (int i = 0; i < TOKEN_ROW_TILES; i++)
        copy_row_tile(to + i * ROW_TILE_BYTES, from + 16 * i * stride, stride, valid - 16 * i);
}

// The inverse of copy_rows.
DEVICE void store_rows(u16* to, const unsigned char* from, i64 stride, int valid) {
    int at = thread(), row = at / K * 8 + at % 8;
    to += row * stride + at / 8 % (K / 8) * 8, from += 16 * at;
    #pragma unroll
    for (int i = 0; i < TOKEN_ROW_TILES; i++) {
        if (row + 16 * i < valid)
            *reinterpret_cast<uint4*>(to + 16 * i * stride) =
                *reinterpret_cast<const uint4*>(from + i * ROW_TILE_BYTES);
    }
}

// Copy the MMAs' operands S, dS, bX, dO, V': row tiles `first` to `end`.
DEVICE void copy_inputs(const GradientsParams& p, const Shared& shared, const WorkTile& tile, int first, int end) {
    constexpr int STATES = 2 * STATE_ROW_TILES;
    const int at = thread(), row = at / K * 8 + at % 8, column = at / 8 % (K / 8) * 8, tokens = tile.chunk.tokens - row;
    const i64 stride = i64(p.HV) * V, states = tile.chunk_row(p) * V * K + row * K + column,
              values = tile.row(p) * V + row * stride + column;
    unsigned char* to = shared.base + 16 * at;
    for (int i = first; i < min(end, STATES); i++) {
        cp_async_16(to + i * ROW_TILE_BYTES,
                    (i < STATE_ROW_TILES ? p.states : p.d_states) + states + i % STATE_ROW_TILES * 16 * K, true);
    }
    for (int row_tile = max(first, STATES); row_tile < end; row_tile++) {
        int which = (row_tile - STATES) / TOKEN_ROW_TILES, i = row_tile % TOKEN_ROW_TILES * 16;
        cp_async_16(to + row_tile * ROW_TILE_BYTES,
                    (which == 0   ? p.d_v
                     : which == 1 ? p.d_o
                                  : p.errors) +
                        values + i * stride,
                    i < tokens);
    }
}

// Copy the gate logits and, with a key head's first value head, q and k.
DEVICE void copy_tokens(const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    int tokens = tile.chunk.tokens;
    if (tile.first()) {
        i64 keys = tile.key_row(p) * K, stride = i64(p.H) * K;
        copy_rows(shared.q(), p.q + keys, stride, tokens);
        copy_rows(shared.k(), p.k + keys, stride, tokens);
    }
    const Logit* g = static_cast<const Logit*>(p.g) + tile.row(p) * K;
    i64 stride = i64(p.HV) * K;
    if constexpr (G_FP32) {
        #pragma unroll
        for (int i = 0; i < CHUNK * K / 4; i += THREADS) {
            int at = i + thread(), row = at / (K / 4), column = at % (K / 4) * 4;
            cp_async_16(shared.g() + (row * FP32_ROW + column) * 4, g + row * stride + column, row < tokens);
        }
    } else {
        copy_rows(shared.g(), reinterpret_cast<const u16*>(g), stride, tokens);
    }
}

DEVICE void store_logits(const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    Logit* d_g = static_cast<Logit*>(p.d_g) + tile.row(p) * K;
    i64 stride = i64(p.HV) * K;
    if constexpr (G_FP32) {
        #pragma unroll
        for (int i = 0; i < CHUNK * K / 4; i += THREADS) {
            int at = i + thread(), row = at / (K / 4), column = at % (K / 4) * 4;
            if (row < tile.chunk.tokens) {
                *reinterpret_cast<float4*>(d_g + row * stride + column) =
                    *reinterpret_cast<const float4*>(shared.g() + (row * FP32_ROW + column) * 4);
            }
        }
    } else {
        store_rows(reinterpret_cast<u16*>(d_g), shared.g(), stride, tile.chunk.tokens);
    }
}
