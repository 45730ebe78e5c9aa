// Prepares one chunk: the decays, the triangles L and Aqk, and the keys and queries scaled by decays that the scan
// multiplies the state by; invert.cuh makes the inverse.
//
// Warp w holds 16 tokens (block b = w / HALVES) by 64 channels (half h) in registers: lane (g, t) = (lane / 4, lane % 4)
// has tokens g and g + 8 and 16 channels, in the order of mma's fragments, so that one register serves as A and as B.
// The decay between two tokens is never a difference of sums. Within 16 tokens it is split at the middle of the smallest
// aligned block of 2, 4, 8 or 16 that holds both (binary anchoring, kda_math.md section 2): its two factors are
// products of decays, at most 1, so fp16 operands are exact to their rounding for any gates. Between blocks of 16 the
// factors are the products up to a block's end and from a block's start, times whole blocks' decays, which are fp32:
// they alone decay the state.
#pragma once
#include "invert.cuh"

// ---------------------------------------------------------------- loading

DEVICE void load_8(float (&to)[8], const float* from) {
    float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// A lane's tokens g and g + 8 of q, k and gate logits as they come: all loads are under way before the first is used.
struct Raw {
    uint4 q[2][2], k[2][2], g[2][2 + 2 * G_WIDE];  // [token][8 or 4 channels]
    u32 beta[2];
    float bias[2][8], rate;
};

// A lane's tokens of a chunk; rows behind the sequence's end read its last token.
DEVICE int token_of(const Cursor& at, int r, int warp, int lane) { return at.chunk * CHUNK + 16 * (warp / HALVES) + lane / 4 + 8 * r; }

DEVICE void load_raw(Raw& raw, const ChunkParams& p, const Cursor& at, int warp, int lane) {
    int channel = 64 * (warp % HALVES) + 8 * (lane % 4);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int token = min(token_of(at, r, warp, lane), at.item.length - 1);
        i64 row = at.item.row(p, token), key = (i64(at.item.first + token) * p.H + at.item.head / p.group) * K + channel;
        const Logit* g = static_cast<const Logit*>(p.g) + row * K + channel;
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            raw.q[r][c] = *reinterpret_cast<const uint4*>(p.q + key + 32 * c);
            raw.k[r][c] = *reinterpret_cast<const uint4*>(p.k + key + 32 * c);
            #pragma unroll
            for (int i = 0; i <= G_WIDE; i++) raw.g[r][c * (1 + G_WIDE) + i] = reinterpret_cast<const uint4*>(g + 32 * c)[i];
        }
        raw.beta[r] = p.beta_wide ? static_cast<const u32*>(p.beta)[row] : static_cast<const u16*>(p.beta)[row];
    }
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        #pragma unroll
        for (int i = 0; i < 8; i++) raw.bias[c][i] = 0.f;
        if (p.dt_bias) load_8(raw.bias[c], p.dt_bias + at.item.head * K + channel + 32 * c);
    }
    raw.rate = p.A_log ? p.A_log[at.item.head] : 0.f;
}

// Brings what load_raw will read into L2.
DEVICE void prefetch_raw(const ChunkParams& p, const Cursor& at, int warp, int lane) {
    if (lane % 4) return;
    int channel = 64 * (warp % HALVES);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int token = min(token_of(at, r, warp, lane), at.item.length - 1);
        i64 key = (i64(at.item.first + token) * p.H + at.item.head / p.group) * K + channel;
        const Logit* g = static_cast<const Logit*>(p.g) + at.item.row(p, token) * K + channel;
        prefetch(p.q + key), prefetch(p.k + key), prefetch(g);
        if (G_WIDE) prefetch(g + 32);
    }
}

DEVICE void unpack_8(float (&to)[8], uint4 w) {
    float2 a = Io::unpack(w.x), b = Io::unpack(w.y), c = Io::unpack(w.z), d = Io::unpack(w.w);
    to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y, to[4] = c.x, to[5] = c.y, to[6] = d.x, to[7] = d.y;
}

