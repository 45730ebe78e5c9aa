// Prepare one chunk: the decays, the triangles L and Aqk, and the decayed keys and queries Kg, Kr and Qg; invert.cuh
// computes the inverse.
//
// Warp w holds 16 tokens (block b = w / HALVES) by 64 channels (half h) in registers: lane (g, t) = (id / 4, id % 4)
// has tokens g and g + 8 and 16 channels, in the order of mma's fragments, so that one register serves as A and as B.
// The decay between two tokens is never a difference of sums. Within 16 tokens it is split at the middle of the
// smallest aligned block of 2, 4, 8 or 16 that holds both (docs/internals/binary_anchoring.md): its two factors
// are products of decays, at most 1, so fp16 operands are exact to their rounding for any gates. Between blocks of 16
// the factors are the products up to a block's end and from a block's start, times whole blocks' decays, which are
// fp32: they alone decay the state.
#pragma once
#include "invert.cuh"

// ---------------------------------------------------------------- loading

// One arrival of a warp, after what all of its lanes have done.
DEVICE void arrive_by_warp(Lane lane, u64* barrier) {
    warp_sync();
    if (lane.id == 0) mbarrier_arrive(barrier);
}

// A lane's tokens g and g + 8 of a chunk; rows after the sequence's end read its last token.
DEVICE int token_of(Lane lane, const Cursor& at, int r) {
    return at.chunk * CHUNK + 16 * (lane.warp / HALVES) + lane.id / 4 + 8 * r;
}
DEVICE int row_of(int warp, int id, const Cursor& at, int r) {
    return min(token_of({warp, id}, at, r), at.tile.length - 1);
}
DEVICE int channel_of(Lane lane) { return 64 * (lane.warp % HALVES) + 8 * (lane.id % 4); }  // a lane's first

DEVICE i64 key_at(const ForwardParams& p, const Cursor& at, int row) {
    return at.keys + i64(row) * (POOLED ? p.key_row : p.H * K);
}
DEVICE const Logit* logits_at(const ForwardParams& p, const Cursor& at, int row) {
    if constexpr (HEAD_GATES && POOLED)
        return static_cast<const Logit*>(p.g) + i64(at.tile.first + row) * p.gate_row + at.tile.head;
    return static_cast<const Logit*>(p.g) + at.tile.row(p, row) * (HEAD_GATES ? 1 : K);
}

// A lane's q and k as loaded, and with HEAD_GATES its tokens' logits; a member that is not used would change the SASS.
struct Raw {
    uint4 q[2][2], k[2][2];  // [token][8 channels]
#if HEAD_GATES
    Logit g[2];
#endif
};

// Prefetch the next chunk's q and k where registers allow.
constexpr bool LOADS_AHEAD = HAS_WGMMA && (SAVES || BLOCK_ROLES || !SEGMENTS);

DEVICE void load_raw(Lane lane, Raw& raw, const ForwardParams& p, const Cursor& at) {
    int channel = channel_of(lane);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = row_of(lane.warp, lane.id, at, r);
        i64 key = key_at(p, at, row) + channel;
#if HEAD_GATES
        raw.g[r] = *logits_at(p, at, row);
#endif
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            raw.q[r][c] = load_once<uint4>(p.q + key + 32 * c);
            raw.k[r][c] = load_once<uint4>(p.k + key + 32 * c);
        }
    }
}

// Bring what load_raw will read into L2. Two integers, not a Lane: it keeps the SASS of every arch.
DEVICE void prefetch_raw(int warp, int id, const ForwardParams& p, const Cursor& at) {
    if (id % 4 > 1) return;
    int row = row_of(warp, id, at, id % 4), channel = 64 * (warp % HALVES);
    i64 key = key_at(p, at, row) + channel;
    prefetch(p.q + key), prefetch(p.k + key);
    if constexpr (HEAD_GATES) {
        if (channel == 0) prefetch(logits_at(p, at, row));
        return;
    }
    const Logit* g = logits_at(p, at, row) + channel;
    if (G_FP32) prefetch(g), prefetch(g + 32);
}

// Prefetch 16-bit gate logits one chunk ahead through shared memory, to hide the latency of q and k; fp32 logits do not
// fit. Each lane copies what it reads itself. Logits of heads are two elements of a lane, in registers with q and k.
DEVICE void fetch_logits(Lane lane, const ForwardParams& p, const Shared& shared, const Cursor& at) {
    #pragma unroll
    for (int r = 0; r < (G_FP32 || HEAD_GATES ? 0 : 2); r++) {
        const Logit* g = logits_at(p, at, row_of(lane.warp, lane.id, at, r)) + channel_of(lane);
        #pragma unroll
        for (int c = 0; c < 2; c++)
            cp_async_16(shared.logits(lane.warp) + (2 * r + c) * 32 + lane.id, g + 32 * c, true);
    }
    cp_async_commit();
}

