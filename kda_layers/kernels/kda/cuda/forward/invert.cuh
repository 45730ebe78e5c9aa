// T' = (I + N)^-1 beta for the lower triangular N = diag(beta) L of a chunk, by three warps: 16 x 16 blocks by masked
// doubling, then merges of neighbours. Every intermediate is itself an inverse, so that entries stay small enough for
// fp16 operands (docs/internals/kernels/forward.md).
#pragma once
#include "shared.cuh"

constexpr int HALVES = K / 64;                 // warps that share 16 tokens, 64 channels each
enum Column { T00, T11, T22, T10, Y20, Y21 };  // blocks that warps exchange
using Tile = float[2][4];                      // 16 x 16, two of mma's accumulators side by side

DEVICE void as_rows(u32 (&a)[4], const Tile& x) {  // A fragments
    a[0] = Fp16::pack(x[0][0], x[0][1]), a[1] = Fp16::pack(x[0][2], x[0][3]);
    a[2] = Fp16::pack(x[1][0], x[1][1]), a[3] = Fp16::pack(x[1][2], x[1][3]);
}

DEVICE uint4 as_columns(const Tile& x) {  // B fragments: tile 0, tile 1
    return make_uint4(transpose_8x8(Fp16::pack(x[0][0], x[0][1])), transpose_8x8(Fp16::pack(x[0][2], x[0][3])),
                      transpose_8x8(Fp16::pack(x[1][0], x[1][1])), transpose_8x8(Fp16::pack(x[1][2], x[1][3])));
}

DEVICE void multiply(Tile& c, const u32 (&a)[4], uint4 b) {
    Fp16::mma(c[0], a[0], a[1], a[2], a[3], b.x, b.y);
    Fp16::mma(c[1], a[0], a[1], a[2], a[3], b.z, b.w);
}

// Entries of x whose row and column lie in sibling blocks of `level`.
DEVICE void between_siblings(Lane lane, Tile& to, const Tile& x, int level) {
    #pragma unroll
    for (int n = 0; n < 2; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = lane.id / 4 + 8 * (i / 2), column = 8 * n + 2 * (lane.id % 4) + i % 2;
            bool inside = row > column && (row ^ column) >= level && (row ^ column) < 2 * level;
            to[n][i] = inside ? x[n][i] : 0.f;
        }
    }
}

DEVICE void negate(Tile& x) {
    #pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = -x[i / 4][i % 4];
}

// (I + N)^-1 for a strictly lower triangular N by masked doubling.
DEVICE void invert(Lane lane, Tile& T, const Tile& N) {
    between_siblings(lane, T, N, 1);
    negate(T);
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        if (lane.id / 4 + 8 * (i % 4 / 2) == 8 * (i / 4) + 2 * (lane.id % 4) + i % 2) T[i / 4][i % 4] = 1.f;
    }
    #pragma unroll
    for (int level = 2; level < 16; level *= 2) {
        Tile M, P = {};
        u32 a[4];
        between_siblings(lane, M, N, level);
        as_rows(a, T);
        multiply(P, a, as_columns(M));
        negate(P);
        as_rows(a, P);
        multiply(T, a, as_columns(T));
    }
}

// Store a 16 x 16 block of T or Aqk.
template <class Type = Io> DEVICE void store_block(Lane lane, unsigned char* to, const Tile& x, int b, int j) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        u32* at = reinterpret_cast<u32*>(to + block_at(2 * b + i / 2, 2 * j + i % 2, CHUNK / 8));
        at[lane.id] = Type::pack(x[i % 2][2 * (i / 2)], x[i % 2][2 * (i / 2) + 1]);
    }
}

// Store a row of blocks, zeros right of the diagonal.
template <class Type = Io>
DEVICE void store_row(Lane lane, unsigned char* to, const Tile (&left)[3], const Tile& own, int b) {
    const Tile zero = {};
    #pragma unroll
    for (int j = 0; j < 3; j++) {
        if (j < b) store_block<Type>(lane, to, left[j], b, j);
        else store_block<Type>(lane, to, zero, b, j + 1);
    }
    store_block<Type>(lane, to, own, b, b);
}

// x[i][j] *= columns[j]
DEVICE void scale_columns(Lane lane, Tile& x, const float* columns) {
    #pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 c = *reinterpret_cast<const float2*>(columns + 8 * n + 2 * (lane.id % 4));
        x[n][0] *= c.x, x[n][1] *= c.y, x[n][2] *= c.x, x[n][3] *= c.y;
    }
}

DEVICE void scale_rows(Tile& x, const float (&rows)[2]) {
    #pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] *= rows[i % 4 / 2];
}

// Store a row of T' to the chunk and, unless `T_fp16` is null, in fp16. Overwrites the row.
DEVICE void store_T(Lane lane, const Stage& stage, unsigned char* T_fp16, Tile (&left)[3], Tile& own, int b) {
    store_row(lane, stage.T(), left, own, b);
    if (!T_fp16) return;
    const float rows[2] = {1 << T_FP16_SHIFT, 1 << T_FP16_SHIFT};
    #pragma unroll
    for (int j = 0; j < 3; j++) scale_rows(left[j], rows);
    scale_rows(own, rows);
    store_row<Fp16>(lane, T_fp16, left, own, b);
}

// Partial sums over one half of the channels.
DEVICE void send_sums(float4* to, const Tile& x) {
    #pragma unroll
    for (int n = 0; n < 2; n++) to[n * 32] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
}

