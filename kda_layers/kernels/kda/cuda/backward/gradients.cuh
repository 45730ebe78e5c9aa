// Shared by the parts of gradients.cu: parameters, work tiles, the plan of shared memory, copies.
#pragma once
#include "GradientsParams.h"
#include "chunk.cuh"
#include "gates.cuh"

// Chosen by the build: K, V (128 or 64), IO (Bf16 or Fp16), GATE and HEAD_GATES (see gates.cuh), G_FP32 (1: gate logits are
// fp32), HAS_WGMMA (1 on sm_90a).
constexpr int BLOCKS = CHUNK / 16;
// A warp has 16 channels of half of the chunk's tokens.
constexpr int CHANNEL_WARPS = K / 16, HALVES = 2, WARPS = HALVES * CHANNEL_WARPS, THREADS = 32 * WARPS;
constexpr int HALF_BLOCKS = BLOCKS / HALVES;

struct HalfLane : Lane {  // `warp` counts those of a half, by channels
    int half;

    static DEVICE HalfLane of_thread() {
        const u32 thread = read_thread_index(), all = u32(broadcast(int(thread / 32)));
        return {{int(all % CHANNEL_WARPS), int(thread % 32)}, int(all / CHANNEL_WARPS % HALVES)};
    }
    // Reading the thread index again costs less than keeping the lane in registers.
    DEVICE void opt_barrier() { *this = of_thread(); }
};
static_assert(K == V, "states are square");

// ---------------------------------------------------------------- work

// A chunk: its row in per-chunk tensors, its first token among B * T, how many it has (0 after the last chunk), its sequence,
// and how many chunks of that are behind it.
struct Chunk {
    int row, first, tokens, sequence, behind;
};

// A sequence's first row in per-chunk tensors, first token among B * T, and number of tokens.
struct Sequence {
    int row, first, length;

    DEVICE int chunks() const { return max(length + CHUNK - 1, 0) / CHUNK; }  // offsets that decrease must not hang
    DEVICE Chunk chunk(int sequence, int behind) const {
        const int at = chunks() - 1 - behind;
        return {row + at, first + at * CHUNK, min(CHUNK, length - at * CHUNK), sequence, behind};
    }
};

// Finds chunks by their place in the order in which the reverse scan leaves them: those of a sequence from the last one on,
// packed sequences one after the other, others together. Places must not decrease from call to call.
struct ChunkFinder {
    int sequence, rows;  // packed: the sequences before `sequence` have `rows` chunks

    DEVICE Chunk find(Lane lane, const GradientsParams& p, int place) {  // executed by a full warp
        if (place >= p.rows) return {0, 0, 0, 0, 0};
        if (!p.cu_seqlens) {
            const int behind = u32(place) / u32(p.sequences), sequence = place - behind * p.sequences;
            const int chunks = (p.T + CHUNK - 1) / CHUNK;
            return Sequence{sequence * chunks, sequence * p.T, p.T}.chunk(sequence, behind);
        }
        for (; sequence < p.sequences; sequence += 32) {  // one sequence per lane
            const int mine = sequence + lane.id;
            Sequence x = {rows, 0, 0};
            if (mine < p.sequences) x.first = offset_of(p, mine), x.length = offset_of(p, mine + 1) - x.first;
            int all = x.chunks();
            for (int mask = 1; mask < 32; mask *= 2) {
                int others = int(shuffle_xor(u32(all), mask));
                if (lane.id & mask) x.row += others;
                all += others;
            }
            const int earlier = count_ones(ballot(x.row + x.chunks() <= place));
            if (earlier < 32) {
                x = {broadcast(x.row, earlier), broadcast(x.first, earlier), broadcast(x.length, earlier)};
                return x.chunk(sequence + earlier, place - x.row);
            }
            rows += all;
        }
        return {0, 0, 0, 0, 0};
    }
};

// A chunk of one value head. The value heads of one key head are consecutive.
struct WorkTile {
    i64 row, chunk_row;             // of its first token in [B * T, HV], its own in [rows, HV]
    int index, key_head, of_group;  // index: of chunk and key head
    Chunk chunk;

    DEVICE bool valid() const { return chunk.tokens > 0; }
    DEVICE int head(const GradientsParams& p) const { return key_head * p.group + of_group; }
    DEVICE bool first() const { return of_group == 0; }
    DEVICE bool last(const GradientsParams& p) const { return of_group == p.group - 1; }
    DEVICE i64 key_row(const GradientsParams& p) const {
        return i64(chunk.first) * p.H + key_head;
    }  // of the first token

