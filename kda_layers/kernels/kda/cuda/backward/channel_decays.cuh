// A warp's q, k and decays of a block of 16 tokens, with gates of channels.
#pragma once
#include "fragments.cuh"

// q or k of block b, normalised with qk_l2norm.
DEVICE void load_vectors(Lane lane, Fragment (&x)[2], const unsigned char* matrix, const float* norms, int b) {
    load_block(lane, x, matrix, b);
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        float2 norm = *reinterpret_cast<const float2*>(norms + 16 * b + 8 * o + 2 * (lane.id % 4));
        x[o][0] *= norm.x, x[o][1] *= norm.y, x[o][2] *= norm.x, x[o][3] *= norm.y;
    }
}

// Gate logits of block b.
DEVICE void load_logits(Lane lane, Fragment (&x)[2], const Shared& shared, int b) {
    if constexpr (!G_FP32) {
        load_block(lane, x, shared.g(), b);
    } else {
        #pragma unroll
        for (int i = 0; i < 8; i++)
            x[i / 4][i % 4] = reinterpret_cast<const float*>(
                shared.g())[token_of(lane, b, i / 4, i) * FP32_ROW + channel_of(lane, i % 4 / 2)];
    }
}

// Decays of block b's tokens, from their logits.
DEVICE void load_decays(Lane lane, Fragment (&e)[2], const GradientsParams& p, const Shared& shared, int tokens,
                        int b) {
    load_logits(lane, e, shared, b);
    const Gates<GATE> gates(rate_of_gates(shared), p.lower_bound);
    float bias[2];
    #pragma unroll
    for (int c = 0; c < 2; c++) bias[c] = gates.bias(shared.bias()[channel_of(lane, c)]);
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) e[o][i] = gates.decay(e[o][i], bias[i / 2], token_of(lane, b, o, i) < tokens);
    }
}

// A token's decays within its aligned block of 1, 2, 4, 8, 16 tokens: from the block's start (own decay included), and
// from after the token to the block's end. Products, never quotients or differences of sums: exact for any gates.
struct Decays {
    Fragment before, after;
    float all[2];  // over the block, per channel (over 8 tokens if the block is 16)

    DEVICE void start(const Fragment& e) {
        #pragma unroll
        for (int i = 0; i < 4; i++) before[i] = e[i], after[i] = 1.f;
    }
    DEVICE void to_2() {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            after[2 * c] = before[2 * c + 1];
            before[2 * c + 1] = all[c] = before[2 * c] * before[2 * c + 1];
        }
    }
    // From 2 to 4 tokens by mask 1, to 8 by mask 2.
    template <int mask> DEVICE void to_twice(Lane lane) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float other = shuffle_xor(all[c], mask);
            all[c] *= other;
            #pragma unroll
            for (int i = 2 * c; i < 2 * c + 2; i++) {
                if (lane.id & mask) before[i] *= other;
                else after[i] *= other;
            }
        }
    }
    // The decay to the block's start or to its end.
    DEVICE void towards(Fragment& near, bool start) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) near[i] = start ? before[i] : after[i];
    }
};

DEVICE void to_16(Decays (&d)[2]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) d[1].before[i] *= d[0].all[i / 2], d[0].after[i] *= d[1].all[i / 2];
}

DEVICE uint4 as_pairs(const Fragment& x, const Fragment& y) {
    return make_uint4(Fp16::pack(x[0], x[1]), Fp16::pack(x[2], x[3]), Fp16::pack(y[0], y[1]), Fp16::pack(y[2], y[3]));
}

// x *= decays packed by `as_pairs`.
DEVICE void decay_by(Fragment (&x)[2], uint4 pairs) {
    u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = Fp16::unpack(words[i]);
        x[i / 2][i % 2 * 2] *= pair.x, x[i / 2][i % 2 * 2 + 1] *= pair.y;
    }
}

// Store the decays of a half's blocks from a block's start, to its end and over it, for the products between blocks.
DEVICE void exchange_decays(HalfLane lane, const GradientsParams& p, const Shared& shared, int tokens) {
    #pragma unroll
    for (int i = 0; i < HALF_BLOCKS; i++) {
        const int b = lane.half * HALF_BLOCKS + i;
        Fragment e[2];
        load_decays(lane, e, p, shared, tokens, b);
        Decays d[2];
        #pragma unroll
        for (int o = 0; o < 2; o++) d[o].start(e[o]), d[o].to_2(), d[o].to_twice<1>(lane), d[o].to_twice<2>(lane);
        to_16(d);
        if (b > 0) shared.rise(b, lane.warp)[lane.id] = as_pairs(d[0].before, d[1].before);
        if (b < BLOCKS - 1) shared.fall(b, lane.warp)[lane.id] = as_pairs(d[0].after, d[1].after);
        if (lane.id % 4 == 0)
            shared.totals(b, lane.warp)[lane.id / 4] =
                make_float2(d[0].all[0] * d[1].all[0], d[0].all[1] * d[1].all[1]);
    }
}
