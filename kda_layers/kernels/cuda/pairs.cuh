// Gradients through pairs of a chunk's tokens, and what of them each token's decay has.
//
// Between blocks of 16 tokens the decay is a product of three: from the later block's start, of whole blocks between, to
// the earlier block's end. Within 16 tokens it is split at the middle of the smallest aligned block of 2, 4, 8 or 16 that
// holds both, as in prepare.cuh. The gradient of a token's log-decay is the sum of the terms that pass through it, and of
// no others: differences of sums would leave the rounding of terms that cancel. Terms that end in a read pass through the
// tokens up to it, terms that begin with a write through those behind it.
#pragma once
#include "products.cuh"

// d += a b: 16 channels by 8 tokens by 8 tokens; b as `rows_of` and `columns_of` give it.
DEVICE void multiply(Octet& d, const Octet& a, float2 b) { Tf32::mma(d, a[0], a[2], a[1], a[3], b.x, b.y); }

// An 8 x 8 block of a triangle's gradient as b: summed over its columns (the writing tokens), over its rows.
DEVICE float2 rows_of(const float* block, int lane) { return reinterpret_cast<const float2*>(block)[lane]; }
DEVICE float2 columns_of(const float* block, int lane) {
    const float* at = block + lane % 4 * 16 + lane / 4;
    return make_float2(at[0], at[8]);
}

DEVICE float over_tokens(float x) {  // of the lanes that have the same channels
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// ---------------------------------------------------------------- between blocks

// Adds the products between blocks to `d`; `through` becomes what passes through whole blocks, for a lane's two channels.
// Coming in, `states` is this lane's part of the sum over V of S dS.
DEVICE void between_blocks(StateGradients& d, float (&through)[BLOCKS][2], const float (&states)[2], const Shared& shared, int warp, int lane) {
    float total[BLOCKS][2], to_end[BLOCKS - 1][2];
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) total[b][c] = shared.totals(b)[channel_of(c, warp, lane)];
        float all = states[c] * (total[0][c] * total[1][c]) * (total[2][c] * total[3][c]);
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) through[b][c] = all;
    }
    #pragma unroll
    for (int b = BLOCKS - 1; b > 0; b--) {
        Octet k[2], q[2];
        uint4 rise = shared.rise(b, warp)[lane];
        load_vectors(k, shared.k(), shared.k_norms(), b, warp, lane), decay_by(k, rise);
        load_vectors(q, shared.q(), shared.q_norms(), b, warp, lane), decay_by(q, rise);
        #pragma unroll
        for (int j = 0; j < b; j++) {
            Octet writer[2];
            load_vectors(writer, shared.k(), shared.k_norms(), j, warp, lane), decay_by(writer, shared.fall(j, warp)[lane]);
            float read[2] = {};
            #pragma unroll
            for (int o = 0; o < 2; o++) {
                Octet &queries = d.queries[2 * b + o], &readers = d.readers[2 * b + o], &writers = d.writers[2 * j + o];
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    int c = i / 2;
                    // What was there before block j, decayed over it, is read here; then comes what j writes.
                    queries[i] *= total[j][c], readers[i] *= total[j][c];
                    read[c] += q[o][i] * queries[i] + k[o][i] * readers[i];
                    if (b == BLOCKS - 1) to_end[j][c] = (2 * o + i % 2 ? to_end[j][c] : 0.f) + writer[o][i] * writers[i];
                    writers[i] *= total[b][c];
                }
            }
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                #pragma unroll
                for (int between = j + 1; between < b; between++) read[c] *= total[between][c];
                through[j][c] += read[c];
            }
            #pragma unroll
            for (int o = 0; o < 2; o++) {
                #pragma unroll
                for (int x = 0; x < 2; x++) {  // 8 tokens 2 b + o, and 2 j + x
                    const float *dL = shared.dL(2 * b + o, 2 * j + x), *dA = shared.dA(2 * b + o, 2 * j + x);
                    multiply(d.queries[2 * b + o], writer[x], rows_of(dA, lane));
                    multiply(d.readers[2 * b + o], writer[x], rows_of(dL, lane));
                    multiply(d.writers[2 * j + x], k[o], columns_of(dL, lane));
                    multiply(d.writers[2 * j + x], q[o], columns_of(dA, lane));
                }
            }
        }
    }
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        #pragma unroll
        for (int j = 0; j < BLOCKS - 1; j++) {  // from a write of block j to the chunk's end
            float x = to_end[j][c];
            #pragma unroll
            for (int b = j + 1; b < BLOCKS; b++) x *= total[b][c];
            #pragma unroll
            for (int b = j + 1; b < BLOCKS; b++) through[b][c] += x;
        }
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) through[b][c] = over_tokens(through[b][c]);
    }
}

