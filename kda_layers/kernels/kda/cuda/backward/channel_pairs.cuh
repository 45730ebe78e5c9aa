// Gradients through pairs of a chunk's tokens, and of the decays between them.
//
// Between blocks of 16 tokens the decay is a product of three: from the later block's start, of full blocks between,
// to the earlier block's end. Within 16 tokens it is split at the middle of the smallest aligned block of 2, 4, 8 or 16
// that holds both, as in prepare.cuh. The gradient of a token's log-decay is the sum of the terms that pass through it,
// and of no others: differences of sums would leave the rounding of terms that cancel. Terms that end in a read pass
// through the tokens up to it, terms that begin with a write through the tokens after it.
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

// The gradients of the triangles among 8 tokens, for the pairs of a lane's two tokens with another: of L for both sides
// of a pair at once, as a token is on one side only; and for the two tokens with each other.
struct Corner {
    float2 both, rows, columns;
    float own_L, own_A;

    DEVICE Corner(Lane lane, const Shared& shared, int fragment) {
        const float *dL = shared.dL(fragment, fragment), *dA = shared.dA(fragment, fragment);
        const u32 token = lane.id % 4 * 2, own = triangle_row(token + 1) + token;
        const bool reads = reads_earlier(lane);
        const float2 row = rows_of(lane, dL), column = columns_of(lane, dL);
        both = make_float2(reads ? row.x : column.x, reads ? row.y : column.y);
        rows = rows_of(lane, dA), columns = columns_of(lane, dA);
        own_L = dL[own], own_A = dA[own];
    }
    // True if the token that a lane has as b's column is after its two others.
    static DEVICE bool reads_earlier(Lane lane) { return lane.id / 4 > lane.id % 4 * 2; }
    // Only pairs of tokens whose indices first differ in bit `level`, 2 or 4, and of these only some.
    template <int level> static DEVICE float2 at(Lane lane, float2 x, bool some = true) {
        const u32 differ = (lane.id / 4 ^ lane.id % 4 * 2) & 6;
        const bool here = some && (level == 4 ? differ >= 4 : differ == 2);
        return make_float2(here ? x.x : 0.f, here ? x.y : 0.f);
    }
};

// Terms of tokens that read or write pass through the decays of tokens between the two: sums over tokens, as products
// with 0s and 1s. As mma's b, an 8 x 8 matrix: 1 where the term of its row's token passes through its column's. In shared
// memory, where a lane loads its part in one instruction.
//
// In a block of 8 tokens. A read of what came before the block passes through the tokens up to the one that reads; a write
// that is read after the block, through the tokens after the one that writes. Both, among pairs of aligned blocks of 2 or
// 4 tokens: upper blocks read, lower ones write.
enum Pattern { READS, WRITES, PAIRS_OF_2, PAIRS_OF_4, PATTERNS };

DEVICE float passes(int which, u32 term, u32 through) {
    if (which == READS) return through <= term;
    if (which == WRITES) return through > term;
    const u32 level = which == PAIRS_OF_2 ? 2 : 4;
    return (term ^ through) < level && (through > term) != bool(term & level);
}

// By one warp for each pattern.
DEVICE void store_patterns(Lane lane, const Shared& shared) {
    const u32 term = lane.id % 4 * 2, through = lane.id / 4;
    if (lane.warp < PATTERNS)
        shared.pattern(lane.warp, lane) =
            make_float2(passes(lane.warp, term, through), passes(lane.warp, term + 1, through));
}

// Add to g the terms that pass through each token.
DEVICE void add_terms(Lane lane, Fragment& g, const Fragment& terms, const Shared& shared, Pattern which) {
    multiply(g, terms, shared.pattern(which, lane));
}
DEVICE void add_all_terms(Fragment& g, const Fragment& terms) { multiply(g, terms, make_float2(1.f, 1.f)); }

// Level 1: a lane's second token reads, its first has written. `e`: the tokens' decays.
DEVICE void anchor_1(Fragment& d_g, float (&writes)[2], Fragment& d_q, Fragment& d_k, const Fragment& e,
                     const Fragment& q, const Fragment& k, const Corner& corner) {
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const float L = corner.own_L * e[i + 1], A = corner.own_A * e[i + 1], by_writer = L * k[i + 1] + A * q[i + 1];
        d_q[i + 1] += A * k[i], d_k[i + 1] += L * k[i], d_k[i] += by_writer;
        const float term = k[i] * by_writer;
        d_g[i + 1] += term, writes[0] += term;
    }
}