DEVICE void unpack_8(float (&to)[8], uint4 w) {
    float2 a = Io::unpack(w.x), b = Io::unpack(w.y), c = Io::unpack(w.z), d = Io::unpack(w.w);
    to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y, to[4] = c.x, to[5] = c.y, to[6] = d.x, to[7] = d.y;
}

DEVICE void load_8(float (&to)[8], const float* from) {
    float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
DEVICE void load_8(float (&to)[8], const u16* from) { unpack_8(to, *reinterpret_cast<const uint4*>(from)); }

DEVICE float as_float(float x) { return x; }
DEVICE float as_float(u16 x) { return Io::unpack(x).x; }

// The biases of 8 channels from 32 c on, or the first of them, which is the head's.
DEVICE void load_biases(Lane lane, float (&bias)[8], int c, const Gates<GATE>& gates, const ForwardParams& p,
                        const Shared& shared, u32 iteration) {
    const float* from = shared.bias(lane.warp, BLOCK_ROLES ? iteration : 0);
    if constexpr (HEAD_GATES) bias[0] = *from;
    else load_8(bias, from + 32 * c + 8 * (lane.id % 4));
    #pragma unroll
    for (int i = 0; BLOCK_ROLES && i < (HEAD_GATES ? 1 : 8); i++) bias[i] = p.dt_bias ? gates.bias(bias[i]) : 0.f;
}

// Decays of 8 channels from 32 c on of a lane's tokens.
DEVICE void load_decays(Lane lane, float (&d)[2][8], int c, const Gates<GATE>& gates, const Raw& raw,
                        const ForwardParams& p, const Shared& shared, const Cursor& at, u32 iteration) {
    float bias[8];
    load_biases(lane, bias, c, gates, p, shared, iteration);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
#if HEAD_GATES
        const float decay = gates.decay(as_float(raw.g[r]), bias[0], token_of(lane, at, r) < at.tile.length);
        #pragma unroll
        for (int i = 0; i < 8; i++) d[r][i] = decay;
#else
        const Logit* from = G_FP32
                                ? logits_at(p, at, row_of(lane.warp, lane.id, at, r)) + channel_of(lane) + 32 * c
                                : reinterpret_cast<const Logit*>(shared.logits(lane.warp) + (2 * r + c) * 32 + lane.id);
        float x[8];
        load_8(x, from);
        bool valid = token_of(lane, at, r) < at.tile.length;
        #pragma unroll
        for (int i = 0; i < 8; i++) d[r][i] = gates.decay(x[i], bias[i], valid);
#endif
    }
}

// ---------------------------------------------------------------- directions

// q and k as fp16 pairs. q has a length in [1, 2), and a power of two is the factor of the output: the gradient of the
// output, which the backward multiplies by it, is then not rounded again. The length of k is at most 1.
struct Directions {
    u32 q[2][8], k[2][8];  // [token g, g + 8][pairs of channels]
    float qk[2];           // <q, k> of one token: the diagonal of Aqk
};

// Reduce x to a power of two; return what it is multiplied by, in [1, 2).
DEVICE float take_mantissa(float& x) {
    const u32 bits = __float_as_uint(x);
    x = __uint_as_float(bits & 0xff800000u);
    return __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
}

DEVICE u32 word(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

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

DEVICE void normalize(Lane lane, Directions& d, const Raw& raw, const ForwardParams& p, const Shared& shared,
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
        bool valid = token_of(lane, at, r) < at.tile.length;  // rows after the end are zeros
        float q_scale = rsqrt_fast(sums.x + (p.qk_l2norm ? 1e-6f : 1e-37f));
        float k_scale = p.qk_l2norm ? rsqrt_fast(sums.y + 1e-6f) : 1.f;
        float o_scale = p.qk_l2norm ? p.scale : p.scale * sums.x * q_scale;
        q_scale *= take_mantissa(o_scale);
        if (!valid) q_scale = k_scale = 0.f;
        d.qk[r] = sums.z * q_scale * k_scale;
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float q[8], k[8];
            unpack_8(q, raw.q[r][c]), unpack_8(k, raw.k[r][c]);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                d.q[r][4 * c + i] = Fp16::pack(q[2 * i] * q_scale, q[2 * i + 1] * q_scale);
                d.k[r][4 * c + i] = Fp16::pack(k[2 * i] * k_scale, k[2 * i + 1] * k_scale);
            }
        }
        if (h == 0 && t == 0) shared.scale(iteration)[16 * b + g + 8 * r] = o_scale;
    }
}

