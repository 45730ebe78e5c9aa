// The gradients of gates of heads (HEAD_GATES): those of a token's log-decays are summed over channels first, and so one
// warp computes those of a chunk's logits, of A_log and of dt_bias, two tokens a lane.
#pragma once
#include "beta_gradients.cuh"

// The gradients of block b's log-decays, summed over a warp's channels.
DEVICE void sum_log_decays(Lane lane, const Fragment (&g)[2], const Shared& shared, int b) {
    const Writes sums = {{g[0][0] + g[0][2], g[0][1] + g[0][3]}, {g[1][0] + g[1][2], g[1][1] + g[1][3]}};
    sum_writes(lane, shared.d_log_decays(lane.warp), sums, b);
}

// A lane's logits of a tile, as loaded: where they are converted, they are waited for.
struct HeadLogits {
    u32 bits[2] = {};

    DEVICE void load(Lane lane, const GradientsParams& p, const WorkTile& tile) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = lane.id + 32 * i;
            const i64 at = tile.row + i64(token) * p.HV;
            if (token >= tile.chunk.tokens) continue;
            bits[i] = G_FP32 ? static_cast<const u32*>(p.g)[at] : u32(static_cast<const u16*>(p.g)[at]);
        }
    }
    DEVICE void store(Lane lane, const Shared& shared) const {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 x = opt_barrier(bits[i]);
            shared.logits()[lane.id + 32 * i] = G_FP32 ? __uint_as_float(x) : Io::unpack(x).x;
        }
    }
};

DEVICE void copy_parameters(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    const int head = tile.head(p);
    if (lane.id == 0) cp_async_4(shared.bias(), p.dt_bias + head, p.dt_bias);
    if (lane.id == 1) cp_async_4(shared.A_log(), p.A_log + head, p.A_log);
}

// The gradients of a tile; the next one's logits and parameters replace what they are computed from.
DEVICE void finish_head_gates(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                              const WorkTile& next, const HeadLogits& logits) {
    const GateGradients<GATE> gates(rate_of_gates(shared), p.lower_bound);
    const float bias = *shared.bias();
    float d_A_log = 0.f, d_bias = 0.f;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = lane.id + 32 * i;
        const bool valid = token < tile.chunk.tokens;
        float d_log_decay = 0.f;
        #pragma unroll
        for (int w = 0; w < CHANNEL_WARPS; w++) d_log_decay += shared.d_log_decays(w)[token];
        const float x = gates.logit(d_A_log, d_log_decay, shared.logits()[token] + bias, valid);
        d_bias += x;
        const i64 at = tile.row + i64(token) * p.HV;
        if (valid && G_FP32) static_cast<float*>(p.d_g)[at] = x;
        else if (valid) static_cast<u16*>(p.d_g)[at] = u16(Io::pack(x, 0.f));
    }
    for (int mask = 1; mask < 32; mask *= 2) d_A_log += shuffle_xor(d_A_log, mask), d_bias += shuffle_xor(d_bias, mask);
    if (lane.id == 0 && p.d_A_log) p.d_A_log[tile.chunk_row] = d_A_log;
    if (lane.id == 0 && p.d_dt_bias) p.d_dt_bias[tile.chunk_row] = d_bias;
    logits.store(lane, shared);
    warp_sync();  // every lane has read the parameters
    if (next.valid()) copy_parameters(lane, p, shared, next);
}