// Sum over the four lanes of a row.
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// q and k as fp16 pairs. q is a unit vector, its length, where the operator keeps it, a factor of the output; k is at
// most one long anyway (kda_math.md, the fact used everywhere).
struct Directions {
    u32 q[2][8], k[2][8];  // [token g, g + 8][pairs of channels]
    float qk[2];           // <q, k> of one token: the diagonal of Aqk
};

DEVICE void normalize(Directions& d, const Raw& raw, const ChunkParams& p, const Shared& shared, const Cursor& at, u32 turn, int warp, int lane) {
    int b = warp / HALVES, h = warp % HALVES, g = lane / 4, t = lane % 4;
    float4 sums[2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float s[3] = {};
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float q[8], k[8];
            unpack_8(q, raw.q[r][c]), unpack_8(k, raw.k[r][c]);
            #pragma unroll
            for (int i = 0; i < 8; i++) s[0] += q[i] * q[i], s[1] += k[i] * k[i], s[2] += q[i] * k[i];
        }
        sums[r] = make_float4(row_sum(s[0]), row_sum(s[1]), row_sum(s[2]), 0.f);
        if (HALVES > 1 && t == 0) shared.sums()[warp * 16 + g + 8 * r] = sums[r];
    }
    if (HALVES > 1) barrier_sync(TOKENS + b, 32 * HALVES);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        if (HALVES > 1) {
            float4 other = shared.sums()[(warp ^ 1) * 16 + g + 8 * r];
            sums[r].x += other.x, sums[r].y += other.y, sums[r].z += other.z;
        }
        bool valid = token_of(at, r, warp, lane) < at.item.length;  // rows behind the end are zeros
        float q_scale = rsqrt_fast(sums[r].x + (p.qk_l2norm ? 1e-6f : 1e-37f));
        float k_scale = p.qk_l2norm ? rsqrt_fast(sums[r].y + 1e-6f) : 1.f;
        float o_scale = p.qk_l2norm ? p.scale : p.scale * sums[r].x * q_scale;
        if (!valid) q_scale = k_scale = 0.f;
        d.qk[r] = sums[r].z * q_scale * k_scale;
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
        if (h == 0 && t == 0) {
            int token = 16 * b + g + 8 * r;
            float logit = p.beta_wide ? __uint_as_float(raw.beta[r]) : Io::unpack(raw.beta[r]).x;
            shared.beta(turn)[token] = valid ? write_strength(logit, p.beta_activation) : 0.f;
            shared.scale(turn)[token] = o_scale;
        }
    }
}

DEVICE void decays_of(float (&d)[2][16], const Raw& raw, const ChunkParams& p, const Cursor& at, int warp, int lane) {
    float rate = exp2_fast(raw.rate * LOG2_E);
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float x[8];
            if constexpr (G_WIDE) {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint4 w = raw.g[r][2 * c + i];
                    x[4 * i] = __uint_as_float(w.x), x[4 * i + 1] = __uint_as_float(w.y);
                    x[4 * i + 2] = __uint_as_float(w.z), x[4 * i + 3] = __uint_as_float(w.w);
                }
            } else {
                unpack_8(x, raw.g[r][c]);
            }
            bool valid = token_of(at, r, warp, lane) < at.item.length;
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                float e = decay<GATE>(x[i], raw.bias[c][i], rate, p.lower_bound);
                d[r][8 * c + i] = valid ? e : 1.f;
            }
        }
    }
}

// ---------------------------------------------------------------- triangles

// Adds the products of 16 channels (fragments i = 0, 1 of them) within the lower and within the upper 8 tokens:
// rows 0-7 of the accumulator are k's (L), rows 8-15 are q's (Aqk).
DEVICE void multiply_8(float (&acc)[4], const u32* k_rows, const u32* q_rows, const u32* k_columns) {
    Fp16::mma(acc, k_rows[0], q_rows[0], k_rows[1], q_rows[1], k_columns[0], k_columns[1]);
}

