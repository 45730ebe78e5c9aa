// The gradients of a chunk's q, k and log-decays with gates of heads. They stay in registers from the MMAs with states on:
// a decay of a token is a factor of a column of the accumulators.
//
// Until they are stored, gradients of q and k are those of the vectors as given, but for what passes through their norms.
#pragma once
#include "head_gates.cuh"
#include "head_pairs.cuh"

// The sum of <S, dS> over channels.
DEVICE void store_through(HalfLane lane, const Shared& shared, const Through& through) {
    float sum = Through::here(lane) ? through.x[0] + through.x[1] : 0.f;
    for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
    if (lane.id == 0) shared.through()[CHANNEL_WARPS * lane.half + lane.warp] = sum;
}

// Gradients through the states: decays from the chunk's start or to its end are numbers of a token, as norms are.
DEVICE void through_states(HalfLane lane, VectorGradients& d, const StateGradients& by_state, const GradientsParams& p,
                           const Shared& shared) {
    float sums[3][HALF_BLOCKS];
    #pragma unroll
    for (int h = 0; h < HALF_BLOCKS; h++) {
        const int b = HALF_BLOCKS * lane.half + h;
        float read_by_q[4] = {}, read_by_k[4] = {}, written[4] = {};
        Fragment q[2], k[2];
        load_block(lane, q, shared.q(), b), load_block(lane, k, shared.k(), b);
        #pragma unroll
        for (int o = 0; o < 2; o++) {
            const int octet = 2 * h + o, token = token_of(lane, b, o, 0);
            const float2 from_start = pair_at(shared.from_start() + token), to_end = pair_at(shared.to_end() + token),
                         q_norms = pair_at(shared.q_norms() + token), k_norms = pair_at(shared.k_norms() + token);
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                const float rise = c ? from_start.y : from_start.x, norm = c ? k_norms.y : k_norms.x;
                const float of_query = p.scale * rise * (c ? q_norms.y : q_norms.x), of_reader = -rise * norm,
                            of_writer = (c ? to_end.y : to_end.x) * norm;
                #pragma unroll
                for (int i = c; i < 4; i += 2) {
                    const float by_query = by_state.x[QUERIES][octet][i] * of_query,
                                by_reader = by_state.x[READERS][octet][i] * of_reader,
                                by_writer = by_state.x[WRITERS][octet][i] * of_writer;
                    read_by_q[2 * o + c] += q[o][i] * by_query, read_by_k[2 * o + c] += k[o][i] * by_reader;
                    written[2 * o + c] += k[o][i] * by_writer;
                    d.q[octet][i] = by_query, d.k[octet][i] = by_reader + by_writer;
                }
            }
        }
        sums[0][h] = over_rows(lane, read_by_q), sums[1][h] = over_rows(lane, read_by_k);
        sums[2][h] = over_rows(lane, written);
    }
    shared.parts(CHUNK / HALVES * lane.half + column_of(lane))[lane.warp] =
        make_float4(over_rows(lane, sums[0]), over_rows(lane, sums[1]), over_rows(lane, sums[2]), 0.f);
}

// Sum the parts of a token's terms, by CHANNEL_WARPS lanes a token. <q, dq> and <k, dk> are sums of terms, too, over the
// value heads of a group; for the last one they become the factors of q and k that pass through the norms.
DEVICE void sum_terms(const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    const int token = int(thread()) / CHANNEL_WARPS, part = int(thread()) % CHANNEL_WARPS, b = token / 16;
    const float4 own = shared.parts(token)[part];
    float rows[2] = {}, columns = 0.f;
    #pragma unroll
    for (int i = 0; i < 2 * BLOCKS / CHANNEL_WARPS; i++) {
        const int which = (part + i * CHANNEL_WARPS) / BLOCKS, later = part % BLOCKS;
        if (later >= b) columns += shared.columns(which, later)[token];
    }
    if (part <= b / HALF_BLOCKS) rows[QK] = shared.rows(QK, part)[token], rows[KK] = shared.rows(KK, part)[token];
    float sums[5] = {own.x + own.y, own.z, own.z + columns, own.x + rows[QK], own.y + rows[KK]};
    for (int mask = 1; mask < CHANNEL_WARPS; mask *= 2) {
        #pragma unroll
        for (int i = 0; i < 5; i++) sums[i] += shuffle_xor(sums[i], mask);
    }
    if (part > 0) return;
    shared.reads()[token] = sums[0], shared.leaves()[token] = sums[1], shared.writes()[token] = sums[2];
    float2 inner = make_float2(sums[3], sums[4] + sums[2]);
    if (!tile.first()) inner.x += shared.inner()[token].x, inner.y += shared.inner()[token].y;
    if (tile.last(p)) {
        const float q_norm = shared.q_norms()[token], k_norm = shared.k_norms()[token];
        inner.x *= q_norm * q_norm, inner.y *= k_norm * k_norm;
    }
    shared.inner()[token] = inner;
}

