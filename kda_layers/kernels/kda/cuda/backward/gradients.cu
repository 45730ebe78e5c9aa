// The gradients of everything but v and the states, parallel over chunks: from what the forward saved (S, V') and what
// the reverse scan left (dS, bX), to q, k, gates and beta. Formulas: docs/internals/kernels/backward.md.
//
// A CTA processes chunks of one key head, and for each the value heads of its group, whose gradients of q and k it
// sums. A warp has 16 channels of half of the tokens, so that decays and sums over 16 tokens stay within it. The next
// work tile's operands are copied while this one is computed.
#include "head_gates.cuh"
#include "near_zero_beta.cuh"
#include "pairs.cuh"

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
    shared.inner_parts(lane.warp)[4 * (8 * b + 4 * (g % 2) + lane.id % 4) + 2 * (g / 4) + g / 2 % 2] = sum;
}

// Through the norms of block b: dq <- |q|^-1 (dq - q <q, dq>), and so dk.
DEVICE void through_norms(HalfLane lane, VectorGradients& d, const Fragment (&q)[2], const Fragment (&k)[2],
                          const Shared& shared, int b) {
    float* sums = shared.inner(lane.warp, lane.half);
    float sum = 0.f;
    #pragma unroll
    for (int w = 0; w < CHANNEL_WARPS; w++) sum += shared.inner_parts(w)[32 * b + lane.id];
    sums[lane.id] = sum;
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

// 1 / |q| and 1 / |k|, or 1 without qk_l2norm: of 8 tokens at a time the diagonal of their products with each other, by
// MMAs, which take an eighth of the instructions that sums of squares would.
DEVICE void find_norms(HalfLane lane, const GradientsParams& p, const Shared& shared) {
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
            p.qk_l2norm ? rsqrt_fast(square + 1e-6f) : 1.f;
    }
}

// Add a warp's sums over block b's tokens to those of its half's block before, in shared memory: registers are few.
DEVICE void add_gate_gradients(HalfLane lane, const Shared& shared, float d_A_log, const float (&d_bias)[2], int b) {
    const bool adds = b % HALF_BLOCKS > 0;
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        float sum = over_tokens(d_bias[c]), &to = shared.d_bias(lane.half)[channel_of(lane, c)];
        if (lane.id % 4 == 0) to = adds ? to + sum : sum;
    }
    for (int mask = 1; mask < 32; mask *= 2) d_A_log += shuffle_xor(d_A_log, mask);
    float& to = shared.d_rates()[CHANNEL_WARPS * lane.half + lane.warp];
    if (lane.id == 0) to = adds ? to + d_A_log : d_A_log;
}

// From the gradients of log-decays to those of logits, which replace the logits.
DEVICE void finish_logits(HalfLane lane, Fragment (&g)[2], const GradientsParams& p, const Shared& shared,
                          const WorkTile& tile, int b) {
    Fragment logits[2];
    const GateGradients<GATE> gates(rate_of_gates(shared), p.lower_bound);
    float d_A_log = 0.f, d_bias[2] = {};
    warp_sync();  // keeps the loads from being hoisted: registers are few
    load_logits(lane, logits, shared, b);
    float bias[2];
    #pragma unroll
    for (int c = 0; c < 2; c++) bias[c] = shared.bias()[channel_of(lane, c)];
    warp_sync();
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool valid = token_of(lane, b, o, i) < tile.chunk.tokens;
            const float x = gates.logit(d_A_log, g[o][i], logits[o][i] + bias[i / 2], valid);
            d_bias[i / 2] += x;
            g[o][i] = x;
            if constexpr (G_FP32)
                reinterpret_cast<float*>(shared.g())[token_of(lane, b, o, i) * FP32_ROW + channel_of(lane, i / 2)] = x;
        }
    }
    if constexpr (!G_FP32) store_block(lane, shared.g(), g, b);
    add_gate_gradients(lane, shared, d_A_log, d_bias, b);
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

// d_A_log, d_dt_bias and d_g, from shared memory.
DEVICE void store_gates(const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    if (p.d_A_log && threadIdx.x == 0) {
        float sum = 0.f;
        for (int w = 0; w < WARPS; w++) sum += shared.d_rates()[w];
        p.d_A_log[tile.chunk_row] = sum;
    }
    const u32 channel = thread();
    if (p.d_dt_bias && channel < K)
        p.d_dt_bias[tile.chunk_row * K + channel] = shared.d_bias(0)[channel] + shared.d_bias(1)[channel];
    store_logits(p, shared, tile);
}

// d_q and d_k after a group's last value head, from shared memory.
DEVICE void store_keys(const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    if (tile.last(p)) {
        i64 keys = tile.key_row(p) * K, stride = i64(p.H) * K;
        store_rows(p.d_q + keys, shared.q(), stride, tile.chunk.tokens);
        store_rows(p.d_k + keys, shared.k(), stride, tile.chunk.tokens);
    }
}

// The triangles' gradients, and gradients as the state sees them.
DEVICE void chunk_products(HalfLane lane, const GradientsParams& p, const Shared& shared) {
    Triangles triangles;
    StateGradients by_state;
    triangles.multiply(lane, shared);
    by_state.multiply(lane, shared);
    #pragma unroll
    for (int i = 0; i < Triangles::EACH; i++) fence_operand(triangles.x[i]);
    triangles.store(lane, p, shared);
    cp_async_wait<0>();
    block_sync();  // the operands are read, and tokens are there
    by_state.store(lane, shared, p.scale);
}

// Find the next work tile; by one warp.
DEVICE void find_next(Lane lane, const GradientsParams& p, const Shared& shared) {
    ChunkFinder finder = shared.finder();
    warp_sync();  // all lanes have read what all of them write
    shared.next() = shared.tile().next(lane, p, finder), shared.finder() = finder;
}

