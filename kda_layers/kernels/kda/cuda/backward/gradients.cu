// The gradients of everything but v and the states, parallel over chunks: from what the forward saved (S, V') and what
// the reverse scan left (dS, bX), to q, k, gates and beta. Formulas: docs/internals/kernels/backward.md.
//
// A CTA processes chunks of one key head, and for each the value heads of its group, whose gradients of q and k it
// sums. A warp has 16 channels of all 64 tokens, so that decays and sums over tokens stay within it. The next work
// tile's operands are copied while this one is computed.
#include "near_zero_beta.cuh"
#include "pairs.cuh"

// <q, dq> and <k, dk> of every token, for the gradients of the norms: a lane's partial sums.
struct Inner {
    float x[CHUNK / 8][4];  // of tokens 2 t, 2 t + 1 of each 8: q's, k's

    // Reduce over the lanes of the same tokens; lane (g, t) keeps the sums of 8 tokens.
    template <int count> DEVICE void fold(Lane lane) {
        bool upper = lane.id & 4 * count;
        #pragma unroll
        for (int o = 0; o < count; o++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                float keep = upper ? x[o + count][i] : x[o][i], give = upper ? x[o][i] : x[o + count][i];
                x[o][i] = keep + shuffle_xor(give, 4 * count);
            }
        }
    }
    DEVICE float4 fold_all(Lane lane) {
        fold<4>(lane), fold<2>(lane), fold<1>(lane);
        return make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
    }
};

// <q, dq> and <k, dk> of every token over all channels, to shared memory.
DEVICE void sum_inner(Lane lane, const Shared& shared, const VectorGradients (&d)[BLOCKS]) {
    Inner inner;
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        Fragment q[2], k[2];
        load_vectors(lane, q, shared.q(), shared.q_norms(), b);
        load_vectors(lane, k, shared.k(), shared.k_norms(), b);
        #pragma unroll
        for (int o = 0; o < 2; o++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                inner.x[2 * b + o][i] = q[o][i] * d[b].q[o][i] + q[o][i + 2] * d[b].q[o][i + 2];
                inner.x[2 * b + o][i + 2] = k[o][i] * d[b].k[o][i] + k[o][i + 2] * d[b].k[o][i + 2];
            }
        }
    }
    shared.parts(lane.warp)[lane.id] = inner.fold_all(lane);
    block_sync();
    if (lane.warp == 0) {
        float4 sum = shared.parts(0)[lane.id];
        for (int w = 1; w < WARPS; w++) {
            float4 x = shared.parts(w)[lane.id];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        shared.inner()[lane.id] = sum;
    }
    block_sync();
}

// Through the norms of block b: dq <- |q|^-1 (dq - q <q, dq>), and so dk.
DEVICE void through_norms(Lane lane, const Shared& shared, VectorGradients& d, int b) {
    Fragment q[2], k[2];
    load_vectors(lane, q, shared.q(), shared.q_norms(), b);
    load_vectors(lane, k, shared.k(), shared.k_norms(), b);
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        int tokens = 16 * b + 8 * o + 2 * (lane.id % 4);
        float4 inner = shared.inner()[tokens / 2];
        float2 q_norm = *reinterpret_cast<const float2*>(shared.q_norms() + tokens);
        float2 k_norm = *reinterpret_cast<const float2*>(shared.k_norms() + tokens);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            d.q[o][i] = (i % 2 ? q_norm.y : q_norm.x) * (d.q[o][i] - q[o][i] * (i % 2 ? inner.y : inner.x));
            d.k[o][i] = (i % 2 ? k_norm.y : k_norm.x) * (d.k[o][i] - k[o][i] * (i % 2 ? inner.w : inner.z));
        }
    }
}

// From the gradients of the unit vectors q and k to those of the inputs, in the inputs' places in shared memory.
DEVICE void finish_vectors(Lane lane, const GradientsParams& p, const Shared& shared, VectorGradients (&d)[BLOCKS]) {
    if (p.qk_l2norm) sum_inner(lane, shared, d);
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (p.qk_l2norm) through_norms(lane, shared, d[b], b);
        warp_sync();
        store_block(lane, shared.q(), d[b].q, b);
        store_block(lane, shared.k(), d[b].k, b);
    }
}

