// Gradients through pairs of a chunk's tokens, and of the decays between them.
//
// Between blocks of 16 tokens the decay is a product of three: from the later block's start, of full blocks between,
// to the earlier block's end. Between the two halves of 16 tokens it is one of three, too, and among 8 tokens one of two,
// from and to the anchor (channel_decays.cuh). The gradient of a token's log-decay is the sum of the terms that pass
// through it: terms that end in a read pass through the tokens up to it, terms that begin with a write through the tokens
// after it. Among 8 tokens, where a term does both, it is the mean of two differences of sums (`Passing`).
#pragma once
#include "channel_products.cuh"

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

// The decays of a lane's two channels over block b, loaded where they are needed: registers are few.
struct Total {
    float over[2];

    DEVICE Total(Lane lane, const Shared& shared, int b) {
        const float2 x = shared.totals(b, lane.warp)[lane.id / 4];
        over[0] = x.x, over[1] = x.y;
    }
    DEVICE void decay(float (&x)[2]) const { x[0] *= over[0], x[1] *= over[1]; }
};

// What passes through each block, from the state before the chunk to the one after it: this half's share.
DEVICE void start_through(HalfLane lane, const Shared& shared, PerBlock& through) {
    float all[2];
    #pragma unroll
    for (int c = 0; c < 2; c++)
        all[c] = lane.id % 4 == 0 ? shared.through(lane.warp, lane.half, 0)[lane.id / 4 + 8 * c] : 0.f;
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) Total(lane, shared, b).decay(all);
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) through[b][0] = all[0], through[b][1] = all[1];
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
    const Total of_j(lane, shared, j), of_b(lane, shared, b);
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int c = i / 2;
            // Block b reads what was written before block j, decayed over j.
            queries[o][i] *= of_j.over[c], readers[o][i] *= of_j.over[c];
            read[c] += q[o][i] * queries[o][i] + k[o][i] * readers[o][i];
            to_end[c] += writer[o][i] * writers[o][i];
            writers[o][i] *= of_b.over[c];
        }
    }
    #pragma unroll
    for (int between = j + 1; between < b; between++) Total(lane, shared, between).decay(read);
    through[j][0] += read[0], through[j][1] += read[1];
    if (b < BLOCKS - 1) return;  // from block j to the chunk's end
    #pragma unroll
    for (int later = j + 1; later < BLOCKS; later++) Total(lane, shared, later).decay(to_end);
    #pragma unroll
    for (int later = j + 1; later < BLOCKS; later++) through[later][0] += to_end[0], through[later][1] += to_end[1];
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
    const Decays decays(lane, shared, b);
    load_vectors(lane, k, shared.k(), shared.k_norms(), b), decay_from_start(k, decays, -1.f);
    load_vectors(lane, q, shared.q(), shared.q_norms(), b), decay_from_start(q, decays, 1.f);
    load_gradients(lane, queries, shared, QUERIES, b), load_gradients(lane, readers, shared, READERS, b);
    #pragma unroll
    for (int j = 0; j < b; j++) {
        lane.opt_barrier();
        Fragment writer[2], own[2];
        load_vectors(lane, writer, shared.k(), shared.k_norms(), j), decay_to_end(lane, writer, shared, j);
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
        float over[2] = {1.f, 1.f};  // the blocks that read in this half
        #pragma unroll
        for (int b = j + 1; b < LAST; b++) Total(lane, shared, b).decay(over);
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

// A sum over 8 tokens' terms that passes through each of their decays, by an MMA with a constant matrix: a lane's part, of
// terms 2 t and 2 t + 1 and the decay of token g.
struct Passing {
    float2 reads, writes;  // 1 where a read passes through a token, up to its own; where a write does, behind its own
    // What tokens read of each other less what they write. Through token n of 8 passes what is read at and after it less what
    // is written there, as well as what is written before it less what is read there. The two differ by rounding alone, the
    // error of either grows with its tokens, and that of their mean with weights n / 8 and 1 - n / 8 is the least.
    float2 pairs;

    DEVICE explicit Passing(Lane lane) {
        const int term = lane.id % 4 * 2, n = lane.id / 4;
        const float before = n / 8.f - 1.f;
        reads = make_float2(n <= term, n <= term + 1), writes = make_float2(n > term, n > term + 1);
        pairs = make_float2(reads.x + before, reads.y + before);
    }
    static DEVICE float2 all() { return make_float2(1.f, 1.f); }
};

// 8 tokens that read and write, with their decays from and to the anchor.
struct Anchored {
    Fragment by_q, by_k, writer;  // q and -k as readers, k as writer

    DEVICE void read(const Fragment& from_anchor, const Fragment& q, const Fragment& k) {
        #pragma unroll
        for (int i = 0; i < 4; i++) by_q[i] = from_anchor[i] * q[i], by_k[i] = -(from_anchor[i] * k[i]);
    }
    DEVICE void write(const Fragment& to_anchor, const Fragment& k) {
        #pragma unroll
        for (int i = 0; i < 4; i++) writer[i] = to_anchor[i] * k[i];
    }
};

// Gradients of these, without the decays from and to the anchor.
struct AnchoredGradients {
    Fragment by_q, by_k, writer;

    // Of what is read from before the block, `decay` before the anchor; of what is read behind it, `decay` behind the anchor.
    DEVICE void load_reads(Lane lane, const Shared& shared, const float (&decay)[2], int octet) {
        load_gradients(lane, by_q, shared, QUERIES, octet), load_gradients(lane, by_k, shared, READERS, octet);
        #pragma unroll
        for (int i = 0; i < 4; i++) by_q[i] *= decay[i / 2], by_k[i] *= decay[i / 2];
    }
    DEVICE void load_writes(Lane lane, const Shared& shared, const float (&decay)[2], int octet) {
        load_gradients(lane, writer, shared, WRITERS, octet);
        #pragma unroll
        for (int i = 0; i < 4; i++) writer[i] *= decay[i / 2];
    }
    DEVICE float read(const Anchored& x, int i) const { return x.by_q[i] * by_q[i] + x.by_k[i] * by_k[i]; }
    DEVICE float written(const Anchored& x, int i) const { return x.writer[i] * writer[i]; }
};

// Pairs among 8 tokens, after all others. `d_g` and `writes` are added to; `to` becomes the gradients of q and k.
DEVICE void within_octet(Lane lane, Fragment& d_g, float (&writes)[2], VectorGradients& to, AnchoredGradients& d,
                         const Anchored& x, const Fragment& from_anchor, const Fragment& to_anchor,
                         const Fragment (&q)[2], const Fragment (&k)[2], const Passing& passing, const Shared& shared,
                         int b, int o) {
    Fragment reads, written, pairs;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        reads[i] = d.read(x, i), written[i] = d.written(x, i), pairs[i] = written[i] - reads[i];
    }
    multiply(d_g, reads, passing.reads), multiply(d_g, written, passing.writes);
    const int octet = 2 * b + o;
    const float *dL = shared.dL(octet, octet), *dA = shared.dA(octet, octet);
    multiply(d.by_q, x.writer, rows_of(lane, dA)), multiply(d.by_k, x.writer, rows_of(lane, dL));
    multiply(d.writer, x.by_k, columns_of(lane, dL)), multiply(d.writer, x.by_q, columns_of(lane, dA));
    const float2 diagonal = *reinterpret_cast<const float2*>(shared.diagonal() + 8 * octet + 2 * (lane.id % 4));
    writes[0] = writes[1] = 0.f;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float own = i % 2 ? diagonal.y : diagonal.x;  // a query reads its own token's write
        const float by_q = own * k[o][i], by_k = own * q[o][i], write = d.written(x, i);
        writes[i % 2] += write + by_q * q[o][i], pairs[i] += d.read(x, i) - write;
        to.q[o][i] = from_anchor[i] * d.by_q[i] + by_q;
        to.k[o][i] = to_anchor[i] * d.writer[i] - from_anchor[i] * d.by_k[i] + by_k;
    }
    multiply(d_g, pairs, passing.pairs);
}