DEVICE void add_sums(Tile& x, const float4* from) {
    #pragma unroll
    for (int n = 0; n < 2; n++) {
        float4 other = from[n * 32];
        x[n][0] += other.x, x[n][1] += other.y, x[n][2] += other.z, x[n][3] += other.w;
    }
}

// Block (b, j) of N from the partial sums of L.
DEVICE void load_block(Lane lane, Tile& x, const Shared& shared, const float* beta, int b, int j) {
    #pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = 0.f;
    #pragma unroll
    for (int h = 0; h < HALVES; h++) add_sums(x, shared.sums_of_L(h, b, j) + lane.id);
    float rows[2] = {beta[16 * b + lane.id / 4], beta[16 * b + lane.id / 4 + 8]};
    scale_rows(x, rows);
}

// Warp 0 has the rows of blocks 0 and 1, warp 1 of block 2, warp 2 of block 3; they exchange blocks through shared
// memory as B fragments.

DEVICE void invert_upper(Lane lane, const Shared& shared, const Stage& stage, unsigned char* T_fp16, const float* beta,
                         uint4* columns) {
    Tile T[3] = {}, own, L;
    load_block(lane, L, shared, beta, 0, 0);
    invert(lane, own, L);
    uint4 t00 = as_columns(own);
    columns[T00 * 32] = t00;
    scale_columns(lane, own, beta);
    store_T(lane, stage, T_fp16, T, own, 0);

    load_block(lane, L, shared, beta, 1, 1);
    invert(lane, own, L);
    columns[T11 * 32] = as_columns(own);
    load_block(lane, L, shared, beta, 1, 0);
    u32 a[4];
    Tile P = {};
    as_rows(a, L);
    multiply(P, a, t00);
    negate(P);
    as_rows(a, own);
    multiply(T[0], a, as_columns(P));
    columns[T10 * 32] = as_columns(T[0]);
    barrier_sync(INVERTING, 32 * INVERTERS);
    scale_columns(lane, T[0], beta);
    scale_columns(lane, own, beta + 16);
    store_T(lane, stage, T_fp16, T, own, 1);
}

// a = -x, as A fragments; x is unchanged.
DEVICE void as_negated_rows(u32 (&a)[4], Tile& x) {
    negate(x);
    as_rows(a, x);
    negate(x);
}

DEVICE void invert_lower(Lane lane, const Shared& shared, const Stage& stage, unsigned char* T_fp16, const float* beta,
                         uint4* columns, int b) {
    Tile T[3] = {}, own, L;
    load_block(lane, L, shared, beta, b, b);
    invert(lane, own, L);
    if (b == 2) columns[T22 * 32] = as_columns(own);
    u32 minus_own[4], minus_t32[4], a[4];
    as_negated_rows(minus_own, own);
    barrier_sync(INVERTING, 32 * INVERTERS);
    if (b == 3) {
        Tile P = {};
        load_block(lane, L, shared, beta, 3, 2);
        as_rows(a, L);
        multiply(P, a, columns[T22 * 32]);
        multiply(T[2], minus_own, as_columns(P));
        negate(T[2]);
        as_rows(minus_t32, T[2]);
        negate(T[2]);
    }
    Tile Y0 = {}, Y1 = {};
    load_block(lane, L, shared, beta, b, 0);
    as_rows(a, L);
    multiply(Y0, a, columns[T00 * 32]);
    load_block(lane, L, shared, beta, b, 1);
    as_rows(a, L);
    multiply(Y0, a, columns[T10 * 32]);
    multiply(Y1, a, columns[T11 * 32]);
    uint4 y0 = as_columns(Y0), y1 = as_columns(Y1);
    if (b == 2) columns[Y20 * 32] = y0, columns[Y21 * 32] = y1;
    multiply(T[0], minus_own, y0);
    multiply(T[1], minus_own, y1);
    barrier_sync(MERGING, 64);
    if (b == 3) {
        multiply(T[0], minus_t32, columns[Y20 * 32]);
        multiply(T[1], minus_t32, columns[Y21 * 32]);
    }
    #pragma unroll
    for (int j = 0; j < 3; j++) scale_columns(lane, T[j], beta + 16 * j);
    scale_columns(lane, own, beta + 16 * b);
    store_T(lane, stage, T_fp16, T, own, b);
}

// Betas of a chunk, one copy per warp; zeros after the sequence's end.
DEVICE void load_write_strengths(Lane lane, float* to, const ForwardParams& p, const Cursor& at) {
    #pragma unroll
    for (int i = lane.id; i < CHUNK; i += 32) {
        int token = at.chunk * CHUNK + i;
        i64 row = at.tile.row(p, min(token, at.tile.length - 1));
        if constexpr (POOLED) row = i64(at.tile.first + min(token, at.tile.length - 1)) * p.beta_row + at.tile.head;
        float logit =
            p.beta_fp32 ? static_cast<const float*>(p.beta)[row] : Io::load(static_cast<const u16*>(p.beta) + row);
        to[i] = token < at.tile.length ? write_strength(logit, p.beta_activation) : 0.f;
    }
}

DEVICE void invert_chunk(Lane lane, const Shared& shared, const Stage& stage, unsigned char* T_fp16,
                         const float* beta) {
    uint4* columns = shared.columns_of_T() + lane.id;
    if (lane.warp == 0) invert_upper(lane, shared, stage, T_fp16, beta, columns);
    else invert_lower(lane, shared, stage, T_fp16, beta, columns, lane.warp + 1);
}
