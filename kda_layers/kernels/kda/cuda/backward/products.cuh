// MMAs over a chunk, by four warps for each 64 channels:
//     dAqk = tril(dO' V'^T)   dL = -tril(bX V'^T)   dQg = dO' S^T   dKg = -bX S^T   dKr = V' dS^T
// the last three transposed, channels by tokens, the order of all that follows. dO' = scale dO.
#pragma once
#include "decays.cuh"

constexpr int GROUPS = WARPS / 4;
using Tokens = Fragment[CHUNK / 8];  // a warp's channels of all tokens

DEVICE void clear(Tokens& x) {
    #pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) x[i / 4][i % 4] = 0.f;
}

DEVICE float load_beta(const GradientsParams& p, i64 at) {
    return p.beta_fp32 ? static_cast<const float*>(p.beta)[at] : Io::load(static_cast<const u16*>(p.beta) + at);
}

DEVICE void store_beta(const GradientsParams& p, i64 at, float x) {
    if (p.beta_fp32) static_cast<float*>(p.d_beta)[at] = x;
    else static_cast<u16*>(p.d_beta)[at] = u16(Io::pack(x, 0.f));
}

// dAqk and dL. Lane (g, t) stores elements 2 t and 2 t + 1 of row g of 8 x 8 block (i, j).
DEVICE void multiply_triangles(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    const Operand errors = operand(shared.errors(), V * 16);
    const int w = lane.warp % 4;
    #pragma unroll
    for (int i = 0; i < 2 / GROUPS; i++) {
        const int which = GROUPS == 2 ? lane.warp / 4 : i;  // dAqk, dL
        const Operand rows = operand(which ? shared.d_v() : shared.d_o(), V * 16);
        const float factor = which ? -1.f : p.scale;
        Tokens d;  // here tokens by tokens
        clear(d);
        wgmma_fence();
        #pragma unroll
        for (int s = 0; s < V / 16; s++) wgmma_ss<Io, CHUNK>(d, operand_at(rows, s * 256), operand_at(errors, s * 256));
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(d);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = 2 * w + r, token = 8 * row + lane.id / 4;
            float own = 0.f;
            #pragma unroll
            for (int j = 0; j < CHUNK / 8; j++) {
                float x = d[j][2 * r] * factor, y = d[j][2 * r + 1] * factor;
                if (j == row) own = lane.id / 4 % 2 ? y : x;
                float* to = which ? shared.dL(row, j) : shared.dA(row, j);
                if (j <= row)
                    *reinterpret_cast<float2*>(to + 2 * lane.id) = make_float2(Tf32::round(x), Tf32::round(y));
            }
            if (lane.id / 8 != lane.id % 4) continue;  // not on the diagonal
            if (which == 0) shared.diagonal()[token] = own;
            else if (token < tile.chunk.tokens) {  // -<bX, V'>
                i64 at = tile.row(p) + i64(token) * p.HV;
                float logit = load_beta(p, at);
                if (!is_near_zero(logit, p.beta_activation))
                    store_beta(p, at, write_strength_gradient<Io>(-own, logit, p.beta_activation));
            }
        }
    }
}

// Gradients of a warp's channels through the state, at the ends of each block of 16 tokens: of queries and of keys that
// read, decayed from the block's start; of keys that write, decayed to its end.
enum Which { QUERIES, READERS, WRITERS };
struct StateGradients {
    Tokens x[3];

    // Asynchronous; see wait().
    DEVICE void multiply(Lane lane, const Shared& shared) {
        const int at = lane.warp / 4 * 8 * 128;
        const Operand state = operand_at(mn_major_operand(shared.state(), K * 16), at),
                      d_state = operand_at(mn_major_operand(shared.d_state(), K * 16), at);
        const Operand values[3] = {operand(shared.d_o(), V * 16), operand(shared.d_v(), V * 16),
                                   operand(shared.errors(), V * 16)};
        clear(x[0]), clear(x[1]), clear(x[2]);
        wgmma_fence();
        #pragma unroll
        for (int which = 0; which < 3; which++) {
            #pragma unroll
            for (int s = 0; s < V / 16; s++) {
                wgmma_ss<Io, CHUNK, true>(x[which], operand_at(which == WRITERS ? d_state : state, s * K * 32),
                                          operand_at(values[which], s * 256));
            }
        }
        wgmma_commit();
    }
    DEVICE void wait() {
        wgmma_wait<0>();
        fence_operand(x[0]), fence_operand(x[1]), fence_operand(x[2]);
    }
    // Replaces the MMAs' operands.
    DEVICE void store(Lane lane, const Shared& shared, float scale) const {
        #pragma unroll
        for (int which = 0; which < 3; which++) {
            const float factor = which == QUERIES ? scale : which == READERS ? -1.f : 1.f;
            #pragma unroll
            for (int o = 0; o < CHUNK / 8; o++) {
                const Fragment& y = x[which][o];
                shared.by_state(which, o, lane.warp)[lane.id] =
                    make_float4(factor * y[0], factor * y[1], factor * y[2], factor * y[3]);
            }
        }
    }
};

DEVICE void load_gradients(Lane lane, Fragment (&x)[2], const Shared& shared, int which, int b) {
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        float4 y = shared.by_state(which, 2 * b + o, lane.warp)[lane.id];
        x[o][0] = y.x, x[o][1] = y.y, x[o][2] = y.z, x[o][3] = y.w;
    }
}

DEVICE void store_gradients(Lane lane, const Shared& shared, const Fragment (&x)[2], int which, int b) {
    #pragma unroll
    for (int o = 0; o < 2; o++)
        shared.by_state(which, 2 * b + o, lane.warp)[lane.id] = make_float4(x[o][0], x[o][1], x[o][2], x[o][3]);
}

// This lane's partial sums of S dS over V, for its two channels.
DEVICE void multiply_states(Lane lane, float (&sum)[2], const Shared& shared) {
    sum[0] = sum[1] = 0.f;
    #pragma unroll 2
    for (int v = 0; v < V / 8; v += 2) {
        Fragment s[2], d[2];
        load_block(lane, s, shared.state(), v / 2);
        load_block(lane, d, shared.d_state(), v / 2);
        #pragma unroll
        for (int x = 0; x < 8; x++) sum[x % 4 / 2] += s[x / 4][x % 4] * d[x / 4][x % 4];
    }
}