// 1 / |q| and 1 / |k|, or 1 without qk_l2norm: K / 32 threads per token.
DEVICE void find_norms(const GradientsParams& p, const Shared& shared) {
    constexpr int PARTS = K / 32;
    for (int i = thread(); i < CHUNK * PARTS; i += THREADS) {
        int id = i % 32, token = i / (8 * PARTS) * 8 + id % 8, part = i / 8 % PARTS;
        float sums[2] = {};
        #pragma unroll
        for (int which = 0; which < 2; which++) {
            #pragma unroll
            for (int c = 0; c < 4; c++) {
                uint4 x = *reinterpret_cast<const uint4*>((which ? shared.k() : shared.q()) +
                                                          block_at(token / 8, part * 4 + c, K / 8) + token % 8 * 16);
                u32 words[4] = {x.x, x.y, x.z, x.w};
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 pair = Io::unpack(words[j]);
                    sums[which] += pair.x * pair.x + pair.y * pair.y;
                }
            }
            #pragma unroll
            for (int mask = 8; mask < 8 * PARTS; mask *= 2) sums[which] += shuffle_xor(sums[which], mask);
        }
        if (part == 0) {
            shared.q_norms()[token] = p.qk_l2norm ? rsqrt_fast(sums[0] + 1e-6f) : 1.f;
            shared.k_norms()[token] = p.qk_l2norm ? rsqrt_fast(sums[1] + 1e-6f) : 1.f;
        }
    }
}

// From the gradients of log-decays to those of logits, which replace the logits, and this lane's sums for d_A_log and
// d_dt_bias.
DEVICE void finish_logits(Lane lane, float& d_A_log, float (&d_bias)[2], Fragment (&g)[2], const GradientsParams& p,
                          const Shared& shared, int tokens, int b) {
    Fragment logits[2];
    warp_sync();  // keeps the loads from being hoisted: registers are few
    load_logits(lane, logits, shared, b);
    warp_sync();
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float part, x = logit_gradient<GATE>(part, g[o][i], logits[o][i], *shared.rate(lane.warp), p.lower_bound);
            bool valid = token_of(lane, b, o, i) < tokens;
            d_A_log += valid ? part : 0.f, d_bias[i / 2] += valid ? x : 0.f;
            g[o][i] = x;
            if constexpr (G_FP32)
                reinterpret_cast<float*>(shared.g())[token_of(lane, b, o, i) * FP32_ROW + channel_of(lane, i / 2)] = x;
        }
    }
    if constexpr (!G_FP32) store_block(lane, shared.g(), g, b);
}

// A thread's sums over the value heads of a group, of block b: in global memory, as all registers are in use, and
// private to the thread.
DEVICE float4* sums_of(const GradientsParams& p, int b, int i) {
    return p.sums + ((i64(blockIdx.x) * BLOCKS + b) * 4 + i) * THREADS + thread();
}

DEVICE void start_sums(VectorGradients& d, const GradientsParams& p, const WorkTile& tile, int b) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        Fragment& to = i < 2 ? d.q[i] : d.k[i - 2];
        float4 x = tile.first() ? make_float4(0.f, 0.f, 0.f, 0.f) : *sums_of(p, b, i);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
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

// d_A_log, d_g and, after a group's last value head, d_q and d_k, from shared memory.
DEVICE void store_outputs(const GradientsParams& p, const Shared& shared, const WorkTile& tile, int tokens) {
    if (p.d_A_log && threadIdx.x == 0) {
        float sum = 0.f;
        for (int w = 0; w < WARPS; w++) sum += shared.d_rates()[w];
        p.d_A_log[tile.chunk_row(p)] = sum;
    }
    store_logits(p, shared, tile);
    if (tile.last(p)) {
        i64 keys = tile.key_row(p) * K, stride = i64(p.H) * K;
        store_rows(p.d_q + keys, shared.q(), stride, tokens);
        store_rows(p.d_k + keys, shared.k(), stride, tokens);
    }
}

// Sums over the chunk's tokens: d_dt_bias to memory, a warp's part of d_A_log to shared memory.
DEVICE void reduce_gate_gradients(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                                  float& d_A_log, float (&d_bias)[2]) {
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        d_bias[c] = over_tokens(d_bias[c]);
        if (p.d_dt_bias && lane.id % 4 == 0) p.d_dt_bias[tile.chunk_row(p) * K + channel_of(lane, c)] = d_bias[c];
    }
    for (int mask = 1; mask < 32; mask *= 2) d_A_log += shuffle_xor(d_A_log, mask);
    if (lane.id == 0) shared.d_rates()[lane.warp] = d_A_log;
}

// Gradients as the state sees them; norms and decays are computed while the MMAs run.
DEVICE void state_gradients(Lane& lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                            int tokens) {
    StateGradients by_state;
    lane.opt_barrier();
    by_state.multiply(lane, shared);
    cp_async_wait<0>();
    block_sync();
    if (tile.first()) find_norms(p, shared);
    exchange_decays(lane, p, shared, tokens);
    by_state.wait();
    block_sync();
    by_state.store(lane, shared, p.scale);
}

