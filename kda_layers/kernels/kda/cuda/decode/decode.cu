// Decode: one or a few tokens of many sequences, the states [slots, HV, V, K] updated in place.
//
// Per value head, with S [V, K] and a token's q, k, decay d = e^g [K], v [V] and beta:
//
//     S <- S d        y_k = S k, y_q = S q         (one pass over the state, which is in registers)
//     e = beta (v - y_k)        o = scale (y_q + (q.k) e)        S <- S + e k^T
//
// The rows of S are independent: a CTA has BLOCK_ROWS of them (state.cuh). While the state is copied, one warp per token
// computes the decays and normalises q and k. With more than a few tokens the kernel is bound by instructions, which
// more rows per lane reduce. A bf16 state is rounded when stored, and after every p.stage tokens; an int8 state after
// every token.
//
// Chosen by the build: what state.cuh names, IO (Bf16 or Fp16), and the shape of the work: ROWS, WARPS and LANES. With
// LAST_TOKENS > 0 the kernel computes only the tokens after a sequence's full chunks, if there are at most LAST_TOKENS of
// them. It starts from p.after, the state after the chunks, or from p.before if there are none.
#include "DecodeParams.h"
#include "state.cuh"

#if LAST_TOKENS
constexpr u32 CHUNK = 64;
#endif

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
        beta[2];  // beta: halves
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

DEVICE void fetch(Raw& raw, const DecodeParams& p, u32 batch, u32 token, u32 head, u32 first_row, u32 lane) {
    const u32 qk_head = u32(head * p.group_inverse >> 32), channel = lane * PER_LANE;
    load_words<PER_LANE / 2>(raw.q, p.q + start(p.q_at, batch, token, qk_head) + channel);
    load_words<PER_LANE / 2>(raw.k, p.k + start(p.k_at, batch, token, qk_head) + channel);
    const u64 g = start(p.g_at, batch, token, head) + channel;
    if (p.g_at.fp32) load_words<PER_LANE>(raw.g, static_cast<const u32*>(p.g) + g);
    else load_words<PER_LANE / 2>(raw.g, static_cast<const u16*>(p.g) + g);
    const u16* v = p.v + start(p.v_at, batch, token, head) + first_row + lane;
    #pragma unroll
    for (int i = 0; i < BLOCK_ROWS; i += 32) raw.v[i / 32] = i + lane < BLOCK_ROWS ? v[i] : 0;
    // Two loads without a branch, whose result would be moved, and so waited for, before the states are copied.
    const u64 beta = start(p.beta_at, batch, token, head) << p.beta_at.fp32;
    const u16* halves = static_cast<const u16*>(p.beta) + beta;
    raw.beta[0] = halves[0], raw.beta[1] = halves[p.beta_at.fp32];
    raw.rate = p.A_log ? __float_as_uint(p.A_log[head]) : 0;
    if (p.dt_bias) load_words<PER_LANE>(raw.bias, p.dt_bias + head * K + channel);
    else
        for (int i = 0; i < PER_LANE; i++) raw.bias[i] = 0;
}

// The fp32 element in 32 bits, or the 16-bit one in their lower (0) or upper (1) half.
DEVICE float element(u32 bits) { return __uint_as_float(bits); }
DEVICE float element(u32 bits, int half) {
    const float2 x = IO::unpack(bits);
    return half ? x.y : x.x;
}

DEVICE void put_words(float* to, const float (&x)[PER_LANE]) {
    if constexpr (PER_LANE == 4) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    else *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
}

template <int gate> DEVICE void decays(float (&g)[PER_LANE], const Raw& raw, const DecodeParams& p) {
    const Gates<gate> gates(exp2_fast(element(raw.rate) * LOG2_E), p.lower_bound);
    #pragma unroll
    for (int i = 0; i < PER_LANE; i++) g[i] = gates.decay(g[i], gates.bias(element(raw.bias[i])), true);
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
        g[i] = p.g_at.fp32 ? element(raw.g[i]) : element(raw.g[i / 2], i % 2);
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
        to.beta = write_strength(p.beta_at.fp32 ? element(raw.beta[0] | raw.beta[1] << 16) : element(raw.beta[0], 0),
                                 p.beta_activation);
        to.qk = t.qk * q_factor * k_factor;
    }
}

// ---------------------------------------------------------------- the kernel

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

#if STATE_BYTES == 1
// The scales of a warp's rows.
struct Scales {
    float x[(WARP_ROWS + 31) / 32];

    DEVICE void load(const float* from, u32 lane) {
        #pragma unroll
        for (u32 i = 0; i < WARP_ROWS; i += 32)
            if (i + lane < WARP_ROWS) x[i / 32] = from[i + lane];
    }
    DEVICE void store(float* to, u32 lane) const {
        #pragma unroll
        for (u32 i = 0; i < WARP_ROWS; i += 32)
            if (i + lane < WARP_ROWS) to[i + lane] = x[i / 32];
    }
};
#endif

