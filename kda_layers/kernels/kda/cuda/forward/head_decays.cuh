// The decays of heads, one number for a token. They and the lengths of q and k scale products of q and k as loaded, which
// are exact but for their sums.
//
// A decay between two tokens of a block of 16 is split as that of a channel (channel_decays.cuh), so it is never a
// difference of sums, but its factors are fp32.
#pragma once

using Pairs = float[2];  // of a lane's two tokens

// Decays of the lane's tokens, as `anchor<1>` takes them.
DEVICE void start_decays(Lane lane, Pairs& near, Pairs& far, const Gates<GATE>& gates, const Raw& raw,
                         const ForwardParams& p, const Shared& shared, const Cursor& at, u32 iteration) {
    const bool odd = lane.id / 4 & 1;
    float bias = *shared.bias(lane.warp, BLOCK_ROLES ? iteration : 0);
    if (BLOCK_ROLES) bias = p.dt_bias ? gates.bias(bias) : 0.f;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const float own = gates.decay(as_float(raw.g[r]), bias, token_of(lane, at, r) < at.tile.length);
        near[r] = odd ? own : 1.f, far[r] = odd ? 1.f : own;
    }
}

// ---------------------------------------------------------------- products

// q and k as loaded; their scales, too, are factors of products.
struct Directions {
    u32 rows[2][4][4];             // [token][16 channels]: k, q, k, q as an MMA's rows
    float q_scale[2], k_scale[2];  // of a lane's two tokens

    DEVICE u32 k(int r, int i) const { return rows[r][i / 2][i % 2 * 2]; }  // pairs of channels
    DEVICE u32 q(int r, int i) const { return rows[r][i / 2][i % 2 * 2 + 1]; }

    // Computes the products among the 16 tokens without decays, too: L and A with its diagonal.
    DEVICE Directions(Lane lane, Tile& L, Tile& A, const Raw& raw, const ForwardParams& p, const Shared& shared,
                      const Cursor& at, u32 iteration);
};

// Add the products over 16 channels, the first or last of 32 that `columns` has: rows 0-7 of the accumulator are k's (L),
// rows 8-15 are q's (Aqk).
DEVICE void multiply_8(float (&acc)[4], const u32 (&rows)[4], uint4 columns, bool last) {
    Io::mma(acc, rows[0], rows[1], rows[2], rows[3], last ? columns.z : columns.x, last ? columns.w : columns.y);
}

