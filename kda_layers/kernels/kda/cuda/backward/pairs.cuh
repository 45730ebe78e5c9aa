// Gradients through pairs of a chunk's tokens, and of the decays between them.
//
// Between blocks of 16 tokens the decay is a product of three: from the later block's start, of whole blocks between,
// to the earlier block's end. Within 16 tokens it is split at the middle of the smallest aligned block of 2, 4, 8 or 16
// that holds both, as in prepare.cuh. The gradient of a token's log-decay is the sum of the terms that pass through it,
// and of no others: differences of sums would leave the rounding of terms that cancel. Terms that end in a read pass
// through the tokens up to it, terms that begin with a write through the tokens after it.
#pragma once
#include "beta_gradients.cuh"

// d += a b: 16 channels by 8 tokens by 8 tokens; b as `rows_of` and `columns_of` give it.
DEVICE void multiply(Fragment& d, const Fragment& a, float2 b) { Tf32::mma(d, a[0], a[2], a[1], a[3], b.x, b.y); }

// An 8 x 8 block of a triangle's gradient as b: summed over its columns (the writing tokens), over its rows.
DEVICE float2 rows_of(Lane lane, const float* block) {
    return *reinterpret_cast<const float2*>(block + triangle_row(lane.id / 4) + lane.id % 4 * 2);
}
DEVICE float2 columns_of(Lane lane, const float* block) {
    const int row = triangle_row(lane.id % 4 * 2), next = row ^ 8;
    return make_float2(block[row + lane.id / 4], block[next + lane.id / 4]);
}

// ---------------------------------------------------------------- between blocks

using PerBlock = float[BLOCKS][2];  // of a lane's two channels
constexpr int LAST = BLOCKS - 1;

// The decay of a lane's channel over block b, loaded where it is needed: registers are few.
DEVICE float total(Lane lane, const Shared& shared, int b, int c) { return shared.totals(b)[channel_of(lane, c)]; }

// What passes through each block, from the state before the chunk to the one after it: this half's share.
DEVICE void start_through(HalfLane lane, const Shared& shared, PerBlock& through) {
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        float all = lane.id % 4 == 0 ? shared.through(lane.warp, lane.half, 0)[lane.id / 4 + 8 * c] : 0.f;
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) all *= total(lane, shared, b, c);
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) through[b][c] = all;
    }
}

DEVICE void store_through(HalfLane lane, const Shared& shared, PerBlock& through) {
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            through[b][c] = over_tokens(through[b][c]);
            if (lane.id % 4 == 0) shared.through(lane.warp, lane.half, b)[lane.id / 4 + 8 * c] = through[b][c];
        }
    }
}

// Decay the gradients of block b's readers over block j, and those of block j's writers over block b; add to `through`
// what is read in b from before j, and what j has written and b has not read, up to the chunk's end.
DEVICE void pass_through(Lane lane, const Shared& shared, PerBlock& through, Fragment (&queries)[2],
                         Fragment (&readers)[2], Fragment (&writers)[2], const Fragment (&q)[2], const Fragment (&k)[2],
                         const Fragment (&writer)[2], int b, int j) {
    float read[2] = {}, to_end[2] = {};
    const float over_j[2] = {total(lane, shared, j, 0), total(lane, shared, j, 1)};
    const float over_b[2] = {total(lane, shared, b, 0), total(lane, shared, b, 1)};
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int c = i / 2;
            // Block b reads what was written before block j, decayed over j.
            queries[o][i] *= over_j[c], readers[o][i] *= over_j[c];
            read[c] += q[o][i] * queries[o][i] + k[o][i] * readers[o][i];
            to_end[c] += writer[o][i] * writers[o][i];
            writers[o][i] *= over_b[c];
        }
    }
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        #pragma unroll
        for (int between = j + 1; between < b; between++) read[c] *= total(lane, shared, between, c);
        through[j][c] += read[c];
        if (b < BLOCKS - 1) continue;  // from block j to the chunk's end
        #pragma unroll
        for (int later = j + 1; later < BLOCKS; later++) to_end[c] *= total(lane, shared, later, c);
        #pragma unroll
        for (int later = j + 1; later < BLOCKS; later++) through[later][c] += to_end[c];
    }
}

