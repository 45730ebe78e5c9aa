// The state of a value head during decoding, in registers, and its update by a token; slots of a pool of states.
//
// A warp has WARP_ROWS rows of the state: it loads them once, updates them for all tokens of the sequence, and stores
// them once, or after each token if each has a slot. LANES lanes share a row, in pieces of 16 bytes, which a lane copies
// to shared memory and reads back itself: in flight they take no registers. A state stays there if it is int8
// (int8_state.cuh) or if the call has one token (layer_step.cu).
//
// Chosen by the build: K, V (128 or 64), IO, STATE_BYTES (of an element: 4 for fp32, 2 for bf16, 1 for int8), ROWS (per
// lane), WARPS and LANES. Only LANES affects the bits of results. Parameter structs have the members `slots`,
// `accepted`, their `Index` and `slot_count` (see decode.py).
#pragma once
#include "gates.cuh"
#include "ptx.cuh"

constexpr int PIECE = 16 / STATE_BYTES;      // elements that a lane reads at once
constexpr int PIECES = K / (LANES * PIECE);  // of a row in a lane
constexpr int WIDTH = PIECES * PIECE;        // elements of a row in a lane
constexpr int GROUPS = 32 / LANES;           // rows in a warp at once
constexpr int WARP_ROWS = ROWS * GROUPS;
constexpr int WARP_PIECES = ROWS * PIECES;  // in a lane
constexpr int BLOCK_ROWS = WARP_ROWS * WARPS;
constexpr int SLICES = V / BLOCK_ROWS;  // CTAs of a head
// Lanes that hold the same output: the same sum after `reduce`, or, with int8, that of one of two rows.
constexpr int COPIES = STATE_BYTES == 1 ? LANES / 2 : LANES / ROWS;
constexpr int OUTPUT_ROWS = GROUPS * (LANES / COPIES);  // of a warp, in its lanes at once
constexpr int PER_LANE = K / 32;                        // elements of q, k and g in a lane that prepares a token
// Resident warps per SM that registers are limited for: as many as are possible without spills.
DEVICE constexpr int resident_warps() {
    if (STATE_BYTES == 1 && ROWS == 8) return __CUDA_ARCH__ < 900 ? 12 : 16;
    if (STATE_BYTES == 1 || ROWS * WIDTH > 32) return 16;
    if (K == 64 || __CUDA_ARCH__ < 900) return 24;
    return __CUDA_ARCH__ == 900 ? 32 : 28;
}
constexpr int RESIDENT = resident_warps();
static_assert(LANES <= 32 && WIDTH * LANES == K, "LANES must split a row into pieces of 16 bytes");
static_assert(SLICES * BLOCK_ROWS == V, "ROWS and WARPS must split V");

DEVICE float sum_over_warp(float x) {
    #pragma unroll
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

// Sums of x[0..count) over the lanes of a row; this lane returns that of index lane / (LANES / count). In every
// step a lane sends half of its sums to its partner. The order of additions depends on LANES only.
template <int count, int mask = LANES / 2> DEVICE float reduce(float* x, u32 lane) {
    if constexpr (mask == 0) {
        return x[0];
    } else if constexpr (count == 1) {
        x[0] += shuffle_xor(x[0], mask);
        return reduce<1, mask / 2>(x, lane);
    } else {
        const bool upper = lane & mask;
        #pragma unroll
        for (int i = 0; i < count / 2; i++) {
            const float low = x[i], high = x[i + count / 2];
            x[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, mask);
        }
        return reduce<count / 2, mask / 2>(x, lane);
    }
}

// ---------------------------------------------------------------- the state

DEVICE constexpr int piece_offset(int row, int piece) {
    return (row * GROUPS * (K / PIECE) + piece * LANES) * PIECE * STATE_BYTES;
}

// The pieces of a lane.
struct Pieces {
    // Call f with each row and piece.
    template <class F> static DEVICE void each(F f) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            #pragma unroll
            for (int i = 0; i < PIECES; i++) f(r, i);
        }
    }
    // Zeros if there is no state.
    static DEVICE void copy(uint4 (*to)[32], const unsigned char* from, bool exists = true) {
        each([&](int r, int i) {
            cp_async_16(&to[r * PIECES + i][threadIdx.x % 32], from + piece_offset(r, i), exists);
        });
        cp_async_commit();
    }
};

#if STATE_BYTES == 1
#include "int8_state.cuh"
#else
struct Token {                   // in shared memory
    float k[K], q[K], decay[K];  // q scaled
    float v[BLOCK_ROWS];
    float beta, qk, unused[2];
};

struct State : Pieces {
    static_assert(ROWS % 4 == 0 && COPIES >= 1, "advance reads the errors of four rows at a time");
    float x[ROWS][WIDTH];

