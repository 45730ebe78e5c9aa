// Gradients through pairs of a chunk's tokens with gates of heads.
//
// With the norms r and the decay D_ij between two tokens, L_ij = r_i r_j D_ij <k_i, k_j> and M_ij likewise with q_i. So the
// gradients of <k_i, k_j> and <q_i, k_j> are dL and dAqk times numbers, and all else are products of these with q and k as
// given. What a pair adds to the gradient of a log-decay, dL_ij L_ij + dAqk_ij M_ij, passes through tokens j + 1 to i: it is
// summed over exactly the pairs that pass through a token.
#pragma once
#include "head_decays.cuh"
#include "products.cuh"

// d += a b: 16 rows by 8 columns by 8; b has elements 2 t and 2 t + 1 of row g of its transpose.
DEVICE void multiply(Fragment& d, const Fragment& a, float2 b) { Tf32::mma(d, a[0], a[2], a[1], a[3], b.x, b.y); }

// Sums over the rows of an accumulator's lanes, of columns 2 t and 2 t + 1 of 4 fragments: a lane keeps one, that of
// `column_of`.
DEVICE float over_rows(Lane lane, const float (&x)[2 * OCTETS]) {
    float y[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) y[i] = keep(lane, 4, x[i], x[i + 4]);
    return keep(lane, 16, keep(lane, 8, y[0], y[2]), keep(lane, 8, y[1], y[3]));
}
DEVICE int column_of(Lane lane) {
    const int g = lane.id / 4;
    return 16 * (g % 2) + 8 * (g / 2 % 2) + 2 * (lane.id % 4) + g / 4;
}

// Store what a lane has of block (i, j) of a matrix, j <= i, and its transpose.
DEVICE void store_pairs(Lane lane, const Shared& shared, int which, int i, int j, const float (&x)[2]) {
    const int g = lane.id / 4, t = lane.id % 4;
    *reinterpret_cast<float2*>(shared.square(which, i, j) + triangle_row(g) + 2 * t) = make_float2(x[0], x[1]);
    float* to = (i == j ? shared.diagonal(which, i) : shared.square(which, j, i)) + g;
    to[triangle_row(2 * t)] = x[0], to[triangle_row(2 * t) ^ 8] = x[1];
}

// From the gradients of a triangle and the products of q or k with k, those of a warp's block of 16 rows with a half's columns:
// the gradients of the products, to shared memory, and the sums of what pairs add to the gradients of log-decays.
struct PairGradients {
    int which, rows;
    bool before[2], until[2];  // column 2 t + c of 8 is before row g; is not after it
    float row_sums[2] = {}, columns[2 * OCTETS] = {}, passing[2 * OCTETS] = {};
    Fragment earlier = {};  // sums of the columns so far

    DEVICE PairGradients(Lane lane, int which) : which(which), rows(lane.warp % 4) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            before[c] = lane.id % 4 * 2 + c < lane.id / 4;
            until[c] = lane.id % 4 * 2 + c <= lane.id / 4;
        }
    }
    // Fragment o, of block `block` of columns, which is that of the rows if `on_diagonal`.
    template <bool on_diagonal> DEVICE void take(Lane lane, const Shared& shared, const Fragment& d,
                                                 const Fragment& products, const Fragment& factors, int block, int o) {
        Fragment terms, through;
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool all = !on_diagonal || r > o % 2, some = all || r == o % 2;  // of the 8 x 8 elements
            float x[2];
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                const int i = 2 * r + c;
                const bool here = all || (some && (which == KK ? before[c] : until[c]));
                x[c] = here ? Tf32::round(d[i] * factors[i]) : 0.f, terms[i] = here ? x[c] * products[i] : 0.f;
                row_sums[r] += terms[i], columns[2 * o + c] += terms[i];
            }
            if (some) store_pairs(lane, shared, which, 2 * rows + r, 2 * block + o % 2, x);
        }
        // Terms of a column pass through the later tokens up to the row's.
        #pragma unroll
        for (int i = 0; i < 4; i++) through[i] = earlier[i];
        multiply(through, terms, make_float2(before[0], before[1])), multiply(earlier, terms, make_float2(1.f, 1.f));
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i / 2, c = i % 2;
            if (!on_diagonal || r > o % 2 || (r == o % 2 && until[c])) passing[2 * o + c] += through[i];
        }
    }
    DEVICE void multiply_in(HalfLane lane, const Tokens& d, const Tokens& products, const GradientsParams& p,
                            const Shared& shared) {
        const int g = lane.id / 4, t = lane.id % 4;
        const float* all_norms = (which == KK ? shared.k_norms() : shared.q_norms()) + 16 * rows;
        const float factor = which == KK ? -1.f : p.scale,
                    norms[2] = {factor * all_norms[g], factor * all_norms[g + 8]};
        const float* rise = shared.decays(rows) + 16;
        #pragma unroll
        for (int h = 0; h < HALF_BLOCKS; h++) {
            const int block = HALF_BLOCKS * lane.half + h;
            if (block > rows) break;
            const float* decays = shared.decays(block) + 2 * t;
            const float between = shared.between(rows)[block];
            #pragma unroll
            for (int o = 2 * h; o < 2 * h + 2; o++) {
                const float2 norm = pair_at(shared.k_norms() + token_of(lane, block, o % 2, 0));
                Fragment factors;
                if (block == rows) {
                    #pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float2 decay = pair_at(decays + (g + 8 * r) * DECAY_ROW + 8 * (o % 2));
                        factors[2 * r] = norms[r] * norm.x * decay.x, factors[2 * r + 1] = norms[r] * norm.y * decay.y;
                    }
                    if (which == KK) store_diagonal(lane, d[o], shared, o % 2);
                    take<true>(lane, shared, d[o], products[o], factors, block, o);
                } else {
                    const float2 fall = pair_at(decays + 15 * DECAY_ROW + 8 * (o % 2));
                    #pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float row = norms[r] * between * rise[(g + 8 * r) * DECAY_ROW];
                        factors[2 * r] = row * (norm.x * fall.x), factors[2 * r + 1] = row * (norm.y * fall.y);
                    }
                    take<false>(lane, shared, d[o], products[o], factors, block, o);
                }
            }
        }
    }
    // <bX, V'>, for beta's gradient.
    DEVICE void store_diagonal(Lane lane, const Fragment& d, const Shared& shared, int o) {
        const int g = lane.id / 4;
        if (g / 2 == lane.id % 4) shared.betas()[16 * rows + 8 * o + g].x = g % 2 ? d[2 * o + 1] : d[2 * o];
    }
    DEVICE void store_sums(HalfLane lane, const Shared& shared) {
        const int column = CHUNK / HALVES * lane.half + column_of(lane);
        shared.columns(which, rows)[column] = over_rows(lane, columns);
        shared.passing(which, rows)[column] = over_rows(lane, passing);
        float* to = shared.rows(which, lane.half) + 16 * rows + lane.id / 4;
        const float sums[2] = {over_tokens(row_sums[0]), over_tokens(row_sums[1])};
        if (lane.id % 4 == 0) to[0] = sums[0], to[8] = sums[1];
    }
};