// Products of the 16 tokens of blocks b (readers) and j (writers).
DEVICE void multiply_pair(Lane lane, const Shared& shared, Fragment (&queries)[2], Fragment (&readers)[2],
                          Fragment (&writers)[2], const Fragment (&q)[2], const Fragment (&k)[2],
                          const Fragment (&writer)[2], int b, int j) {
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int x = 0; x < 2; x++) {  // 8 tokens 2 b + o, and 2 j + x
            const float *dL = shared.dL(2 * b + o, 2 * j + x), *dA = shared.dA(2 * b + o, 2 * j + x);
            multiply(queries[o], writer[x], rows_of(lane, dA));
            multiply(readers[o], writer[x], rows_of(lane, dL));
            multiply(writers[x], k[o], columns_of(lane, dL));
            multiply(writers[x], q[o], columns_of(lane, dA));
        }
    }
}

// The products of block b, which reads, with all blocks before it. The last block's writers have the StateGradients;
// those of others have `partial` sums, by block.
template <int b>
DEVICE void multiply_earlier(HalfLane lane, const Shared& shared, PerBlock& through, Fragment (*partial)[2]) {
    lane.opt_barrier();
    Fragment k[2], q[2], queries[2], readers[2];
    uint4 rise = shared.rise(b, lane.warp)[lane.id];
    load_vectors(lane, k, shared.k(), shared.k_norms(), b), decay_by(k, rise);
    load_vectors(lane, q, shared.q(), shared.q_norms(), b), decay_by(q, rise);
    load_gradients(lane, queries, shared, QUERIES, b), load_gradients(lane, readers, shared, READERS, b);
    #pragma unroll
    for (int j = 0; j < b; j++) {
        lane.opt_barrier();
        Fragment writer[2], own[2];
        load_vectors(lane, writer, shared.k(), shared.k_norms(), j),
            decay_by(writer, shared.fall(j, lane.warp)[lane.id]);
        if (b == LAST) load_gradients(lane, own, shared, WRITERS, j);
        Fragment(&writers)[2] = b == LAST ? own : partial[j];
        pass_through(lane, shared, through, queries, readers, writers, q, k, writer, b, j);
        multiply_pair(lane, shared, queries, readers, writers, q, k, writer, b, j);
        if (b == LAST) store_gradients(lane, shared, own, WRITERS, j);
        warp_sync();  // keeps the next block's loads from being hoisted, which would spill
    }
    store_gradients(lane, shared, queries, QUERIES, b), store_gradients(lane, shared, readers, READERS, b);
    warp_sync();
}

// Add the products between blocks to the StateGradients. The chunk's second half has the pairs of the last block, the
// first half the three others, whose products with a writer it adds to what the last block has made of the writer's.
DEVICE void between_blocks(HalfLane lane, const Shared& shared) {
    PerBlock through;
    block_sync();  // each half reads StateGradients of the other's tokens
    start_through(lane, shared, through);
    if (lane.half == 1) {
        multiply_earlier<LAST>(lane, shared, through, nullptr);
        store_through(lane, shared, through);
        block_sync();
        return;
    }
    Fragment writers[2][2] = {};
    multiply_earlier<2>(lane, shared, through, writers);
    multiply_earlier<1>(lane, shared, through, writers);
    store_through(lane, shared, through);
    block_sync();
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        Fragment x[2];
        load_gradients(lane, x, shared, WRITERS, j);
        float over[2];  // the blocks that read in this half
        #pragma unroll
        for (int c = 0; c < 2; c++) over[c] = total(lane, shared, 2, c) * (j == 0 ? total(lane, shared, 1, c) : 1.f);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i / 4][i % 4] = x[i / 4][i % 4] * over[i % 4 / 2] + writers[j][i / 4][i % 4];
        }
        store_gradients(lane, shared, x, WRITERS, j);
    }
    warp_sync();
}

// ---------------------------------------------------------------- within a block

// Gradients of q and k of 16 tokens.
struct VectorGradients {
    Fragment q[2], k[2];
};

// The gradients of the triangles among 8 tokens: of L for both sides of a pair at once, as a token is on one side only.
struct Corner {
    float2 both, rows, columns;