// ---------------------------------------------------------------- triangles

// Add the products over 16 channels: rows 0-7 of the accumulator are k's (L), rows 8-15 are q's (Aqk).
DEVICE void multiply_8(float (&acc)[4], const u32* k_rows, const u32* q_rows, const u32* k_columns) {
    Fp16::mma(acc, k_rows[0], q_rows[0], k_rows[1], q_rows[1], k_columns[0], k_columns[1]);
}

// Decays of two channels in fp16, as accurate as the operands that they scale.
struct Pair {
    u32 x;
    static DEVICE Pair of(float a, float b) { return {Fp16::pack(a, b)}; }
    DEVICE Pair operator*(Pair y) const { return {Fp16::multiply(x, y.x)}; }
    DEVICE Pair from_lane(int mask) const { return {shuffle_xor(x, mask)}; }
};
// Of a lane's two tokens; with HEAD_GATES all channels share one pair, which saves 28 registers and most shuffles.
using Pairs = Pair[2][HEAD_GATES ? 1 : 8];
DEVICE constexpr int pair_of(int i) { return HEAD_GATES ? 0 : i; }
DEVICE constexpr bool last_use(int i) { return !HEAD_GATES || i == 7; }  // of the pair of channels 2 i and 2 i + 1

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
                Pair &x = near[r][pair_of(2 * s + i)], &y = far[r][pair_of(2 * s + i)];
                k[i] = Fp16::multiply(d.k[r][2 * s + i], x.x), q[i] = Fp16::multiply(d.q[r][2 * s + i], x.x);
                if (!last_use(2 * s + i)) continue;
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
DEVICE void anchor_8(Tile& L, Tile& A, Pairs& before, Pairs& after, const Directions& d) {
    float acc[4] = {};
    #pragma unroll
    for (int s = 0; s < 4; s++) {
        u32 k[2], q[2], columns[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int x = 2 * s + i, pair = pair_of(x);
            k[i] = Fp16::multiply(d.k[1][x], before[1][pair].x), q[i] = Fp16::multiply(d.q[1][x], before[1][pair].x);
            columns[i] = Fp16::multiply(d.k[0][x], after[0][pair].x);
            if (!last_use(x)) continue;
            Pair low = before[0][pair] * after[0][pair], high = before[1][pair] * after[1][pair];
            before[1][pair] = before[1][pair] * low, after[0][pair] = after[0][pair] * high;
        }
        multiply_8(acc, k, q, columns);
    }
    #pragma unroll
    for (int x = 0; x < 2; x++) L[0][2 + x] = acc[x], A[0][2 + x] = acc[2 + x];
}

// ---------------------------------------------------------------- the chunk

// fp16 pairs in the type of the scan's operands.
DEVICE u32 as_io(u32 x) {
    float2 f = Fp16::unpack(x);
    return Io::pack(f.x, f.y);
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
DEVICE void start_decays(Lane lane, Pairs& near, Pairs& far, float* block_decays, const Gates<GATE>& gates,
                         const Raw& raw, const ForwardParams& p, const Shared& shared, const Cursor& at,
                         u32 iteration) {
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
                near[r][pair_of(4 * c + i)] = g & 1 ? own : one, far[r][pair_of(4 * c + i)] = g & 1 ? one : own;
            }
        }
        #pragma unroll
        for (int i = 0; i < 8; i++) block[8 * c + i] = e[0][i] * e[1][i];
    }
    store_block_decays(lane, block_decays, block);
}

// The diagonal of Aqk.
DEVICE void set_diagonal(Lane lane, Tile& A, const Directions& d) {
    int h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    #pragma unroll
    for (int x = 0; x < 2; x++) {
        if (h == 0 && g == 2 * t + x) A[0][x] = d.qk[0], A[1][2 + x] = d.qk[1];
    }
}

// Keys decayed to their block's end: columns for later blocks. Keys and queries decayed from its start: rows.
struct Decayed {
    u32 k_fall[2][8], k_rise[2][8], q_rise[2][8];

