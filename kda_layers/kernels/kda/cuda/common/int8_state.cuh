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
constexpr float MOST_UPDATE = 16384;   // in units of a row, as fp16 numbers
constexpr u32 HASH = 0x9e3779b1u;      // 2^32 / the golden ratio
static_assert(LANES == 4 && ROWS % 2 == 0, "the fragments of an MMA");

struct Token {  // in shared memory
    // Of a channel, at `place`: d as the sum of two fp16 numbers, each in the half of a word that a diagonal matrix B has
    // it in; k over key_unit, a power of two, as the sum of two fp16 numbers.
    uint2 decay[K];
    uint2 zeros[8 + K];  // from 8 on the rest of the diagonal matrices, read at the same time from other banks
    u32 keys[K];
    uint4 digits[K / 64][8][LANES];  // of 64 channels each; the four of d k, then those of d q, most significant first
    float v[BLOCK_ROWS];
    float unit[LANES];  // of the digits 0 and 1, 2 and 3, ... together
    float beta, qk, key_unit;
    u32 exponents;  // upper bytes of fp16 numbers 1024 + n; as a constant, each `select_bytes` would first move it

    // Place 8 j + n has column n of the j-th diagonal matrix: lane t of a row has columns 2 t and 2 t + 1.
    static DEVICE u32 place(u32 channel) {
        const u32 pair = channel / 2;
        return 8 * (pair / 32 * 8 + pair % 8) + 2 * (pair / 8 % LANES) + channel % 2;
    }
    // Store the lane's decays and its k; `largest` is the token's largest |k|.
    DEVICE void put_update(const float (&k)[PER_LANE], const float (&d)[PER_LANE], float largest, u32 lane) {
        const u32 exponent = min(max(__float_as_uint(fabsf(largest)) >> 23, 30u), 252u);
        const float inverse = __uint_as_float(253 - exponent << 23);
        #pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const u32 at = place(lane * PER_LANE + i), both = halves(d[i]);
            decay[at] = i % 2 ? make_uint2(both << 16, both & 0xffff0000u) : make_uint2(both & 0xffffu, both >> 16);
            keys[at] = halves(k[i] * inverse);
        }
        for (int i = lane; i < K; i += 32) zeros[8 + i] = {};
        if (lane == 0) key_unit = __uint_as_float(exponent + 1 << 23), exponents = 0x64646464u;
    }
    // x as the sum of two fp16 numbers, the larger in the lower half: 22 bits.
    static DEVICE u32 halves(float x) {
        const u32 high = Fp16::pack(x, 0.f);
        return Fp16::pack(x, x - Fp16::unpack(high).x);
    }
    // Split d y into digits from column `first` on, where y is k or the scaled q. A power of two gives the token's
    // largest |d y|, `largest`, 30 bits.
    DEVICE void put_digits(int first, const float (&y)[PER_LANE], const float (&d)[PER_LANE], float largest, u32 lane) {
        const u32 exponent = max(__float_as_uint(fabsf(largest)) >> 23, 30u);
        const float factor = __uint_as_float(283 - exponent << 23);
        u32 word[4] = {};  // of a channel: digit i, from -128 to 127, in byte i
        #pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            word[i] = u32(round_to_int(d[i] * y[i] * factor)) + 0x80808080u ^ 0x80808080u;
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

private:
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
    uint4 (*pieces)[32];
    float* scales;

    // The output of row lane / 2, which is `row` of the CTA, its error e, and the rows.
    DEVICE float read(uint4 (&n)[HEIGHT][PIECES], float& e, const Token& t, u32 row, u32 lane, u32 group) const {
        int sum[4] = {};
        #pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const uint4 a = n[0][i] = piece(0, i), b = n[1][i] = piece(1, i), digits = t.digits[i][group][lane];
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

    // Decay the two rows, add e k and round.
    DEVICE void update(uint4 (&n)[HEIGHT][PIECES], const float (&e)[HEIGHT], const Token& t, u32 lane,
                       u32 group) const {
        float x[MATRICES][4], unit[HEIGHT];  // x: of rows 0 and 1 two channels each
        u32 keep[HEIGHT], offset[HEIGHT], errors[HEIGHT], hash[HEIGHT];
        #pragma unroll
        for (int r = 0; r < HEIGHT; r++) {
            // fp16 ends at 65504, so the unit is at least 2^-14 of the update. Where that exceeds the scale, the
            // integers become fractions, which fp16 rounds by at most a hundredth of a step of the new scale.
            const float scale = scales[r * GROUPS], each = e[r] * t.key_unit;
            unit[r] = fmaxf(fmaxf(scale, fabsf(each) * (1.f / MOST_UPDATE)), LEAST_SCALE);
            const float inverse = inverse_of(unit[r]), steps = each * inverse, factor = scale * inverse;
            keep[r] = Fp16::pack(factor, factor), offset[r] = Fp16::pack(-1152.f * factor, -1152.f * factor);
            const float first = Fp16::unpack(Fp16::pack(steps, 0.f)).x, part = lane ? steps - first : first;
            errors[r] = lane < 2 ? Fp16::pack(part, part) : 0;
            hash[r] = __float_as_uint(steps) * HASH + lane;
        }
        const bool diagonal = group / 2 == lane;
        const u32 exponents = t.exponents;
        const uint2* decays = diagonal ? t.decay : t.zeros + 8;
        #pragma unroll
        for (int i = 0; i < PIECES; i++) {
            #pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 words[HEIGHT];
                #pragma unroll
                for (int r = 0; r < HEIGHT; r++) words[r] = word(n[r][i], w) ^ 0x80808080u;
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int j = i * 8 + w * 2 + h;
                    u32 a[HEIGHT];  // 1024 + the byte + 128 in fp16
                    #pragma unroll
                    for (int r = 0; r < HEIGHT; r++)
                        a[r] = Fp16::multiply_add(select_bytes(words[r], exponents, h ? 0x4342 : 0x4140), keep[r],
                                                  offset[r]);
                    const uint2 d = decays[8 * j + group];
                    x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0;
                    Fp16::mma(x[j], a[0], a[1], d.x);
                    Fp16::mma(x[j], a[0], a[1], d.y);
                    Fp16::mma(x[j], errors[0], errors[1], t.keys[8 * j + group]);
                }
            }
        }
        #pragma unroll
        for (int r = 0; r < HEIGHT; r++) {
            float peaks[4];  // four chains; a row with a NaN has nothing else, as its sums are NaN
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                const float y = fabsf(x[i / 2][2 * r + i % 2]);
                peaks[i % 4] = i < 4 ? y : fmaxf(peaks[i % 4], y);
            }
            float peak = fmaxf(fmaxf(peaks[0], peaks[1]), fmaxf(peaks[2], peaks[3]));
            hash[r] += __float_as_uint(peak);
            peak = fmaxf(peak, shuffle_xor(peak, 1));
            peak = fmaxf(peak, shuffle_xor(peak, 2));
            const float scale = rounded_up(unit[r] * (peak * (1.f / 127)));
            const float ratio = scale > LEAST_SCALE ? unit[r] * inverse_of(scale) : 0.f;
            #pragma unroll
            for (int i = 0; i < PIECES; i++) n[r][i] = rounded(x + i * 8, r, ratio, hash[r]);
            unit[r] = scale;
        }
        warp_sync();
        #pragma unroll
        for (int r = 0; r < HEIGHT; r++)
            if (lane == 0) scales[r * GROUPS] = unit[r];
    }
    DEVICE uint4& piece(u32 r, u32 i) const { return pieces[r * PIECES + i][threadIdx.x % 32]; }

