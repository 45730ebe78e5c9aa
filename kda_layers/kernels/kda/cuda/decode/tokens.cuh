// What the decode kernels share: a token's operands, prepared by a warp in shared memory, and a thread's place.
//
// While the states are copied, one warp per token computes the decays and normalises q and k.
#pragma once
#include "DecodeParams.h"
#include "state.cuh"

// Offset of a token's head in a tensor.
DEVICE u64 start(const Rows& at, u32 b, u32 t, u32 h) {
    return u64(b) * at.batch + u64(t) * at.token + u64(h) * at.head;
}

// ---------------------------------------------------------------- a token's operands

struct Shared {
    uint4 state[WARPS][WARP_PIECES][32];
#if STATE_BYTES == 1
    float scales[WARPS][WARP_ROWS];
#else
    float errors[2][WARPS][WARP_ROWS];  // e of this token and of the previous one
#endif
    Token tokens[1];  // p.stage of them
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the host's plan of shared memory");

struct Raw {  // a lane's part of a token, as loaded
    u32 q[PER_LANE / 2], k[PER_LANE / 2], g[PER_LANE], bias[PER_LANE], v[(BLOCK_ROWS + 31) / 32],
        beta[2];  // beta, and with HEAD_GATES g: halves
    u32 rate;     // its logarithm
};

// Load `words` words from an address aligned to their size.
template <int words> DEVICE void load_words(u32* to, const void* from) {
    if constexpr (words == 4) {
        const uint4 x = *static_cast<const uint4*>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (words == 2) {
        const uint2 x = *static_cast<const uint2*>(from);
        to[0] = x.x, to[1] = x.y;
    } else {
        to[0] = *static_cast<const u32*>(from);
    }
}

// Load an element of each head [B, T, heads] as halves. Two loads without a branch, whose result would be moved, and so
// waited for, before the states are copied.
DEVICE void load_halves(u32* to, const void* from, const Rows& at, u32 batch, u32 token, u32 head) {
    const u16* halves = static_cast<const u16*>(from) + (start(at, batch, token, head) << at.fp32);
    to[0] = halves[0], to[1] = halves[at.fp32];
}

DEVICE void fetch(Raw& raw, const DecodeParams& p, u32 batch, u32 token, u32 head, u32 first_row, u32 lane) {
    const u32 qk_head = u32(head * p.group_inverse >> 32), channel = lane * PER_LANE;
    load_words<PER_LANE / 2>(raw.q, p.q + start(p.q_at, batch, token, qk_head) + channel);
    load_words<PER_LANE / 2>(raw.k, p.k + start(p.k_at, batch, token, qk_head) + channel);
    if constexpr (HEAD_GATES) {
        load_halves(raw.g, p.g, p.g_at, batch, token, head);
    } else {
        const u64 g = start(p.g_at, batch, token, head) + channel;
        if (p.g_at.fp32) load_words<PER_LANE>(raw.g, static_cast<const u32*>(p.g) + g);
        else load_words<PER_LANE / 2>(raw.g, static_cast<const u16*>(p.g) + g);
    }
    const u16* v = p.v + start(p.v_at, batch, token, head) + first_row + lane;
    #pragma unroll
    for (int i = 0; i < BLOCK_ROWS; i += 32) raw.v[i / 32] = i + lane < BLOCK_ROWS ? v[i] : 0;
    load_halves(raw.beta, p.beta, p.beta_at, batch, token, head);
    raw.rate = p.A_log ? __float_as_uint(p.A_log[head]) : 0;
    if (p.dt_bias && HEAD_GATES) load_words<1>(raw.bias, p.dt_bias + head);
    else if (p.dt_bias) load_words<PER_LANE>(raw.bias, p.dt_bias + head * K + channel);
    else
        for (int i = 0; i < PER_LANE; i++) raw.bias[i] = 0;
}

// The fp32 element in 32 bits, or the 16-bit one in their lower (0) or upper (1) half.
DEVICE float element(u32 bits) { return __uint_as_float(bits); }
DEVICE float element(u32 bits, int half) {
    const float2 x = IO::unpack(bits);
    return half ? x.y : x.x;
}
// What `load_halves` has loaded.
DEVICE float element_of_halves(const u32* bits, bool fp32) {
    return fp32 ? element(bits[0] | bits[1] << 16) : element(bits[0], 0);
}

DEVICE void put_words(float* to, const float* x) {
    if constexpr (PER_LANE == 4) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    else *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
}

template <int gate> DEVICE void decays(float (&g)[PER_LANE], const Raw& raw, const DecodeParams& p) {
    const Gates<gate> gates(exp2_fast(element(raw.rate) * LOG2_E), p.lower_bound);
    #pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        g[i] = HEAD_GATES && i ? g[0] : gates.decay(g[i], gates.bias(element(raw.bias[HEAD_GATES ? 0 : i])), true);
}

// `decays` of p.gate.
template <int gate = 0> DEVICE void decays_of_any_gate(float (&g)[PER_LANE], const Raw& raw, const DecodeParams& p) {
    if constexpr (gate + 1 == GATE_COUNT) decays<gate>(g, raw, p);
    else if (p.gate == gate) decays<gate>(g, raw, p);
    else decays_of_any_gate<gate + 1>(g, raw, p);
}

// Of a token's q, k and decays before q and k are scaled.
struct Totals {
    float qq = 0, kk = 0, qk = 0;
    u32 k = 0, dk = 0, dq = 0;  // bits of the largest |k|, |d k| and |d q|, which int8 states need; a NaN is above all

    DEVICE void add(float q, float k, float d) {
        qq += q * q, kk += k * k, qk += q * k;
        if constexpr (STATE_BYTES == 1) raise(this->k, k), raise(dk, d * k), raise(dq, d * q);
    }
    DEVICE void reduce_over_warp() {  // in one chain of shuffles: the other warps wait for it
        #pragma unroll
        for (int mask = 16; mask; mask /= 2) {
            qq += shuffle_xor(qq, mask), kk += shuffle_xor(kk, mask), qk += shuffle_xor(qk, mask);
            if constexpr (STATE_BYTES == 1)
                k = max(k, shuffle_xor(k, mask)), dk = max(dk, shuffle_xor(dk, mask)),
                dq = max(dq, shuffle_xor(dq, mask));
        }
    }

private:
    static DEVICE void raise(u32& largest, float x) { largest = max(largest, __float_as_uint(fabsf(x))); }
};

DEVICE void prepare_token(Token& to, Raw& raw, const DecodeParams& p, u32 lane) {
    raw.rate = opt_barrier(raw.rate);  // else it is waited for before the states are copied
    float q[PER_LANE], k[PER_LANE], g[PER_LANE];
    #pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        q[i] = element(raw.q[i / 2], i % 2), k[i] = element(raw.k[i / 2], i % 2);
        if constexpr (HEAD_GATES) g[i] = element_of_halves(raw.g, p.g_at.fp32);
        else g[i] = p.g_at.fp32 ? element(raw.g[i]) : element(raw.g[i / 2], i % 2);
    }
    decays_of_any_gate(g, raw, p);
    Totals t;
    #pragma unroll
    for (int i = 0; i < PER_LANE; i++) t.add(q[i], k[i], g[i]);
    t.reduce_over_warp();
    const float q_factor = p.scale * (p.qk_l2norm ? rsqrt_fast(t.qq + 1e-6f) : 1.f);
    const float k_factor = p.qk_l2norm ? rsqrt_fast(t.kk + 1e-6f) : 1.f;
    #pragma unroll
    for (int i = 0; i < PER_LANE; i++) q[i] *= q_factor, k[i] *= k_factor;
#if STATE_BYTES == 1
    to.put_digits(0, k, g, __uint_as_float(t.dk) * k_factor, lane);
    to.put_digits(4, q, g, __uint_as_float(t.dq) * fabsf(q_factor), lane);
    to.put_update(k, g, __uint_as_float(t.k) * k_factor, lane);
#else
    const u32 channel = lane * PER_LANE;
    put_words(to.q + channel, q), put_words(to.k + channel, k), put_words(to.decay + channel, g);
#endif
    #pragma unroll
    for (int i = 0; i < BLOCK_ROWS; i += 32) {
        if (i + lane < BLOCK_ROWS) to.v[i + lane] = element(raw.v[i / 32], 0);
    }
    if (lane == 0) {
        to.beta = write_strength(element_of_halves(raw.beta, p.beta_at.fp32), p.beta_activation);
        to.qk = t.qk * q_factor * k_factor;
    }
}

// ---------------------------------------------------------------- places

// A thread's place.
struct Place {
    u32 head, heads, block_row;  // the CTA's value head, of how many, and its first row
    u32 warp, group, lane, row;  // a warp's groups of LANES have a row each at a time; row: of the CTA, of the output

