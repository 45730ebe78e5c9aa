// Activations of gate and beta logits, element by element. Decays are e^g, always in (0, 1].
#pragma once
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

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
    float in, out;  // factors of the logit and of the activation, base 2

    DEVICE Gates(float rate, float lower_bound) {
        in = gate == LOWER_BOUND ? -rate * LOG2_E : 1.f;
        out = (gate == LOWER_BOUND ? lower_bound : gate == SOFTPLUS ? -rate : 1.f) * LOG2_E;
    }
    DEVICE float bias(float x) const { return in * x; }  // scaled for decay()
    // Decay of one channel of a token; 1 if the token is not valid.
    DEVICE float decay(float logit, float bias, bool valid) const {
        if constexpr (gate == LOWER_BOUND)
            return exp2_fast((valid ? out : 0.f) * reciprocal(1.f + exp2_fast(in * logit + bias)));
        float x = gate == SOFTPLUS ? softplus(logit + bias) : logit;  // may be infinite
        return exp2_fast(valid ? out * x : 0.f);
    }
};

DEVICE float write_strength(float logit, int beta) {
    return beta == PRECOMPUTED ? logit : (beta == TWICE_SIGMOID ? 2.f : 1.f) * sigmoid(logit);
}

// ---------------------------------------------------------------- gradients

// sigmoid'(x), which keeps its digits where the sigmoid is near 0 or 1.
DEVICE float sigmoid_gradient(float x) {
    float z = exp2_fast(-fabsf(x) * LOG2_E), y = reciprocal(1.f + z);
    return z * y * y;
}

// Gradient of the logit from d_g, the gradient of the log-decay; d_A_log is the element's contribution to the gradient
// of A_log. `x` is the logit plus bias.
template <int gate> DEVICE float logit_gradient(float& d_A_log, float d_g, float x, float rate, float lower_bound) {
    float d_x = d_g;
    d_A_log = 0.f;
    if constexpr (gate == LOWER_BOUND) d_x = d_g * lower_bound * rate * sigmoid_gradient(rate * x), d_A_log = d_x * x;
    if constexpr (gate == SOFTPLUS) d_x = d_g * -rate * sigmoid(x), d_A_log = d_g * -rate * softplus(x);
    return d_x;
}

// Gradient of the beta logit, or of a precomputed beta that is not near zero, from `product` = <bX, V'> = beta^2
// d_beta. bX and V' contain beta as rounded in T', so the division uses the rounded beta.
template <class Io> DEVICE float write_strength_gradient(float product, float logit, int beta) {
    float strength = write_strength(logit, beta), rounded = Io::unpack(Io::pack(strength, 0.f)).x;
    if (fabsf(rounded) < 1e-30f) return 0.f;  // sigmoid'(logit) is as small
    float undo = reciprocal(rounded);
    return product * undo * (beta == PRECOMPUTED ? undo : undo * strength * sigmoid(-logit));
}

// True if a precomputed beta is so near zero that 16-bit bX and V', which contain it as a factor, are too inaccurate.
DEVICE bool is_near_zero(float logit, int beta) { return beta == PRECOMPUTED && fabsf(logit) < 1.f / 1024; }
