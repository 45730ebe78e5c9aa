// The state of a value head in int8 with a scale per row, and its update by a token: an element is n scale. Part of
// state.cuh.
//
// The sums S d k and S d q of a token are MMAs of the integers as loaded. d k and d q are split into four digits of 8
// bits each, the eight columns of B, so that the sums are exact. A row is then updated in units of its scale, to
// n d + (e / scale) k, and rounded to its new scale. The MMA has 16 rows; lane (g, t) = (group, lane) has rows g and
// g + 8. Its pieces, t and t + 4, are fragments of A as they are: any order of the channels will do that B shares.
//
// Rounded to the nearest integer, an update smaller than half a step would be lost at every token. An element is
// therefore rounded up with the probability of its fraction, by a hash of the update and of the row's largest element
// in the lane: equal inputs give equal bits, with no counter. docs/internals/kernels/decode.md compares other roundings
// and counts instructions.
//
// A scale is a row's largest magnitude / 127 with 15 bits of mantissa, rounded up. So 127 scale / 127 is scale again,
// and a row that does not change keeps its bits: a scale that changed would round every element at every token.
#pragma once

constexpr float LEAST_SCALE = 1e-37f;  // of smaller ones the reciprocal overflows: the row is rounded to 0
constexpr float MOST_UPDATE = 1e30f;   // in steps, beside which the row is nothing: larger ones could overflow
constexpr u32 HASH = 0x9e3779b1u;      // 2^32 / the golden ratio
static_assert(LANES == 4 && ROWS % 2 == 0, "the fragments of an MMA");

struct Token {  // in shared memory
    float k[K], decay[K];
    uint4 digits[K / 64][8][LANES];  // of 64 channels each; the four of d k, then those of d q, most significant first
    float v[BLOCK_ROWS];
    float unit[LANES];  // of the digits 0 and 1, 2 and 3, ... together
    float beta, qk, unused[2];

    // Split d k and d q, q scaled, into digits.
    DEVICE void put_digits(const float (&q)[PER_LANE], const float (&k)[PER_LANE], const float (&d)[PER_LANE],
                           u32 lane) {
        float y[PER_LANE];
        #pragma unroll
        for (int i = 0; i < PER_LANE; i++) y[i] = d[i] * k[i];
        put_digits(0, y, lane);
        #pragma unroll
        for (int i = 0; i < PER_LANE; i++) y[i] = d[i] * q[i];
        put_digits(4, y, lane);
    }

private:
    // Multiplied by a power of two, the largest has 30 bits.
    DEVICE void put_digits(int first, const float (&y)[PER_LANE], u32 lane) {
        u32 peak = 0;
        #pragma unroll
        for (int i = 0; i < PER_LANE; i++) peak = max(peak, __float_as_uint(fabsf(y[i])));  // NaN is above all
        #pragma unroll
        for (int mask = 16; mask; mask /= 2) peak = max(peak, shuffle_xor(peak, mask));
        const u32 exponent = max(peak >> 23, 30u);
        const float factor = __uint_as_float(283 - exponent << 23);
        u32 word[4] = {};  // of a channel: digit i, from -128 to 127, in byte i
        #pragma unroll
        for (int i = 0; i < PER_LANE; i++) word[i] = u32(round_to_int(y[i] * factor)) + 0x80808080u ^ 0x80808080u;
        const u32 low[2] = {select_bytes(word[0], word[1], 0x5140), select_bytes(word[2], word[3], 0x5140)};
        const u32 high[2] = {select_bytes(word[0], word[1], 0x7362), select_bytes(word[2], word[3], 0x7362)};
        put_channels(first, select_bytes(high[0], high[1], 0x7632), lane);
        put_channels(first + 1, select_bytes(high[0], high[1], 0x5410), lane);
        put_channels(first + 2, select_bytes(low[0], low[1], 0x7632), lane);
        put_channels(first + 3, select_bytes(low[0], low[1], 0x5410), lane);
        if (lane == 0) {
            const float least = __uint_as_float(exponent == 255 ? 0x7fffffffu : exponent - 29 << 23);
            unit[first / 2] = 65536.f * least, unit[first / 2 + 1] = least;
        }
    }
    // A digit of the lane's channels.
    DEVICE void put_channels(int column, u32 bytes, u32 lane) {
        const u32 channel = lane * PER_LANE;
        unsigned char* to = reinterpret_cast<unsigned char*>(digits[channel / 64][column]) + channel % 64;
        if constexpr (PER_LANE == 4) *reinterpret_cast<u32*>(to) = bytes;
        else *reinterpret_cast<u16*>(to) = u16(bytes);
    }
};

// In shared memory, not in registers: a warp may have many rows.
struct State : Pieces {
    DEVICE void take(const uint4 (*)[32]) { cp_async_wait<0>(); }
    DEVICE void put_back(const uint4 (*)[32]) const {}
};

// A lane's part of the 16 rows of an MMA.
struct Tile {
    static constexpr int HEIGHT = 2;  // rows of a lane, GROUPS apart
    uint4 (*const pieces)[32];
    float* const scales;

