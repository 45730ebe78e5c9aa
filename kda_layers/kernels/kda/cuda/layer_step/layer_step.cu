// One decode step of a KDA layer between its projections, for one or a few tokens of many sequences: short convolution
// and SiLU of q, k and v, their normalisation, decays and output gate from their low-rank factors, the state's update
// (see decode.cu), and the gated norm. Both states are updated in place.
//
// A CTA has one value head of one sequence, with all of its state. A q/k head's channels of the convolution's state are
// read by every value head of its group: those are one cluster, and its first CTA writes them when all have read.
//
// Chosen by the build: K, V (128 or 64), IO (Bf16 or Fp16), STATE_BYTES, ROWS, WARPS and LANES as in decode.cu, with
// WARPS that hold all V rows; TAPS of the convolution, TAP_BYTES of each (4 for fp32, 2 for IO), HISTORY inputs of it
// that are kept, TAPS or the TAPS - 1 that it needs; DECAY_RANK and GATE_RANK of the factors of decays and output gate,
// 0 where the logits are given.
#include "LayerStepParams.h"
#include "gates.cuh"
#include "state.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int CHANNELS = 2 * K + V;                             // of a head: q, k, v
constexpr int PER_THREAD = (CHANNELS + THREADS - 1) / THREADS;  // channels that a thread convolves
constexpr int ROW_THREADS = THREADS / K;                        // threads that share a row of a factor
// Resident threads per SM that registers are limited for: a small batch, which has the factors read here, leaves SMs idle.
constexpr int RESIDENT_THREADS = DECAY_RANK || GATE_RANK ? 512 : 1024;
constexpr int DROPPED = TAPS - HISTORY;  // 1: the first input, which `shift` drops before it is used, is not kept
static_assert(DROPPED == 0 || DROPPED == 1, "the convolution reads TAPS - 1 earlier inputs");
static_assert(SLICES == 1 && K == V, "a CTA has the complete state of a head");
static_assert(DECAY_RANK % (8 * ROW_THREADS) == 0 && GATE_RANK % (8 * ROW_THREADS) == 0,
              "threads share a row in pieces of 16 bytes");

struct Operands {
    Token token;
    float gate[V];  // sigmoid of its logits
};

struct Shared {
    uint4 state[WARPS][ROWS * PIECES][32];
    float errors[2][WARPS][WARP_ROWS];
    float o[2][V];         // of this token and of the previous one
    Operands operands[1];  // p.tokens of them
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the host's plan of shared memory");

// A number as it was loaded. It is converted where it is used: a conversion beside the load would wait for it, and loads
// after that one would begin late.
struct Loaded {
    u32 bits;

    DEVICE void load(const u16* from) { bits = *from; }
    DEVICE float value() const { return IO::unpack(opt_barrier(bits)).x; }
};

DEVICE float rounded(float x) { return IO::unpack(IO::pack(x, 0.f)).x; }
DEVICE void store(u16* to, float x) { *to = u16(IO::pack(x, 0.f)); }

struct Tap {
    u32 bits;

    DEVICE void load(const void* from, u32 i) {
        bits = TAP_BYTES == 4 ? static_cast<const u32*>(from)[i] : static_cast<const u16*>(from)[i];
    }
    DEVICE float value() const {
        const u32 x = opt_barrier(bits);
        return TAP_BYTES == 4 ? __uint_as_float(x) : IO::unpack(x).x;
    }
};

// ---------------------------------------------------------------- convolution

struct Channel {
    const u16* x;      // of the first token
    u32 token_stride;  // of x
    u32 channel;       // of the convolution
    Tap taps[TAPS];
    Loaded inputs[TAPS], next;