// Decays of two channels in fp16: as exact as the operands that they become factors of.
struct Pair {
    u32 x;
    static DEVICE Pair of(float a, float b) { return {Fp16::pack(a, b)}; }
    DEVICE Pair operator*(Pair y) const { return {Fp16::multiply(x, y.x)}; }
    DEVICE Pair from_lane(int mask) const { return {shuffle_xor(x, mask)}; }
};
using Pairs = Pair[2][8];  // of a lane's two tokens

// One level of binary anchoring within 8 tokens: pairs of tokens whose numbers first differ in bit `level`. Coming in,
// `near` is a token's decay towards the other half of its block of 2 * level (with the token itself in the upper half,
// behind the token in the lower one), `far` towards the outside; going out, they are those of the next level.
template <int level>
DEVICE void anchor(Tile& L, Tile& A, Pairs& near, Pairs& far, const Directions& d, int lane) {
    int g = lane / 4, t = lane % 4;
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
// itself, `after` the one behind it; first of the 8 tokens, then of the 16.
DEVICE void anchor_8(Tile& L, Tile& A, Pairs& before, Pairs& after, const Directions& d) {
    float acc[4] = {};
    #pragma unroll
    for (int s = 0; s < 4; s++) {
        u32 k[2], q[2], columns[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            int x = 2 * s + i;
            k[i] = Fp16::multiply(d.k[1][x], before[1][x].x), q[i] = Fp16::multiply(d.q[1][x], before[1][x].x);
            columns[i] = Fp16::multiply(d.k[0][x], after[0][x].x);
            Pair low = before[0][x] * after[0][x], high = before[1][x] * after[1][x];
            before[1][x] = before[1][x] * low, after[0][x] = after[0][x] * high;
        }
        multiply_8(acc, k, q, columns);
    }
    #pragma unroll
    for (int x = 0; x < 2; x++) L[0][2 + x] = acc[x], A[0][2 + x] = acc[2 + x];
}

// ---------------------------------------------------------------- the chunk

// fp16 pairs as the scan multiplies them.
DEVICE u32 as_io(u32 x) {
    float2 f = Fp16::unpack(x);
    return Io::pack(f.x, f.y);
}

// Prepares the chunk under the cursor.
DEVICE void prepare_chunk(const ChunkParams& p, const Shared& shared, const Stage& stage, const Cursor& at, u32 count, u32 turn, int warp,
                          int lane) {
    int b = warp / HALVES, h = warp % HALVES, g = lane / 4, t = lane % 4;
    Directions d;
    Pairs near, far;
    float* decays = shared.decays(turn) + 64 * h + 8 * t;
    Raw raw;
    load_raw(raw, p, at, warp, lane);
    // Nothing is written to the ring before the barrier below.
    if (RECYCLES && count >= RING && warp == 0) wait_for_place(p, count, lane);
    normalize(d, raw, p, shared, at, turn, warp, lane);
    {
        float e[2][16];
        decays_of(e, raw, p, at, warp, lane);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                Pair own = Pair::of(e[r][2 * i], e[r][2 * i + 1]), one = Pair::of(1.f, 1.f);
                near[r][i] = g & 1 ? own : one, far[r][i] = g & 1 ? one : own;
            }
        }
        #pragma unroll
        for (int x = 0; x < 16; x++) {  // of the whole block
            float all = e[0][x] * e[1][x];
            all *= shuffle_xor(all, 4), all *= shuffle_xor(all, 8), all *= shuffle_xor(all, 16);
            if (g == 0) decays[b * K + 32 * (x / 8) + x % 8] = all;
        }
    }
    Tile L = {}, own = {};  // diagonal blocks of L and Aqk
    anchor<1>(L, own, near, far, d, lane);
    anchor<2>(L, own, near, far, d, lane);
    anchor<4>(L, own, near, far, d, lane);
    Pairs &after = near, &before = far;  // as g / 8 is even, as if all 8 tokens were a lower half
    anchor_8(L, own, before, after, d);
    #pragma unroll
    for (int x = 0; x < 2; x++) {
        if (h == 0 && g == 2 * t + x) own[0][x] = d.qk[0], own[1][2 + x] = d.qk[1];
    }
    bool gives = HALVES > 1 && h == turn % 2;  // its sums of Aqk to the block's other warp
    if (turn > 0) mbarrier_wait(shared.inverted(), (turn - 1) & 1);
    send_sums(shared.sums_of_L(h, b, b) + lane, L);
    if (gives) send_sums(shared.sums_of_A(b, b) + lane, own);
    // Columns for later blocks are keys decayed to this block's end, rows are decayed from its start.
    u32 k_fall[2][8], k_rise[2][8], q_rise[2][8];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            k_fall[r][i] = Fp16::multiply(d.k[r][i], after[r][i].x);
            k_rise[r][i] = Fp16::multiply(d.k[r][i], before[r][i].x), q_rise[r][i] = Fp16::multiply(d.q[r][i], before[r][i].x);
        }
    }
    #pragma unroll
    for (int s = 0; s < 4; s++) {
        shared.columns(turn)[(warp * 4 + s) * 32 + lane] = make_uint4(k_fall[0][2 * s], k_fall[0][2 * s + 1], k_fall[1][2 * s], k_fall[1][2 * s + 1]);
    }
    barrier_sync(PREPARED, 32 * PREPARE_WARPS);
    if (warp == 0) stage.scale()[lane] = shared.scale(turn)[lane], stage.scale()[lane + 32] = shared.scale(turn)[lane + 32];

    // Kr: decayed on to the chunk's end; and the decay of the whole chunk.
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        float rest[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) rest[i] = 1.f;
        #pragma unroll
        for (int other = 1; other < 4; other++) {
            if (other <= b) continue;
            float x[8];
            load_8(x, decays + other * K + 32 * c);
            #pragma unroll
            for (int i = 0; i < 8; i++) rest[i] *= x[i];
        }
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 k[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) k[i] = as_io(Fp16::multiply(k_fall[r][4 * c + i], Fp16::pack(rest[2 * i], rest[2 * i + 1])));
            *reinterpret_cast<uint4*>(stage.Kr() + block_at(2 * b + r, 8 * h + 4 * c + t, K / 8) + 16 * g) = make_uint4(k[0], k[1], k[2], k[3]);
        }
        if (b == 0 && g == 0) {
            float* gamma = stage.gamma() + 64 * h + 32 * c + 8 * t;
            float x[8];
            load_8(x, decays + 32 * c);
            *reinterpret_cast<float4*>(gamma) = make_float4(x[0] * rest[0], x[1] * rest[1], x[2] * rest[2], x[3] * rest[3]);
            *reinterpret_cast<float4*>(gamma + 4) = make_float4(x[4] * rest[4], x[5] * rest[5], x[6] * rest[6], x[7] * rest[7]);
        }
    }
    // Products with the columns of earlier blocks; then Kg and Qg, decayed from the chunk's start.
    Tile A[3] = {};
    float between[16];  // decay of the blocks between
    #pragma unroll
    for (int x = 0; x < 16; x++) between[x] = 1.f;
    #pragma unroll
    for (int j = 2; j >= 0; j--) {
        if (j >= b) continue;
        #pragma unroll
        for (int i = 0; i < 8; i++) L[i / 4][i % 4] = 0.f;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 columns = shared.columns(turn)[((j * HALVES + h) * 4 + s) * 32 + lane];
            u32 k[4], q[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 factor = Fp16::pack(between[4 * s + 2 * (i / 2)], between[4 * s + 2 * (i / 2) + 1]);
                k[i] = Fp16::multiply(k_rise[i % 2][2 * s + i / 2], factor);
                q[i] = Fp16::multiply(q_rise[i % 2][2 * s + i / 2], factor);
            }
            multiply(L, k, columns);
            multiply(A[j], q, columns);
        }
        send_sums(shared.sums_of_L(h, b, j) + lane, L);
        if (gives) send_sums(shared.sums_of_A(b, j) + lane, A[j]);
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float x[8];
            load_8(x, decays + j * K + 32 * c);
            #pragma unroll
            for (int i = 0; i < 8; i++) between[8 * c + i] *= x[i];
        }
    }
    warp_sync();
    if (lane == 0) mbarrier_arrive(shared.summed());
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 k[4], q[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 factor = Fp16::pack(between[8 * c + 2 * i], between[8 * c + 2 * i + 1]);
                k[i] = as_io(Fp16::multiply(k_rise[r][4 * c + i], factor));
                q[i] = as_io(Fp16::multiply(q_rise[r][4 * c + i], factor));
            }
            int at = block_at(2 * b + r, 8 * h + 4 * c + t, K / 8) + 16 * g;
            *reinterpret_cast<uint4*>(stage.Kg() + at) = make_uint4(k[0], k[1], k[2], k[3]);
            *reinterpret_cast<uint4*>(stage.Qg() + at) = make_uint4(q[0], q[1], q[2], q[3]);
        }
    }
    if (HALVES > 1) barrier_sync(TOKENS + b, 32 * HALVES);
    if (gives) return;
    if (HALVES > 1) {
        #pragma unroll
        for (int j = 0; j < 3; j++) {
            if (j < b) add_sums(A[j], shared.sums_of_A(b, j) + lane);
        }
        add_sums(own, shared.sums_of_A(b, b) + lane);
    }
    store_row(stage.Aqk(), A, own, b, lane);
}

