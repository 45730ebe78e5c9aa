// The state of a value head in int8 with a scale per row: an element is n scale. Part of state.cuh.
//
// Rounded to the nearest n, an update smaller than half a step would be lost at every token. An element is therefore
// rounded up with the probability of its fraction (15 bits), by a hash of its own bits: equal inputs give equal bits,
// with no counter. docs/internals/kernels/decode.md compares other roundings and counts instructions.
//
// A scale is a row's largest magnitude / 127 with 15 bits of mantissa, rounded up. So 127 scale / 127 is scale again, and
// a row that does not change keeps its bits: a scale that changed would round every element at every token.
#pragma once

constexpr float LEAST_SCALE = 1e-37f;  // of smaller ones the reciprocal overflows: the row is rounded to 0

struct Max {
    static DEVICE float of(float x, float y) { return fmaxf(x, y); }
};

struct Scales {  // in shared memory, of a warp's rows by group
    float scale[WARP_ROWS], inverse[WARP_ROWS];
};

struct State {
    float x[ROWS][WIDTH];
    float scale[ROWS];  // as loaded

    // The rows of a warp are contiguous: a lane copies 16 bytes that others read.
    static DEVICE void copy(uint4 (*to)[32], const unsigned char* from) {
        from += 16 * (threadIdx.x % 32);
        #pragma unroll
        for (int i = 0; i < WARP_PIECES; i++) cp_async_16(&to[i][threadIdx.x % 32], from + 512 * i, true);
        cp_async_commit();
    }
    DEVICE void load_scales(const float* from) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) scale[r] = from[r * GROUPS];
    }
    DEVICE void take(const uint4 (*from)[32]) {
        cp_async_wait<0>();
        warp_sync();
        const uint2* words = reinterpret_cast<const uint2*>(from) + threadIdx.x % 32;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            unpack(x[r], words[32 * r].x, scale[r]);
            unpack(x[r] + 4, words[32 * r].y, scale[r]);
        }
    }
    // Choose the scales of the rows; return that of row lane / COPIES.
    DEVICE float choose_scales(Scales& to, u32 lane, u32 group) const {
        float peak[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            peak[r] = fabsf(x[r][0]);  // a row with a NaN has nothing else (`advance`), so that its scale is NaN
            #pragma unroll
            for (int i = 1; i < WIDTH; i++) peak[r] = fmaxf(peak[r], fabsf(x[r][i]));
        }
        const float mine = rounded_up(reduce<ROWS, Max>(peak, lane) * (1.f / 127));
        if (lane % COPIES == 0) {
            const u32 row = group * ROWS + lane / COPIES;
            to.scale[row] = mine, to.inverse[row] = mine > LEAST_SCALE ? inverse_of(mine) : 0.f;
        }
        warp_sync();
        return mine;
    }
    // Store the warp's rows in shared or global memory.
    DEVICE void store(void* to, const Scales& scales, u32 group) const {
        uint2* words = static_cast<uint2*>(to) + threadIdx.x % 32;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float inverse = scales.inverse[group * ROWS + r];
            words[32 * r] = make_uint2(pack(x[r], inverse), pack(x[r] + 4, inverse));
        }
    }
    // The same, to be taken again.
    DEVICE void put_back(uint4 (*to)[32], const Scales& scales, u32 group) {
        store(to, scales, group);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) scale[r] = scales.scale[group * ROWS + r];
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
    // 2^15 + 128 + n has n ^ 128 in byte 1. As a scale has 15 bits, both products are exact.
    static DEVICE void unpack(float* y, u32 word, float scale) {
        word ^= 0x80808080u;
        #pragma unroll
        for (int i = 0; i < 4; i++)
            y[i] = fmaf(__uint_as_float(select_bytes(word, 0x47000000u, 0x7504 + 16 * i)), scale, -32896.f * scale);
    }
    // 384 + y has (128 + y) 2^15 in its mantissa. The rounded 128 + n is in bits 15 to 22.
    static DEVICE u32 rounded(float y, float inverse) {
        return __float_as_uint(fmaf(y, inverse, 384.f)) + (__float_as_uint(y) * 0x9e3779b1u >> 17);
    }
    // Two of them, in bytes 0 and 2.
    static DEVICE u32 rounded_pair(const float* y, float inverse) {
        return select_bytes(rounded(y[0], inverse), rounded(y[1], inverse), 0x6521) >> 7;
    }
    static DEVICE u32 pack(const float* y, float inverse) {
        return select_bytes(rounded_pair(y, inverse), rounded_pair(y + 2, inverse), 0x6420) ^ 0x80808080u;
    }
};
