// Activations of gate and beta logits, element by element. Decays are e^g, always in (0, 1].
#pragma once
#include "ptx.cuh"

#ifndef HEAD_GATES  // 1: a token has one gate logit for all channels of a head, and the head one bias
#define HEAD_GATES 0
#endif

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LARGEST = 3.4e38f;  // its reciprocal is as good as 0

enum Gate { LOWER_BOUND = 0, SOFTPLUS = 1, LOG_DECAY = 2, GATE_COUNT };
enum Beta { SIGMOID = 0, TWICE_SIGMOID = 1, PRECOMPUTED = 2 };

// log(1 + e^x) by series for small z = e^-|x|: rounding 1 + z would accumulate over a long sequence.
DEVICE float softplus(float x) {
    float z = exp2_fast(-fabsf(x) * LOG2_E);
    float series = z * (1.f + z * (-1.f / 2 + z * (1.f / 3 + z * (-1.f / 4 + z * (1.f / 5)))));
    return fmaxf(x, 0.f) + (z < 0.0625f ? series : log2_fast(1.f + z) * (1.f / LOG2_E));
}

DEVICE float sigmoid(float x) { return reciprocal(1.f + exp2_fast(-x * LOG2_E)); }

// Decays of one head; the factors that do not depend on the token are computed once.
template <int gate> struct Gates {
    static_assert(gate < GATE_COUNT, "a gate of activations.py that this file lacks");
    float in, out;  // factors of the logit and of the activation, base 2; LOWER_BOUND: the inverse of the latter

    DEVICE Gates(float rate, float lower_bound) {
        in = gate == LOWER_BOUND ? -rate * LOG2_E : 1.f;
        // Finite, so that 0 times it is 0.
        if constexpr (gate == LOWER_BOUND) out = fmaxf(reciprocal(lower_bound * LOG2_E), -LARGEST);
        else out = (gate == SOFTPLUS ? -rate : 1.f) * LOG2_E;
    }
    DEVICE float bias(float x) const { return in * x; }  // scaled for decay()
    // Decay of one channel of a token; 1 if the token is not valid.
    DEVICE float decay(float logit, float bias, bool valid) const {
        if constexpr (gate == LOWER_BOUND) {  // bound / (1 + z) as 1 / (1 / bound + z / bound): one FMA
            const float z = exp2_fast(in * logit + bias);
            return exp2_fast(reciprocal((valid ? out : -LARGEST) + z * out));
        }
        float x = gate == SOFTPLUS ? softplus(logit + bias) : logit;  // may be infinite
        return exp2_fast(valid ? out * x : 0.f);
    }
};

DEVICE float write_strength(float logit, int beta) {
    return beta == PRECOMPUTED ? logit : (beta == TWICE_SIGMOID ? 2.f : 1.f) * sigmoid(logit);
}

// ---------------------------------------------------------------- gradients

// From the gradients of a head's log-decays to those of logits and of A_log; factors as in Gates.
template <int gate> struct GateGradients {
    float in, out;

    DEVICE GateGradients(float rate, float lower_bound) {
        in = -rate * LOG2_E;
        out = gate == LOWER_BOUND ? lower_bound * rate : gate == SOFTPLUS ? -rate : 1.f;
    }
    // The gradient of the logit, from d_g; `x` is the logit plus bias. Adds what the element gives to the gradient of
    // A_log. Both 0 if the token is not valid.
    DEVICE float logit(float& d_A_log, float d_g, float x, bool valid) const {
        const float d = d_g * (valid ? out : 0.f);
        if constexpr (gate == LOWER_BOUND) {  // sigmoid' keeps its digits where the sigmoid is near 0 or 1
            const float z = exp2_fast(fabsf(x) * in), y = reciprocal(1.f + z), d_x = d * (z * y) * y;
            d_A_log += d_x * x;
            return d_x;
        }
        if constexpr (gate == SOFTPLUS) {
            d_A_log += d * softplus(x);
            return d * sigmoid(x);
        }
        return d;
    }
};

// Gradient of the beta logit, or of a precomputed beta that is not near zero, from `product` = <bX, V'> = beta^2
// d_beta. V' contains beta as rounded in T', and so does bX, except that with T_FP16 it contains beta itself, which
// differs by less than the rounding of V'. So the division uses the rounded beta.
template <class Io> DEVICE float write_strength_gradient(float product, float logit, int beta) {
    float strength = write_strength(logit, beta), rounded = Io::unpack(Io::pack(strength, 0.f)).x;
    if (fabsf(rounded) < 1e-30f) return 0.f;  // sigmoid'(logit) is as small
    float undo = reciprocal(rounded);
    return product * undo * (beta == PRECOMPUTED ? undo : undo * strength * sigmoid(-logit));
}

// True if a precomputed beta is so near zero that 16-bit bX and V', which contain it as a factor, are too inaccurate.
DEVICE bool is_near_zero(float logit, int beta) { return beta == PRECOMPUTED && fabsf(logit) < 1.f / 1024; }