// q or k times k, of a half's tokens as columns, and what follows from it.
DEVICE void all_pair_gradients(HalfLane lane, Triangles& triangles, const GradientsParams& p, const Shared& shared) {
    const Operand columns = swizzled_operand(shared.k() + lane.half * HALF_ROWS);
    #pragma unroll
    for (int i = 0; i < Triangles::EACH; i++) {
        const int which = Triangles::is_L(lane, i) ? KK : QK;
        const Operand rows = swizzled_operand(which == KK ? shared.k() : shared.q());
        Tokens products;
        clear(products);
        wgmma_fence();
        #pragma unroll
        for (int s = 0; s < K / 16; s++) wgmma_ss<Io, 8 * OCTETS>(products, values_at(rows, s), values_at(columns, s));
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(products);
        if (lane.warp % 4 < HALF_BLOCKS * lane.half) continue;  // above the diagonal
        PairGradients pairs(lane, which);
        pairs.multiply_in(lane, triangles.x[i], products, p, shared);
        pairs.store_sums(lane, shared);
    }
}

// Gradients of q and k of a warp's channels and half of the tokens.
struct VectorGradients {
    Tokens q, k;
};

// q or k of block b, for a warp's part of the matrix.
DEVICE void load_tokens(Fragment (&x)[2], const unsigned char* part, int b) {
    u32 r[4];
    ldmatrix_x4_trans(r, part + 16 * b * PANEL_ROW);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = Io::unpack(r[i]);
        x[i / 2][i % 2 * 2] = pair.x, x[i / 2][i % 2 * 2 + 1] = pair.y;
    }
}
DEVICE const unsigned char* part_of(Lane lane, const unsigned char* matrix) { return matrix + rows_at(lane, 0, CHUNK); }

// Add the products of the pairs' gradients with q and k; those above the diagonal belong to the tokens that write.
template <int half> DEVICE void add_pairs(Lane lane, VectorGradients& d, const Shared& shared) {
    // Hidden from the compiler, which would compute an address for each block
    const float* at = shared.square(0, 0, 0) + opt_barrier(triangle_row(lane.id / 4) + lane.id % 4 * 2);
    const auto block = [&](int which, int i, int j) { return pair_at(at + Shared::square_at(which, i, j)); };
    const unsigned char *q_part = part_of(lane, shared.q()), *k_part = part_of(lane, shared.k());
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        Fragment q[2], k[2];
        load_tokens(k, k_part, b);
        if (b >= HALF_BLOCKS * half) load_tokens(q, q_part, b);
        #pragma unroll
        for (int x = 0; x < 2; x++) {
            #pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                const int i = OCTETS * half + o, j = 2 * b + x;
                multiply(d.k[o], k[x], block(KK, i, j));
                if (j <= i) multiply(d.q[o], k[x], block(QK, i, j));
                else multiply(d.k[o], q[x], block(QK, i, j));
                if (i == j) {
                    multiply(d.k[o], k[x], block(KK, CHUNK / 8, i));
                    multiply(d.k[o], q[x], block(QK, CHUNK / 8, i));
                }
            }
        }
    }
}