    static DEVICE Place of_thread() {
        Place at;
        at.head = blockIdx.x / SLICES, at.heads = gridDim.x / SLICES, at.block_row = blockIdx.x % SLICES * BLOCK_ROWS;
        at.warp = threadIdx.x / 32, at.group = threadIdx.x % 32 / LANES, at.lane = threadIdx.x % LANES;
        at.row = at.warp * WARP_ROWS + at.group + at.lane / COPIES * GROUPS;
        return at;
    }
};

// A head's state in slot 0 of the pool: where this thread's rows begin; of scales, those of its warp.
struct Pool {
    unsigned char* states;
    const DecodeParams& p;
#if STATE_BYTES == 1
    float* scales;
#endif

    DEVICE Pool(const DecodeParams& p, const Place& at) : p(p) {
        const u32 first_row = at.block_row + at.warp * WARP_ROWS + at.group;
        states = p.state + 16 * (u64(at.head) * p.head_stride + first_row * (K / PIECE) + at.lane);
#if STATE_BYTES == 1
        scales = p.state_scale + u64(at.head) * p.scale_head_stride + at.block_row + at.warp * WARP_ROWS;
#endif
    }
    DEVICE unsigned char* state_at(u32 slot) const { return states + 16 * (u64(slot) * p.slot_stride); }
    // In the pool that is only read.
    DEVICE const unsigned char* initial_at(u32 slot, const Place& at) const {
        const u64 within = states - p.state - 16 * (u64(at.head) * p.head_stride);
        return p.initial + within + 16 * (u64(slot) * p.initial_slot_stride + u64(at.head) * p.initial_head_stride);
    }
#if LAST_TOKENS
    // The state before the last tokens of sequence n, which has `in_chunks` tokens in chunks; null if it is zero.
    DEVICE const unsigned char* before(u32 n, u32 slot, u32 in_chunks) const {
        const unsigned char* from = in_chunks ? p.after : p.before;
        const u32 row = in_chunks && p.positions ? p.positions[n] : slot;
        return from ? from + (states - p.state) + 16 * (u64(row) * p.slot_stride) : nullptr;
    }
#endif
#if STATE_BYTES == 1
    DEVICE float* scales_at(u32 slot) const { return scales + u64(slot) * p.scale_slot_stride; }
#endif
};

// The slot of the initial state of sequence n in the pool that is only read; false if there is none.
DEVICE bool initial_of(const DecodeParams& p, u32 n, u32& slot) {
    const u64 s = u64(value_at(p.initial_at, p.initial_slots, n, 0));
    slot = u32(s);
    return s < p.initial_count;
}

DEVICE void clear_outputs(u16* o, u32 tokens, u32 heads) {
    #pragma unroll 1
    for (u32 t = 0; t < tokens; t++) {
        #pragma unroll
        for (u32 row = 0; row < WARP_ROWS; row += OUTPUT_ROWS) o[u64(t) * heads * V + row] = 0;
    }
}

// Every WARPS-th of `count` tokens, from t on; `token` is the first's index in the batch.
DEVICE void prepare_tokens(Shared& shared, const DecodeParams& p, u32 t, u32 count, u32 batch, u32 token, u32 head,
                           u32 block_row, u32 lane) {
    #pragma unroll 1
    for (; t < count; t += WARPS) {
        Raw raw;
        fetch(raw, p, opt_barrier(batch), token + t, opt_barrier(head), opt_barrier(block_row), lane);
        prepare_token(shared.tokens[t], raw, p, lane);
    }
}

// The tokens of sequence n: `start` is the first's index in batch row `batch`, `output` its row of the outputs.
struct Sequence {
    u32 batch, start, tokens;
    u64 output;

    DEVICE Sequence(const DecodeParams& p, u32 n) : batch(n), start(0), tokens(p.tokens), output(u64(n) * p.tokens) {
        if (!p.offsets) return;
        start = u32(value_at(p.offsets_at, p.offsets, n, 0));
        const int length = int(u32(value_at(p.offsets_at, p.offsets, n + 1, 0)) - start);
        batch = 0, output = start, tokens = max(length, 0);
    }
};