// A thread's sums over the value heads of a group, in global memory.
DEVICE float4* sums_of(const GradientsParams& p, int i) {
    return p.sums + (i64(blockIdx.x) * 2 * OCTETS + i) * THREADS + thread();
}

DEVICE void add_sums(VectorGradients& d, const GradientsParams& p) {
    #pragma unroll
    for (int i = 0; i < 2 * OCTETS; i++) {
        Fragment& to = i < OCTETS ? d.q[i] : d.k[i - OCTETS];
        const float4 x = *sums_of(p, i);
        to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
    }
}

DEVICE void keep_sums(const VectorGradients& d, const GradientsParams& p) {
    #pragma unroll
    for (int i = 0; i < 2 * OCTETS; i++) {
        const Fragment& x = i < OCTETS ? d.q[i] : d.k[i - OCTETS];
        *sums_of(p, i) = make_float4(x[0], x[1], x[2], x[3]);
    }
}

// Through the norms: dq <- dq - q |q|^-2 <q, dq>, and so dk.
DEVICE void through_norms(HalfLane lane, VectorGradients& d, const Shared& shared) {
    #pragma unroll
    for (int h = 0; h < HALF_BLOCKS; h++) {
        const int b = HALF_BLOCKS * lane.half + h;
        Fragment q[2], k[2];
        load_block(lane, q, shared.q(), b), load_block(lane, k, shared.k(), b);
        #pragma unroll
        for (int o = 0; o < 2; o++) {
            const float4 inner = *reinterpret_cast<const float4*>(shared.inner() + token_of(lane, b, o, 0));
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                d.q[2 * h + o][i] -= q[o][i] * (i % 2 ? inner.z : inner.x);
                d.k[2 * h + o][i] -= k[o][i] * (i % 2 ? inner.w : inner.y);
            }
        }
    }
}

// Gradients of a half's tokens and a warp's channels, to where the vectors were.
DEVICE void store_tokens(HalfLane lane, unsigned char* matrix, const Tokens& x) {
    #pragma unroll
    for (int h = 0; h < HALF_BLOCKS; h++)
        store_block(lane, matrix, reinterpret_cast<const Fragment(&)[2]>(x[2 * h]), HALF_BLOCKS * lane.half + h);
}

DEVICE void chunk_gradients(HalfLane& lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                            const WorkTile& next) {
    VectorGradients d;
    Triangles triangles;
    {
        StateGradients by_state;
        Through through;
        constexpr bool TRIANGLES_FIRST = HAS_WGMMA && Triangles::EACH == 1;  // fewer instructions, more registers
        if constexpr (TRIANGLES_FIRST) triangles.multiply(lane, shared);
        by_state.multiply(lane, shared, through);
        if constexpr (!TRIANGLES_FIRST) triangles.multiply(lane, shared);
        store_through(lane, shared, through);
        cp_async_wait<0>();
        wgmma_wait<0>();
        #pragma unroll
        for (int i = 0; i < Triangles::EACH; i++) fence_operand(triangles.x[i]);
        fence_proxy_async_shared();
        block_sync();  // the operands are read, and tokens are there
        if (next.valid()) copy_inputs<0, INPUT_SHARES>(Place::of_thread(), p, shared, next);
        cp_async_commit();
        lane.opt_barrier();
        if (tile.first()) find_norms(lane, p, shared, 1.f);
        find_decays(lane, p, shared, tile.chunk.tokens);
        block_sync();
        lane.opt_barrier();
        through_states(lane, d, by_state, p, shared);
    }
    lane.opt_barrier();
    all_pair_gradients(lane, triangles, p, shared);
    block_sync();
    lane.opt_barrier();
    if (!tile.first()) add_sums(d, p);
    if (lane.half == 0) add_pairs<0>(lane, d, shared);
    else add_pairs<1>(lane, d, shared);
    sum_terms(p, shared, tile);
    if (!tile.last(p)) return keep_sums(d, p);
    block_sync();  // gradients replace q and k
    lane.opt_barrier();
    if (p.qk_l2norm) through_norms(lane, d, shared);
    store_tokens(lane, shared.q(), d.q), store_tokens(lane, shared.k(), d.k);
}
