// The decays of channels, and the products that they scale: binary anchoring (docs/internals/binary_anchoring.md).
//
// The decay between two tokens is never a difference of sums. Within 16 tokens it is split at the middle of the smallest
// aligned block of 2, 4, 8 or 16 that holds both: its two factors are products of decays, at most 1, so fp16 operands
// are exact to their rounding for any gates. Between blocks of 16 the factors are the products up to a block's end and
// from a block's start, times whole blocks' decays, which are fp32: they alone decay the state.
#pragma once

// The biases of 8 channels from 32 c on.
DEVICE void load_biases(Lane lane, float (&bias)[8], int c, const Gates<GATE>& gates, const ForwardParams& p,
                        const Shared& shared, u32 iteration) {
    const float* from = shared.bias(lane.warp, BLOCK_ROLES ? iteration : 0);
    load_8(bias, from + 32 * c + 8 * (lane.id % 4));
    #pragma unroll
    for (int i = 0; BLOCK_ROLES && i < 8; i++) bias[i] = p.dt_bias ? gates.bias(bias[i]) : 0.f;
}

// Decays of 8 channels from 32 c on of a lane's tokens.
DEVICE void load_decays(Lane lane, float (&d)[2][8], int c, const Gates<GATE>& gates, const Raw& raw,
                        const ForwardParams& p, const Shared& shared, const Cursor& at, u32 iteration) {
    float bias[8];
    load_biases(lane, bias, c, gates, p, shared, iteration);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float x[8];
        if (LOGIT_PIECES) {
            const uint4* from = shared.inputs(lane.warp) + logit_row(r, c) * 32 + lane.id;
            load_8(x, reinterpret_cast<const Logit*>(from), 32 * 4);
        } else {
            load_8(x, logits_at(p, at, row_of(lane.warp, lane.id, at, r)) + channel_of(lane) + 32 * c);
        }
        bool valid = token_of(lane, at, r) < at.tile.length;
        #pragma unroll
        for (int i = 0; i < 8; i++) d[r][i] = gates.decay(x[i], bias[i], valid);
    }
}

// ---------------------------------------------------------------- directions

// q and k as fp16 pairs, scaled.
struct Directions {
    u32 q[2][8], k[2][8];  // [token g, g + 8][pairs of channels]
    float qk[2];           // <q, k> of one token: the diagonal of Aqk

    DEVICE Directions(Lane lane, Tile&, Tile&, const Raw& raw, const ForwardParams& p, const Shared& shared,
                      const Cursor& at, u32 iteration);
};

// <k, k>, <q, k> and <q, q> of each token over a warp's channels, as diagonals of MMAs.
DEVICE void sum_squares(Lane lane, const Raw& raw, const Shared& shared) {
    int g = lane.id / 4, t = lane.id % 4;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float with_k[4] = {}, with_q[4] = {};  // rows: 8 tokens of k, 8 of q
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 k = raw.k[r][s / 2], q = raw.q[r][s / 2];
            int i = s % 2 * 2;
            Io::mma(with_k, word(k, i), word(q, i), word(k, i + 1), word(q, i + 1), word(k, i), word(k, i + 1));
            Io::mma(with_q, word(k, i), word(q, i), word(k, i + 1), word(q, i + 1), word(q, i), word(q, i + 1));
        }
        if (t == g / 2) {
            bool odd = g % 2;
            shared.sums()[lane.warp * 16 + g + 8 * r] =
                make_float4(odd ? with_q[3] : with_q[2], odd ? with_k[1] : with_k[0], odd ? with_k[3] : with_k[2], 0.f);
        }
    }
}

DEVICE Directions::Directions(Lane lane, Tile&, Tile&, const Raw& raw, const ForwardParams& p, const Shared& shared,
                              const Cursor& at, u32 iteration) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    sum_squares(lane, raw, shared);
    if (HALVES > 1) barrier_sync(TOKENS + b, 32 * HALVES);
    else warp_sync();
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float4 sums = shared.sums()[b * HALVES * 16 + g + 8 * r];
        if (HALVES > 1) {
            float4 other = shared.sums()[(b * HALVES + 1) * 16 + g + 8 * r];
            sums.x += other.x, sums.y += other.y, sums.z += other.z;
        }
        const Scales scales(p, sums.x, sums.y, token_of(lane, at, r) < at.tile.length);
        qk[r] = sums.z * scales.q * scales.k;
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float q_8[8], k_8[8];
            unpack_8(q_8, raw.q[r][c]), unpack_8(k_8, raw.k[r][c]);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                q[r][4 * c + i] = Fp16::pack(q_8[2 * i] * scales.q, q_8[2 * i + 1] * scales.q);
                k[r][4 * c + i] = Fp16::pack(k_8[2 * i] * scales.k, k_8[2 * i + 1] * scales.k);
            }
        }
        if (h == 0 && t == 0) shared.scale(iteration)[16 * b + g + 8 * r] = scales.o;
    }
}