// Find the next work tile; by one warp.
DEVICE void find_next(Lane lane, const GradientsParams& p, const Shared& shared, int count) {
    ChunkFinder finder = shared.finder();
    warp_sync();  // all lanes have read what all of them write
    shared.tile(count + 1) = shared.tile(count).next(lane, p, finder), shared.finder() = finder;
}

// The gradients of block b's q, k and gate logits.
DEVICE void block_gradients(Lane lane, VectorGradients& d, float& d_A_log, float (&d_bias)[2], const GradientsParams& p,
                            const Shared& shared, const WorkTile& tile, int tokens, int b) {
    Fragment e[2], d_g[2];
    load_logits(lane, e, shared, b);
    decays_of(lane, e, e, p, *shared.rate(lane.warp), tokens, b);
    start_sums(d, p, tile, b);
    within_block(lane, d_g, d, e, shared, b);
    finish_logits(lane, d_A_log, d_bias, d_g, p, shared, tokens, b);
    keep_sums(d, p, tile, b);
}

// Rotate, so that the loop over blocks indexes registers by constants.
DEVICE void rotate(VectorGradients (&d)[BLOCKS]) {
    VectorGradients first = d[0];
    #pragma unroll
    for (int i = 0; i < BLOCKS - 1; i++) d[i] = d[i + 1];
    d[BLOCKS - 1] = first;
}

// The gradients of all blocks' q, k and gate logits; the next work tile's operands replace what a block has read.
DEVICE void token_gradients(Lane& lane, VectorGradients (&d)[BLOCKS], float& d_A_log, float (&d_bias)[2],
                            const GradientsParams& p, const Shared& shared, const WorkTile& tile, const WorkTile& next,
                            int tokens) {
    #pragma unroll 1
    for (int b = 0; b < BLOCKS; b++) {
        lane.opt_barrier();
        block_gradients(lane, d[0], d_A_log, d_bias, p, shared, tile, tokens, b);
        rotate(d);
        lane.opt_barrier();
        block_sync();
        if (next.valid())
            copy_inputs(p, shared, next, b * BLOCK_ROW_TILES, min((b + 1) * BLOCK_ROW_TILES, INPUT_ROW_TILES));
    }
    cp_async_commit();
}

// Complete a work tile in shared memory, store it, and copy the next one's tokens in its place.
DEVICE void finish_tile(Lane lane, VectorGradients (&d)[BLOCKS], const GradientsParams& p, const Shared& shared,
                        const WorkTile& tile, const WorkTile& next, int tokens) {
    if (tile.last(p)) finish_vectors(lane, p, shared, d);
    block_sync();
    store_outputs(p, shared, tile, tokens);
    block_sync();
    if (next.valid()) copy_tokens(p, shared, next);
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda_gradients(const __grid_constant__ GradientsParams p) {
    const Shared shared{shared_memory()};
    Lane lane = {broadcast(threadIdx.x / 32), int(threadIdx.x % 32)};
    if (lane.warp == 0) {
        ChunkFinder finder = {0, 0};
        shared.tile(0) = WorkTile::of(lane, p, blockIdx.x, finder), shared.finder() = finder;
    }
    block_sync();
    if (shared.tile(0).valid()) {
        copy_inputs(p, shared, shared.tile(0), 0, INPUT_ROW_TILES), cp_async_commit();
        copy_tokens(p, shared, shared.tile(0)), cp_async_commit();
    }
    for (int count = 0; broadcast(shared.tile(count).valid()); count++) {
        const WorkTile &tile = shared.tile(count), &next = shared.tile(count + 1);
        lane.opt_barrier();
        if (lane.warp == 0) find_next(lane, p, shared, count);
        const int tokens = tile.chunk.tokens;
        load_gates(lane, p, shared, tile.head(p));
        cp_async_wait<1>();
        fence_proxy_async_shared();
        block_sync();
        multiply_triangles(lane, p, shared, tile);
        if (p.beta_activation == PRECOMPUTED) near_zero_beta_gradients(lane, p, shared, tile);
        float states[2];
        multiply_states(lane, states, shared);
        state_gradients(lane, p, shared, tile, tokens);
        if (next.valid()) copy_inputs(p, shared, next, BLOCKS * BLOCK_ROW_TILES, INPUT_ROW_TILES);
        lane.opt_barrier();
        between_blocks(lane, shared, states);
        lane.opt_barrier();
        VectorGradients d[BLOCKS];
        float d_A_log = 0.f, d_bias[2] = {};
        token_gradients(lane, d, d_A_log, d_bias, p, shared, tile, next, tokens);
        reduce_gate_gradients(lane, p, shared, tile, d_A_log, d_bias);
        lane.opt_barrier();
        finish_tile(lane, d, p, shared, tile, next, tokens);
    }
}
