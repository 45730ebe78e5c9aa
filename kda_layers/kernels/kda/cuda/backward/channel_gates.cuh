// The gradients of gates of channels, from those of log-decays, and the copies of logits and parameters.
#pragma once
#include "channel_decays.cuh"
#include "products.cuh"

// A lane's sums over its tokens for the gradients of the gates' parameters.
struct GateSums {
    float A_log = 0.f, bias[2] = {};

    DEVICE void store(HalfLane lane, const Shared& shared) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const float sum = over_tokens(bias[c]);
            if (lane.id % 4 == 0) shared.d_bias(lane.half)[channel_of(lane, c)] = sum;
        }
        for (int mask = 1; mask < 32; mask *= 2) A_log += shuffle_xor(A_log, mask);
        if (lane.id == 0) shared.d_rates()[CHANNEL_WARPS * lane.half + lane.warp] = A_log;
    }
};

// Nothing passes through a decay of SMALLEST_DECAY or less. But the sums over pairs that it parts leave their rounding in the
// gradient of its logarithm, by which the gradient of A_log would multiply it.
struct Resets {
    float limit;  // of the logit

    DEVICE explicit Resets(float rate) {
        const float smallest = 24.f / LOG2_E / rate;  // softplus of the logit
        limit = smallest + log2_fast(1.f - exp2_fast(-smallest * LOG2_E)) / LOG2_E;
    }
    DEVICE bool at(float x) const {
        if constexpr (GATE == LOWER_BOUND) return false;
        return GATE == SOFTPLUS ? x > limit : x < -24.f / LOG2_E;
    }
};

// From the gradients of log-decays to those of logits, which replace the logits.
DEVICE void finish_logits(HalfLane lane, Fragment (&g)[2], GateSums& sums, const GradientsParams& p,
                          const Shared& shared, const WorkTile& tile, int b) {
    Fragment logits[2];
    const float rate = rate_of_gates(shared);
    const GateGradients<GATE> gates(rate, p.lower_bound);
    warp_sync();  // keeps the loads from being hoisted: registers are few
    load_logits(lane, logits, shared, b);
    float bias[2];
    #pragma unroll
    for (int c = 0; c < 2; c++) bias[c] = shared.bias()[channel_of(lane, c)];
    const Resets resets(rate);
    warp_sync();
    #pragma unroll
    for (int o = 0; o < 2; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float logit = logits[o][i] + bias[i / 2];
            const bool passes = token_of(lane, b, o, i) < tile.chunk.tokens && !resets.at(logit);
            const float x = gates.logit(sums.A_log, g[o][i], logit, passes);
            sums.bias[i / 2] += x;
            g[o][i] = x;
            if constexpr (G_FP32)
                reinterpret_cast<float*>(shared.g())[token_of(lane, b, o, i) * FP32_ROW + channel_of(lane, i / 2)] = x;
        }
    }
    if constexpr (!G_FP32) store_block(lane, shared.g(), g, b);
}

DEVICE void store_logits(Place place, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    Logit* d_g = static_cast<Logit*>(p.d_g) + tile.row * K;
    i64 stride = i64(p.HV) * K;
    if constexpr (G_FP32) {
        #pragma unroll
        for (int i = 0; i < CHUNK * K / 4; i += THREADS) {
            const u32 at = i + thread(), row = at / (K / 4), column = at % (K / 4) * 4;
            if (row < tile.chunk.tokens) {
                *reinterpret_cast<float4*>(d_g + row * stride + column) =
                    *reinterpret_cast<const float4*>(shared.g() + (row * FP32_ROW + column) * 4);
            }
        }
    } else {
        store_rows(place, reinterpret_cast<u16*>(d_g), shared.g(), stride, tile.chunk.tokens);
    }
}

// d_A_log, d_dt_bias and d_g, from shared memory.
DEVICE void store_gates(Place place, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    if (p.d_A_log && threadIdx.x == 0) {
        float sum = 0.f;
        for (int w = 0; w < WARPS; w++) sum += shared.d_rates()[w];
        p.d_A_log[tile.chunk_row] = sum;
    }
    const u32 channel = thread();
    if (p.d_dt_bias && channel < K)
        p.d_dt_bias[tile.chunk_row * K + channel] = shared.d_bias(0)[channel] + shared.d_bias(1)[channel];
    store_logits(place, p, shared, tile);
}

// Copy the gate's parameters and logits and, with a key head's first value head, q and k.
DEVICE void copy_tokens(Place place, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    const int tokens = tile.chunk.tokens, head = tile.head(p), channel = int(thread());
    if (channel < K) cp_async_4(shared.bias() + channel, p.dt_bias + head * K + channel, p.dt_bias);
    else if (channel == K) cp_async_4(shared.A_log(), p.A_log + head, p.A_log);
    if (tile.first()) copy_keys(place, p, shared, tile, tokens);
    const Logit* g = static_cast<const Logit*>(p.g) + tile.row * K;
    i64 stride = i64(p.HV) * K;
    if constexpr (G_FP32) {
        #pragma unroll
        for (int i = 0; i < CHUNK * K / 4; i += THREADS) {
            const u32 at = i + thread(), row = at / (K / 4), column = at % (K / 4) * 4;
            cp_async_16(shared.g() + (row * FP32_ROW + column) * 4, g + row * stride + column, row < tokens);
        }
    } else {
        copy_rows(place, shared.g(), reinterpret_cast<const u16*>(g), stride, tokens);
    }
}