    static DEVICE WorkTile of(Lane lane, const GradientsParams& p, int index, ChunkFinder& finder) {
        const int key_head = int(u32(index) % u32(p.H)), head = key_head * p.group;
        const Chunk chunk = finder.find(lane, p, int(u32(index) / u32(p.H)));
        return {i64(chunk.first) * p.HV + head, i64(chunk.row) * p.HV + head, index, key_head, 0, chunk};
    }
    DEVICE WorkTile of_next_head() const { return {row + 1, chunk_row + 1, index, key_head, of_group + 1, chunk}; }
};

// ---------------------------------------------------------------- shared memory

// A matrix lies in panels of 64 columns, swizzled (ptx.cuh): neither 8 rows of one piece of 16 bytes nor the pieces of
// a row have bank conflicts. All threads copy one share of a panel at once.
constexpr int PANELS = K / 64, PANEL_ROW = 128;  // bytes
constexpr int SHARE = 16 * THREADS, SHARE_ROWS = SHARE / PANEL_ROW;
constexpr int KEYS = CHUNK * K * 2, VALUES = CHUNK * V * 2, STATE = V * K * 2;
constexpr int STATE_SHARES = STATE / SHARE, TOKEN_SHARES = KEYS / SHARE;
constexpr int INPUT_SHARES = 2 * STATE_SHARES + 3 * TOKEN_SHARES;  // operands of the MMAs
// With gates of channels, the MMAs' results for each 16 tokens replace so many shares, and behind them a share of decays.
constexpr int BLOCK_SHARES = HEAD_GATES ? 0 : 3, DECAY_SHARES = HEAD_GATES ? 0 : BLOCKS;
constexpr int RESULT_SHARES = BLOCKS * BLOCK_SHARES + DECAY_SHARES;
constexpr int INPUTS = (INPUT_SHARES > RESULT_SHARES ? INPUT_SHARES : RESULT_SHARES) * SHARE;
constexpr int HALF_ROWS = CHUNK / HALVES * PANEL_ROW;  // bytes of a half's tokens in a panel
static_assert(STATE_SHARES % PANELS == 0 && TOKEN_SHARES % PANELS == 0, "a share is of one panel");

// The place of a piece of a matrix of `rows` rows.
DEVICE constexpr int piece_at(int row, int piece, int rows) {
    return int((u32(piece) / 8 * u32(rows) + u32(row)) * PANEL_ROW + u32(piece ^ row) % 8 * 16);
}

// What lies first in shared memory.
struct Inputs {
    unsigned char* base;
    // operands of the MMAs; inputs of tokens
    static constexpr int AT_D_STATE = STATE;
    static constexpr int AT_D_V = AT_D_STATE + STATE;
    static constexpr int AT_D_O = AT_D_V + VALUES;
    static constexpr int AT_ERRORS = AT_D_O + VALUES;
    static constexpr int AT_Q = INPUTS;
    static constexpr int AT_K = AT_Q + KEYS;
    static constexpr int AFTER_KEYS = AT_K + KEYS;

    DEVICE unsigned char* state() const { return base; }                 // S: [V, K]
    DEVICE unsigned char* d_state() const { return base + AT_D_STATE; }  // dS
    DEVICE unsigned char* errors() const { return base + AT_ERRORS; }    // V': [64, V]
    DEVICE unsigned char* d_v() const { return base + AT_D_V; }
    DEVICE unsigned char* d_o() const { return base + AT_D_O; }
    DEVICE unsigned char* q() const { return base + AT_Q; }  // [64, K] inputs, later their gradients
    DEVICE unsigned char* k() const { return base + AT_K; }
    DEVICE float* floats(int at) const { return reinterpret_cast<float*>(base + at); }
};

#if HEAD_GATES
#include "head_memory.cuh"
#else
#include "channel_memory.cuh"
#endif
static_assert(Shared::BYTES == SHARED_BYTES, "the host's plan of shared memory");

// ---------------------------------------------------------------- copies

DEVICE void block_sync() { barrier_sync(0, THREADS); }

// Keeps addresses of copies from being held in registers.
DEVICE u32 thread() { return read_thread_index(); }