    // Channel `c` of a head's, those of q first.
    DEVICE void load_taps(const LayerStepParams& p, u32 c, u32 n, u32 head) {
        const u32 qk_head = u32(head * p.group_inverse >> 32);
        const u32 part = c < K ? 0 : c < 2 * K ? 1 : 2, own = c - part * K;
        const u32 within = part == 2 ? head * V + own : qk_head * K + own;
        const Tokens& at = part == 0 ? p.q_at : part == 1 ? p.k_at : p.v_at;
        x = (part == 0 ? p.q : part == 1 ? p.k : p.v) + u64(n) * at.batch + within;
        token_stride = at.token;
        channel = part * p.qk_channels + within;
        #pragma unroll
        for (int i = 0; i < TAPS; i++) taps[i].load(p.conv_weight, channel * TAPS + i);
    }
    // The history is in slot `slot`.
    DEVICE void load_inputs(const LayerStepParams& p, u32 slot) {
        const u16* history = state(p, slot);
        #pragma unroll
        for (int i = 0; i < HISTORY; i++) inputs[DROPPED + i].load(history + i * p.conv_tap_stride);
        next.load(x);
    }
    DEVICE u16* state(const LayerStepParams& p, u32 slot) const {
        return p.conv_state + u64(slot) * p.conv_slot_stride + u64(channel) * p.conv_channel_stride;
    }
    DEVICE void shift(u32 token, u32 tokens) {
        #pragma unroll
        for (int i = 0; i + 1 < TAPS; i++) inputs[i] = inputs[i + 1];
        inputs[TAPS - 1] = next;
        if (token + 1 < tokens) next.load(x + u64(token + 1) * token_stride);
    }
    DEVICE float output() const {
        float y = 0;
        #pragma unroll
        for (int i = 0; i < TAPS; i++) y += taps[i].value() * inputs[i].value();
        return rounded(y * sigmoid(y));
    }
    DEVICE void keep(const LayerStepParams& p, u32 slot) const {
        u16* kept = state(p, slot);
        #pragma unroll
        for (int i = 0; i < HISTORY; i++) kept[i * p.conv_tap_stride] = u16(inputs[DROPPED + i].bits);
    }
};

// The channels of a thread.
struct Convolution {
    Channel channels[PER_THREAD];

    // Call f with each channel of this thread and its number in the head.
    template <class F> DEVICE void each(F f) {
        #pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const u32 c = threadIdx.x + i * THREADS;
            if (c < CHANNELS) f(channels[i], c);
        }
    }
    DEVICE Convolution(const LayerStepParams& p, u32 n, u32 head) {
        each([&](Channel& channel, u32 c) { channel.load_taps(p, c, n, head); });
    }
    DEVICE void load_inputs(const LayerStepParams& p, u32 slot) {
        each([&](Channel& channel, u32) { channel.load_inputs(p, slot); });
    }
    // The outputs of all tokens to shared memory, and the new states, once every CTA that reads the old ones has done so.
    DEVICE void run(const LayerStepParams& p, Shared& shared, u32 n, u32 source) {
#if CLUSTER > 1
        cluster_sync();
        const bool writes_qk = cluster_rank() == 0;
#else
        constexpr bool writes_qk = true;
#endif
        each([&](Channel& channel, u32 c) {
            #pragma unroll 1
            for (u32 t = 0; t < p.tokens; t++) {
                channel.shift(t, p.tokens);
                Token& to = shared.operands[t].token;
                float& y = c < K ? to.q[c] : c < 2 * K ? to.k[c - K] : to.v[c - 2 * K];
                y = channel.output();
                u32 slot = source;
                if (destination_of(p, n, t, p.tokens, slot) && (writes_qk || c >= 2 * K)) channel.keep(p, slot);
            }
        });
    }
};

// ---------------------------------------------------------------- decays and gate

DEVICE float dot8(uint4 x, uint4 y, float sum) {
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = IO::unpack(a[i]), v = IO::unpack(b[i]);
        sum += u.x * v.x;
        sum += u.y * v.y;
    }
    return sum;
}

