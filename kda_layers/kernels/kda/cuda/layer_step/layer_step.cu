// One decode step of a KDA layer between its projections, for one token of each of many sequences: short convolution and
// SiLU of q, k and v, their normalisation, decays and output gate from their low-rank factors, the state's update (see
// decode.cu), and the gated norm. Both states are updated in place.
//
// A CTA has one value head of one sequence, with all of its state, which stays in shared memory: registers for it would
// leave room for fewer CTAs. A q/k head's channels of the convolution's state are read by every value head of its group:
// those are one cluster, and its first CTA writes them when all have read.
//
// Chosen by the build: K, V (128 or 64), IO (Bf16 or Fp16), STATE_BYTES, ROWS, WARPS and LANES as in decode.cu, with
// WARPS that hold all V rows; TAPS of the convolution, TAP_BYTES of each (4 for fp32, 2 for IO), HISTORY inputs of it
// that are kept, TAPS or the TAPS - 1 that it needs; DECAY_RANK and GATE_RANK of the factors of decays and output gate,
// 0 where the logits are given; HEAD_GATES, 1 where a head has one decay instead of one for each key channel.
#include "LayerStepParams.h"
#include "gates.cuh"
#include "state.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int CHANNELS = 2 * K + V;                             // of a head: q, k, v
constexpr int PER_THREAD = (CHANNELS + THREADS - 1) / THREADS;  // channels that a thread convolves
constexpr int ROW_THREADS = THREADS / K;                        // threads that share a row of a factor
// Resident threads per SM that registers are limited for, without spills: those of three fp32 states with K = 128 where
// shared memory has room for them. A small batch, which has the factors read here, leaves SMs idle.
constexpr bool THREE_FIT = STATE_BYTES == 4 && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200;
constexpr int RESIDENT_THREADS = DECAY_RANK || GATE_RANK ? 512 : THREE_FIT ? 1536 : 1024;
constexpr int UNUSED = HISTORY - (TAPS - 1);  // 1: the state keeps one input more than the convolution reads
static_assert(UNUSED == 0 || UNUSED == 1, "the convolution reads TAPS - 1 earlier inputs");
static_assert(SLICES == 1 && K == V, "a CTA has the complete state of a head");
static_assert(!HEAD_GATES || DECAY_RANK == 0, "the logits of heads' decays are given");
static_assert(DECAY_RANK % (8 * ROW_THREADS) == 0 && GATE_RANK % (8 * ROW_THREADS) == 0,
              "threads share a row in pieces of 16 bytes");

struct Shared {
    uint4 state[WARPS][WARP_PIECES][32];
    float errors[WARPS][WARP_ROWS];
    float o[V];
    float gate[V];  // activated
    Token token;
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
    const u16* x;
    u32 channel;  // of the convolution
    Tap taps[TAPS];
    Loaded inputs[TAPS];