DEVICE Directions::Directions(Lane lane, Tile& L, Tile& A, const Raw& raw, const ForwardParams& p, const Shared& shared,
                              const Cursor& at, u32 iteration) {
    const int b = lane.warp / HALVES, h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    float within[2][4] = {}, squares[2][4] = {}, corner[4] = {};
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        // The compiler copies rows that it can recompute into consecutive registers before each MMA. Where registers are
        // enough to keep them, a mask that it cannot see through prevents the copies. What is saved has the signs that zeros
        // have in one role, so that mask is always ~0.
        const bool hides = SAVES ? p.T < 0 : token_of(lane, at, r) >= at.tile.length;
        const u32 mask = BLOCK_ROLES && !SEGMENTS && hides ? 0u : ~0u;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                rows[r][s][2 * i] = word(raw.k[r][s / 2], s % 2 * 2 + i) & mask;
                rows[r][s][2 * i + 1] = word(raw.q[r][s / 2], s % 2 * 2 + i) & mask;
            }
            multiply_8(within[r], rows[r][s], raw.k[r][s / 2], s % 2);
            multiply_8(squares[r], rows[r][s], raw.q[r][s / 2], s % 2);
            if (r == 1) multiply_8(corner, rows[r][s], raw.k[0][s / 2], s % 2);
        }
        if (t == g / 2) {
            const bool odd = g % 2;
            shared.sums()[lane.warp * 16 + g + 8 * r] =
                make_float4(odd ? squares[r][3] : squares[r][2], odd ? within[r][1] : within[r][0], 0.f, 0.f);
        }
    }
    if (HALVES > 1) barrier_sync(TOKENS + b, 32 * HALVES);
    else warp_sync();
    uint4* columns = shared.columns(iteration) + lane.warp * 4 * 32 + lane.id;  // for later blocks
    #pragma unroll
    for (int i = 0; i < 4; i++) columns[i * 32] = raw.k[i / 2][i % 2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float4 sums = shared.sums()[b * HALVES * 16 + g + 8 * r];
        if (HALVES > 1) {
            const float4 other = shared.sums()[(b * HALVES + 1) * 16 + g + 8 * r];
            sums.x += other.x, sums.y += other.y;
        }
        const Scales scales(p, sums.x, sums.y, token_of(lane, at, r) < at.tile.length);
        q_scale[r] = scales.q, k_scale[r] = scales.k;
        if (h == 0 && t == 0) shared.scale(iteration)[16 * b + g + 8 * r] = scales.o;
    }
    #pragma unroll
    for (int x = 0; x < 2; x++) {
        const int column = 2 * t + x;
        const float low = shuffle(k_scale[0], 4 * column), high = shuffle(k_scale[1], 4 * column);
        L[0][x] = g > column ? within[0][x] * k_scale[0] * low : 0.f;
        A[0][x] = g >= column ? within[0][2 + x] * q_scale[0] * low : 0.f;
        L[0][2 + x] = corner[x] * k_scale[1] * low, A[0][2 + x] = corner[2 + x] * q_scale[1] * low;
        L[1][2 + x] = g > column ? within[1][x] * k_scale[1] * high : 0.f;
        A[1][2 + x] = g >= column ? within[1][2 + x] * q_scale[1] * high : 0.f;
    }
}

// ---------------------------------------------------------------- triangles

// One level of binary anchoring within 8 tokens, see channel_decays.cuh.
template <int level> DEVICE void anchor(Lane lane, Tile& L, Tile& A, Pairs& near, Pairs& far, const Directions&) {
    int g = lane.id / 4, t = lane.id % 4;
    bool turns = ((g / level) ^ (g / (2 * level))) & 1;  // in the next block the other side is near
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        #pragma unroll
        for (int x = 0; x < 2; x++) {
            const int column = 2 * t + x;
            const float decay = near[r] * shuffle(near[r], 4 * column);
            if ((g ^ column) >= level && (g ^ column) < 2 * level) L[r][2 * r + x] *= decay, A[r][2 * r + x] *= decay;
        }
        const float through = near[r] * shuffle_xor(near[r] * far[r], 4 * level);
        near[r] = turns ? far[r] : through, far[r] = turns ? through : far[r];
    }
}

// Level 8. `before` is a token's decay from its block's start, with itself, `after` the one after it; on entry of the 8
// tokens, on exit of the 16.
DEVICE void anchor_8(Lane lane, Tile& L, Tile& A, Pairs& before, Pairs& after, const Directions&) {
    #pragma unroll
    for (int x = 0; x < 2; x++) {
        const float decay = before[1] * shuffle(after[0], 4 * (2 * (lane.id % 4) + x));
        L[0][2 + x] *= decay, A[0][2 + x] *= decay;
    }
    const float low = before[0] * after[0], high = before[1] * after[1];
    before[1] *= low, after[0] *= high;
}

// ---------------------------------------------------------------- what the scan reads

// The factors of a lane's keys and queries, with their decays from the block's start, and of its keys with those to the
// block's end, which later blocks read.
struct Decayed {
    const Directions& d;
    float k_rise[2], q_rise[2], k_fall[2], over_block;

    DEVICE Decayed(const Directions& d, const Pairs& before, const Pairs& after) : d(d), over_block(before[1]) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            k_rise[r] = d.k_scale[r] * before[r], q_rise[r] = d.q_scale[r] * before[r];
            k_fall[r] = d.k_scale[r] * after[r];
        }
    }
    DEVICE void store_columns(Lane lane, const Shared& shared, u32 iteration) const {
        const int b = lane.warp / HALVES, g = lane.id / 4;
        if (lane.warp % HALVES || lane.id % 4) return;
        float* factors = shared.decays(iteration);
        factors[16 * b + g] = k_fall[0], factors[16 * b + g + 8] = k_fall[1];
        if (g == 7) factors[CHUNK + b] = over_block;
    }
};

