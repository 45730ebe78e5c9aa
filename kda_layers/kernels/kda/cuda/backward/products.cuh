// MMAs over a chunk, by warpgroups, each with 64 rows by 32 tokens:
//     dAqk = tril(dO' V'^T)   dL = -tril(bX V'^T)   dQg = dO' S^T   dKg = -bX S^T   dKr = V' dS^T
// the last three transposed, channels by tokens, the order of all that follows. dO' = scale dO.
#pragma once
#include "fragments.cuh"

constexpr int OCTETS = CHUNK / 8 / HALVES;
using Tokens = Fragment[OCTETS];  // 16 rows, of a half's tokens

// Step s of a K-major operand of the chunk's tokens, 16 columns of V.
DEVICE Operand values_at(Operand values, int s) { return operand_at(values, s / 4 * CHUNK * PANEL_ROW + s % 4 * 32); }

DEVICE void clear(Tokens& x) {
    #pragma unroll
    for (int i = 0; i < 4 * OCTETS; i++) x[i / 4][i % 4] = 0.f;
}

DEVICE void store_beta(const GradientsParams& p, i64 at, float x) {
    if (p.beta_fp32) static_cast<float*>(p.d_beta)[at] = x;
    else static_cast<u16*>(p.d_beta)[at] = u16(Io::pack(x, 0.f));
}

// The place of row r in an 8 x 8 block of a triangle: neither rows 0 to 3 or 4 to 7 nor even or odd ones share banks.
DEVICE int triangle_row(int r) { return 8 * (r ^ r / 4); }

// dAqk and dL, whose columns are a half's tokens: a warpgroup has one of them, or one after the other.
struct Triangles {
    static constexpr int EACH = 8 / CHANNEL_WARPS;  // of a warpgroup
    Tokens x[EACH];                                 // here tokens by tokens

    static DEVICE bool is_L(Lane lane, int i) { return EACH == 1 ? lane.warp / 4 : i; }

    static DEVICE int row_of(Lane lane, int r) { return 2 * (lane.warp % 4) + r; }  // of 8 tokens

    // Asynchronous.
    DEVICE void multiply(HalfLane lane, const Shared& shared) {
        const Operand errors = swizzled_operand(shared.errors() + lane.half * HALF_ROWS);
        #pragma unroll
        for (int i = 0; i < EACH; i++) clear(x[i]);
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            const Operand rows = swizzled_operand(is_L(lane, i) ? shared.d_v() : shared.d_o());
            #pragma unroll
            for (int s = 0; s < V / 16; s++) wgmma_ss<Io, 8 * OCTETS>(x[i], values_at(rows, s), values_at(errors, s));
        }
        wgmma_commit();
    }
};

DEVICE float over_tokens(float x) {  // sum over the lanes that have the same channels
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// <S, dS> of each channel, what passes through the chunk: on diagonals of the channels' products with each other. Those of
// 16 channels with 8 take no more instructions than those of 8, whose operands would have to be moved beside zeros.
struct Through {
    float x[2] = {};  // of channels g and g + 8, in the lanes where `here`

    template <int steps> DEVICE void find(Lane lane, const u32 (&S)[steps][4], const u32 (&dS)[steps][4]) {
        Fragment sums[2] = {};
        #pragma unroll
        for (int s = 0; s < steps; s++) {
            #pragma unroll
            for (int c = 0; c < 2; c++) Io::mma(sums[c], S[s][0], S[s][1], S[s][2], S[s][3], dS[s][c], dS[s][c + 2]);
        }
        #pragma unroll
        for (int c = 0; c < 2; c++) x[c] = lane.id / 4 % 2 ? sums[c][2 * c + 1] : sums[c][2 * c];
    }
    static DEVICE bool here(Lane lane) { return lane.id % 4 == lane.id / 8; }
};

// Gradients of a warp's channels and tokens through the state, without decays: of queries, of keys that read, of keys
// that write.
enum Which { QUERIES, READERS, WRITERS };
struct StateGradients {
    Tokens x[3];

    // The states stay in registers for all that they are multiplied by: the MMAs are bound by reading shared memory. Also
    // finds <S, dS>, which passes through the chunk: the warps of either half of the tokens have one half of V.
    DEVICE void multiply(HalfLane lane, const Shared& shared, Through& through) {
        constexpr int STEPS = V / 16 / HALVES;  // of V, whose states are in registers at once
        const int rows = lane.half * HALF_ROWS;
        const Operand values[3] = {swizzled_operand(shared.d_o() + rows), swizzled_operand(shared.d_v() + rows),
                                   swizzled_operand(shared.errors() + rows)};
        clear(x[0]), clear(x[1]), clear(x[2]);
        #pragma unroll
        for (int half = 0; half < HALVES; half++) {
            u32 S[STEPS][4], dS[STEPS][4];
            #pragma unroll
            for (int s = 0; s < STEPS; s++) {
                ldmatrix_x4_trans(S[s], shared.state() + rows_at(lane, STEPS * half + s, V));
                ldmatrix_x4_trans(dS[s], shared.d_state() + rows_at(lane, STEPS * half + s, V));
            }
            wgmma_fence();
            #pragma unroll
            for (int s = 0; s < STEPS; s++) {
                #pragma unroll
                for (int which = 0; which < 3; which++)
                    wgmma_rs<Io, 8 * OCTETS>(x[which], which == WRITERS ? dS[s] : S[s],
                                             values_at(values[which], STEPS * half + s));
            }
            wgmma_commit();
            if (half == lane.half) through.find(lane, S, dS);
            wgmma_wait<0>();
            #pragma unroll
            for (int which = 0; which < 3; which++) fence_operand(x[which]);
        }
    }
};

// The half of two values that a lane keeps when it exchanges sums with the lane whose index differs in one bit.
DEVICE float keep(Lane lane, int mask, float low, float high) {
    const bool upper = lane.id & mask;
    return (upper ? high : low) + shuffle_xor(upper ? low : high, mask);
}

// q_scale / |q| and 1 / |k|, or q_scale and 1 without qk_l2norm: of 8 tokens at a time the diagonal of their products with each other, by
// MMAs, which take an eighth of the instructions that sums of squares would.
DEVICE void find_norms(HalfLane lane, const GradientsParams& p, const Shared& shared, float q_scale) {
    #pragma unroll
    for (int i = 0; i < 2 * CHUNK / 8 / WARPS; i++) {
        const int which = lane.half, octet = i * CHANNEL_WARPS + lane.warp;
        const unsigned char* matrix = which ? shared.k() : shared.q();
        Fragment sums[2] = {};
        #pragma unroll
        for (int s = 0; s < K / 32; s++) {
            u32 x[4];  // 8 tokens x 32 channels
            ldmatrix_x4(x, matrix + piece_at(8 * octet + lane.id % 8, 4 * s + lane.id / 8, CHUNK));
            Io::mma(sums[0], x[0], 0, x[1], 0, x[0], x[1]), Io::mma(sums[1], x[2], 0, x[3], 0, x[2], x[3]);
        }
        const int token = lane.id / 4;  // whose product with itself is in lane token / 2 of 4
        if (lane.id % 4 != token / 2) continue;
        const float square = token % 2 ? sums[0][1] + sums[1][1] : sums[0][0] + sums[1][0];
        (which ? shared.k_norms() : shared.q_norms())[8 * octet + token] =
            (which ? 1.f : q_scale) * (p.qk_l2norm ? rsqrt_fast(square + 1e-6f) : 1.f);
    }
}