// A thread's place in a share.
struct Place {
    int row, piece;

    static DEVICE Place of_thread() {
        const u32 at = thread();
        return {int(at / 8), int(at % 8)};
    }
    DEVICE int in_shared() const { return piece_at(row, piece, 0); }
    DEVICE i64 in_global(i64 stride) const { return row * stride + 8 * piece; }
};

// The first row and column of a matrix's share, of `count`.
DEVICE constexpr int row_of_share(int share, int count) { return share % (count / PANELS) * SHARE_ROWS; }
DEVICE constexpr int column_of_share(int share, int count) { return share / (count / PANELS) * 64; }

// Copy a matrix of a chunk's tokens, rows `stride` elements apart; rows from `valid` on become zeros.
DEVICE void copy_rows(Place at, unsigned char* to, const u16* from, i64 stride, int valid) {
    to += at.in_shared(), from += at.in_global(stride);
    #pragma unroll
    for (int i = 0; i < TOKEN_SHARES; i++) {
        const int row = row_of_share(i, TOKEN_SHARES);
        cp_async_16(to + i * SHARE, from + row * stride + column_of_share(i, TOKEN_SHARES), at.row + row < valid);
    }
}

// The inverse of copy_rows.
DEVICE void store_rows(Place at, u16* to, const unsigned char* from, i64 stride, int valid) {
    to += at.in_global(stride), from += at.in_shared();
    #pragma unroll
    for (int i = 0; i < TOKEN_SHARES; i++) {
        const int row = row_of_share(i, TOKEN_SHARES);
        if (at.row + row < valid)
            *reinterpret_cast<uint4*>(to + row * stride + column_of_share(i, TOKEN_SHARES)) =
                *reinterpret_cast<const uint4*>(from + i * SHARE);
    }
}

// Copy shares `first` to `end` of the MMAs' operands S, dS, bX, dO, V'.
template <int first, int end>
DEVICE void copy_inputs(Place at, const GradientsParams& p, const Shared& shared, const WorkTile& tile) {
    const int tokens = tile.chunk.tokens - at.row;
    const i64 stride = i64(p.HV) * V, states = tile.chunk_row * V * K, saved = at.row * K + saved_at(at.row, at.piece),
              values = tile.row * V + at.in_global(stride);
    unsigned char* to = shared.base + at.in_shared();
    #pragma unroll
    for (int i = first; i < min(end, INPUT_SHARES); i++) {
        if (i < 2 * STATE_SHARES) {
            const int share = i % STATE_SHARES, row = row_of_share(share, STATE_SHARES);
            const u16* from = i < STATE_SHARES ? p.states + saved : p.d_states + at.in_global(K);
            cp_async_16(to + i * SHARE, from + states + row * K + column_of_share(share, STATE_SHARES), true);
        } else {
            const int which = (i - 2 * STATE_SHARES) / TOKEN_SHARES, share = (i - 2 * STATE_SHARES) % TOKEN_SHARES;
            const int row = row_of_share(share, TOKEN_SHARES);
            const u16* from = which == 0 ? p.d_v : which == 1 ? p.d_o : p.errors;
            cp_async_16(to + i * SHARE, from + values + row * stride + column_of_share(share, TOKEN_SHARES),
                        row < tokens);
        }
    }
}

// Copy q and k.
DEVICE void copy_keys(Place at, const GradientsParams& p, const Shared& shared, const WorkTile& tile, int tokens) {
    i64 keys = tile.key_row(p) * K, stride = i64(p.H) * K;
    copy_rows(at, shared.q(), p.q + keys, stride, tokens);
    copy_rows(at, shared.k(), p.k + keys, stride, tokens);
}

// Beta as loaded: where it is converted, it is waited for.
struct LoadedBeta {
    u32 bits;

    static DEVICE LoadedBeta load(const GradientsParams& p, const WorkTile& tile, int token) {
        if (token >= tile.chunk.tokens) return {0};
        const i64 at = tile.row + i64(token) * p.HV;
        return {p.beta_fp32 ? static_cast<const u32*>(p.beta)[at] : u32(static_cast<const u16*>(p.beta)[at])};
    }
    DEVICE float value(const GradientsParams& p) const {
        const u32 x = opt_barrier(bits);
        return p.beta_fp32 ? __uint_as_float(x) : Io::unpack(x).x;
    }
};