private:
    static constexpr int MATRICES = K / 8;  // diagonal ones

    static DEVICE u32 word(const uint4& x, int w) { return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w; }
    // Within one rounding: 127 scale inverse rounds to 127, where a larger error could let the element become 128.
    static DEVICE float inverse_of(float x) {
        const float y = reciprocal(x);
        return fmaf(y, fmaf(-x, y, 1.f), y);
    }
    // To 15 bits; NaN and inf as they are.
    static DEVICE float rounded_up(float x) {
        return x < 1e38f ? __uint_as_float(__float_as_uint(x) + 0x1ffu & ~0x1ffu) : x;
    }
    // A piece, rounded with one random number u from -1/2 to 1/2: u for eight and -u for the others, so that the error of
    // their sum is less than that of independent ones. The nearest fp16 of 1536 + x + u is an integer, n
    // in its lower byte. u is an odd multiple of 2^-13, the lowest bit of that sum in fp32: integers stay as they are.
    static DEVICE uint4 rounded(const float (*x)[4], int r, float ratio, u32& hash) {
        hash = hash * HASH + 0x7f4a7c15u;
        const float even = __uint_as_float(((hash | 1u << 19) >> 19) + 0x44bff000u), odd = 3072.f - even;
        u32 pairs[8];
        #pragma unroll
        for (int i = 0; i < 8; i++)
            pairs[i] = Fp16::pack(fmaf(x[i][2 * r], ratio, even), fmaf(x[i][2 * r + 1], ratio, odd));
        return make_uint4(select_bytes(pairs[0], pairs[1], 0x6420), select_bytes(pairs[2], pairs[3], 0x6420),
                          select_bytes(pairs[4], pairs[5], 0x6420), select_bytes(pairs[6], pairs[7], 0x6420));
    }
};