    DEVICE Decayed(const Directions& d, const Pairs& before, const Pairs& after) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                k_fall[r][i] = Fp16::multiply(d.k[r][i], after[r][pair_of(i)].x);
                k_rise[r][i] = Fp16::multiply(d.k[r][i], before[r][pair_of(i)].x);
                q_rise[r][i] = Fp16::multiply(d.q[r][i], before[r][pair_of(i)].x);
            }
        }
    }
    DEVICE void store_columns(Lane lane, uint4* columns) const {
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

DEVICE void store_scale(Lane lane, const Stage& stage, const float* scale) {
    stage.scale()[lane.id] = scale[lane.id], stage.scale()[lane.id + 32] = scale[lane.id + 32];
}

// Kr, keys decayed to the chunk's end, and gamma, the decay over the chunk.
DEVICE void store_Kr(Lane lane, const Shared& shared, const Stage& stage, const u32 (&k_fall)[2][8], u32 iteration) {
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
                k[i] = as_io(Fp16::multiply(k_fall[r][4 * c + i], Fp16::pack(rest[2 * i], rest[2 * i + 1])));
            *reinterpret_cast<uint4*>(stage.Kr() + block_at(2 * b + r, 8 * h + 4 * c + t, K / 8) + 16 * g) =
                make_uint4(k[0], k[1], k[2], k[3]);
        }
        if (b == 0 && g == 0) {
            float* gamma = stage.gamma() + 64 * h + 32 * c + 8 * t;
            float x[8];
            load_8(x, decays_of(lane, shared, iteration, 0) + 32 * c);
            if constexpr (LANE_ORDER) {
                #pragma unroll
                for (int i = 0; i < 8; i += 2)
                    *reinterpret_cast<float2*>(stage.gamma() + gamma_at(64 * h + 32 * c + 8 * t + i)) =
                        make_float2(x[i] * rest[i], x[i + 1] * rest[i + 1]);
            } else {
                *reinterpret_cast<float4*>(gamma) =
                    make_float4(x[0] * rest[0], x[1] * rest[1], x[2] * rest[2], x[3] * rest[3]);
                *reinterpret_cast<float4*>(gamma + 4) =
                    make_float4(x[4] * rest[4], x[5] * rest[5], x[6] * rest[6], x[7] * rest[7]);
            }
        }
    }
}

// Block j of L and Aqk, left of the diagonal; `between` are the decays over the blocks in between.
DEVICE void multiply_block(Lane lane, Tile& L, Tile& A, const Decayed& x, const uint4* all_columns,
                           const float (&between)[16], int j) {
    int h = lane.warp % HALVES;
    #pragma unroll
    for (int i = 0; i < 8; i++) L[i / 4][i % 4] = 0.f;
    #pragma unroll
    for (int s = 0; s < 4; s++) {
        uint4 columns = all_columns[((j * HALVES + h) * 4 + s) * 32 + lane.id];
        u32 low = Fp16::pack(between[4 * s], between[4 * s + 1]),
            high = Fp16::pack(between[4 * s + 2], between[4 * s + 3]);
        columns.x = Fp16::multiply(columns.x, low), columns.z = Fp16::multiply(columns.z, low);
        columns.y = Fp16::multiply(columns.y, high), columns.w = Fp16::multiply(columns.w, high);
        u32 k[4] = {x.k_rise[0][2 * s], x.k_rise[1][2 * s], x.k_rise[0][2 * s + 1], x.k_rise[1][2 * s + 1]};
        u32 q[4] = {x.q_rise[0][2 * s], x.q_rise[1][2 * s], x.q_rise[0][2 * s + 1], x.q_rise[1][2 * s + 1]};
        multiply(L, k, columns);
        multiply(A, q, columns);
    }
}

// L and Aqk left of the diagonal block; `between` becomes the decay from the chunk's start to the block's.
DEVICE void multiply_blocks(Lane lane, Tile& L, Tile (&A)[3], float (&between)[16], const Decayed& x,
                            const Shared& shared, u32 iteration, bool gives) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES;
    #pragma unroll
    for (int i = 0; i < 16; i++) between[i] = 1.f;
    #pragma unroll
    for (int j = 2; j >= 0; j--) {
        if (j >= b) continue;
        multiply_block(lane, L, A[j], x, shared.columns(iteration), between, j);
        send_sums(shared.sums_of_L(h, b, j) + lane.id, L);
        if (gives) send_sums(shared.sums_of_A(iteration, b, j) + lane.id, A[j]);
        #pragma unroll
        for (int c = 0; c < 2; c++) multiply_decays(between + 8 * c, decays_of(lane, shared, iteration, j) + 32 * c);
    }
}