// ---------------------------------------------------------------- triangles

// Add the products over 16 channels: rows 0-7 of the accumulator are k's (L), rows 8-15 are q's (Aqk).
DEVICE void multiply_8(float (&acc)[4], const u32* k_rows, const u32* q_rows, const u32* k_columns) {
    Fp16::mma(acc, k_rows[0], q_rows[0], k_rows[1], q_rows[1], k_columns[0], k_columns[1]);
}

// fp16 pairs in the type of the scan's operands.
DEVICE u32 as_io(u32 x) {
    float2 f = Fp16::unpack(x);
    return Io::pack(f.x, f.y);
}

// The diagonal of Aqk.
DEVICE void set_diagonal(Lane lane, Tile& A, const Directions& d) {
    int h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    #pragma unroll
    for (int x = 0; x < 2; x++) {
        if (h == 0 && g == 2 * t + x) A[0][x] = d.qk[0], A[1][2 + x] = d.qk[1];
    }
}

// Decays of two channels in fp16, as accurate as the operands that they scale.
struct Pair {
    u32 x;
    static DEVICE Pair of(float a, float b) { return {Fp16::pack(a, b)}; }
    DEVICE Pair operator*(Pair y) const { return {Fp16::multiply(x, y.x)}; }
    DEVICE Pair from_lane(int mask) const { return {shuffle_xor(x, mask)}; }
};
using Pairs = Pair[2][8];  // of a lane's two tokens

// One level of binary anchoring within 8 tokens: pairs of tokens whose indices first differ in bit `level`. On entry
// `near` is a token's decay towards the other half of its block of 2 * level (with the token itself in the upper half,
// after the token in the lower one), `far` towards the outside; on exit they are those of the next level.
template <int level> DEVICE void anchor(Lane lane, Tile& L, Tile& A, Pairs& near, Pairs& far, const Directions& d) {
    int g = lane.id / 4, t = lane.id % 4;
    bool turns = ((g / level) ^ (g / (2 * level))) & 1;  // in the next block the other side is near
    float low[4] = {}, high[4] = {};
    #pragma unroll
    for (int s = 0; s < 4; s++) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 k[2], q[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                Pair &x = near[r][2 * s + i], &y = far[r][2 * s + i];
                k[i] = Fp16::multiply(d.k[r][2 * s + i], x.x), q[i] = Fp16::multiply(d.q[r][2 * s + i], x.x);
                Pair through = x * (x * y).from_lane(4 * level);
                x = turns ? y : through, y = turns ? through : y;
            }
            multiply_8(r ? high : low, k, q, k);
        }
    }
    #pragma unroll
    for (int x = 0; x < 2; x++) {
        int column = 2 * t + x;
        if (g > column && (g ^ column) >= level && (g ^ column) < 2 * level) {
            L[0][x] = low[x], A[0][x] = low[2 + x];
            L[1][2 + x] = high[x], A[1][2 + x] = high[2 + x];
        }
    }
}

// Level 8: rows are the upper 8 tokens, columns the lower 8. `before` is a token's decay from its block's start, with
// itself, `after` the one after it; on entry of the 8 tokens, on exit of the 16.
DEVICE void anchor_8(Lane lane, Tile& L, Tile& A, Pairs& before, Pairs& after, const Directions& d) {
    float acc[4] = {};
    #pragma unroll
    for (int s = 0; s < 4; s++) {
        u32 k[2], q[2], columns[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int x = 2 * s + i;
            k[i] = Fp16::multiply(d.k[1][x], before[1][x].x), q[i] = Fp16::multiply(d.q[1][x], before[1][x].x);
            columns[i] = Fp16::multiply(d.k[0][x], after[0][x].x);
            Pair low = before[0][x] * after[0][x], high = before[1][x] * after[1][x];
            before[1][x] = before[1][x] * low, after[0][x] = after[0][x] * high;
        }
        multiply_8(acc, k, q, columns);
    }
    #pragma unroll
    for (int x = 0; x < 2; x++) L[0][2 + x] = acc[x], A[0][2 + x] = acc[2 + x];
    set_diagonal(lane, A, d);
}

