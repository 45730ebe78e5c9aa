// Decays between tokens with gates of heads: numbers. Always products of decays, so that none overflows, and never quotients
// or differences of sums, which would lose all digits where a gate resets.
#pragma once
#include "fragments.cuh"

DEVICE float2 pair_at(const float* x) { return *reinterpret_cast<const float2*>(x); }

// Find all decays; by a warp for each block of 16 tokens, a lane for each column.
DEVICE void find_decays(HalfLane lane, const GradientsParams& p, const Shared& shared, int tokens) {
    if (lane.half == 0 || lane.warp >= BLOCKS) return;
    const int b = lane.warp, column = lane.id;
    const Gates<GATE> gates(rate_of_gates(shared), p.lower_bound);
    const float bias = gates.bias(*shared.bias());
    float own[2], over[BLOCKS];  // decays of tokens id and id + 32; over blocks
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = lane.id + 32 * i;
        own[i] = gates.decay(shared.logits()[token], bias, token < tokens);
        float x = own[i];
        for (int mask = 1; mask < 16; mask *= 2) x *= shuffle_xor(x, mask);
        over[2 * i] = shuffle(x, 0), over[2 * i + 1] = shuffle(x, 16);
    }
    float before = 1.f, behind = 1.f, between = 1.f, decay = 1.f;
    #pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        if (i < b) before *= over[i];
        if (i > b) behind *= over[i];
        if (column < i && i < b) between *= over[i];
    }
    if (column < BLOCKS) shared.between(b)[column] = between;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const float x = shuffle(b / 2 ? own[1] : own[0], 16 * (b % 2) + i);
        if (i > column || column == 16) decay *= x;
        if (column <= 16) shared.decays(b)[i * DECAY_ROW + column] = decay;
    }
    warp_sync();
    if (column >= 16) return;
    shared.from_start()[16 * b + column] = before * shared.decays(b)[column * DECAY_ROW + 16];
    shared.to_end()[16 * b + column] = behind * decay;
}
