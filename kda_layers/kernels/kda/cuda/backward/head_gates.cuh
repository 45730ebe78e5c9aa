// The gradients of gates of heads (HEAD_GATES): one warp computes those of a chunk's log-decays, logits, A_log and dt_bias,
// two tokens a lane.
#pragma once
#include "head_decays.cuh"

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

// Sums over the lanes of a warp: of all, of this and the later ones, of the earlier ones.
struct LaneSums {
    float all, from_here, before = 0.f;

    DEVICE LaneSums(Lane lane, float x) : all(x), from_here(x) {
        for (int mask = 1; mask < 32; mask *= 2) {
            const float others = shuffle_xor(all, mask);
            if (lane.id & mask) before += others;
            else from_here += others;
            all += others;
        }
    }
};

// The gradients of the log-decays of tokens id and id + 32: the sums of what passes through them, and of nothing else.
DEVICE void log_decay_gradients(Lane lane, float (&d)[2], const Shared& shared) {
    constexpr int HALF = CHUNK / HALVES;
    const int token = lane.id;
    // Into the second half: from before the chunk, and from the first half
    const LaneSums reads(lane, shared.reads()[token]), later_reads(lane, shared.reads()[token + HALF]),
        across(lane, shared.rows(QK, 0)[token + HALF] + shared.rows(KK, 0)[token + HALF]),
        leaves(lane, shared.leaves()[token]), later_leaves(lane, shared.leaves()[token + HALF]);
    float through = lane.id < WARPS ? shared.through()[lane.id] : 0.f;
    through = LaneSums(lane, through).all * shared.from_start()[CHUNK - 1];
    d[0] = through + leaves.before + reads.from_here + later_reads.all;
    d[1] = through + leaves.all + later_leaves.before + later_reads.from_here + across.from_here;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        #pragma unroll
        for (int b = HALF_BLOCKS * i; b < BLOCKS; b++)
            if (b >= (token + HALF * i) / 16)
                d[i] += shared.passing(QK, b)[token + HALF * i] + shared.passing(KK, b)[token + HALF * i];
    }
}

// The gradients of a tile; the next one's logits and parameters replace what they are computed from.
DEVICE void finish_head_gates(Lane lane, const GradientsParams& p, const Shared& shared, const WorkTile& tile,
                              const WorkTile& next, const HeadLogits& logits) {
    const GateGradients<GATE> gates(rate_of_gates(shared), p.lower_bound);
    const float bias = *shared.bias();
    float d_A_log = 0.f, d_bias = 0.f, d_log_decays[2];
    log_decay_gradients(lane, d_log_decays, shared);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = lane.id + 32 * i;
        const bool valid = token < tile.chunk.tokens;
        const float x = gates.logit(d_A_log, d_log_decays[i], shared.logits()[token] + bias, valid);
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

// Copy q and k with a key head's first value head.
DEVICE void copy_tokens(Place place, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    if (tile.first()) copy_keys(place, p, shared, tile, tile.chunk.tokens);
}

// What a token writes in all, for beta's gradient.
DEVICE float written(Lane, const Shared& shared, int token) { return shared.writes()[token]; }
