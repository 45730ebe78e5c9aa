// Products of a whole chunk, by the four warps of each 64 channels:
//     dAqk = tril(dO' V'^T)   dL = -tril(bX V'^T)   dQg = dO' S^T   dKg = -bX S^T   dKr = V' dS^T
// the last three transposed, channels by tokens, which is the order that everything after them is in. dO' = scale dO.
#pragma once
#include "decays.cuh"

constexpr int GROUPS = WARPS / 4;
using Tokens = Octet[CHUNK / 8];  // a warp's channels of all tokens

DEVICE void clear(Tokens& x) {
    #pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) x[i / 4][i % 4] = 0.f;
}

// beta's gradient comes from the diagonal of bX V'^T.
DEVICE void store_beta(const GradientParams& p, const Turn& turn, int token, float product) {
    if (token >= turn.chunk.tokens) return;
    i64 at = turn.row(p) + i64(token) * p.HV;
    float logit = p.beta_wide ? static_cast<const float*>(p.beta)[at] : Io::load(static_cast<const u16*>(p.beta) + at);
    float x = write_strength_gradient(product, logit, p.beta_activation);
    if (p.beta_wide) static_cast<float*>(p.d_beta)[at] = x;
    else static_cast<u16*>(p.d_beta)[at] = u16(Io::pack(x, 0.f));
}

// The gradients of the triangles. Row r = 8 i + g of 8 x 8 block (i, j) has its numbers 2 t, 2 t + 1 at lane (g, t).
DEVICE void multiply_triangles(const GradientParams& p, const Shared& shared, const Turn& turn, int warp, int lane) {
    const Operand errors = operand(shared.errors(), V * 16);
    const int w = warp % 4;
    for (int which = warp / 4; which < 2; which += GROUPS) {  // dAqk, dL
        const Operand rows = operand(which ? shared.d_v() : shared.d_o(), V * 16);
        const float factor = which ? -1.f : p.scale;
        Tokens d;  // here tokens by tokens
        clear(d);
        product_begin();
        #pragma unroll
        for (int s = 0; s < V / 16; s++) multiply_group<Io, CHUNK>(d, operand_at(rows, s * 256), operand_at(errors, s * 256));
        product_commit();
        product_wait<0>();
        product_use(d);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            #pragma unroll
            for (int j = 0; j < CHUNK / 8; j++) {
                int i = 2 * w + r;
                if (j > i) continue;
                float* to = which ? shared.dL(i, j) : shared.dA(i, j);
                *reinterpret_cast<float2*>(to + 2 * lane) = make_float2(Tf32::round(d[j][2 * r] * factor), Tf32::round(d[j][2 * r + 1] * factor));
                if (j < i || lane / 8 != lane % 4) continue;  // below, on the diagonal
                int token = 8 * i + lane / 4;
                float x = lane / 4 % 2 ? d[j][2 * r + 1] : d[j][2 * r];
                if (which) store_beta(p, turn, token, x);
                else shared.diagonal()[token] = x * factor;
            }
        }
    }
}

// Gradients of a warp's channels, as the state sees them at the ends of each block of 16 tokens: of the queries and the
// keys that read, from the block's start; of the keys that write, to its end.
struct StateGradients {
    Tokens queries, readers, writers;

    // To be waited for.
    DEVICE void multiply(const Shared& shared, int warp) {
        const int at = warp / 4 * 8 * 128;
        const Operand state = operand_at(standing_operand(shared.state(), K * 16), at), d_state = operand_at(standing_operand(shared.d_state(), K * 16), at);
        const Operand d_o = operand(shared.d_o(), V * 16), d_v = operand(shared.d_v(), V * 16), errors = operand(shared.errors(), V * 16);
        clear(queries), clear(readers), clear(writers);
        product_begin();
        #pragma unroll
        for (int s = 0; s < V / 16; s++) multiply_group<Io, CHUNK, true>(queries, operand_at(state, s * K * 32), operand_at(d_o, s * 256));
        #pragma unroll
        for (int s = 0; s < V / 16; s++) multiply_group<Io, CHUNK, true>(readers, operand_at(state, s * K * 32), operand_at(d_v, s * 256));
        #pragma unroll
        for (int s = 0; s < V / 16; s++) multiply_group<Io, CHUNK, true>(writers, operand_at(d_state, s * K * 32), operand_at(errors, s * 256));
        product_commit();
    }
    DEVICE void wait(float scale) {
        product_wait<0>();
        product_use(queries), product_use(readers), product_use(writers);
        #pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) queries[i / 4][i % 4] *= scale, readers[i / 4][i % 4] *= -1.f;
    }
};

// Sum over V of S dS, this lane's part of it, for its two channels.
DEVICE void multiply_states(float (&sum)[2], const Shared& shared, int warp, int lane) {
    sum[0] = sum[1] = 0.f;
    #pragma unroll 2
    for (int v = 0; v < V / 8; v += 2) {
        Octet s[2], d[2];
        load_block(s, shared.state(), v / 2, warp, lane);
        load_block(d, shared.d_state(), v / 2, warp, lane);
        #pragma unroll
        for (int x = 0; x < 8; x++) sum[x % 4 / 2] += s[x / 4][x % 4] * d[x / 4][x % 4];
    }
}