// Kg and Qg, decayed from the chunk's start.
DEVICE void store_Kg_Qg(Lane lane, const Stage& stage, const Decayed& x, const float (&from_start)[16]) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES, g = lane.id / 4, t = lane.id % 4;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 k[4], q[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 factor = Fp16::pack(from_start[8 * c + 2 * i], from_start[8 * c + 2 * i + 1]);
                k[i] = as_io(Fp16::multiply(x.k_rise[r][4 * c + i], factor));
                q[i] = as_io(Fp16::multiply(x.q_rise[r][4 * c + i], factor));
            }
            int at = block_at(2 * b + r, 8 * h + 4 * c + t, K / 8) + 16 * g;
            *reinterpret_cast<uint4*>(stage.Kg() + at) = make_uint4(k[0], k[1], k[2], k[3]);
            *reinterpret_cast<uint4*>(stage.Qg() + at) = make_uint4(q[0], q[1], q[2], q[3]);
        }
    }
}

// Add the other half's sums to Aqk.
DEVICE void add_other_half(Lane lane, Tile (&A)[3], Tile& own, const Shared& shared, u32 iteration, int b) {
    #pragma unroll
    for (int j = 0; j < 3; j++) {
        if (j < b) add_sums(A[j], shared.sums_of_A(iteration, b, j) + lane.id);
    }
    add_sums(own, shared.sums_of_A(iteration, b, b) + lane.id);
}

// Prepare the chunk at the cursor, whose q and k are loaded to `raw`, and prefetch the next one.
DEVICE void prepare_chunk(Lane lane, const ForwardParams& p, const Shared& shared, const Gates<GATE>& gates, Raw& raw,
                          const Cursor& at, const Cursor& next, u32 count, u32 iteration) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES;
    Pairs near, far;
    float* block_decays = decays_of(lane, shared, iteration, b);
    cp_async_wait<0>();
    if (BLOCK_ROLES) warp_sync();  // other lanes have copied biases
    start_decays(lane, near, far, block_decays, gates, raw, p, shared, at, iteration);
    Directions d;
    normalize(lane, d, raw, p, shared, at, iteration);
    // L and Aqk among the block's 16 tokens: binary anchoring
    Tile L = {}, own = {};  // diagonal blocks of L and Aqk
    anchor<1>(lane, L, own, near, far, d);
    if (next.valid(p)) fetch_logits(lane, p, shared, next), prefetch_raw(lane.warp, lane.id, p, next);
    anchor<2>(lane, L, own, near, far, d);
    anchor<4>(lane, L, own, near, far, d);
    Pairs &after = near, &before = far;  // as g / 8 is even, as if all 8 tokens were a lower half
    anchor_8(L, own, before, after, d);
    set_diagonal(lane, own, d);
    // Exchange columns with the warps of later blocks, and sums of Aqk with the other half of the channels
    bool gives = HALVES > 1 && h == iteration % 2;  // this warp sends its sums of Aqk to the other half
    if (!HAS_WGMMA) lane.opt_barrier();             // without it, sm_100a spills in one variant
    if (iteration > 0) mbarrier_wait(shared.inverted(), (iteration - 1) & 1);
    send_sums(shared.sums_of_L(h, b, b) + lane.id, L);
    const Decayed decayed(d, before, after);
    decayed.store_columns(lane, shared.columns(iteration));
    barrier_sync(PREPARED, 32 * PREPARE_WARPS);
    wait_for_room(shared, iteration);
    const Stage stage = room(p, shared, at, count, iteration);
    if (gives) send_sums(shared.sums_of_A(iteration, b, b) + lane.id, own);
    if (lane.warp == 0) store_scale(lane, stage, shared.scale(iteration));
    store_Kr(lane, shared, stage, decayed.k_fall, iteration);
    Tile A[3] = {};
    float between[16];
    multiply_blocks(lane, L, A, between, decayed, shared, iteration, gives);
    arrive_by_warp(lane, shared.summed());
    store_Kg_Qg(lane, stage, decayed, between);
    if (LOADS_AHEAD && next.valid(p)) load_raw(lane, raw, p, next);
    if (HALVES > 1) barrier_sync(TOKENS + b, 32 * HALVES);
    if (gives) return;
    if (HALVES > 1) add_other_half(lane, A, own, shared, iteration, b);
    store_row(lane, stage.Aqk(), A, own, b);
}
