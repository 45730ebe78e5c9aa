// Gradients of precomputed betas near zero, for which <bX, V'> / beta^2 has no accurate digits, or is 0 / 0: <X, e>
// with
//     e = v - Kg S - L V'     X = Aqk^T dO' + Kr dS - L^T bX
// by one warp per token, from the token to both ends of the chunk. Slow, as such betas are rare.
#pragma once
#include "products.cuh"

constexpr int ELEMENTS = K / 32;
using Vector = float[ELEMENTS];  // elements id + 32 i

// Row `row` of a matrix of the chunk's tokens.
DEVICE void load_row(Lane lane, Vector& x, const unsigned char* matrix, int row) {
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int column = lane.id + 32 * i;
        x[i] = Io::load(reinterpret_cast<const u16*>(matrix + piece_at(row, column / 8, CHUNK)) + column % 8);
    }
}

DEVICE float inner_product(const Vector& x, const Vector& y) {
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sum += x[i] * y[i];
    for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
    return sum;
}

DEVICE void add(Vector& to, float factor, const Vector& x) {
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) to[i] += factor * x[i];
}

// to += factor * state [V, K] * x
DEVICE void add_state(Lane lane, Vector& to, float factor, const unsigned char* state, const Vector& x,
                      const Shared& shared) {
    float* staged = shared.staged(lane.warp);  // unused until the next barrier, which other warps may wait at
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) staged[lane.id + 32 * i] = x[i];
    warp_sync();
    for (int c = 0; c < K; c++) {
        #pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            int v = lane.id + 32 * i;
            to[i] += factor * staged[c] * Io::load(reinterpret_cast<const u16*>(state + piece_at(v, c / 8, V)) + c % 8);
        }
    }
    warp_sync();
}

// A token's q or k, normalised with qk_l2norm.
DEVICE void load_unit(Lane lane, Vector& x, const GradientsParams& p, const unsigned char* matrix, int token) {
    load_row(lane, x, matrix, token);
    float norm = p.qk_l2norm ? rsqrt_fast(inner_product(x, x) + 1e-6f) : 1.f;
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) x[i] *= norm;
}

DEVICE void decay_over(Lane lane, Vector& x, const GradientsParams& p, const Shared& shared, int token) {
    const Gates<GATE> gates(rate_of_gates(shared), p.lower_bound);
#if HEAD_GATES
    const float decay = gates.decay(shared.logits()[token], gates.bias(*shared.bias()), true);
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) x[i] *= decay;
#else
    Vector logits;
    if constexpr (!G_FP32) load_row(lane, logits, shared.g(), token);
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int channel = lane.id + 32 * i;
        if constexpr (G_FP32) logits[i] = reinterpret_cast<const float*>(shared.g())[token * FP32_ROW + channel];
        x[i] *= gates.decay(logits[i], gates.bias(shared.bias()[channel]), true);
    }
#endif
}

DEVICE float near_zero_beta_gradient(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                                     int token) {
    Vector key, y, e, x = {};
    const u16* v = p.v + (tile.row + i64(token) * p.HV) * V;
    #pragma unroll
    for (int i = 0; i < ELEMENTS; i++) e[i] = Io::load(v + lane.id + 32 * i);
    load_unit(lane, key, p, shared.k(), token);
    for (int t = token; t > 0; t--) {  // what the token reads
        decay_over(lane, key, p, shared, t);
        load_unit(lane, y, p, shared.k(), t - 1);
        float L = inner_product(key, y);
        load_row(lane, y, shared.errors(), t - 1), add(e, -L, y);
    }
    decay_over(lane, key, p, shared, 0);
    add_state(lane, e, -1.f, shared.state(), key, shared);
    load_unit(lane, key, p, shared.k(), token);
    for (int t = token; t < tile.chunk.tokens; t++) {  // what reads the token
        if (t > token) {
            decay_over(lane, key, p, shared, t);
            load_unit(lane, y, p, shared.k(), t);
            float L = inner_product(key, y);
            load_row(lane, y, shared.d_v(), t), add(x, -L, y);
        }
        load_unit(lane, y, p, shared.q(), t);
        float A = inner_product(key, y);
        load_row(lane, y, shared.d_o(), t), add(x, p.scale * A, y);
    }
    add_state(lane, x, 1.f, shared.d_state(), key, shared);
    return inner_product(x, e);
}

DEVICE void near_zero_beta_gradients(HalfLane lane, const GradientsParams& p, const Shared& shared,
                                     const WorkTile& tile) {
    cp_async_wait<0>();
    block_sync();
    if (lane.half > 0) return;  // there is shared memory for the warps of one half
    for (int token = lane.warp; token < tile.chunk.tokens; token += CHANNEL_WARPS) {
        if (!is_near_zero(shared.betas()[token].y, p.beta_activation)) continue;
        float x = near_zero_beta_gradient(lane, p, shared, tile, token);
        if (lane.id == 0) store_beta(p, tile.row + i64(token) * p.HV, x);
    }
}