// ---------------------------------------------------------------- within a block

// Gradients of q and k of 16 tokens, and of their log-decays.
struct BlockGradients {
    Octet q[2], k[2], g[2];
};

// The gradients of the triangles among 8 tokens: of L for both sides of a pair at once, as a token is on one side only.
struct Corner {
    float2 both, rows, columns;

    DEVICE Corner(const Shared& shared, int octet, int lane) {
        const float *dL = shared.dL(octet, octet), *dA = shared.dA(octet, octet);
        float2 row = rows_of(dL, lane), column = columns_of(dL, lane);
        int g = lane / 4, m = lane % 4 * 2;
        both = make_float2(g > m ? row.x : column.x, g > m + 1 ? row.y : column.y);
        rows = rows_of(dA, lane), columns = columns_of(dA, lane);
        rows = make_float2(g > m ? rows.x : 0.f, g > m + 1 ? rows.y : 0.f);
        columns = make_float2(g < m ? columns.x : 0.f, g < m + 1 ? columns.y : 0.f);
    }
    // Of pairs whose numbers first differ in bit `level`.
    template <int level> static DEVICE float2 at(float2 x, int lane) {
        int first = lane / 4 ^ lane % 4 * 2, second = first ^ 1;
        return make_float2(first >= level && first < 2 * level ? x.x : 0.f, second >= level && second < 2 * level ? x.y : 0.f);
    }
};

// One level of anchoring among 8 tokens; `near` is a token's decay towards the other half of its block. `terms` becomes
// the sum of the terms that a token reads in the upper half, or has written in the lower one.
template <int level>
DEVICE void anchor(Octet& terms, Octet& d_q, Octet& d_k, const Octet& near, const Octet& q, const Octet& k, const Corner& corner, int lane) {
    Octet near_q, near_k, by_q = {}, by_k = {};
    #pragma unroll
    for (int i = 0; i < 4; i++) near_q[i] = near[i] * q[i], near_k[i] = near[i] * k[i];
    multiply(by_k, near_k, Corner::at<level>(corner.both, lane));
    multiply(by_k, near_q, Corner::at<level>(corner.columns, lane));
    multiply(by_q, near_k, Corner::at<level>(corner.rows, lane));
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        terms[i] = near_q[i] * by_q[i] + near_k[i] * by_k[i];
        d_q[i] += near[i] * by_q[i], d_k[i] += near[i] * by_k[i];
    }
}

// Terms of the levels, and of what leads out of the block (r: reads, w: writes), to each token's log-decay.
struct Terms {
    Octet r[2], w[2], of_8[2], of_4[2], of_2[2], of_1[2];

    DEVICE void sum(Octet (&g)[2], const float (&through)[2], int lane) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {  // a half's tokens have what the other half reads, or has written
            float reads = over_tokens(r[1][2 * c] + r[1][2 * c + 1]), writes = over_tokens(w[0][2 * c] + w[0][2 * c + 1]);
            g[0][2 * c] = g[0][2 * c + 1] = through[c] + reads, g[1][2 * c] = g[1][2 * c + 1] = through[c] + writes;
        }
        #pragma unroll
        for (int o = 0; o < 2; o++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) (o ? r : w)[o][i] += of_8[o][i];
            halves<2>(g[o], of_4[o], o, lane);
            halves<1>(g[o], of_2[o], o, lane);
            #pragma unroll
            for (int c = 0; c < 4; c += 2) {
                float high = r[o][c + 1];  // what the second token of a pair reads from before the pair
                g[o][c] += r[o][c] + high;
                g[o][c + 1] += high + of_1[o][c + 1] + w[o][c];
            }
        }
    }
    // Halves of 4 tokens (mask 2) or of 2 (mask 1); then the terms between them join the others.
    template <int mask> DEVICE void halves(Octet& g, const Octet& between, int o, int lane) {
        bool upper = lane & mask;
        #pragma unroll
        for (int c = 0; c < 4; c += 2) {
            float x = upper ? r[o][c] + r[o][c + 1] : w[o][c] + w[o][c + 1];
            if (mask == 2) x += shuffle_xor(x, 1);
            x = shuffle_xor(x, mask);
            g[c] += x, g[c + 1] += x;
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) r[o][i] += upper ? between[i] : 0.f, w[o][i] += upper ? 0.f : between[i];
    }
};

