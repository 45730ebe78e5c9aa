// The plan of shared memory for gates of heads.
#pragma once

// Products of q or k with k, and their gradients: M and L without decays and norms.
enum Pairs { QK, KK };

// A matrix of tokens by tokens in 8 x 8 blocks of fp32: below the diagonal elements, above it their transposes; those of
// the blocks on the diagonal follow.
constexpr int SQUARE_BLOCKS = CHUNK / 8 * (CHUNK / 8 + 1);
constexpr int DECAY_ROW = 24;  // of decays within 16 tokens, padded against bank conflicts

struct Shared : Inputs {
    static constexpr int AT_SQUARES = AFTER_KEYS;
    static constexpr int AT_PARTS = AT_SQUARES + 2 * SQUARE_BLOCKS * 256;
    static constexpr int AT_DECAYS = AT_PARTS + CHUNK * (CHANNEL_WARPS + 1) * 16;
    static constexpr int AT_COLUMNS = AT_DECAYS + (CHUNK * DECAY_ROW + BLOCKS * BLOCKS) * 4;
    static constexpr int AT_ROWS = AT_COLUMNS + 2 * 2 * BLOCKS * CHUNK * 4;
    static constexpr int AT_TOKENS = AT_ROWS + 2 * HALVES * CHUNK * 4;
    static constexpr int AT_BETAS = AT_TOKENS + 10 * CHUNK * 4;
    static constexpr int AT_TILES = AT_BETAS + CHUNK * 8;
    static constexpr int AT_FINDER = AT_TILES + 2 * sizeof(WorkTile);
    static constexpr int AT_TAKEN = AT_FINDER + sizeof(ChunkFinder);
    static constexpr int AT_THROUGH = AT_TAKEN + 8;
    static constexpr int BYTES = AT_THROUGH + (WARPS + 2) * 4;

    // 8 x 8 block (i, j) of a matrix, and the transpose of block (i, i)
    static DEVICE constexpr int square_at(int which, int i, int j) {
        return (which * SQUARE_BLOCKS + i * (CHUNK / 8) + j) * 64;
    }
    DEVICE float* square(int which, int i, int j) const { return floats(AT_SQUARES) + square_at(which, i, j); }
    DEVICE float* diagonal(int which, int i) const { return square(which, CHUNK / 8, i); }
    DEVICE float* staged(int warp) const { return floats(AT_SQUARES) + warp * K; }  // see near_zero_beta.cuh
    // A token's terms through states, summed over a warp's channels: <q, dq>, <k, dk> of what is read, of what is written
    DEVICE float4* parts(int token) const {
        return reinterpret_cast<float4*>(base + AT_PARTS) + token * (CHANNEL_WARPS + 1);
    }
    // Decays within block b: element (i, j) from after token j to token i >= j, and in column 16 from the block's start
    DEVICE float* decays(int b) const { return floats(AT_DECAYS) + 16 * b * DECAY_ROW; }
    DEVICE float* between(int b) const { return decays(BLOCKS) + b * BLOCKS; }  // over the blocks from after [j] to b
    // Sums over pairs, of the rows of block b: of all with a column, of those that pass through a token: [64]; and of those
    // with a row, of the columns of one half: [64]
    DEVICE float* columns(int which, int b) const { return floats(AT_COLUMNS) + (which * BLOCKS + b) * CHUNK; }
    DEVICE float* passing(int which, int b) const { return columns(2 + which, b); }
    DEVICE float* rows(int which, int half) const { return floats(AT_ROWS) + (which * HALVES + half) * CHUNK; }
    // Sums of tokens, [64]: of what is read from before the chunk, of what is left behind it, of all that is written
    DEVICE float* reads() const { return floats(AT_TOKENS); }
    DEVICE float* leaves() const { return reads() + CHUNK; }
    DEVICE float* writes() const { return leaves() + CHUNK; }
    DEVICE float2* inner() const { return reinterpret_cast<float2*>(writes() + CHUNK); }  // <q, dq>, <k, dk>
    DEVICE float* q_norms() const { return writes() + 3 * CHUNK; }                        // 1 / |q|
    DEVICE float* k_norms() const { return q_norms() + CHUNK; }
    DEVICE float* logits() const { return k_norms() + CHUNK; }
    DEVICE float* from_start() const { return logits() + CHUNK; }  // decays from the chunk's start to tokens: [64]
    DEVICE float* to_end() const { return from_start() + CHUNK; }  // and from after them to its end
    DEVICE float2* betas() const { return reinterpret_cast<float2*>(base + AT_BETAS); }  // <bX, V'> and beta as given
    DEVICE WorkTile& tile() const { return reinterpret_cast<WorkTile*>(base + AT_TILES)[0]; }
    DEVICE WorkTile& next() const { return (&tile())[1]; }
    DEVICE ChunkFinder& finder() const { return *reinterpret_cast<ChunkFinder*>(base + AT_FINDER); }
    DEVICE int& taken() const { return *reinterpret_cast<int*>(base + AT_TAKEN); }  // the work tile after the next
    DEVICE float* through() const { return floats(AT_THROUGH); }                    // parts of <S, dS>, of all warps
    DEVICE float* A_log() const { return through() + WARPS; }                       // the head's, or 0
    DEVICE float* bias() const { return A_log() + 1; }                              // the same
};
