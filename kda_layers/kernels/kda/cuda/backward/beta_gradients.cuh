// The gradient of beta from two sums that are equal but for rounding. With b the beta as rounded in T',
//     a = <bX, V'> / b     w = <k, dk of what the token writes>     b dbeta = a = w
// a has the rounding of everything that bX passed through; w that of V', which is proportional to b, and of pairs of
// tokens, which correlated keys sum up. Taken is a + c (w - a): w where the gradients of 16 tokens agree to a rounding to
// 16 bits, else part of the way to it. Derivation and errors: docs/internals/studies/2026-11-23-beta-gradient.md.
#pragma once
#include "products.cuh"

template <class T> constexpr float ROUNDING = 1.f / 256;  // of T, bf16 or fp16
template <> constexpr float ROUNDING<Fp16> = 1.f / 2048;

// beta's gradient of block b's tokens; by one warp, two lanes a token. With `written(lane, shared, token)`, w.
DEVICE void finish_betas(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile, int b) {
    const int token = 16 * b + lane.id % 16;
    const float2 own = shared.betas()[token];  // <bX, V'>, beta as given
    const float w = written(lane, shared, token);
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
