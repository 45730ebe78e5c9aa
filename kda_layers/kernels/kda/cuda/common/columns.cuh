// A scan whose MMAs have columns of V as rows: shared by the reverse scan and the forward's by blocks of two roles.
//
// A CTA has BV columns of V, which are independent, and a scanning warp 16 of them: the result of one MMA, rounded, is
// operand A of the next in the same lane, so that the chain from chunk to chunk does not pass through shared memory. What a
// scanning warp issues is what a chunk takes, so moving warps bring a chunk's values to shared memory and take its results from
// there, by complete rows; of global memory, a scanning warp addresses only states and their gradients.
#pragma once
#include "stage.cuh"

constexpr int WARPS = BV / 16, MOVERS = 4;  // warps that scan, 16 columns each, and that move
static_assert(WARPS % 4 == 0, "only full warpgroups scan");

// Arrive at a barrier that expects every warp of a role.
DEVICE void signal(Lane lane, u64* barrier) {
    warp_sync();
    if (lane.id == 0) mbarrier_arrive(barrier);
}

// Wait for chunk `count` at one of two barriers, for even and for odd chunks.
DEVICE void wait_in_turn(u64* barrier, u32 count) { mbarrier_wait(barrier, count / 2 & 1); }

// Offset of 16 bytes of a token, its columns 8 piece to 8 piece + 7, in a chunk's values or results [64, BV]. Pieces are
// permuted so that those of eight rows have no bank conflicts, nor those of a row.
DEVICE int token_at(int token, int piece) { return (token * (BV / 8) + (piece ^ token % 8)) * 16; }

// ---------------------------------------------------------------- operands

using Tokens = u32[CHUNK / 16][4];              // 16 columns by the chunk's tokens, rounded, as operand A
template <int N> using Sums = float[N / 8][4];  // 16 columns by N, in mma's accumulator order

constexpr u32 SIGNS = 0x80008000u;  // of a pair

// Round x to operand A; `signs` is XORed with each pair, SIGNS to negate.
template <int N> DEVICE void as_operand(u32 (&to)[N / 16][4], const Sums<N>& x, u32 signs = 0) {
    #pragma unroll
    for (int i = 0; i < N / 4; i++) to[i / 4][i % 4] = Io::pack(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]) ^ signs;
}

// d += a b over the tokens 16 first to 16 last (= instead of += if `overwrites`), b [64, N] of [64, row].
template <int N, int first = 0, int last = CHUNK / 16, bool overwrites = false, class Type = Io, int row = N>
DEVICE void multiply_tokens(Sums<N>& d, const Tokens& a, Operand b) {
    wgmma_rs<Type, N, true, overwrites>(d, a[first], operand_at(b, first * row * 32));
    #pragma unroll
    for (int s = first + 1; s < last; s++) wgmma_rs<Type, N, true>(d, a[s], operand_at(b, s * row * 32));
    wgmma_commit();
}

// d += a b^T over columns 16 first to 16 last of b, [64, 16 steps] (= instead of += if `overwrites`).
template <int steps, int first = 0, int last = steps, bool overwrites = false>
DEVICE void multiply_rows(Sums<CHUNK>& d, const u32 (&a)[steps][4], Operand b) {
    wgmma_rs<Io, CHUNK, false, overwrites>(d, a[first], operand_at(b, first * 256));
    #pragma unroll
    for (int s = first + 1; s < last; s++) wgmma_rs<Io, CHUNK>(d, a[s], operand_at(b, s * 256));
    wgmma_commit();
}

// The place in a chunk's values or results that a lane gives for step s of a warp's operand, the rows of four 8 x 8 matrices.
DEVICE unsigned char* operand_row(Lane lane, unsigned char* tokens, int s) {
    return tokens + token_at(16 * s + lane.id / 16 * 8 + lane.id % 8, 2 * lane.warp + lane.id / 8 % 2);
}

// ---------------------------------------------------------------- a state, or its gradient

// Its transpose, columns of V by K: the accumulators of one MMA, or of one for each half of the channels, so that a half can be
// read while the other is computed. `eight(i)`: of channels 8 i to 8 i + 7.
struct Whole {
    Sums<K> S;
    DEVICE float (&eight(int i))[4] { return S[i]; }
};
struct Halves {
    Sums<K / 2> low, high;
    DEVICE float (&eight(int i))[4] { return i < K / 16 ? low[i] : high[i - K / 16]; }
};

template <class Accumulators> struct ColumnsOf : Accumulators {
    // Call f with each pair of neighbours and its offset in the warp's [16, K].
    template <class F> DEVICE void each(Lane lane, F f) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int column = lane.id / 4 + 8 * r;
            #pragma unroll
            for (int i = 0; i < K / 8; i++) {
                float (&x)[4] = this->eight(i);
                f(x[2 * r], x[2 * r + 1], column * K + 8 * i + lane.id % 4 * 2);
            }
        }
    }
    DEVICE void load(Lane lane, const float* from) {
        each(lane, [&](float& a, float& b, int at) {
            float2 x = from ? *reinterpret_cast<const float2*>(from + at) : make_float2(0.f, 0.f);
            a = x.x, b = x.y;
        });
    }
    DEVICE void store(Lane lane, float* to) {
        each(lane, [&](float& a, float& b, int at) { *reinterpret_cast<float2*>(to + at) = make_float2(a, b); });
    }
    // To another warp: a warp's [16, K] in the order of its lanes.
    DEVICE void give(Lane lane, float* to) {
        #pragma unroll
        for (int i = 0; i < K / 8; i++) {
            const float (&x)[4] = this->eight(i);
            reinterpret_cast<float4*>(to)[32 * i + lane.id] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    DEVICE void take(Lane lane, const float* from) {
        #pragma unroll
        for (int i = 0; i < K / 8; i++) {
            const float4 from_lane = reinterpret_cast<const float4*>(from)[32 * i + lane.id];
            float (&x)[4] = this->eight(i);
            x[0] = from_lane.x, x[1] = from_lane.y, x[2] = from_lane.z, x[3] = from_lane.w;
        }
    }
};
using StateColumns = ColumnsOf<Whole>;

// ---------------------------------------------------------------- the moving warps

// A warp's 16 tokens of a chunk, complete rows: each lane has 16 bytes of every TOKENS-th token.
struct Rows {
    static constexpr int PIECES = BV / 8, TOKENS = 32 / PIECES;
    uint4 x[16 / TOKENS];

    template <class F> static DEVICE void each(Lane lane, F f) {
        #pragma unroll
        for (int i = 0; i < 16 / TOKENS; i++) f(i, 16 * lane.warp + TOKENS * i + lane.id / PIECES, lane.id % PIECES);
    }
    // Load zeros for tokens from `tokens` on.
    DEVICE void load(Lane lane, const u16* from, i64 stride, int tokens) {
        each(lane, [&](int i, int token, int piece) {
            x[i] = token < tokens ? load_once<uint4>(from + token * stride + 8 * piece) : make_uint4(0, 0, 0, 0);
        });
    }
};
