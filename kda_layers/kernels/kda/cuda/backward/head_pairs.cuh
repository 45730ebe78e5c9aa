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

// Sums over the rows of an accumulator's lanes: of 16 columns, 2 t and 2 t + 1 of 2 fragments, and of two such sums, a half's
// columns. A lane keeps one, that of `column_of`.
DEVICE float over_rows(Lane lane, const float (&x)[4]) {
    return keep(lane, 8, keep(lane, 4, x[0], x[2]), keep(lane, 4, x[1], x[3]));
}
DEVICE float over_rows(Lane lane, const float (&of_16)[HALF_BLOCKS]) { return keep(lane, 16, of_16[0], of_16[1]); }
DEVICE int column_of(Lane lane) {
    const int g = lane.id / 4;
    return 16 * (g / 4) + 8 * (g % 2) + 2 * (lane.id % 4) + g / 2 % 2;
}

// From the gradients of a triangle and the products of q or k with k, those of a warp's block of 16 rows with a half's
// columns: the gradients of the products, to shared memory, and the sums of what pairs add to the gradients of log-decays.
struct PairGradients {
    int which, rows;
    int g, t, ahead;  // row g is `ahead` of column 2 t of the same 8 tokens
    float row_sums[2] = {}, columns[HALF_BLOCKS] = {}, passing[HALF_BLOCKS] = {};
    Fragment earlier = {};  // sums of the columns so far

    DEVICE PairGradients(Lane lane, int which)
        : which(which), rows(lane.warp % 4), g(lane.id / 4), t(lane.id % 4), ahead(g - 2 * t) {}

    DEVICE void multiply(HalfLane lane, const Tokens& d, const Tokens& products, const GradientsParams& p,
                         const Shared& shared) {
        const float* of_rows = (which == KK ? shared.k_norms() : shared.q_norms()) + 16 * rows + g;
        const float factor = which == KK ? -1.f : p.scale, norms[2] = {factor * of_rows[0], factor * of_rows[8]};
        const float* rise = shared.decays(rows) + g * DECAY_ROW + 16;
        #pragma unroll
        for (int h = 0; h < HALF_BLOCKS; h++) {
            const int block = HALF_BLOCKS * lane.half + h;
            if (block > rows) break;
            const float* decays = shared.decays(block) + 2 * t;
            const float* norms_at = shared.k_norms() + 16 * block + 2 * t;
            const Places to(*this, shared, block);
            float of_columns[4], through[4];
            if (block == rows) {
                #pragma unroll
                for (int o = 0; o < 2; o++) {
                    const float2 norm = pair_at(norms_at + 8 * o);
                    Fragment factors;
                    #pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float2 decay = pair_at(decays + (g + 8 * r) * DECAY_ROW + 8 * o);
                        factors[2 * r] = norms[r] * norm.x * decay.x, factors[2 * r + 1] = norms[r] * norm.y * decay.y;
                    }
                    if (which == KK) store_diagonal(d[2 * h + o], shared, o);
                    take<true>(to, d[2 * h + o], products[2 * h + o], factors, of_columns, through, o);
                }
            } else {
                const float between = shared.between(rows)[block];
                const float of_row[2] = {norms[0] * (between * rise[0]), norms[1] * (between * rise[8 * DECAY_ROW])};
                #pragma unroll
                for (int o = 0; o < 2; o++) {
                    const float2 norm = pair_at(norms_at + 8 * o), fall = pair_at(decays + 15 * DECAY_ROW + 8 * o);
                    const float x = norm.x * fall.x, y = norm.y * fall.y;
                    const Fragment factors = {of_row[0] * x, of_row[0] * y, of_row[1] * x, of_row[1] * y};
                    take<false>(to, d[2 * h + o], products[2 * h + o], factors, of_columns, through, o);
                }
            }
            columns[h] = over_rows(lane, of_columns), passing[h] = over_rows(lane, through);
        }
    }
    DEVICE void store_sums(HalfLane lane, const Shared& shared) const {
        const int column = CHUNK / HALVES * lane.half + column_of(lane);
        shared.columns(which, rows)[column] = over_rows(lane, columns);
        shared.passing(which, rows)[column] = over_rows(lane, passing);
        float* to = shared.rows(which, lane.half) + 16 * rows + g;
        const float sums[2] = {over_tokens(row_sums[0]), over_tokens(row_sums[1])};
        if (t == 0) to[0] = sums[0], to[8] = sums[1];
    }