// The decay over the blocks between two.
struct Between {
    float x = 1.f;

    DEVICE void add_block(Lane, const Shared& shared, u32 iteration, int j) {
        x *= shared.decays(iteration)[CHUNK + j];
    }
};

// Block j of L and Aqk, left of the diagonal.
DEVICE void multiply_block(Lane lane, Tile& L, Tile& A, const Decayed& x, const Shared& shared, u32 iteration,
                           const Between& between, int j) {
    const uint4* all_columns = shared.columns(iteration) + (j * HALVES + lane.warp % HALVES) * 4 * 32 + lane.id;
    float acc[2][2][4] = {};  // [token][8 columns]
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        const uint4 columns[2] = {all_columns[c * 32], all_columns[(2 + c) * 32]};
        #pragma unroll
        for (int i = 0; i < 8; i++)
            multiply_8(acc[i % 2][i / 2 % 2], x.d.rows[i % 2][2 * c + i / 4], columns[i / 2 % 2], i / 4);
    }
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        const int n = i / 4, r = i / 2 % 2, y = i % 2;
        L[n][2 * r + y] = acc[r][n][y], A[n][2 * r + y] = acc[r][n][2 + y];
    }
    const float k_rows[2] = {x.k_rise[0] * between.x, x.k_rise[1] * between.x};
    const float q_rows[2] = {x.q_rise[0] * between.x, x.q_rise[1] * between.x};
    const float* falls = shared.decays(iteration) + 16 * j;
    scale_rows(L, k_rows), scale_columns(lane, L, falls);
    scale_rows(A, q_rows), scale_columns(lane, A, falls);
}

// Store a lane's keys or queries of token r, x times `scale`, as an operand of the scan.
template <bool keys> DEVICE void store_scaled(Lane lane, unsigned char* to, const Directions& x, float scale, int r) {
    const int b = lane.warp / HALVES, h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        u32 y[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = Io::unpack(keys ? x.k(r, 4 * c + i) : x.q(r, 4 * c + i));
            y[i] = Io::pack(pair.x * scale, pair.y * scale);
        }
        *reinterpret_cast<uint4*>(to + block_at(2 * b + r, 8 * h + 4 * c + t, K / 8) + 16 * g) =
            make_uint4(y[0], y[1], y[2], y[3]);
    }
}

// Kr, keys decayed to the chunk's end, and gamma, the decay over the chunk.
DEVICE void store_Kr(Lane lane, const Shared& shared, const Stage& stage, const Decayed& x, u32 iteration) {
    const int b = lane.warp / HALVES, h = lane.warp % HALVES;
    const float* blocks = shared.decays(iteration) + CHUNK;
    float rest = 1.f;
    #pragma unroll
    for (int other = 1; other < 4; other++) rest *= other > b ? blocks[other] : 1.f;
    #pragma unroll
    for (int r = 0; r < 2; r++) store_scaled<true>(lane, stage.Kr(), x.d, x.k_fall[r] * rest, r);
    const float gamma = rest * blocks[0];
    if (b == 0 && lane.id < 16)
        *reinterpret_cast<float4*>(stage.gamma() + 64 * h + 4 * lane.id) = make_float4(gamma, gamma, gamma, gamma);
}

// Kg and Qg, decayed from the chunk's start.
DEVICE void store_Kg_Qg(Lane lane, const Stage& stage, const Decayed& x, const Between& from_start) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        store_scaled<true>(lane, stage.Kg(), x.d, x.k_rise[r] * from_start.x, r);
        store_scaled<false>(lane, stage.Qg(), x.d, x.q_rise[r] * from_start.x, r);
    }
}