// The gradients of block b's q, k, which are loaded, and gate logits.
DEVICE void block_gradients(HalfLane lane, VectorGradients& d, Fragment (&q)[2], Fragment (&k)[2],
                            const GradientsParams& p, const Shared& shared, const WorkTile& tile, int b) {
    Fragment e[2], d_g[2];
    load_decays(lane, e, p, shared, tile.chunk.tokens, b);
    load_vectors(lane, q, shared.q(), shared.q_norms(), b), load_vectors(lane, k, shared.k(), shared.k_norms(), b);
    Writes writes;
    within_block(lane, d_g, writes, d, e, q, k, shared, b);
    sum_writes(lane, shared.writes(lane.warp), writes, b);
    add_sums(d, p, tile, b);
    if (p.qk_l2norm && tile.last(p)) sum_inner(lane, shared, d, q, k, b);
    if constexpr (HEAD_GATES) sum_log_decays(lane, d_g, shared, b);
    else finish_logits(lane, d_g, p, shared, tile, b);
    keep_sums(d, p, tile, b);
}

// The gradients of the q, k and gate logits of a half's blocks; the next work tile's operands replace what was read.
DEVICE void token_gradients(HalfLane& lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                            const WorkTile& next) {
    #pragma unroll 1
    for (int i = 0; i < HALF_BLOCKS; i++) {
        VectorGradients d = {};
        Fragment q[2], k[2];
        lane.opt_barrier();
        block_gradients(lane, d, q, k, p, shared, tile, HALF_BLOCKS * lane.half + i);
        block_sync();
        lane.opt_barrier();
        const int b = HALF_BLOCKS * lane.half + i;
        if (next.valid()) {
            if (i == 0) replace_block<0>(p, shared, next), replace_block<HALF_BLOCKS>(p, shared, next);
            else replace_block<1>(p, shared, next), replace_block<HALF_BLOCKS + 1>(p, shared, next);
        }
        if (!tile.last(p)) continue;
        if (p.qk_l2norm) through_norms(lane, d, q, k, shared, b);
        store_block(lane, shared.q(), d.q, b), store_block(lane, shared.k(), d.k, b);
    }
    cp_async_commit();
}

// Store a work tile, go on to the next one, and copy its tokens: what a thread copies replaces what it has stored.
DEVICE void finish_tile(const GradientsParams& p, const Shared& shared) {
    const WorkTile tile = shared.tile(), next = shared.next();
    // The warps that store no sums of the gates finish the betas of a block each. They load the next work tile's before
    // the barrier, and before the copies, behind whose requests the load would wait.
    const HalfLane lane = HalfLane::of_thread();
    const int b = lane.warp - (CHANNEL_WARPS - BLOCKS), token = 16 * b + lane.id % 16;
    const bool has_betas = lane.half == HALVES - 1 && b >= 0;
    LoadedBeta beta = {0};
    if (has_betas) beta = LoadedBeta::load(p, next, token);
#if HEAD_GATES
    const bool has_gates = lane.half == 0 && lane.warp == 0;
    HeadLogits logits;
    if (has_gates) logits.load(lane, p, next);
#endif
    block_sync();
    if (threadIdx.x == 0) shared.tile() = next;
    if (has_betas) {
        finish_betas(lane, p, shared, tile, b);
        warp_sync();
        shared.betas()[token].y = beta.value(p);
    }
#if HEAD_GATES
    if (has_gates) finish_head_gates(lane, p, shared, tile, next, logits);
#else
    store_gates(p, shared, tile);
#endif
    store_keys(p, shared, tile);
    if (next.valid()) copy_tokens(p, shared, next);
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 128 / K)
    kda_gradients(const __grid_constant__ GradientsParams p) {
    const Shared shared{shared_memory()};
    HalfLane lane = HalfLane::of_thread();
    const WorkTile &tile = shared.tile(), &next = shared.next();
    wait_for_earlier_kernels();
    launch_dependents();
    if (threadIdx.x < 32) {
        ChunkFinder finder = {0, 0};
        shared.tile() = WorkTile::of(lane, p, blockIdx.x, finder), shared.finder() = finder;
    }
    if (lane.half == 1) store_patterns(lane, shared);
    block_sync();
    if (tile.valid()) {
        copy_inputs<0, INPUT_SHARES>(p, shared, tile), cp_async_commit();
#if HEAD_GATES
        HeadLogits logits;
        if (threadIdx.x < 32)
            logits.load(lane, p, tile), logits.store(lane, shared), copy_parameters(lane, p, shared, tile);
#endif
        copy_tokens(p, shared, tile), cp_async_commit();
        if (threadIdx.x < CHUNK) shared.betas()[threadIdx.x].y = LoadedBeta::load(p, tile, threadIdx.x).value(p);
    }
    for (;;) {
        cp_async_wait<1>();
        fence_proxy_async_shared();
        block_sync();
        if (!broadcast(tile.valid())) break;
        lane.opt_barrier();
        if (threadIdx.x < 32) find_next(lane, p, shared);
        if (p.beta_activation == PRECOMPUTED) near_zero_beta_gradients(lane, p, shared, tile);
        lane.opt_barrier();
        chunk_products(lane, p, shared);
        if (next.valid()) copy_inputs<BLOCKS * BLOCK_SHARES, INPUT_SHARES>(p, shared, next);
        lane.opt_barrier();
        if (tile.first()) find_norms(lane, p, shared);
        exchange_decays(lane, p, shared, tile.chunk.tokens);
        lane.opt_barrier();
        between_blocks(lane, shared);
        lane.opt_barrier();
        token_gradients(lane, p, shared, tile, next);
        finish_tile(p, shared);
    }
}