// Multiply with the lane whose index differs in one bit; each of the two keeps half of 2 n elements.
template <int n> DEVICE void multiply_halves(Lane lane, float (&x)[16]) {
    bool upper = lane.id & 2 * n;
    #pragma unroll
    for (int i = 0; i < n; i++) {
        float others = upper ? x[i] : x[n + i];
        x[i] = (upper ? x[n + i] : x[i]) * shuffle_xor(others, 2 * n);
    }
}

// Store the products over the eight lanes that have the same channels, two channels per lane.
DEVICE void store_block_decays(Lane lane, float* to, float (&x)[16]) {
    multiply_halves<8>(lane, x);
    multiply_halves<4>(lane, x);
    multiply_halves<2>(lane, x);
    int first = (lane.id & 16 ? 32 : 0) + (lane.id & 8 ? 4 : 0) + (lane.id & 4 ? 2 : 0);
    *reinterpret_cast<float2*>(to + first) = make_float2(x[0], x[1]);
}

// Decays over a block, from a lane's first channel on.
DEVICE float* decays_of(Lane lane, const Shared& shared, u32 iteration, int block) {
    return shared.decays(iteration) + (64 * (lane.warp % HALVES) + 8 * (lane.id % 4) + block * K);
}

// Decays of the lane's tokens, as `anchor<1>` takes them, and of the block, which are stored.
DEVICE void start_decays(Lane lane, Pairs& near, Pairs& far, const Gates<GATE>& gates, const Raw& raw,
                         const ForwardParams& p, const Shared& shared, const Cursor& at, u32 iteration) {
    float* block_decays = decays_of(lane, shared, iteration, lane.warp / HALVES);
    int g = lane.id / 4;
    float block[16];  // decays over the block's tokens
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        float e[2][8];
        load_decays(lane, e, c, gates, raw, p, shared, at, iteration);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                Pair own = Pair::of(e[r][2 * i], e[r][2 * i + 1]), one = Pair::of(1.f, 1.f);
                near[r][4 * c + i] = g & 1 ? own : one, far[r][4 * c + i] = g & 1 ? one : own;
            }
        }
        #pragma unroll
        for (int i = 0; i < 8; i++) block[8 * c + i] = e[0][i] * e[1][i];
    }
    store_block_decays(lane, block_decays, block);
}

// Keys decayed to their block's end: columns for later blocks. Keys and queries decayed from its start: rows.
struct Decayed {
    u32 k_fall[2][8], k_rise[2][8], q_rise[2][8];

    DEVICE Decayed(const Directions& d, const Pairs& before, const Pairs& after) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                k_fall[r][i] = Fp16::multiply(d.k[r][i], after[r][i].x);
                k_rise[r][i] = Fp16::multiply(d.k[r][i], before[r][i].x);
                q_rise[r][i] = Fp16::multiply(d.q[r][i], before[r][i].x);
            }
        }
    }
    DEVICE void store_columns(Lane lane, const Shared& shared, u32 iteration) const {
        uint4* columns = shared.columns(iteration);
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            columns[(lane.warp * 4 + s) * 32 + lane.id] =
                make_uint4(k_fall[0][2 * s], k_fall[0][2 * s + 1], k_fall[1][2 * s], k_fall[1][2 * s + 1]);
        }
    }
};

// Multiply by 8 channels' decays over a block.
DEVICE void multiply_decays(float* x, const float* decays) {
    float y[8];
    load_8(y, decays);
    #pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= y[i];
}

