// The gradients of a chunk's q, k and gates, with gates of channels.
#pragma once
#include "channel_gates.cuh"
#include "channel_pairs.cuh"

// <q, dq> and <k, dk> of block b's tokens over a warp's channels, for the gradients of the norms. Lanes of the same
// tokens exchange sums until each has one.
DEVICE void sum_inner(Lane lane, const Shared& shared, const VectorGradients& d, const Fragment (&q)[2],
                      const Fragment (&k)[2], int b) {
    float x[2][4];  // of tokens 2 t, 2 t + 1 of each 8: q's, k's
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            x[o][i] = q[o][i] * d.q[o][i] + q[o][i + 2] * d.q[o][i + 2];
            x[o][i + 2] = k[o][i] * d.k[o][i] + k[o][i + 2] * d.k[o][i + 2];
        }
    }
    float octet[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) octet[i] = keep(lane, 4, x[0][i], x[1][i]);
    float low = keep(lane, 8, octet[0], octet[1]), high = keep(lane, 8, octet[2], octet[3]);
    float sum = keep(lane, 16, low, high);
    int g = lane.id / 4;
    shared.inner_parts(lane.warp, b)[4 * (4 * (g % 2) + lane.id % 4) + 2 * (g / 4) + g / 2 % 2] = sum;
}

// Through the norms of block b: dk <- |k|^-1 (dk - k <k, dk>), and so dq, where q and its norm have the scale.
DEVICE void through_norms(HalfLane lane, VectorGradients& d, const Fragment (&q)[2], const Fragment (&k)[2],
                          const GradientsParams& p, const Shared& shared, int b) {
    float* sums = shared.inner(lane.warp, b);
    float sum = 0.f;
    #pragma unroll
    for (int w = 0; w < CHANNEL_WARPS; w++) sum += shared.inner_parts(w, b)[lane.id];
    // Finite, so that 0 times it is 0.
    sums[lane.id] = lane.id & 2 ? sum : sum * fminf(reciprocal(p.scale * p.scale), LARGEST);
    warp_sync();
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        const int tokens = 16 * b + 8 * o + 2 * (lane.id % 4);
        float4 inner = reinterpret_cast<const float4*>(sums)[4 * o + lane.id % 4];
        float2 q_norm = *reinterpret_cast<const float2*>(shared.q_norms() + tokens);
        float2 k_norm = *reinterpret_cast<const float2*>(shared.k_norms() + tokens);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            d.q[o][i] = (i % 2 ? q_norm.y : q_norm.x) * (d.q[o][i] - q[o][i] * (i % 2 ? inner.y : inner.x));
            d.k[o][i] = (i % 2 ? k_norm.y : k_norm.x) * (d.k[o][i] - k[o][i] * (i % 2 ? inner.w : inner.z));
        }
    }
}

DEVICE void scale_queries(VectorGradients& d, float scale) {
    #pragma unroll
    for (int i = 0; i < 8; i++) d.q[i / 4][i % 4] *= scale;
}

// A thread's sums over the value heads of a group, of block b: in global memory, as all registers are in use, and
// private to the thread.
DEVICE float4* sums_of(const GradientsParams& p, int b, int i) {
    return p.sums + ((i64(blockIdx.x) * HALF_BLOCKS + b % HALF_BLOCKS) * 4 + i) * THREADS + thread();
}

DEVICE void add_sums(VectorGradients& d, const GradientsParams& p, const WorkTile& tile, int b) {
    if (tile.first()) return;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        Fragment& to = i < 2 ? d.q[i] : d.k[i - 2];
        float4 x = *sums_of(p, b, i);
        to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
    }
}

DEVICE void keep_sums(const VectorGradients& d, const GradientsParams& p, const WorkTile& tile, int b) {
    if (tile.last(p)) return;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const Fragment& x = i < 2 ? d.q[i] : d.k[i - 2];
        *sums_of(p, b, i) = make_float4(x[0], x[1], x[2], x[3]);
    }
}

// The triangles' gradients, and gradients as the state sees them.
DEVICE void chunk_products(HalfLane lane, const Shared& shared) {
    Triangles triangles;
    StateGradients by_state;
    Through through;
    triangles.multiply(lane, shared);
    by_state.multiply(lane, shared, through);
    #pragma unroll
    for (int i = 0; i < Triangles::EACH; i++) fence_operand(triangles.x[i]);
    store_triangles(lane, triangles, shared);
    cp_async_wait<0>();
    block_sync();  // the operands are read, and tokens are there
    store_gradients(lane, by_state, through, shared);
}

// Those that take the place of what block b's results took.
template <int b>
DEVICE void replace_block(Place at, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    copy_inputs<b * BLOCK_SHARES, (b + 1) * BLOCK_SHARES>(at, p, shared, tile);
}

// The gradients of block b's q, k, which are loaded, and gate logits.
DEVICE void block_gradients(HalfLane lane, VectorGradients& d, GateSums& sums, Fragment (&q)[2], Fragment (&k)[2],
                            const GradientsParams& p, const Shared& shared, const WorkTile& tile, int b) {
    Fragment d_g[2];
    load_vectors(lane, q, shared.q(), shared.q_norms(), b), load_vectors(lane, k, shared.k(), shared.k_norms(), b);
    Writes writes;
    within_block(lane, d_g, writes, d, q, k, shared, b);
    warp_sync();  // all lanes have read what these sums replace
    sum_writes(lane, shared.writes(lane.warp), writes, b);
    add_sums(d, p, tile, b);
    if (p.qk_l2norm && tile.last(p)) sum_inner(lane, shared, d, q, k, b);
    finish_logits(lane, d_g, sums, p, shared, tile, b);
    keep_sums(d, p, tile, b);
}

// The gradients of the q, k and gate logits of a half's blocks; the next work tile's operands replace what was read.
DEVICE void token_gradients(HalfLane& lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                            const WorkTile& next) {
    GateSums sums;
    #pragma unroll 1
    for (int i = 0; i < HALF_BLOCKS; i++) {
        VectorGradients d;
        Fragment q[2], k[2];
        lane.opt_barrier();
        block_gradients(lane, d, sums, q, k, p, shared, tile, HALF_BLOCKS * lane.half + i);
        block_sync();
        lane.opt_barrier();
        const int b = HALF_BLOCKS * lane.half + i;
        if (next.valid()) {
            const Place at = Place::of_thread();
            if (i == 0) replace_block<0>(at, p, shared, next), replace_block<HALF_BLOCKS>(at, p, shared, next);
            else {
                replace_block<1>(at, p, shared, next), replace_block<HALF_BLOCKS + 1>(at, p, shared, next);
                // In the place of the first blocks' decays
                copy_inputs<BLOCKS * BLOCK_SHARES, INPUT_SHARES>(at, p, shared, next);
            }
        }
        if (!tile.last(p)) continue;
        if (p.qk_l2norm) through_norms(lane, d, q, k, p, shared, b);
        else scale_queries(d, p.scale);
        store_block(lane, shared.q(), d.q, b), store_block(lane, shared.k(), d.k, b);
    }
    sums.store(lane, shared);
    cp_async_commit();
}

DEVICE void chunk_gradients(HalfLane& lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                            const WorkTile& next) {
    chunk_products(lane, shared);
    lane.opt_barrier();
    if (tile.first()) find_norms(lane, p, shared, p.scale);
    store_decays(lane, p, shared, tile.chunk.tokens);
    lane.opt_barrier();
    between_blocks(lane, shared);
    lane.opt_barrier();
    token_gradients(lane, p, shared, tile, next);
}
