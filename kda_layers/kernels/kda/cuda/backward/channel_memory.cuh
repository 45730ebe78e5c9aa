// The plan of shared memory for gates of channels.
#pragma once

constexpr int FP32_ROW = K + 4;  // fp32 logits, padded against bank conflicts
constexpr int LOGITS = G_FP32 ? CHUNK * FP32_ROW * 4 : KEYS;
constexpr int TRIANGLE = 36 * 256;  // 8 x 8 blocks of fp32 of a lower triangle

struct Shared : Inputs {
    static constexpr int AT_G = AFTER_KEYS;
    static constexpr int AT_TRIANGLES = AT_G + LOGITS;
    static constexpr int AT_FACTORS = AT_TRIANGLES + 2 * TRIANGLE;
    static constexpr int AT_TOTALS = AT_FACTORS + CHANNEL_WARPS * 6 * 512;
    static constexpr int AT_DIAGONAL = AT_TOTALS + BLOCKS * K * 4;
    static constexpr int AT_NORMS = AT_DIAGONAL + CHUNK * 4;
    static constexpr int AT_PARTS = AT_NORMS + 2 * CHUNK * 4;
    static constexpr int AT_BETAS = AT_PARTS + CHANNEL_WARPS * CHUNK * 8;
    static constexpr int AT_TILES = AT_BETAS + CHUNK * 8;
    static constexpr int AT_FINDER = AT_TILES + 2 * sizeof(WorkTile);
    static constexpr int AT_PATTERNS = AT_FINDER + sizeof(ChunkFinder);
    static constexpr int AT_RATES = AT_PATTERNS + (G_FP32 ? 0 : 4 * 32 * 8);
    static constexpr int AT_BIAS = AT_RATES + (WARPS + 1) * 4;
    static constexpr int BYTES = AT_BIAS + K * 4;

    // Logits, later their gradients; if fp32, in rows of FP32_ROW
    DEVICE unsigned char* g() const { return base + AT_G; }
    // 8 x 8 blocks of dL or dAqk
    DEVICE float* dL(int i, int j) const { return floats(AT_TRIANGLES) + (i * (i + 1) / 2 + j) * 64; }
    DEVICE float* dA(int i, int j) const { return dL(i, j) + TRIANGLE / 4; }
    // Decays of a warp's channels in fp16 pairs: of block b from its start, b > 0, and to its end, b < 3
    DEVICE uint4* rise(int b, int warp) const {
        return reinterpret_cast<uint4*>(base + AT_FACTORS) + (warp * 6 + b - 1) * 32;
    }
    DEVICE uint4* fall(int b, int warp) const {
        return reinterpret_cast<uint4*>(base + AT_FACTORS) + (warp * 6 + b + 3) * 32;
    }
    // StateGradients of 8 tokens and a warp's channels, [lane]; they replace the MMAs' operands
    DEVICE float4* by_state(int which, int fragment, int warp) const {
        return reinterpret_cast<float4*>(base + fragment / 2 * BLOCK_SHARES * SHARE) +
               ((which * CHANNEL_WARPS + warp) * 2 + fragment % 2) * 32;
    }
    DEVICE float2* totals(int b, int warp) const {  // decays of full blocks, of a lane's two channels
        return reinterpret_cast<float2*>(floats(AT_TOTALS) + b * K) + 8 * warp;
    }
    // A half's sums [K], in the place of what is read before both halves of a chunk have met
    DEVICE float* d_bias(int half) const { return floats(AT_TOTALS) + half * (BLOCKS - 1) * K; }
    DEVICE float* diagonal() const { return floats(AT_DIAGONAL); }  // of dAqk: [64]
    DEVICE float* q_norms() const { return floats(AT_NORMS); }      // 1 / |q|: [64]
    DEVICE float* k_norms() const { return q_norms() + CHUNK; }
    DEVICE float4* parts(int warp) const { return reinterpret_cast<float4*>(base + AT_PARTS) + warp * 32; }
    // What passes through block b, summed by one half's warp: [16 channels]; two halves' sums
    DEVICE float* through(int warp, int half, int b) const {
        return reinterpret_cast<float*>(parts(warp)) + (half * BLOCKS + b) * 16;
    }
    // In the place of factors: <q, dq> and <k, dk> of all tokens over a warp's channels; a warp's copy of one block's
    // sums over all channels; what all tokens write (beta_gradients.cuh)
    DEVICE float* inner_parts(int warp) const { return floats(AT_FACTORS + warp * 6 * 512); }
    DEVICE float* inner(int warp, int half) const { return inner_parts(warp) + 2 * CHUNK + 32 * half; }
    DEVICE float* writes(int warp) const { return inner_parts(warp) + 3 * CHUNK; }
    DEVICE float* staged(int warp) const { return inner_parts(warp); }                   // see near_zero_beta.cuh
    DEVICE float2* betas() const { return reinterpret_cast<float2*>(base + AT_BETAS); }  // <bX, V'> and beta as given
    DEVICE float* d_rates() const { return floats(AT_RATES); }                           // of all warps
    DEVICE float* A_log() const { return d_rates() + WARPS; }                            // the head's, or 0
    DEVICE float* bias() const { return floats(AT_BIAS); }                               // [K], or zeros
    // A lane's part of a pattern (channel_pairs.cuh). Beside fp32 logits there is no room but in their rows' padding.
    DEVICE float2& pattern(int which, Lane lane) const {
        if constexpr (!G_FP32) return (reinterpret_cast<float2*>(base + AT_PATTERNS) + 32 * which)[lane.id];
        float* padding = reinterpret_cast<float*>(g()) + (16 * which + lane.id / 2) * FP32_ROW + K;
        return reinterpret_cast<float2*>(padding)[lane.id % 2];
    }
    DEVICE WorkTile& tile() const { return reinterpret_cast<WorkTile*>(base + AT_TILES)[0]; }
    DEVICE WorkTile& next() const { return (&tile())[1]; }
    DEVICE ChunkFinder& finder() const { return *reinterpret_cast<ChunkFinder*>(base + AT_FINDER); }
};