// Kr, keys decayed to the chunk's end, and gamma, the decay over the chunk.
DEVICE void store_Kr(Lane lane, const Shared& shared, const Stage& stage, const Decayed& x, u32 iteration) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        float rest[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) rest[i] = 1.f;
        #pragma unroll
        for (int other = 1; other < 4; other++) {
            if (other > b) multiply_decays(rest, decays_of(lane, shared, iteration, other) + 32 * c);
        }
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 k[4];
            #pragma unroll
            for (int i = 0; i < 4; i++)
                k[i] = as_io(Fp16::multiply(x.k_fall[r][4 * c + i], Fp16::pack(rest[2 * i], rest[2 * i + 1])));
            *reinterpret_cast<uint4*>(stage.Kr() + block_at(2 * b + r, 8 * h + 4 * c + t, K / 8) + 16 * g) =
                make_uint4(k[0], k[1], k[2], k[3]);
        }
        if (b == 0 && g == 0) {
            float* gamma = stage.gamma() + 64 * h + 32 * c + 8 * t;
            float first[8];
            load_8(first, decays_of(lane, shared, iteration, 0) + 32 * c);
            if constexpr (LANE_ORDER) {
                #pragma unroll
                for (int i = 0; i < 8; i += 2)
                    *reinterpret_cast<float2*>(stage.gamma() + gamma_at(64 * h + 32 * c + 8 * t + i)) =
                        make_float2(first[i] * rest[i], first[i + 1] * rest[i + 1]);
            } else {
                *reinterpret_cast<float4*>(gamma) =
                    make_float4(first[0] * rest[0], first[1] * rest[1], first[2] * rest[2], first[3] * rest[3]);
                *reinterpret_cast<float4*>(gamma + 4) =
                    make_float4(first[4] * rest[4], first[5] * rest[5], first[6] * rest[6], first[7] * rest[7]);
            }
        }
    }
}

// The decays over the blocks between two.
struct Between {
    float x[16];

    DEVICE Between() {
        #pragma unroll
        for (int i = 0; i < 16; i++) x[i] = 1.f;
    }
    DEVICE void add_block(Lane lane, const Shared& shared, u32 iteration, int j) {
        #pragma unroll
        for (int c = 0; c < 2; c++) multiply_decays(x + 8 * c, decays_of(lane, shared, iteration, j) + 32 * c);
    }
};

// Block j of L and Aqk, left of the diagonal.
DEVICE void multiply_block(Lane lane, Tile& L, Tile& A, const Decayed& x, const Shared& shared, u32 iteration,
                           const Between& between, int j) {
    int h = lane.warp % HALVES;
    const uint4* all_columns = shared.columns(iteration);
    #pragma unroll
    for (int i = 0; i < 8; i++) L[i / 4][i % 4] = 0.f;
    #pragma unroll
    for (int s = 0; s < 4; s++) {
        uint4 columns = all_columns[((j * HALVES + h) * 4 + s) * 32 + lane.id];
        u32 low = Fp16::pack(between.x[4 * s], between.x[4 * s + 1]),
            high = Fp16::pack(between.x[4 * s + 2], between.x[4 * s + 3]);
        columns.x = Fp16::multiply(columns.x, low), columns.z = Fp16::multiply(columns.z, low);
        columns.y = Fp16::multiply(columns.y, high), columns.w = Fp16::multiply(columns.w, high);
        u32 k[4] = {x.k_rise[0][2 * s], x.k_rise[1][2 * s], x.k_rise[0][2 * s + 1], x.k_rise[1][2 * s + 1]};
        u32 q[4] = {x.q_rise[0][2 * s], x.q_rise[1][2 * s], x.q_rise[0][2 * s + 1], x.q_rise[1][2 * s + 1]};
        multiply(L, k, columns);
        multiply(A, q, columns);
    }
}

// Kg and Qg, decayed from the chunk's start.
DEVICE void store_Kg_Qg(Lane lane, const Stage& stage, const Decayed& x, const Between& from_start) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 k[4], q[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 factor = Fp16::pack(from_start.x[8 * c + 2 * i], from_start.x[8 * c + 2 * i + 1]);
                k[i] = as_io(Fp16::multiply(x.k_rise[r][4 * c + i], factor));
                q[i] = as_io(Fp16::multiply(x.q_rise[r][4 * c + i], factor));
            }
            int at = block_at(2 * b + r, 8 * h + 4 * c + t, K / 8) + 16 * g;
            *reinterpret_cast<uint4*>(stage.Kg() + at) = make_uint4(k[0], k[1], k[2], k[3]);
            *reinterpret_cast<uint4*>(stage.Qg() + at) = make_uint4(q[0], q[1], q[2], q[3]);
        }
    }
}
