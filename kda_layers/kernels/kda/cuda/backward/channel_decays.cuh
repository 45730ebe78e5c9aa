// A warp's q, k and decays of a block of 16 tokens, with gates of channels.
#pragma once
#include "fragments.cuh"

// q, times the scale of the scores, or k of block b, normalised with qk_l2norm.
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

// Where decays are no smaller than this, those between 8 tokens and their anchor, and the inverses, are far from the ends of
// fp32's range. What is smaller is as good as 0: fp32 rounds by as much.
constexpr float SMALLEST_DECAY = 1.f / (1 << 24);

// Decays of block b's tokens, from their logits, at least SMALLEST_DECAY.
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
        for (int i = 0; i < 4; i++) {
            e[o][i] = gates.decay(e[o][i], bias[i / 2], token_of(lane, b, o, i) < tokens);
            if constexpr (GATE != LOWER_BOUND) e[o][i] = fmaxf(e[o][i], SMALLEST_DECAY);  // a bound is -5 or above
        }
    }
}

// The decays of a lane's tokens and channels in block b. Each 8 tokens have an anchor in their middle: a token reads what
// lies before the anchor with its decay from there, and writes for what lies behind with the decay to there, the inverse.
// Among the 8, the two are a decay and the inverse of another one, and their product the decay between two tokens.
struct Decays {
    Fragment from_anchor[2];
    float start[2], gap[2];  // of a channel: from the block's start to the first anchor, and on to the second

    DEVICE Decays(Lane lane, const Shared& shared, int b) {
        #pragma unroll
        for (int o = 0; o < 2; o++) {
            const float4 x = shared.decays(2 * b + o, lane.warp)[lane.id];
            from_anchor[o][0] = x.x, from_anchor[o][1] = x.y, from_anchor[o][2] = x.z, from_anchor[o][3] = x.w;
        }
        const float4 x = shared.spans(b, lane.warp)[lane.id / 4];
        start[0] = x.x, start[1] = x.y, gap[0] = x.z, gap[1] = x.w;
    }
    // From the second anchor to the block's end: the last token's.
    static DEVICE float2 end(Lane lane, const Shared& shared, int b) {
        const float4 x = shared.decays(2 * b + 1, lane.warp)[lane.id | 3];
        return make_float2(x.y, x.w);
    }
};

// x times decays from block b's start, or to its end.
DEVICE void decay_from_start(Fragment (&x)[2], const Decays& d, float sign) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float start = sign * d.start[i / 2];
        x[0][i] *= d.from_anchor[0][i] * start, x[1][i] *= d.from_anchor[1][i] * (start * d.gap[i / 2]);
    }
}
DEVICE void decay_to_end(Lane lane, Fragment (&x)[2], const Shared& shared, int b) {
    const Decays d(lane, shared, b);
    const float2 both = Decays::end(lane, shared, b);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float end = i / 2 ? both.y : both.x;
        x[0][i] *= reciprocal(d.from_anchor[0][i]) * (d.gap[i / 2] * end);
        x[1][i] *= reciprocal(d.from_anchor[1][i]) * end;
    }
}

// Store the decays of a half's blocks.
DEVICE void store_decays(HalfLane lane, const GradientsParams& p, const Shared& shared, int tokens) {
    #pragma unroll
    for (int i = 0; i < HALF_BLOCKS; i++) {
        const int b = lane.half * HALF_BLOCKS + i;
        Fragment e[2];
        load_decays(lane, e, p, shared, tokens, b);
        float own[2][2], other[2][2];  // [octet][channel]: over 4 tokens, on a lane's side of the anchor and the other
        #pragma unroll
        for (int o = 0; o < 2; o++) {
            float to_first[2], to_second[2];
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                const float first = e[o][2 * c], two = first * e[o][2 * c + 1], neighbours = shuffle_xor(two, 1);
                own[o][c] = two * neighbours, other[o][c] = shuffle_xor(own[o][c], 2);
                const float before = lane.id & 1 ? neighbours : 1.f;
                const float from_anchor = lane.id & 2 ? before : before * reciprocal(own[o][c]);
                to_first[c] = first * from_anchor, to_second[c] = two * from_anchor;
            }
            shared.decays(2 * b + o, lane.warp)[lane.id] =
                make_float4(to_first[0], to_second[0], to_first[1], to_second[1]);
        }
        if (lane.id % 4 > 0) continue;  // a lane before the anchors
        float gap[2], total[2];
        #pragma unroll
        for (int c = 0; c < 2; c++) gap[c] = other[0][c] * own[1][c], total[c] = own[0][c] * gap[c] * other[1][c];
        shared.spans(b, lane.warp)[lane.id / 4] = make_float4(own[0][0], own[0][1], gap[0], gap[1]);
        shared.totals(b, lane.warp)[lane.id / 4] = make_float2(total[0], total[1]);
    }
}
