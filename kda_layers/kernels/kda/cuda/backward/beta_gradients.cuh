// The gradient of beta from two sums that are equal but for rounding. With b the beta as rounded in T',
//     a = <bX, V'> / b     w = <k, dk of what the token writes>     b dbeta = a = w
// a has the rounding of everything that bX passed through; w that of V', which is proportional to b, and of pairs of
// tokens, which correlated keys sum up. Taken is a + c (w - a): w where the gradients of 16 tokens agree to a rounding to
// 16 bits, else part of the way to it. Derivation and errors: docs/internals/studies/2026-11-23-beta-gradient.md.
#pragma once
#include "products.cuh"

template <class T> constexpr float ROUNDING = 1.f / 256;  // of T, bf16 or fp16
template <> constexpr float ROUNDING<Fp16> = 1.f / 2048;

// What a lane's tokens write: [octet][token 2 t, 2 t + 1], summed over its channels.
using Writes = float[2][2];

DEVICE void add_writes(float (&to)[2], const Fragment& terms, bool writes = true) {
    if (writes) to[0] += terms[0] + terms[2], to[1] += terms[1] + terms[3];
}

// Sums of block b's tokens over a warp's channels, to [64] in shared memory.
DEVICE void sum_writes(Lane lane, float* to, const Writes& x, int b) {
    const float low = keep(lane, 4, x[0][0], x[1][0]), high = keep(lane, 4, x[0][1], x[1][1]);
    float sum = keep(lane, 8, low, high);
    sum += shuffle_xor(sum, 16);
    const int g = lane.id / 4, token = 8 * (g % 2) + 2 * (lane.id % 4) + g / 2 % 2;
    if (lane.id < 16) to[16 * b + token] = sum;
}

// beta's gradient of block b's tokens; by one warp, two lanes a token.
DEVICE void finish_betas(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile, int b) {
    const int token = 16 * b + lane.id % 16;
    const float2 own = shared.betas()[token];  // <bX, V'>, beta as given
    float w = 0.f;
    #pragma unroll
    for (int i = 0; i < CHANNEL_WARPS / 2; i++) w += shared.writes(2 * i + lane.id / 16)[token];
    w += shuffle_xor(w, 16);
    const bool here = token < tile.chunk.tokens && !is_near_zero(own.y, p.beta_activation);
    // The gradient is proportional to the sum that it is taken from
    const float by = here ? write_strength_gradient<Io>(1.f, own.y, p.beta_activation) : 0.f;
    const float rounded = Io::unpack(Io::pack(write_strength(own.y, p.beta_activation), 0.f)).x;
    const float x = by * own.x, d = by * (rounded * w - own.x);
    float largest = fabsf(x);
    for (int mask = 1; mask < 16; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
    const float unit = largest > 0.f ? 1.f / largest : 0.f;  // squares neither overflow nor vanish
    float squares = x * unit * (x * unit), differences = d * unit * (d * unit);
    for (int mask = 1; mask < 16; mask *= 2)
        squares += shuffle_xor(squares, mask), differences += shuffle_xor(differences, mask);
    const float c = differences > 0.f ? fminf(1.f, ROUNDING<Io> * ROUNDING<Io> * squares / differences) : 1.f;
    if (here && lane.id < 16) store_beta(p, tile.row + i64(token) * p.HV, x + c * d);
}