// ---------------------------------------------------------------- the warps that prepare

constexpr int STRIDE = SHARED_CHUNKS ? SLICES : 1;

DEVICE Stage place_of(const ChunkParams& p, const Shared& shared, const Cursor& at, u32 count) {
    return SHARED_CHUNKS ? ring_at(p, at, count) : shared.stage(count);
}

// A warp has written its part of a chunk.
DEVICE void wrote(const Shared& shared, int lane) {
    warp_sync();
    if (lane == 0) mbarrier_arrive(shared.written());
}

DEVICE void prepare(const ChunkParams& p, const Shared& shared, int warp, int lane) {
    Cursor at;
    at.start(p, slice() % STRIDE, lane);
    u32 turn = 0;
    for (u32 count = slice() % STRIDE; at.valid(p); count += STRIDE, turn++) {
        Cursor next = at;
        next.skip(p, STRIDE, lane);
        if (next.valid(p)) prefetch_raw(p, next, warp, lane);
        if (!SHARED_CHUNKS) {
            for (int part = 0; part < PARTS; part++) wait_for_release(shared, part, count);
        }
        prepare_chunk(p, shared, place_of(p, shared, at, count), at, count, turn, warp, lane);
        wrote(shared, lane);
        at = next;
    }
}

// The warps that invert. The last of them publishes each chunk, for all: one warp waits for what was written to arrive
// where other blocks see it.
DEVICE void invert_chunks(const ChunkParams& p, const Shared& shared, int inverter, int lane) {
    u32 all = chunks_of_unit(p), turn = 0;
    Cursor at;
    if constexpr (SAVES) at.start(p, slice() % STRIDE, lane);
    for (u32 count = slice() % STRIDE; count < all; count += STRIDE, turn++) {
        mbarrier_wait(shared.summed(), turn & 1);
        invert_chunk(shared, place_of(p, shared, at, count), turn, inverter, lane);
        warp_sync();
        if (lane == 0) mbarrier_arrive(shared.inverted());
        wrote(shared, lane);
        if constexpr (SAVES) at.skip(p, STRIDE, lane);
        if (inverter != INVERTERS - 1) continue;
        mbarrier_wait(shared.written(), turn & 1);
        if (lane == 0) {
            if (SHARED_CHUNKS) publish_more(prepared(p, slice()), 1);
            for (int part = 0; !SHARED_CHUNKS && part < PARTS; part++) mbarrier_arrive(shared.full(part, count));
        }
        warp_sync();
    }
}