    // Channel `c` of a head's, those of q first.
    DEVICE void load_taps(const LayerStepParams& p, u32 c, u32 n, u32 head) {
        const u32 qk_head = u32(head * p.group_inverse >> 32);
        const u32 part = c < K ? 0 : c < 2 * K ? 1 : 2, own = c - part * K;
        const u32 within = part == 2 ? head * V + own : qk_head * K + own;
        const u64 stride = part == 0 ? p.q_stride : part == 1 ? p.k_stride : p.v_stride;
        x = (part == 0 ? p.q : part == 1 ? p.k : p.v) + n * stride + within;
        channel = part * p.qk_channels + within;
        #pragma unroll
        for (int i = 0; i < TAPS; i++) taps[i].load(p.conv_weight, channel * TAPS + i);
    }
    // The earlier inputs are in slot `slot`.
    DEVICE void load_inputs(const LayerStepParams& p, u32 slot) {
        const u16* history = state(p, slot);
        #pragma unroll
        for (int i = 0; i + 1 < TAPS; i++) inputs[i].load(history + (UNUSED + i) * p.conv_tap_stride);
        inputs[TAPS - 1].load(x);
    }
    DEVICE u16* state(const LayerStepParams& p, u32 slot) const {
        return p.conv_state + u64(slot) * p.conv_slot_stride + u64(channel) * p.conv_channel_stride;
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
        for (int i = 0; i < HISTORY; i++) kept[i * p.conv_tap_stride] = u16(inputs[TAPS - HISTORY + i].bits);
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
    // The outputs to shared memory, and the new state, once every CTA that reads the old one has done so.
    DEVICE void run(const LayerStepParams& p, Token& to, u32 slot) {
#if CLUSTER > 1
        cluster_sync();
        const bool writes_qk = cluster_rank() == 0;
#else
        constexpr bool writes_qk = true;
#endif
        each([&](Channel& channel, u32 c) {
            float& y = c < K ? to.q[c] : c < 2 * K ? to.k[c - K] : to.v[c - 2 * K];
            y = channel.output();
            if (writes_qk || c >= 2 * K) channel.keep(p, slot);
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

// One row of the logits [HV, width]: row `row` of the head, by ROW_THREADS neighbouring threads.
template <int RANK> struct Logit {
    static constexpr int ROW_PIECES = RANK / 8 / ROW_THREADS;  // pieces of 8 elements in a thread
    const u16* from;
    uint4 weights[ROW_PIECES];

    DEVICE Logit(const u16* from, u64 stride, const u16* weight, u32 n, u32 row, u32 part)
        : from(from + n * stride + part * 8) {
        #pragma unroll
        for (int i = 0; i < ROW_PIECES; i++)
            weights[i] = *reinterpret_cast<const uint4*>(weight + u64(row) * RANK + (i * ROW_THREADS + part) * 8);
    }
    DEVICE float plus(float bias) const {
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < ROW_PIECES; i++)
            sum = dot8(weights[i], *reinterpret_cast<const uint4*>(from + i * ROW_THREADS * 8), sum);
        #pragma unroll
        for (int mask = ROW_THREADS / 2; mask; mask /= 2) sum += shuffle_xor(sum, mask);
        return rounded(sum + bias);
    }
};

template <> struct Logit<0> {
    const u16* from;

    DEVICE Logit(const u16* from, u64 stride, const u16*, u32 n, u32 row, u32) : from(from + n * stride + row) {}
    DEVICE float plus(float) const { return IO::load(from); }
};

// The decay of a gate that is known at run time.
template <int gate = 0> DEVICE float decay(int activation, float logit, float rate, float bias, float lower_bound) {
    if constexpr (gate + 1 < GATE_COUNT) {
        if (activation != gate) return decay<gate + 1>(activation, logit, rate, bias, lower_bound);
    }
    const Gates<gate> gates(exp2_fast(rate * LOG2_E), lower_bound);
    return gates.decay(logit, gates.bias(bias), true);
}

// The row of this thread of decays and gate: their parameters, loaded before they are needed.
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
          f(p.f, p.f_stride, p.f_weight, n, decay_row(head, own), part),
          g(p.gate, p.gate_stride, p.gate_weight, n, head * K + own, part) {
        rate = p.A_log ? __float_as_uint(p.A_log[head]) : 0;
        shift = p.dt_bias ? p.dt_bias[decay_row(head, own)] : 0.f;
        bias = {};
        if (p.gate_bias) bias.load(p.gate_bias + head * K + own);
    }
    static DEVICE u32 decay_row(u32 head, u32 own) { return HEAD_GATES ? head : head * K + own; }
};

DEVICE void decays_and_gate(const LayerStepParams& p, Shared& shared, const Row& row) {
    const float rate = __uint_as_float(opt_barrier(row.rate)), bias = row.bias.value();
    const float x = row.f.plus(0.f), y = row.g.plus(bias);
    if (row.part != 0) return;
    shared.token.decay[row.own] = decay(p.gate_activation, x, rate, row.shift, p.lower_bound);
    shared.gate[row.own] = p.silu ? y * sigmoid(y) : sigmoid(y);
}

// q and k, normalised, q scaled; by one warp.
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

// The slot of sequence n; false if it has none.
DEVICE bool slot_of(const LayerStepParams& p, u32 n, u32& slot) {
    const u64 s = p.slots ? u64(value_at(p.slots_at, p.slots, n, 0)) : n;
    slot = u32(s);
    return s >= p.first_slot && s < p.slot_count;
}

// `advance` (state.cuh), with the same bits, of a state in shared memory, which goes to `to`. Reading it twice, a piece at
// a time, takes 40 registers instead of 64.
DEVICE float advance(const uint4 (*state)[32], unsigned char* to, const Token& t, float* errors, u32 row, u32 lane,
                     u32 group) {
    float y_k[ROWS] = {}, y_q[ROWS] = {};
    #pragma unroll
    for (int i = 0; i < PIECES; i++) {
        float k[PIECE], q[PIECE], d[PIECE];
        spread(k, t.k, i, lane), spread(q, t.q, i, lane), spread(d, t.decay, i, lane);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float x[PIECE];
            State::unpack(x, state[r * PIECES + i][threadIdx.x % 32]);
            #pragma unroll
            for (int j = 0; j < PIECE; j++) {
                x[j] = decayed(x[j], d[j]);
                y_k[r] += x[j] * k[j];
                y_q[r] += x[j] * q[j];
            }
        }
    }
    const float e = t.beta * (t.v[row] - reduce<ROWS>(y_k, lane)), o = reduce<ROWS>(y_q, lane) + t.qk * e;
    errors += group * ROWS;
    if (lane % COPIES == 0) errors[lane / COPIES] = e;
    warp_sync();
    #pragma unroll
    for (int i = 0; i < PIECES; i++) {
        float k[PIECE], d[PIECE];
        spread(k, t.k, i, lane), spread(d, t.decay, i, lane);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float x[PIECE];
            State::unpack(x, state[r * PIECES + i][threadIdx.x % 32]);
            #pragma unroll
            for (int j = 0; j < PIECE; j++) x[j] = written(decayed(x[j], d[j]), errors[r], k[j]);
            *reinterpret_cast<uint4*>(to + piece_offset(r, i)) = State::pack(x);
        }
    }
    return o;
}

// RMSNorm of the output, times the gate: by V threads.
DEVICE void gated_norm(const Shared& shared, float weight, float eps, u16* o, u32 lane) {
    const float* y = shared.o;
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < V / 32; i++) squares += y[lane + 32 * i] * y[lane + 32 * i];
    const float factor = rsqrt_fast(sum_over_warp(squares) * (1.f / V) + eps);
    const u32 row = threadIdx.x;
    store(o + row, y[row] * factor * weight * shared.gate[row]);
}