private:
    // Where a lane stores its part of a block of 16 rows and columns, and of its transpose, by neighbours. What depends on
    // the lane is hidden from the compiler, which would compute an address for each store.
    struct Places {
        float *below, *above[2], *diagonal[2];

        DEVICE Places(const PairGradients& pairs, const Shared& shared, int block) {
            const int i = 2 * pairs.rows, j = 2 * block, row = triangle_row(2 * pairs.t);
            below = shared.square(pairs.which, i, j) + opt_barrier(triangle_row(pairs.g) + 2 * pairs.t);
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                const int at = opt_barrier((c ? row ^ 8 : row) + pairs.g);
                above[c] = shared.square(pairs.which, j, i) + at, diagonal[c] = shared.diagonal(pairs.which, i) + at;
            }
        }
        // 8 x 8 elements (r, o) of the block
        template <bool on_diagonal> DEVICE void store(int r, int o, float x, float y) const {
            *reinterpret_cast<float2*>(below + Shared::square_at(0, r, o)) = make_float2(x, y);
            const bool diagonal_ones = on_diagonal && r == o;
            const int at = diagonal_ones ? 64 * r : Shared::square_at(0, o, r);
            (diagonal_ones ? diagonal : above)[0][at] = x, (diagonal_ones ? diagonal : above)[1][at] = y;
        }
    };

    // 16 rows by 8 columns, o of 2; `on_diagonal`: rows and columns are the same 16 tokens. Sums of a lane's two rows: of the
    // columns' terms, of those that pass through the columns' tokens.
    template <bool on_diagonal> DEVICE void take(const Places& to, const Fragment& d, const Fragment& products,
                                                 const Fragment& factors, float (&of_columns)[4], float (&through)[4],
                                                 int o) {
        Fragment terms, rounded, passing;  // `rounded`: as add_pairs takes them
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float x[2];
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                const int i = 2 * r + c;
                const bool here = !on_diagonal || r > o || (r == o && ahead >= c + (which == KK));
                const float of_pair = here ? d[i] * factors[i] : 0.f;
                x[c] = Tf32::round(of_pair);
                terms[i] = here ? of_pair * products[i] : 0.f, rounded[i] = here ? x[c] * products[i] : 0.f;
            }
            if (!on_diagonal || r >= o)
                to.store<on_diagonal>(r, o, x[0], x[1]), row_sums[r] += rounded[2 * r] + rounded[2 * r + 1];
        }
        // Terms of a column pass through the later tokens up to the row's.
        #pragma unroll
        for (int i = 0; i < 4; i++) passing[i] = earlier[i];
        ::multiply(passing, terms, make_float2(ahead > 0, ahead > 1));
        ::multiply(earlier, terms, make_float2(1.f, 1.f));
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float x[2];
            #pragma unroll
            for (int r = 0; r < 2; r++)
                x[r] = !on_diagonal || r > o || (r == o && ahead >= c) ? passing[2 * r + c] : 0.f;
            of_columns[2 * o + c] = rounded[c] + rounded[2 + c], through[2 * o + c] = x[0] + x[1];
        }
    }
    // <bX, V'>, for beta's gradient.
    DEVICE void store_diagonal(const Fragment& d, const Shared& shared, int o) const {
        if (g / 2 == t) shared.betas()[16 * rows + 8 * o + g].x = g % 2 ? d[2 * o + 1] : d[2 * o];
    }
};

// q or k times k, of a half's tokens as columns, and what follows from it.
DEVICE void all_pair_gradients(HalfLane lane, Triangles& triangles, const GradientsParams& p, const Shared& shared) {
    #pragma unroll
    for (int i = 0; i < Triangles::EACH; i++) {
        lane.opt_barrier();  // with K = 64 the first triangle's addresses would take the second one's registers
        const Operand columns = swizzled_operand(shared.k() + lane.half * HALF_ROWS);
        const int which = Triangles::is_L(lane, i) ? KK : QK;
        const Operand rows = swizzled_operand(which == KK ? shared.k() : shared.q());
        Tokens products;
        wgmma_fence();
        wgmma_ss<Io, 8 * OCTETS, false, true>(products, rows, columns);
        #pragma unroll
        for (int s = 1; s < K / 16; s++) wgmma_ss<Io, 8 * OCTETS>(products, values_at(rows, s), values_at(columns, s));
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(products);
        if (lane.warp % 4 < HALF_BLOCKS * lane.half) continue;  // above the diagonal
        PairGradients pairs(lane, which);
        pairs.multiply(lane, triangles.x[i], products, p, shared);
        pairs.store_sums(lane, shared);
    }
}

// Gradients of q and k of a warp's channels and half of the tokens.
struct VectorGradients {
    Tokens q, k;
};

// Add the products of the pairs' gradients with q and k; those above the diagonal belong to the tokens that write.
template <int half> DEVICE void add_pairs(Lane lane, VectorGradients& d, const Shared& shared) {
    // Hidden from the compiler, which would compute an address for each block
    const float* at = shared.square(0, 0, 0) + opt_barrier(triangle_row(lane.id / 4) + lane.id % 4 * 2);
    const auto block = [&](int which, int i, int j) { return pair_at(at + Shared::square_at(which, i, j)); };
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        Fragment q[2], k[2];
        load_block(lane, k, shared.k(), b);
        if (b >= HALF_BLOCKS * half) load_block(lane, q, shared.q(), b);
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