    DEVICE Corner(Lane lane, const Shared& shared, int fragment) {
        const float *dL = shared.dL(fragment, fragment), *dA = shared.dA(fragment, fragment);
        float2 row = rows_of(lane, dL), column = columns_of(lane, dL);
        int g = lane.id / 4, m = lane.id % 4 * 2;
        both = make_float2(g > m ? row.x : column.x, g > m + 1 ? row.y : column.y);
        rows = rows_of(lane, dA), columns = columns_of(lane, dA);
        rows = make_float2(g > m ? rows.x : 0.f, g > m + 1 ? rows.y : 0.f);
        columns = make_float2(g < m ? columns.x : 0.f, g < m + 1 ? columns.y : 0.f);
    }
    // Only pairs of tokens whose indices first differ in bit `level`.
    template <int level> static DEVICE float2 at(Lane lane, float2 x) {
        int first = lane.id / 4 ^ lane.id % 4 * 2, second = first ^ 1;
        return make_float2(first >= level && first < 2 * level ? x.x : 0.f,
                           second >= level && second < 2 * level ? x.y : 0.f);
    }
};

// Sums along a lane's two tokens of each channel and the lanes that have their neighbours, from each token on or,
// without it, of those before it, within aligned blocks of `size` tokens: added to g. Terms are of reads in the upper
// block of a pair, of writes in the lower one.
template <int size> DEVICE void add_terms(Lane lane, Fragment& g, const Fragment& terms, bool upper) {
    #pragma unroll
    for (int c = 0; c < 4; c += 2) {
        float both = terms[c] + terms[c + 1], others = 0.f;
        if constexpr (size >= 4) {
            float x = shuffle_xor(both, 1);
            others += upper != bool(lane.id & 1) ? x : 0.f;
            if constexpr (size >= 8) {
                float y = shuffle_xor(both + x, 2);
                others += upper != bool(lane.id & 2) ? y : 0.f;
            }
        }
        g[c] += others + (upper ? both : 0.f);
        g[c + 1] += others + (upper ? terms[c + 1] : terms[c]);
    }
}

// One level of anchoring among 8 tokens: those in upper blocks of `level` tokens read what those in lower ones have
// written. `near` is a token's decay towards the other block of its pair.
template <int level> DEVICE void anchor(Lane lane, Fragment& d_g, float (&writes)[2], Fragment& d_q, Fragment& d_k,
                                        const Fragment& near, const Fragment& q, const Fragment& k,
                                        const Corner& corner) {
    Fragment near_q, near_k, terms, by_q = {}, by_k = {};
    #pragma unroll
    for (int i = 0; i < 4; i++) near_q[i] = near[i] * q[i], near_k[i] = near[i] * k[i];
    multiply(by_k, near_k, Corner::at<level>(lane, corner.both));
    multiply(by_k, near_q, Corner::at<level>(lane, corner.columns));
    multiply(by_q, near_k, Corner::at<level>(lane, corner.rows));
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        terms[i] = near_q[i] * by_q[i] + near_k[i] * by_k[i];
        d_q[i] += near[i] * by_q[i], d_k[i] += near[i] * by_k[i];
    }
    if constexpr (level == 1) d_g[1] += terms[1], d_g[3] += terms[3], writes[0] += terms[0] + terms[2];
    else add_terms<level>(lane, d_g, terms, lane.id & level / 2), add_writes(writes, terms, !(lane.id & level / 2));
}

// Level 8: the upper 8 tokens read, the lower 8 have written.
DEVICE void anchor_8(Lane lane, Fragment (&d_g)[2], Writes& writes, VectorGradients& to, const Decays (&decays)[2],
                     const Fragment (&q)[2], const Fragment (&k)[2], const float* dL, const float* dA) {
    Fragment reader_q, reader_k, writer, by_q = {}, by_k = {}, by_writer = {};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        writer[i] = decays[0].after[i] * k[0][i];
        reader_q[i] = decays[1].before[i] * q[1][i], reader_k[i] = decays[1].before[i] * k[1][i];
    }
    multiply(by_q, writer, rows_of(lane, dA));
    multiply(by_k, writer, rows_of(lane, dL));
    multiply(by_writer, reader_k, columns_of(lane, dL));
    multiply(by_writer, reader_q, columns_of(lane, dA));
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        to.q[1][i] += decays[1].before[i] * by_q[i], to.k[1][i] += decays[1].before[i] * by_k[i];
        to.k[0][i] += decays[0].after[i] * by_writer[i];
        by_q[i] = reader_q[i] * by_q[i] + reader_k[i] * by_k[i], by_writer[i] *= writer[i];
    }
    add_terms<8>(lane, d_g[1], by_q, true), add_terms<8>(lane, d_g[0], by_writer, false);
    add_writes(writes[0], by_writer);
}