// `d_g` becomes the gradient of the log-decays, `writes` what the tokens write, `to` the gradients of q and k.
DEVICE void within_block(HalfLane& lane, Fragment (&d_g)[2], Writes& writes, VectorGradients& to,
                         const Fragment (&q)[2], const Fragment (&k)[2], const Shared& shared, int b) {
    const float *through = shared.through(lane.warp, 0, b) + lane.id / 4,
                *other = shared.through(lane.warp, 1, b) + lane.id / 4;
    #pragma unroll
    for (int i = 0; i < 4; i++) d_g[0][i] = d_g[1][i] = through[i / 2 * 8] + other[i / 2 * 8];
    const Decays decays(lane, shared, b);
    const float2 both_ends = Decays::end(lane, shared, b);
    const Passing passing(lane);
    const float *dL = shared.dL(2 * b + 1, 2 * b), *dA = shared.dA(2 * b + 1, 2 * b);
    float to_second[2], end[2] = {both_ends.x, both_ends.y}, from_first[2];  // from the start, to the end of the block
    #pragma unroll
    for (int c = 0; c < 2; c++) to_second[c] = decays.start[c] * decays.gap[c], from_first[c] = decays.gap[c] * end[c];

    Anchored first, second;
    AnchoredGradients d_first, d_second;
    Fragment to_anchor, terms, by_q = {}, by_k = {}, by_writer = {};
    second.read(decays.from_anchor[1], q[1], k[1]);
    #pragma unroll
    for (int i = 0; i < 4; i++) to_anchor[i] = reciprocal(decays.from_anchor[0][i]);
    first.write(to_anchor, k[0]);

    // The second 8 tokens read what lies before the block, and what the first 8 have written.
    d_second.load_reads(lane, shared, to_second, 2 * b + 1);
    #pragma unroll
    for (int i = 0; i < 4; i++) terms[i] = d_second.read(second, i);
    multiply(d_g[0], terms, Passing::all());
    multiply(by_q, first.writer, rows_of(lane, dA)), multiply(by_k, first.writer, rows_of(lane, dL));
    // The first 8 are read behind the block, and by the second 8.
    d_first.load_writes(lane, shared, from_first, 2 * b);
    #pragma unroll
    for (int i = 0; i < 4; i++) terms[i] = d_first.written(first, i);
    multiply(d_g[1], terms, Passing::all());
    multiply(by_writer, second.by_k, columns_of(lane, dL)), multiply(by_writer, second.by_q, columns_of(lane, dA));
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float gap = decays.gap[i / 2];
        d_second.by_q[i] += gap * by_q[i], d_second.by_k[i] += gap * by_k[i], d_first.writer[i] += gap * by_writer[i];
    }
    first.read(decays.from_anchor[0], q[0], k[0]);
    d_first.load_reads(lane, shared, decays.start, 2 * b);
    within_octet(lane, d_g[0], writes[0], to, d_first, first, decays.from_anchor[0], to_anchor, q, k, passing, shared,
                 b, 0);
    #pragma unroll
    for (int i = 0; i < 4; i++) to_anchor[i] = reciprocal(decays.from_anchor[1][i]);
    second.write(to_anchor, k[1]);
    d_second.load_writes(lane, shared, end, 2 * b + 1);
    within_octet(lane, d_g[1], writes[1], to, d_second, second, decays.from_anchor[1], to_anchor, q, k, passing, shared,
                 b, 1);
}