// The tokens from `first` on that are in shared memory: their outputs, and the states after them that are kept.
#if STATE_BYTES == 1
DEVICE void advance_tokens(State&, const Place& at, const DecodeParams& p, u16* o, const Pool& pool, u32 n, u32 first,
                           u32 count, u32 tokens, u32& slot) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    #pragma unroll 1
    for (u32 t = 0; t < count; t++) {
        const bool kept = destination_of(p, n, first + t, tokens, slot);
        const Token& token = shared.tokens[t];
        unsigned char* to = pool.state_at(slot);
        u16* out = o + u64(first + t) * at.heads * V;
        Tile S = {shared.state[at.warp], shared.scales[at.warp] + at.group};
        #pragma unroll 1
        for (u32 row = at.row; row < at.row + WARP_ROWS; row += OUTPUT_ROWS) {
            uint4 words[Tile::HEIGHT][PIECES];
            float e;
            const float y = S.read(words, e, token, row, at.lane, at.group);
            if (at.lane % COPIES == 0) *out = u16(IO::pack(y, 0.f));
            const float e_other = shuffle_xor(e, COPIES);
            const bool upper = at.lane / COPIES;
            const float errors[Tile::HEIGHT] = {upper ? e_other : e, upper ? e : e_other};
            S.update(words, errors, token, at.lane, at.group);
            #pragma unroll
            for (u32 r = 0; r < Tile::HEIGHT; r++) {
                #pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    if (kept) *reinterpret_cast<uint4*>(to + piece_offset(r, i)) = words[r][i];
                    if (first + t + 1 < tokens) S.piece(r, i) = words[r][i];
                }
            }
            S.pieces += Tile::HEIGHT * PIECES, S.scales += OUTPUT_ROWS;
            to += piece_offset(Tile::HEIGHT, 0), out += OUTPUT_ROWS;
        }
        warp_sync();
        if (kept) {
            Scales scales;
            scales.load(shared.scales[at.warp], threadIdx.x % 32);
            scales.store(pool.scales_at(slot), threadIdx.x % 32);
        }
    }
}
#else
DEVICE void advance_tokens(State& S, const Place& at, const DecodeParams& p, u16* o, const Pool& pool, u32 n, u32 first,
                           u32 count, u32 tokens, u32& slot) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    #pragma unroll 1
    for (u32 t = 0; t < count; t++) {
        const bool kept = destination_of(p, n, first + t, tokens, slot);
        const float y = advance(S, shared.tokens[t], shared.errors[t % 2][at.warp], at.row, at.lane, at.group);
        if (at.lane % COPIES == 0) o[u64(first + t) * at.heads * V] = u16(IO::pack(y, 0.f));
        if (kept && (!LAST_TOKENS || p.state)) S.store(pool.state_at(slot));
    }
}
#endif

// Grid: x = HV * SLICES, y z >= sequences. CTA: 32 WARPS threads. Dynamic shared memory: Shared with p.stage tokens.
// A sequence without tokens changes nothing. Neither does one whose slot or number of accepted tokens is out of
// range, such as -1 where a batch is padded; its outputs are 0.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    kda_decode(const __grid_constant__ DecodeParams p) {
    const u32 n = blockIdx.z * gridDim.y + blockIdx.y;
    if (n >= p.sequences) return;
    const Place at = Place::of_thread();
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());

    u32 batch = n, start = 0, tokens = p.tokens;
    u64 output = u64(n) * tokens;
    if (p.offsets) {
        start = u32(value_at(p.offsets_at, p.offsets, n, 0));
        const int length = int(u32(value_at(p.offsets_at, p.offsets, n + 1, 0)) - start);
        if (length <= 0) return;
        batch = 0, output = start, tokens = length;
    }
#if LAST_TOKENS
    if (!p.offsets) batch = 0, start = n * tokens;  // all tokens are rows at one stride
    const u32 in_chunks = tokens / CHUNK * CHUNK;
    start += in_chunks, output += in_chunks, tokens -= in_chunks;
    if (tokens == 0 || tokens > LAST_TOKENS) return;
#endif
    u16* o = p.o + (output * at.heads + at.head) * V + at.block_row + at.row;

    // Load the first tokens before the states: they need more work after they arrive.
    const u32 lane = threadIdx.x % 32;
    const bool prepares = WARPS == 1 || at.warp < min(p.stage, tokens);
    Raw raw;
    if (prepares) fetch(raw, p, batch, start + at.warp, at.head, at.block_row, lane);
    u32 slot;
    if (!source_of(p, n, slot)) return clear_outputs(o, tokens, at.heads);
    const Pool pool(p, at);
    State S;
#if LAST_TOKENS
    const unsigned char* from = pool.before(n, slot, in_chunks);
    S.copy(shared.state[at.warp], from, from);
#else
    S.copy(shared.state[at.warp], pool.state_at(slot));
#endif
#if STATE_BYTES == 1
    Scales scales;
    scales.load(pool.scales_at(slot), lane);
#endif
    if (prepares) prepare_token(shared.tokens[at.warp], raw, p, lane);
#if STATE_BYTES == 1
    scales.store(shared.scales[at.warp], lane);  // not before: the token must not wait for them
#endif
    for (u32 first = 0; first < tokens; first += p.stage) {
        const u32 count = min(p.stage, tokens - first);
        prepare_tokens(shared, p, first ? at.warp : at.warp + WARPS, count, batch, start + first, at.head, at.block_row,
                       lane);
        barrier_sync(0, 32 * WARPS);
        S.take(shared.state[at.warp]);
        advance_tokens(S, at, p, o, pool, n, first, count, tokens, slot);
        if (first + p.stage < tokens) {
            S.put_back(shared.state[at.warp]);
            barrier_sync(0, 32 * WARPS);
        }
    }
}