    DEVICE void take(const uint4 (*from)[32]) {
        cp_async_wait<0>();
        each([&](int r, int i) { unpack(x[r] + i * PIECE, from[r * PIECES + i][threadIdx.x % 32]); });
    }
    DEVICE void put_back(uint4 (*to)[32]) const {
        each([&](int r, int i) { to[r * PIECES + i][threadIdx.x % 32] = pack(x[r] + i * PIECE); });
    }
    DEVICE void store(unsigned char* to) const {
        each([&](int r, int i) { *reinterpret_cast<uint4*>(to + piece_offset(r, i)) = pack(x[r] + i * PIECE); });
    }
    // To what `store` writes.
    DEVICE void round() {
        each([&](int r, int i) { unpack(x[r] + i * PIECE, pack(x[r] + i * PIECE)); });
    }

#if STATE_BYTES == 2
    static DEVICE void unpack(float* y, uint4 words) {
        const float2 a = Bf16::unpack(words.x), b = Bf16::unpack(words.y), c = Bf16::unpack(words.z),
                     d = Bf16::unpack(words.w);
        y[0] = a.x, y[1] = a.y, y[2] = b.x, y[3] = b.y, y[4] = c.x, y[5] = c.y, y[6] = d.x, y[7] = d.y;
    }
    static DEVICE uint4 pack(const float* y) {
        return make_uint4(Bf16::pack(y[0], y[1]), Bf16::pack(y[2], y[3]), Bf16::pack(y[4], y[5]),
                          Bf16::pack(y[6], y[7]));
    }
#else
    static DEVICE void unpack(float* y, uint4 words) {
        y[0] = __uint_as_float(words.x), y[1] = __uint_as_float(words.y);
        y[2] = __uint_as_float(words.z), y[3] = __uint_as_float(words.w);
    }
    static DEVICE uint4 pack(const float* y) {
        return make_uint4(__float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]), __float_as_uint(y[3]));
    }
#endif
};

// This lane's elements of piece i of a row.
DEVICE void spread(float* to, const float* from, int i, u32 lane) {
    #pragma unroll
    for (int j = 0; j < PIECE; j += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + (i * LANES + lane) * PIECE + j);
        to[j] = x.x, to[j + 1] = x.y, to[j + 2] = x.z, to[j + 3] = x.w;
    }
}
DEVICE void spread(float (&to)[WIDTH], const float* from, u32 lane) {
    #pragma unroll
    for (int i = 0; i < PIECES; i++) spread(to + i * PIECE, from, i, lane);
}

// The two operations of an update, one rounding each, so that every kernel gives the same bits.
DEVICE float decayed(float x, float d) { return __fmul_rn(x, d); }
DEVICE float written(float x, float e, float k) { return __fmaf_rn(e, k, x); }

// Advance the state by one token; return the output of row lane / COPIES of the lane's group, row `row` of the CTA.
DEVICE float advance(State& S, const Token& t, float* errors, u32 row, u32 lane, u32 group) {
    float k[WIDTH], y_k[ROWS], y_q[ROWS];
    spread(k, t.k, lane);
    {
        float q[WIDTH], d[WIDTH];
        spread(q, t.q, lane);
        spread(d, t.decay, lane);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            y_k[r] = y_q[r] = 0;
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                S.x[r][i] = decayed(S.x[r][i], d[i]);
                y_k[r] += S.x[r][i] * k[i];
                y_q[r] += S.x[r][i] * q[i];
            }
        }
    }
    const float e = t.beta * (t.v[row] - reduce<ROWS>(y_k, lane)), o = reduce<ROWS>(y_q, lane) + t.qk * e;
    errors += group * ROWS;
    if (lane % COPIES == 0) errors[lane / COPIES] = e;
    warp_sync();
    #pragma unroll
    for (int r = 0; r < ROWS; r += 4) {
        const float4 four = *reinterpret_cast<const float4*>(errors + r);
        const float each[4] = {four.x, four.y, four.z, four.w};
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) S.x[r + j][i] = written(S.x[r + j][i], each[j], k[i]);
        }
    }
    return o;
}
#endif

// ---------------------------------------------------------------- slots

template <class Index> DEVICE i64 value_at(const Index& at, const void* data, u32 n, u32 c) {
    const u64 i = u64(n) * at.row + u64(c) * at.column;
    return at.int64 ? static_cast<const i64*>(data)[i] : static_cast<const int*>(data)[i];
}

// The slot of the initial state of sequence n; false if there is none.
template <class Params> DEVICE bool source_of(const Params& p, u32 n, u32& slot) {
    slot = n;
    if (!p.slots) return true;
    u64 column = 0;
    if (p.accepted) {
        column = u64(value_at(p.accepted_at, p.accepted, n, 0) - 1);
        if (column >= p.slots_at.columns) return false;
    }
    const u64 s = u64(value_at(p.slots_at, p.slots, n, u32(column)));
    slot = u32(s);
    return s < p.slot_count;
}

// The slot of the state after a token: false if that state is not kept, or if there is no such slot.
template <class Params> DEVICE bool destination_of(const Params& p, u32 n, u32 token, u32 tokens, u32& slot) {
    bool kept = token + 1 == tokens;
    if (p.slots_at.columns) {
        kept = token < p.slots_at.columns;
        if (kept) {
            const u64 s = u64(value_at(p.slots_at, p.slots, n, token));
            slot = u32(s);
            kept = s < p.slot_count;
        }
    }
    return kept;
}
