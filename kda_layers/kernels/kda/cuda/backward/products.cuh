// MMAs over a chunk, by warpgroups, each with 64 rows by 32 tokens:
//     dAqk = tril(dO' V'^T)   dL = -tril(bX V'^T)   dQg = dO' S^T   dKg = -bX S^T   dKr = V' dS^T
// the last three transposed, channels by tokens, the order of all that follows. dO' = scale dO.
#pragma once
#include "decays.cuh"

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
    static DEVICE bool on_diagonal(HalfLane lane, int r) {
        return row_of(lane, r) / OCTETS == lane.half && lane.id / 8 == lane.id % 4;
    }

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
    // Lane (g, t) stores elements 2 t and 2 t + 1 of row g of 8 x 8 block (i, j).
    DEVICE void store(HalfLane lane, const GradientsParams& p, const Shared& shared) const {
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool L = is_L(lane, i);
            const float factor = L ? -1.f : p.scale;
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = row_of(lane, r);
                float own = 0.f;
                #pragma unroll
                for (int o = 0; o < OCTETS; o++) {
                    const int j = OCTETS * lane.half + o;
                    float a = x[i][o][2 * r] * factor, b = x[i][o][2 * r + 1] * factor;
                    if (j == row) own = lane.id / 4 % 2 ? b : a;
                    float* to = L ? shared.dL(row, j) : shared.dA(row, j);
                    if (j <= row)
                        *reinterpret_cast<float2*>(to + triangle_row(lane.id / 4) + lane.id % 4 * 2) =
                            make_float2(Tf32::round(a), Tf32::round(b));
                }
                if (on_diagonal(lane, r)) store_diagonal(own, L, shared, 8 * row + lane.id / 4);
            }
        }
    }
    // Of dAqk; or of dL, -<bX, V'>, for beta's gradient.
    static DEVICE void store_diagonal(float x, bool L, const Shared& shared, int token) {
        if (L) shared.betas()[token].x = -x;
        else shared.diagonal()[token] = x;
    }
};

DEVICE float over_tokens(float x) {  // sum over the lanes that have the same channels
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// Gradients of a warp's channels and tokens through the state, at the ends of each block of 16 tokens: of queries and of
// keys that read, decayed from the block's start; of keys that write, decayed to its end. Also <S, dS> for each channel,
// what passes through the chunk: the warps of either half of the tokens sum it over one half of V.
enum Which { QUERIES, READERS, WRITERS };
struct StateGradients {
    Tokens x[3];
    float through[2];

    // The states stay in registers for all that they are multiplied by: the MMAs are bound by reading shared memory.
    DEVICE void multiply(HalfLane lane, const Shared& shared) {
        constexpr int STEPS = V / 16 / HALVES;  // of V, whose states are in registers at once
        const int rows = lane.half * HALF_ROWS;
        const Operand values[3] = {swizzled_operand(shared.d_o() + rows), swizzled_operand(shared.d_v() + rows),
                                   swizzled_operand(shared.errors() + rows)};
        clear(x[0]), clear(x[1]), clear(x[2]), through[0] = through[1] = 0.f;
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
            if (half == lane.half) sum_states(S, dS);
            wgmma_wait<0>();
            #pragma unroll
            for (int which = 0; which < 3; which++) fence_operand(x[which]);
        }
    }
    template <int steps> DEVICE void sum_states(const u32 (&S)[steps][4], const u32 (&dS)[steps][4]) {
        #pragma unroll
        for (int s = 0; s < steps; s++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 a = Io::unpack(S[s][i]), b = Io::unpack(dS[s][i]);
                through[i % 2] += a.x * b.x + a.y * b.y;
            }
        }
    }
    // Replaces the MMAs' operands.
    DEVICE void store(HalfLane lane, const Shared& shared, float scale) const {
        #pragma unroll
        for (int which = 0; which < 3; which++) {
            const float factor = which == QUERIES ? scale : which == READERS ? -1.f : 1.f;
            #pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                const Fragment& y = x[which][o];
                shared.by_state(which, OCTETS * lane.half + o, lane.warp)[lane.id] =
                    make_float4(factor * y[0], factor * y[1], factor * y[2], factor * y[3]);
            }
        }
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const float sum = over_tokens(through[c]);
            if (lane.id % 4 == 0) shared.through(lane.warp, lane.half, 0)[lane.id / 4 + 8 * c] = sum;
        }
    }
};

// Of 8 tokens; of block b.
DEVICE void load_gradients(Lane lane, Fragment& x, const Shared& shared, int which, int octet) {
    float4 y = shared.by_state(which, octet, lane.warp)[lane.id];
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
DEVICE void load_gradients(Lane lane, Fragment (&x)[2], const Shared& shared, int which, int b) {
    load_gradients(lane, x[0], shared, which, 2 * b), load_gradients(lane, x[1], shared, which, 2 * b + 1);
}

DEVICE void store_gradients(Lane lane, const Shared& shared, const Fragment (&x)[2], int which, int b) {
    #pragma unroll
    for (int o = 0; o < 2; o++)
        shared.by_state(which, 2 * b + o, lane.warp)[lane.id] = make_float4(x[o][0], x[o][1], x[o][2], x[o][3]);
}

// The half of two values that a lane keeps when it exchanges sums with the lane whose index differs in one bit.
DEVICE float keep(Lane lane, int mask, float low, float high) {
    const bool upper = lane.id & mask;
    return (upper ? high : low) + shuffle_xor(upper ? low : high, mask);
}