// Level 2 or 4: tokens in upper blocks of `level` read what those in lower ones have written. `near` is a token's decay
// towards the other block of its pair.
template <int level> DEVICE void anchor(Lane lane, Fragment& d_g, float (&writes)[2], Fragment& d_q, Fragment& d_k,
                                        const Fragment& near, const Fragment& q, const Fragment& k,
                                        const Corner& corner, const Shared& shared) {
    Fragment near_q, near_k, terms, by_q = {}, by_k = {};
    #pragma unroll
    for (int i = 0; i < 4; i++) near_q[i] = near[i] * q[i], near_k[i] = near[i] * k[i];
    multiply(by_k, near_k, Corner::at<level>(lane, corner.both));
    multiply(by_k, near_q, Corner::at<level>(lane, corner.columns, !Corner::reads_earlier(lane)));
    multiply(by_q, near_k, Corner::at<level>(lane, corner.rows, Corner::reads_earlier(lane)));
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        terms[i] = near_q[i] * by_q[i] + near_k[i] * by_k[i];
        d_q[i] += near[i] * by_q[i], d_k[i] += near[i] * by_k[i];
    }
    add_terms(lane, d_g, terms, shared, level == 2 ? PAIRS_OF_2 : PAIRS_OF_4);
    add_writes(writes, terms, !(lane.id & level / 2));
}

// Level 8: the upper 8 tokens read, the lower 8 have written.
DEVICE void anchor_8(Lane lane, Fragment (&d_g)[2], Writes& writes, VectorGradients& to, const Decays (&decays)[2],
                     const Fragment (&q)[2], const Fragment (&k)[2], const Shared& shared, int b) {
    const float *dL = shared.dL(2 * b + 1, 2 * b), *dA = shared.dA(2 * b + 1, 2 * b);
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
    add_terms(lane, d_g[1], by_q, shared, READS), add_terms(lane, d_g[0], by_writer, shared, WRITES);
    add_writes(writes[0], by_writer);
}

// Reads of 8 tokens from before the block; `decay`: from its start.
DEVICE void read_earlier(Lane lane, Fragment (&d_g)[2], Fragment& d_q, Fragment& d_k, const Fragment& decay,
                         const Fragment& q, const Fragment& k, const Shared& shared, int b, int o) {
    Fragment queries, readers, terms;
    load_gradients(lane, queries, shared, QUERIES, 2 * b + o),
        load_gradients(lane, readers, shared, READERS, 2 * b + o);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float by_q = decay[i] * queries[i], by_k = decay[i] * readers[i];
        d_q[i] += by_q, d_k[i] += by_k, terms[i] = q[i] * by_q + k[i] * by_k;
    }
    add_terms(lane, d_g[o], terms, shared, READS);
    if (o == 1) add_all_terms(d_g[0], terms);
}

// Writes of 8 tokens that are read after the block; `decay`: to its end.
DEVICE void write_later(Lane lane, Fragment (&d_g)[2], float (&writes)[2], Fragment& d_k, const Fragment& decay,
                        const Fragment& k, const Shared& shared, int b, int o) {
    Fragment writers, terms;
    load_gradients(lane, writers, shared, WRITERS, 2 * b + o);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float by_writer = decay[i] * writers[i];
        d_k[i] += by_writer, terms[i] = k[i] * by_writer;
    }
    add_terms(lane, d_g[o], terms, shared, WRITES), add_writes(writes, terms);
    if (o == 0) add_all_terms(d_g[1], terms);
}

// `e`: the tokens' decays; `d_g` becomes the gradient of their logarithms, `writes` what the tokens write; the gradients
// of q and k are added to.
DEVICE void within_block(HalfLane& lane, Fragment (&d_g)[2], Writes& writes, VectorGradients& to,
                         const Fragment (&e)[2], const Fragment (&q)[2], const Fragment (&k)[2], const Shared& shared,
                         int b) {
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
        anchor_1(d_g[o], writes[o], to.q[o], to.k[o], e[o], q[o], k[o], corner);
        d.to_2();
        Fragment near;
        d.towards(near, lane.id & 1);
        anchor<2>(lane, d_g[o], writes[o], to.q[o], to.k[o], near, q[o], k[o], corner, shared);
        d.to_twice<1>(lane);
        d.towards(near, lane.id & 2);
        anchor<4>(lane, d_g[o], writes[o], to.q[o], to.k[o], near, q[o], k[o], corner, shared);
        d.to_twice<2>(lane);
        Fragment from_start;
        #pragma unroll
        for (int i = 0; i < 4; i++) from_start[i] = d.before[i] * (o ? decays[0].all[i / 2] : 1.f);
        read_earlier(lane, d_g, to.q[o], to.k[o], from_start, q[o], k[o], shared, b, o);
        warp_sync();  // keeps registers free, as above
    }
    lane.Lane::opt_barrier();
    anchor_8(lane, d_g, writes, to, decays, q, k, shared, b);
    #pragma unroll
    for (int i = 0; i < 4; i++) decays[0].after[i] *= decays[1].all[i / 2];
    #pragma unroll
    for (int o = 0; o < 2; o++) write_later(lane, d_g, writes[o], to.k[o], decays[o].after, k[o], shared, b, o);
}