// `e`: the tokens' decays; q, k, g of `to` are the block's gradients: q and k are added to.
DEVICE void within_block(BlockGradients& to, const StateGradients& d, const Octet (&e)[2], const float (&through)[2], const Shared& shared, int b, int warp,
                         int lane) {
    Octet q[2], k[2];
    load_vectors(q, shared.q(), shared.q_norms(), b, warp, lane), load_vectors(k, shared.k(), shared.k_norms(), b, warp, lane);
    Terms terms;
    Decays decays(e);
    const Corner corners[2] = {Corner(shared, 2 * b, lane), Corner(shared, 2 * b + 1, lane)};
    auto near = [&](Octet& x, int o, auto upper) {
        #pragma unroll
        for (int i = 0; i < 4; i++) x[i] = upper(i) ? decays.before[o][i] : decays.after[o][i];
    };
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        float2 diagonal = *reinterpret_cast<const float2*>(shared.diagonal() + 16 * b + 8 * o + 2 * (lane % 4));
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = i % 2 ? diagonal.y : diagonal.x;  // a query reads what its own token has just written
            to.q[o][i] += x * k[o][i], to.k[o][i] += x * q[o][i];
        }
        Octet x;
        near(x, o, [](int i) { return i % 2; });
        anchor<1>(terms.of_1[o], to.q[o], to.k[o], x, q[o], k[o], corners[o], lane);
    }
    decays.to_2();
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        Octet x;
        near(x, o, [&](int) { return lane & 1; });
        anchor<2>(terms.of_2[o], to.q[o], to.k[o], x, q[o], k[o], corners[o], lane);
    }
    decays.to_twice<1>(lane);
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        Octet x;
        near(x, o, [&](int) { return lane & 2; });
        anchor<4>(terms.of_4[o], to.q[o], to.k[o], x, q[o], k[o], corners[o], lane);
    }
    decays.to_twice<2>(lane);
    {  // between the upper 8 tokens, which read, and the lower 8
        Octet reader_q, reader_k, writer, by_q = {}, by_k = {}, by_writer = {};
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            writer[i] = decays.after[0][i] * k[0][i];
            reader_q[i] = decays.before[1][i] * q[1][i], reader_k[i] = decays.before[1][i] * k[1][i];
        }
        const float *dL = shared.dL(2 * b + 1, 2 * b), *dA = shared.dA(2 * b + 1, 2 * b);
        multiply(by_q, writer, rows_of(dA, lane));
        multiply(by_k, writer, rows_of(dL, lane));
        multiply(by_writer, reader_k, columns_of(dL, lane));
        multiply(by_writer, reader_q, columns_of(dA, lane));
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            to.q[1][i] += decays.before[1][i] * by_q[i], to.k[1][i] += decays.before[1][i] * by_k[i];
            to.k[0][i] += decays.after[0][i] * by_writer[i];
            terms.of_8[1][i] = reader_q[i] * by_q[i] + reader_k[i] * by_k[i], terms.of_8[0][i] = writer[i] * by_writer[i];
        }
    }
    decays.to_16();
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {  // other blocks and the states
            float by_q = decays.before[o][i] * d.queries[2 * b + o][i], by_k = decays.before[o][i] * d.readers[2 * b + o][i];
            float by_writer = decays.after[o][i] * d.writers[2 * b + o][i];
            to.q[o][i] += by_q, to.k[o][i] += by_k + by_writer;
            terms.r[o][i] = q[o][i] * by_q + k[o][i] * by_k, terms.w[o][i] = k[o][i] * by_writer;
        }
    }
    terms.sum(to.g, through, lane);
}
