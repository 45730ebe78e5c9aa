// What the MMAs over a chunk leave in shared memory with gates of channels: the triangles' gradients, and gradients
// through the state, from which channel_pairs.cuh goes on. The scale of dO' is left to q, which load_vectors gives it, and
// the sign of dL and dKg to the keys that read: here are dAqk and dQg of dO, -dL and -dKg.
#pragma once
#include "channel_decays.cuh"
#include "products.cuh"

// Lane (g, t) stores elements 2 t and 2 t + 1 of row g of 8 x 8 block (i, j), zeros above the diagonal and on it. What is there
// is stored apart: of dAqk, and of dL, <bX, V'>, for beta's gradient.
DEVICE void store_triangles(HalfLane lane, const Triangles& triangles, const Shared& shared) {
    const int g = lane.id / 4, ahead = g - lane.id % 4 * 2;  // row g of column 2 t
    #pragma unroll
    for (int i = 0; i < Triangles::EACH; i++) {
        const bool L = Triangles::is_L(lane, i);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = Triangles::row_of(lane, r);
            #pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                const int j = OCTETS * lane.half + o;
                if (j > row) break;
                float a = triangles.x[i][o][2 * r], b = triangles.x[i][o][2 * r + 1];
                if (j == row) {
                    float* own = L ? &shared.betas()[8 * row + g].x : shared.diagonal() + 8 * row + g;
                    if (ahead == 0) *own = a;
                    if (ahead == 1) *own = b;
                    if (ahead <= 0) a = 0.f;
                    if (ahead <= 1) b = 0.f;
                }
                float* to = L ? shared.dL(row, j) : shared.dA(row, j);
                *reinterpret_cast<float2*>(to + triangle_row(g) + lane.id % 4 * 2) =
                    make_float2(Tf32::round(a), Tf32::round(b));
            }
        }
    }
}

// Replaces the MMAs' operands.
DEVICE void store_gradients(HalfLane lane, const StateGradients& by_state, const Through& through,
                            const Shared& shared) {
    #pragma unroll
    for (int which = 0; which < 3; which++) {
        #pragma unroll
        for (int o = 0; o < OCTETS; o++) {
            const Fragment& y = by_state.x[which][o];
            shared.by_state(which, OCTETS * lane.half + o, lane.warp)[lane.id] = make_float4(y[0], y[1], y[2], y[3]);
        }
    }
    float* to = shared.through(lane.warp, lane.half, 0) + lane.id / 4;
    if (Through::here(lane)) to[0] = through.x[0], to[8] = through.x[1];
}

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

// What a lane's tokens write: [octet][token 2 t, 2 t + 1], summed over its channels.
using Writes = float[2][2];

// Sums of block b's tokens over a warp's channels, to [64] in shared memory.
DEVICE void sum_writes(Lane lane, float* to, const Writes& x, int b) {
    const float low = keep(lane, 4, x[0][0], x[1][0]), high = keep(lane, 4, x[0][1], x[1][1]);
    float sum = keep(lane, 8, low, high);
    sum += shuffle_xor(sum, 16);
    const int g = lane.id / 4, token = 8 * (g % 2) + 2 * (lane.id % 4) + g / 2 % 2;
    if (lane.id < 16) to[16 * b + token] = sum;
}

// Sum over all channels; by one warp, two lanes a token.
DEVICE float written(Lane lane, const Shared& shared, int token) {
    float w = 0.f;
    #pragma unroll
    for (int i = 0; i < CHANNEL_WARPS / 2; i++) w += shared.writes(2 * i + lane.id / 16)[token];
    return w + shuffle_xor(w, 16);
}