    // The output of row lane / 2, which is `row` of the CTA, and its error e.
    DEVICE float read(float& e, const Token& t, u32 row, u32 lane, u32 group) const {
        int sum[4] = {};
        #pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const uint4 a = piece(0, i), b = piece(1, i), digits = t.digits[i][group][lane];
            Int8::mma(sum, a.x, b.x, a.y, b.y, digits.x, digits.y);
            Int8::mma(sum, a.z, b.z, a.w, b.w, digits.z, digits.w);
        }
        float y[HEIGHT];  // S d k in lanes 0 and 1, S d q in lanes 2 and 3
        #pragma unroll
        for (int r = 0; r < HEIGHT; r++) {
            y[r] = float(sum[2 * r] * 256 + sum[2 * r + 1]) * t.unit[lane] * scales[r * GROUPS];
            y[r] += shuffle_xor(y[r], 1);
        }
        const bool second = lane / 2;
        const float other = shuffle_xor(second ? y[0] : y[1], 2);
        e = t.beta * (t.v[row] - (second ? other : y[0]));
        return (second ? y[1] : other) + t.qk * e;
    }

    // Decay row r, add e k and round.
    DEVICE void update(uint4 (&n)[PIECES], u32 r, float e, const Token& t, u32 lane) const {
        #pragma unroll
        for (int i = 0; i < PIECES; i++) n[i] = piece(r, i);
        const float scale = updated(n, scales[r * GROUPS], e, t, lane);
        warp_sync();
        if (lane == 0) scales[r * GROUPS] = scale;
    }
    DEVICE uint4& piece(u32 r, u32 i) const { return pieces[r * PIECES + i][threadIdx.x % 32]; }

private:
    // Decay a row, add e k and round; return the new scale. A row at a time takes half of the registers that both of a
    // lane would, and k and d are loaded twice.
    static DEVICE float updated(uint4 (&n)[PIECES], float scale, float e, const Token& t, u32 lane) {
        const float steps = e * inverse_of(scale);
        const bool kept = scale > LEAST_SCALE && fabsf(steps) < MOST_UPDATE;
        const float unit = kept ? scale : 1.f, error = kept ? steps : e;
        const float keep = kept ? 1.f : 0.f, offset = kept ? -8388736.f : 0.f;  // 2^23 + 128
        float x[WIDTH];
        #pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const u32 words[4] = {n[i].x, n[i].y, n[i].z, n[i].w};
            #pragma unroll
            for (int w = 0; w < 4; w++) {
                const u32 word = words[w] ^ 0x80808080u, channel = (i * LANES + lane) * PIECE + 4 * w;
                const float4 k = *reinterpret_cast<const float4*>(t.k + channel),
                             d = *reinterpret_cast<const float4*>(t.decay + channel);
                const float each_k[4] = {k.x, k.y, k.z, k.w}, each_d[4] = {d.x, d.y, d.z, d.w};
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    x[i * PIECE + 4 * w + j] = fmaf(error, each_k[j], fmaf(unpack(word, j), keep, offset) * each_d[j]);
            }
        }
        float peaks[4];  // four chains; a row with a NaN has nothing else, as its sums are NaN
        #pragma unroll
        for (int i = 0; i < WIDTH; i++) peaks[i % 4] = i < 4 ? fabsf(x[i]) : fmaxf(peaks[i % 4], fabsf(x[i]));
        float peak = fmaxf(fmaxf(peaks[0], peaks[1]), fmaxf(peaks[2], peaks[3]));
        u32 hash = __float_as_uint(error) * HASH + __float_as_uint(peak) + lane;
        peak = fmaxf(peak, shuffle_xor(peak, 1));
        peak = fmaxf(peak, shuffle_xor(peak, 2));
        scale = rounded_up(unit * (peak * (1.f / 127)));
        const float ratio = scale > LEAST_SCALE ? unit * inverse_of(scale) : 0.f;
        #pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const uint2 low = rounded(x + i * PIECE, ratio, hash), high = rounded(x + i * PIECE + 8, ratio, hash);
            n[i] = make_uint4(low.x, low.y, high.x, high.y);
        }
        return scale;
    }
    // Within one rounding: 127 scale inverse rounds to 127, where a larger error could let the element become 128.
    static DEVICE float inverse_of(float x) {
        const float y = reciprocal(x);
        return fmaf(y, fmaf(-x, y, 1.f), y);
    }
    // To 15 bits; NaN and inf as they are.
    static DEVICE float rounded_up(float x) {
        return x < 1e38f ? __uint_as_float(__float_as_uint(x) + 0x1ffu & ~0x1ffu) : x;
    }
    // 2^23 + byte i of the word.
    static DEVICE float unpack(u32 word, int i) {
        return __uint_as_float(i ? select_bytes(word, 0x4b000000u, 0x7540 + i) : word & 0xffu | 0x4b000000u);
    }
    // Eight neighbours, rounded with one random number u from -1/2 to 1/2: u for four and -u for the others, so that
    // the error of their sum is less than that of independent ones. The nearest fp16 of 1536 + x + u is an integer, n
    // in its lower byte. u is an odd multiple of 2^-13, the lowest bit of that sum in fp32: integers stay as they are.
    static DEVICE uint2 rounded(const float* x, float ratio, u32& hash) {
        hash = hash * HASH + 0x7f4a7c15u;
        const float even = __uint_as_float(((hash | 1u << 19) >> 19) + 0x44bff000u), odd = 3072.f - even;
        u32 pairs[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = Fp16::pack(fmaf(x[2 * i], ratio, even), fmaf(x[2 * i + 1], ratio, odd));
        return make_uint2(select_bytes(pairs[0], pairs[1], 0x6420), select_bytes(pairs[2], pairs[3], 0x6420));
    }
};
