// The plan of shared memory for gates of channels.
#pragma once

constexpr int FP32_ROW = K + 4;  // fp32 logits, padded against bank conflicts
constexpr int LOGITS = G_FP32 ? CHUNK * FP32_ROW * 4 : KEYS;
constexpr int TRIANGLE = 36 * 256;  // 8 x 8 blocks of fp32 of a lower triangle

struct Shared : Inputs {
    static constexpr int AT_G = AFTER_KEYS;
    static constexpr int AT_TRIANGLES = AT_G + LOGITS;
    static constexpr int AT_SPANS = AT_TRIANGLES + 2 * TRIANGLE;
    static constexpr int AT_TOTALS = AT_SPANS + 2 * BLOCKS * K * 4;
    static constexpr int AT_DIAGONAL = AT_TOTALS + BLOCKS * K * 4;
    static constexpr int AT_NORMS = AT_DIAGONAL + CHUNK * 4;
    static constexpr int AT_PARTS = AT_NORMS + 2 * CHUNK * 4;
    static constexpr int AT_BETAS = AT_PARTS + CHANNEL_WARPS * CHUNK * 8;
    static constexpr int AT_TILES = AT_BETAS + CHUNK * 8;
    static constexpr int AT_FINDER = AT_TILES + 2 * sizeof(WorkTile);
    static constexpr int AT_TAKEN = AT_FINDER + sizeof(ChunkFinder);
    static constexpr int AT_RATES = AT_TAKEN + 8;
    static constexpr int AT_BIAS = AT_RATES + (WARPS + 1) * 4;
    static constexpr int BYTES = AT_BIAS + K * 4;

    // Logits, later their gradients; if fp32, in rows of FP32_ROW
    DEVICE unsigned char* g() const { return base + AT_G; }
    // 8 x 8 blocks of dL or dAqk
    DEVICE float* dL(int i, int j) const { return floats(AT_TRIANGLES) + (i * (i + 1) / 2 + j) * 64; }
    DEVICE float* dA(int i, int j) const { return dL(i, j) + TRIANGLE / 4; }
    // StateGradients of 8 tokens and a warp's channels, [lane]; they replace the MMAs' operands
    DEVICE float4* by_state(int which, int fragment, int warp) const {
        return reinterpret_cast<float4*>(base + fragment / 2 * BLOCK_SHARES * SHARE) +
               ((which * CHANNEL_WARPS + warp) * 2 + fragment % 2) * 32;
    }
    // Decays of 8 tokens and a warp's channels from their anchor, [lane] (channel_decays.cuh). The blocks that each half has
    // first lie first, where the next work tile's operands may then go.
    DEVICE float4* decays(int fragment, int warp) const {
        const int b = fragment / 2, share = BLOCKS * BLOCK_SHARES + b % HALF_BLOCKS * HALVES + b / HALF_BLOCKS;
        return reinterpret_cast<float4*>(base + share * SHARE) + (2 * warp + fragment % 2) * 32;
    }
    // Decays of block b from its start to its first anchor, and on to its second one, of a lane's two channels
    DEVICE float4* spans(int b, int warp) const {
        return reinterpret_cast<float4*>(floats(AT_SPANS) + b * 2 * K) + 8 * warp;
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
    // In its place, what all tokens write, over a warp's channels: [64] (beta_gradients.cuh)
    DEVICE float* writes(int warp) const { return through(warp, 0, 0); }
    // In the place of a block's decays: <q, dq> and <k, dk> of its tokens over a warp's channels; a warp's copy of the sums
    // over all channels
    DEVICE float* inner_parts(int warp, int b) const { return reinterpret_cast<float*>(decays(2 * b, warp)); }
    DEVICE float* inner(int warp, int b) const { return inner_parts(warp, b) + 32; }
    DEVICE float* staged(int warp) const { return floats(AT_SPANS) + warp * K; }         // see near_zero_beta.cuh
    DEVICE float2* betas() const { return reinterpret_cast<float2*>(base + AT_BETAS); }  // <bX, V'> and beta as given
    DEVICE float* d_rates() const { return floats(AT_RATES); }                           // of all warps
    DEVICE float* A_log() const { return d_rates() + WARPS; }                            // the head's, or 0
    DEVICE float* bias() const { return floats(AT_BIAS); }                               // [K], or zeros
    DEVICE WorkTile& tile() const { return reinterpret_cast<WorkTile*>(base + AT_TILES)[0]; }
    DEVICE WorkTile& next() const { return (&tile())[1]; }
    DEVICE ChunkFinder& finder() const { return *reinterpret_cast<ChunkFinder*>(base + AT_FINDER); }
    DEVICE int& taken() const { return *reinterpret_cast<int*>(base + AT_TAKEN); }  // the work tile after the next
};