// Reads from before the block, and writes that are read after it.
DEVICE void to_other_blocks(Lane lane, Fragment (&d_g)[2], Writes& written, VectorGradients& to,
                            const Decays (&decays)[2], const Fragment (&q)[2], const Fragment (&k)[2],
                            const Shared& shared, int b) {
    Fragment queries[2], readers[2], writers[2];
    load_gradients(lane, queries, shared, QUERIES, b), load_gradients(lane, readers, shared, READERS, b);
    load_gradients(lane, writers, shared, WRITERS, b);
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        Fragment reads, writes;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float by_q = decays[o].before[i] * queries[o][i], by_k = decays[o].before[i] * readers[o][i],
                  by_writer = decays[o].after[i] * writers[o][i];
            to.q[o][i] += by_q, to.k[o][i] += by_k + by_writer;
            reads[i] = q[o][i] * by_q + k[o][i] * by_k, writes[i] = k[o][i] * by_writer;
        }
        add_terms<8>(lane, d_g[o], reads, true), add_terms<8>(lane, d_g[o], writes, false);
        add_writes(written[o], writes);
        #pragma unroll
        for (int c = 0; c < 4; c += 2) {  // through all of the other 8 tokens
            float x = over_tokens(o ? reads[c] + reads[c + 1] : writes[c] + writes[c + 1]);
            d_g[1 - o][c] += x, d_g[1 - o][c + 1] += x;
        }
    }
}

// `e`: the tokens' decays; `d_g` becomes the gradient of their logarithms, `writes` what the tokens write; the gradients
// of q and k are added to.
DEVICE void within_block(Lane lane, Fragment (&d_g)[2], Writes& writes, VectorGradients& to, const Fragment (&e)[2],
                         const Fragment (&q)[2], const Fragment (&k)[2], const Shared& shared, int b) {
    Decays decays[2];
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        Decays& d = decays[o];
        float2 diagonal = *reinterpret_cast<const float2*>(shared.diagonal() + 16 * b + 8 * o + 2 * (lane.id % 4));
        const float *through = shared.through(lane.warp, 0, b) + lane.id / 4,
                    *other = shared.through(lane.warp, 1, b) + lane.id / 4;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = i % 2 ? diagonal.y : diagonal.x;  // a query reads its own token's write
            to.q[o][i] += x * k[o][i], to.k[o][i] += x * q[o][i];
            d_g[o][i] = through[i / 2 * 8] + other[i / 2 * 8];
        }
        writes[o][0] = diagonal.x * (q[o][0] * k[o][0] + q[o][2] * k[o][2]);
        writes[o][1] = diagonal.y * (q[o][1] * k[o][1] + q[o][3] * k[o][3]);
        const Corner corner(lane, shared, 2 * b + o);
        d.start(e[o]);
        const Fragment own = {1.f, e[o][1], 1.f, e[o][3]};
        anchor<1>(lane, d_g[o], writes[o], to.q[o], to.k[o], own, q[o], k[o], corner);
        d.to_2();
        Fragment near;
        d.towards(near, lane.id & 1);
        anchor<2>(lane, d_g[o], writes[o], to.q[o], to.k[o], near, q[o], k[o], corner);
        d.to_twice<1>(lane);
        d.towards(near, lane.id & 2);
        anchor<4>(lane, d_g[o], writes[o], to.q[o], to.k[o], near, q[o], k[o], corner);
        d.to_twice<2>(lane);
        warp_sync();  // keeps registers free, as above
    }
    anchor_8(lane, d_g, writes, to, decays, q, k, shared.dL(2 * b + 1, 2 * b), shared.dA(2 * b + 1, 2 * b));
    to_16(decays);
    warp_sync();
    to_other_blocks(lane, d_g, writes, to, decays, q, k, shared, b);
}