// Grid: x = HV, in clusters of CLUSTER = HV / H; y z >= sequences. Dynamic shared memory: Shared. Everything is loaded
// before anything waits for it, the layer's parameters while earlier kernels run.
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
    const u32 first_row = warp * WARP_ROWS + group, row = first_row + lane / COPIES * GROUPS;  // of the output
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    u16* o = p.o + (u64(n) * heads + head) * V;

    u32 slot;
    if (!slot_of(p, n, slot)) {
        if (threadIdx.x < V) o[threadIdx.x] = 0;
        return;
    }
    unsigned char* state =
        p.state + 16 * (u64(slot) * p.slot_stride + u64(head) * p.head_stride + first_row * (K / PIECE) + lane);
    State::copy(shared.state[warp], state);
    convolution.load_inputs(p, slot);
    if (threadIdx.x == 0) logit.load(p.beta + u64(n) * p.beta_stride + head);
    decays_and_gate(p, shared, of_thread);
    if (threadIdx.x == 0) shared.token.beta = write_strength(logit.value(), p.beta_activation);
    convolution.run(p, shared.token, slot);
    barrier_sync(0, THREADS);
    if (warp == 0) normalise(p, shared.token, threadIdx.x);
    barrier_sync(0, THREADS);

    cp_async_wait<0>();
    const float y = advance(shared.state[warp], state, shared.token, shared.errors[warp], row, lane, group);
    if (lane % COPIES == 0) shared.o[row] = rounded(y);
    barrier_sync(0, THREADS);
    if (warp < V / 32) gated_norm(shared, norm_weight.value(), p.norm_eps, o, threadIdx.x % 32);
}
