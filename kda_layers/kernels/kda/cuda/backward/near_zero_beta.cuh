// Gradients of given betas near zero, where <bX, V'> / beta^2 has no digits left, or is 0 / 0. They are <X, e> with
//     e = v - Kg S - L V'     X = Aqk^T dO' + Kr dS - L^T bX
// of one token, by one warp, walking from the token to both ends of the chunk. Slow: such betas are rare.
#pragma once
#include "products.cuh"

constexpr int NUMBERS = K / 32;
using Vector = float[NUMBERS];  // a lane has numbers lane + 32 i

// Row `row` of a matrix in 8 x 8 blocks.
DEVICE void load_row(Vector& x, const unsigned char* matrix, int row, int lane) {
    #pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
        int column = lane + 32 * i;
        x[i] = Io::load(reinterpret_cast<const u16*>(matrix + block_at(row / 8, column / 8, K / 8) + row % 8 * 16) + column % 8);
    }
}

DEVICE float inner_product(const Vector& x, const Vector& y) {
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < NUMBERS; i++) sum += x[i] * y[i];
    for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
    return sum;
}

DEVICE void add(Vector& to, float factor, const Vector& x) {
    #pragma unroll
    for (int i = 0; i < NUMBERS; i++) to[i] += factor * x[i];
}

// Adds `factor` times the state [V, K] times x.
DEVICE void add_state(Vector& to, float factor, const unsigned char* state, const Vector& x, const Shared& shared, int warp, int lane) {
    float* whole = reinterpret_cast<float*>(shared.parts(warp));
    #pragma unroll
    for (int i = 0; i < NUMBERS; i++) whole[lane + 32 * i] = x[i];
    warp_sync();
    for (int c = 0; c < K; c++) {
        #pragma unroll
        for (int i = 0; i < NUMBERS; i++) {
            int v = lane + 32 * i;
            to[i] += factor * whole[c] * Io::load(reinterpret_cast<const u16*>(state + block_at(v / 8, c / 8, K / 8) + v % 8 * 16) + c % 8);
        }
    }
    warp_sync();
}

// A token's vector, of unit length where the operator makes it so.
DEVICE void load_unit(Vector& x, const GradientsParams& p, const unsigned char* matrix, int token, int lane) {
    load_row(x, matrix, token, lane);
    float norm = p.qk_l2norm ? rsqrt_fast(inner_product(x, x) + 1e-6f) : 1.f;
    #pragma unroll
    for (int i = 0; i < NUMBERS; i++) x[i] *= norm;
}

DEVICE void decay_over(Vector& x, const GradientsParams& p, const Shared& shared, int token, int lane) {
    const Gates<GATE> gates(*shared.rate(0), p.lower_bound);
    Vector logits;
    if constexpr (!G_FP32) load_row(logits, shared.g(), token, lane);
    #pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
        int channel = lane + 32 * i;
        if constexpr (G_FP32) logits[i] = reinterpret_cast<const float*>(shared.g())[token * WIDE_ROW + channel];
        x[i] *= gates.decay(logits[i], gates.bias(shared.bias()[channel]), true);
    }
}

DEVICE float near_zero_beta_gradient(const GradientsParams& p, const Shared& shared, const Turn& turn, int token, int warp, int lane) {
    Vector key, y, e, x = {};
    const u16* v = p.v + (turn.row(p) + i64(token) * p.HV) * V;
    #pragma unroll
    for (int i = 0; i < NUMBERS; i++) e[i] = Io::load(v + lane + 32 * i);
    load_unit(key, p, shared.k(), token, lane);
    for (int t = token; t > 0; t--) {  // what the token reads
        decay_over(key, p, shared, t, lane);
        load_unit(y, p, shared.k(), t - 1, lane);
        float L = inner_product(key, y);
        load_row(y, shared.errors(), t - 1, lane), add(e, -L, y);
    }
    decay_over(key, p, shared, 0, lane);
    add_state(e, -1.f, shared.state(), key, shared, warp, lane);
    load_unit(key, p, shared.k(), token, lane);
    for (int t = token; t < turn.chunk.tokens; t++) {  // what reads it
        if (t > token) {
            decay_over(key, p, shared, t, lane);
            load_unit(y, p, shared.k(), t, lane);
            float L = inner_product(key, y);
            load_row(y, shared.d_v(), t, lane), add(x, -L, y);
        }
        load_unit(y, p, shared.q(), t, lane);
        float A = inner_product(key, y);
        load_row(y, shared.d_o(), t, lane), add(x, p.scale * A, y);
    }
    add_state(x, 1.f, shared.d_state(), key, shared, warp, lane);
    return inner_product(x, e);
}

DEVICE void near_zero_beta_gradients(const GradientsParams& p, const Shared& shared, const Turn& turn, int warp, int lane) {
    for (int token = warp; token < turn.chunk.tokens; token += WARPS) {
        i64 at = turn.row(p) + i64(token) * p.HV;
        if (!is_near_zero(load_beta(p, at), p.beta_activation)) continue;
        float x = near_zero_beta_gradient(p, shared, turn, token, warp, lane);
        if (lane == 0) store_beta(p, at, x);
    }
}