// One row of the logits [HV, width] of every token: row `row` of the head, by ROW_THREADS neighbouring threads.
template <int RANK> struct Logit {
    static constexpr int ROW_PIECES = RANK / 8 / ROW_THREADS;  // pieces of 8 elements in a thread
    const u16* from;
    Tokens at;
    uint4 weights[ROW_PIECES];

    DEVICE Logit(const u16* from, const Tokens& at, const u16* weight, u32 n, u32 row, u32 part)
        : from(from + u64(n) * at.batch + part * 8), at(at) {
        #pragma unroll
        for (int i = 0; i < ROW_PIECES; i++)
            weights[i] = *reinterpret_cast<const uint4*>(weight + u64(row) * RANK + (i * ROW_THREADS + part) * 8);
    }
    DEVICE float of(u32 token, float bias) const {
        const u16* a = from + u64(token) * at.token;
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < ROW_PIECES; i++)
            sum = dot8(weights[i], *reinterpret_cast<const uint4*>(a + i * ROW_THREADS * 8), sum);
        #pragma unroll
        for (int mask = ROW_THREADS / 2; mask; mask /= 2) sum += shuffle_xor(sum, mask);
        return rounded(sum + bias);
    }
};

template <> struct Logit<0> {
    const u16* from;
    Tokens at;

    DEVICE Logit(const u16* from, const Tokens& at, const u16*, u32 n, u32 row, u32)
        : from(from + u64(n) * at.batch + row), at(at) {}
    DEVICE float of(u32 token, float) const { return IO::load(from + u64(token) * at.token); }
};

// The decay of a gate that is known at run time.
template <int gate = 0> DEVICE float decay(int activation, float logit, float rate, float bias, float lower_bound) {
    if constexpr (gate + 1 < GATE_COUNT) {
        if (activation != gate) return decay<gate + 1>(activation, logit, rate, bias, lower_bound);
    }
    const Gates<gate> gates(exp2_fast(rate * LOG2_E), lower_bound);
    return gates.decay(logit, gates.bias(bias), true);
}

// The row of this thread of decays and gate: what does not depend on the token, loaded before it is needed.
struct Row {
    u32 own, part;
    Logit<DECAY_RANK> f;
    Logit<GATE_RANK> g;
    u32 rate;  // of fp32
    float shift;
    Loaded bias;

    DEVICE Row(const LayerStepParams& p, u32 n, u32 head, u32 own, u32 part)
        : own(own),
          part(part),
          f(p.f, p.f_at, p.f_weight, n, head * K + own, part),
          g(p.gate, p.gate_at, p.gate_weight, n, head * K + own, part) {
        const u32 row = head * K + own;
        rate = p.A_log ? __float_as_uint(p.A_log[head]) : 0, shift = p.dt_bias ? p.dt_bias[row] : 0.f;
        bias = {};
        if (p.gate_bias) bias.load(p.gate_bias + row);
    }
};

DEVICE void decays_and_gate(const LayerStepParams& p, Shared& shared, const Row& row) {
    const float rate = __uint_as_float(opt_barrier(row.rate)), bias = row.bias.value();
    #pragma unroll 1
    for (u32 t = 0; t < p.tokens; t++) {
        const float x = row.f.of(t, 0.f), y = row.g.of(t, bias);
        Operands& to = shared.operands[t];
        if (row.part != 0) continue;
        // Keeps the gates' factors from being held from token to token, which would spill.
        const float lower_bound = __uint_as_float(opt_barrier(__float_as_uint(p.lower_bound)));
        to.token.decay[row.own] = decay(p.gate_activation, x, rate, row.shift, lower_bound);
        to.gate[row.own] = sigmoid(y);
    }
}

// q and k of a token, normalised, q scaled; by one warp.
DEVICE void normalise(const LayerStepParams& p, Token& token, u32 lane) {
    float q[PER_LANE], k[PER_LANE], qq = 0, kk = 0, qk = 0;
    #pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        q[i] = token.q[lane * PER_LANE + i], k[i] = token.k[lane * PER_LANE + i];
        qq += q[i] * q[i], kk += k[i] * k[i], qk += q[i] * k[i];
    }
    qq = sum_over_warp(qq), kk = sum_over_warp(kk), qk = sum_over_warp(qk);
    const float q_factor = p.scale * rsqrt_fast(qq + 1e-6f), k_factor = rsqrt_fast(kk + 1e-6f);
    #pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        token.q[lane * PER_LANE + i] = q[i] * q_factor;
        token.k[lane * PER_LANE + i] = k[i] * k_factor;
    }
    if (lane == 0) token.qk = qk * q_factor * k_factor;
}

// ---------------------------------------------------------------- the kernel

// RMSNorm of a token's output, times the gate: by V threads.
DEVICE void gated_norm(const float* y, const float* gate, float weight, float eps, u16* o, u32 lane) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < V / 32; i++) squares += y[lane + 32 * i] * y[lane + 32 * i];
    const float factor = rsqrt_fast(sum_over_warp(squares) * (1.f / V) + eps);
    const u32 row = threadIdx.x;
    store(o + row, y[row] * factor * weight * gate[row]);
}

// Grid: x = HV, in clusters of CLUSTER = HV / H; y z >= sequences. Dynamic shared memory: Shared with p.tokens operands.
// Everything is loaded before anything waits for it, the layer's parameters while earlier kernels run.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS)
    kda_layer_step(const __grid_constant__ LayerStepParams p) {
    launch_dependents();  // the output projection can load its weights
    const u32 n = blockIdx.z * gridDim.y + blockIdx.y, head = blockIdx.x, heads = gridDim.x;
    const Row of_thread(p, n, head, threadIdx.x / ROW_THREADS, threadIdx.x % ROW_THREADS);
    Convolution convolution(p, n, head);
    Loaded norm_weight = {}, logit = {};
    if (threadIdx.x < V) norm_weight.load(p.norm_weight + threadIdx.x);
    wait_for_earlier_kernels();
    if (n >= p.sequences) return;
    const u32 warp = threadIdx.x / 32, group = threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    const u32 row = warp * WARP_ROWS + group + lane / COPIES * GROUPS;  // of the output
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    u16* o = p.o + (u64(n) * p.tokens * heads + head) * V;

    u32 slot;
    if (!source_of(p, n, slot)) {
        for (u32 t = 0; t < p.tokens; t++)
            if (threadIdx.x < V) o[u64(t) * heads * V + threadIdx.x] = 0;
        return;
    }
    const u32 first_row = warp * WARP_ROWS + group;
    unsigned char* states = p.state + 16 * (u64(head) * p.head_stride + first_row * (K / PIECE) + lane);
    State::copy(shared.state[warp], states + 16 * (u64(slot) * p.slot_stride));
    convolution.load_inputs(p, slot);
    if (threadIdx.x < p.tokens)
        logit.load(p.beta + u64(n) * p.beta_at.batch + u64(threadIdx.x) * p.beta_at.token + head);
    decays_and_gate(p, shared, of_thread);
    if (threadIdx.x < p.tokens)
        shared.operands[threadIdx.x].token.beta = write_strength(logit.value(), p.beta_activation);
    convolution.run(p, shared, n, slot);
    barrier_sync(0, THREADS);
    for (u32 t = warp; t < p.tokens; t += WARPS) normalise(p, shared.operands[t].token, threadIdx.x % 32);
    barrier_sync(0, THREADS);

    State S;
    S.take(shared.state[warp]);
    #pragma unroll 1
    for (u32 t = 0; t < p.tokens; t++) {
        const bool kept = destination_of(p, n, t, p.tokens, slot);
        const float y = advance(S, shared.operands[t].token, shared.errors[t % 2][warp], row, lane, group);
        if (lane % COPIES == 0) shared.o[t % 2][row] = rounded(y);
        if (kept) S.store(states + 16 * (u64(slot) * p.slot_stride));
        barrier_sync(0, THREADS);
        if (warp < V / 32)
            gated_norm(shared.o[t % 2], shared.operands[t].gate, norm_weight.value(), p.norm_eps,
                       o + u64(t) * heads * V, threadIdx.x % 32);
    }
}
