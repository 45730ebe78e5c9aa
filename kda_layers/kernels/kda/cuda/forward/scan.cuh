// The scan over prepared chunks, by four warps. Per chunk
//     R = Kg S     V' = T' (v - R)     O = scale (Qg S + Aqk V')     S = gamma S + Kr^T V'
// The state S stays in registers in fp32; S, v - R and V' pass through shared memory, rounded, as operands whose rows
// are columns of V. Column n = 8 i + 2 t + {0, 1} of the MMAs is column BV / 4 * t + 2 i + {0, 1} of V, so that a
// lane's columns are contiguous in memory.
#pragma once
#include "pooled.cuh"

constexpr int TILES = BV / 8;
using Columns = float[TILES][4];  // rows g and g + 8 of the warp's 16, by BV columns

// Store 64 rows of 16-bit elements, transposed, as blocks (., row), (., row + 1) of an operand.
DEVICE void store_columns(Lane lane, unsigned char* to, const u32 (&x)[TILES][2], int row, int columns) {
    #pragma unroll
    for (int i = 0; i < TILES; i += 2) {
        stmatrix_x4_trans(to + block_at(i + lane.id / 16, row + lane.id / 8 % 2, columns) + 16 * (lane.id % 8), x[i][0],
                          x[i][1], x[i + 1][0], x[i + 1][1]);
    }
}

// d += a b^T over K = 16 steps (= instead of += if `overwrites`): a [64, K], b [BV, K].
template <int steps, bool overwrites> DEVICE void multiply_rows(Columns& d, Operand a, Operand b) {
    wgmma_ss<Io, BV, false, overwrites>(d, a, b);
    #pragma unroll
    for (int s = 1; s < steps; s++) wgmma_ss<Io, BV>(d, operand_at(a, s * 256), operand_at(b, s * 256));
    wgmma_commit();
}

// d += a^T b^T over the chunk's tokens: a [64, K], b [BV, 64].
DEVICE void multiply_tokens(Columns& d, Operand a, Operand b) {
    #pragma unroll
    for (int s = 0; s < CHUNK / 16; s++) wgmma_ss<Io, BV, true>(d, operand_at(a, s * K * 32), operand_at(b, s * 256));
    wgmma_commit();
}

DEVICE void round_columns(u32 (&x)[TILES][2], const Columns& d) {
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        x[i][0] = Io::pack(d[i][0], d[i][1]), x[i][1] = Io::pack(d[i][2], d[i][3]);
    }
}

struct State {
    Columns S[K / 64];

    // Offset of a lane's first element in [BV, K].
    static DEVICE int place(Lane lane) { return BV / 4 * (lane.id % 4) * K + 16 * lane.warp + lane.id / 4; }

    DEVICE void load(const float* from) {
        each([&](float& x, int at) { x = from ? from[at] : 0.f; });
    }
    DEVICE void store(float* to) {
        each([&](float& x, int at) { store_once(to + at, x); });
    }
    template <class F> DEVICE void each(F f) {
        #pragma unroll
        for (int m = 0; m < K / 64; m++) {
            #pragma unroll
            for (int i = 0; i < TILES; i++) {
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    f(S[m][i][j], (2 * i + j % 2) * K + 64 * m + 8 * (j / 2));
                }
            }
        }
    }
    DEVICE void decay(Lane lane, const float* gamma) {
        #pragma unroll
        for (int m = 0; m < K / 64; m++) {
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = gamma[64 * m + 16 * lane.warp + lane.id / 4 + 8 * r];
                #pragma unroll
                for (int i = 0; i < TILES; i++) S[m][i][2 * r] *= x, S[m][i][2 * r + 1] *= x;
            }
        }
    }
    // Store S, rounded, as an operand.
    DEVICE void publish(Lane lane, unsigned char* to) {
        #pragma unroll
        for (int m = 0; m < K / 64; m++) {
            u32 x[TILES][2];
            #pragma unroll
            for (int i = 0; i < TILES; i++) {
                x[i][0] = Io::pack(S[m][i][0], S[m][i][1]), x[i][1] = Io::pack(S[m][i][2], S[m][i][3]);
            }
            store_columns(lane, to, x, 8 * m + 2 * lane.warp, K / 8);
        }
    }
};

// A lane's columns of its two tokens of v or o, contiguous in memory.
struct Values {
    u32 x[2][TILES];

    DEVICE void load(Lane lane, const u16* from, int stride, int tokens) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {  // rows after the end multiply zeros: any finite value will do
            const u16* at =
                from + min(16 * lane.warp + lane.id / 4 + 8 * r, tokens - 1) * stride + BV / 4 * (lane.id % 4);
            if constexpr (BV >= 32) {
                #pragma unroll
                for (int i = 0; i < TILES; i += 4) {
                    // not for transitions, whose scan would spill
                    const uint4 v = SEGMENTS == TRANSITIONS ? *reinterpret_cast<const uint4*>(at + 2 * i)
                                                            : load_once<uint4>(at + 2 * i);
                    x[r][i] = v.x, x[r][i + 1] = v.y, x[r][i + 2] = v.z, x[r][i + 3] = v.w;
                }
            } else {
                uint2 v = load_once<uint2>(at);
                x[r][0] = v.x, x[r][1] = v.y;
            }
        }
    }
    DEVICE void take(const u32 (&from)[TILES][2]) {
        #pragma unroll
        for (int i = 0; i < 2 * TILES; i++) x[i % 2][i / 2] = from[i / 2][i % 2];
    }
    DEVICE void take_scaled(Lane lane, const Columns& O, const float* scale) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float factor = scale[16 * lane.warp + lane.id / 4 + 8 * r];
            #pragma unroll
            for (int i = 0; i < TILES; i++) x[r][i] = Io::pack(O[i][2 * r] * factor, O[i][2 * r + 1] * factor);
        }
    }
    DEVICE void store(Lane lane, u16* to, int stride, int tokens) const {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int token = 16 * lane.warp + lane.id / 4 + 8 * r;
            if (token >= tokens) continue;
            u16* at = to + token * stride + BV / 4 * (lane.id % 4);
            if constexpr (BV >= 32) {
                #pragma unroll
                for (int i = 0; i < TILES; i += 4)
                    store_once(at + 2 * i, make_uint4(x[r][i], x[r][i + 1], x[r][i + 2], x[r][i + 3]));
            } else {
                store_once(at, make_uint2(x[r][0], x[r][1]));
            }
        }
    }
};

// Store a state, an operand in shared memory, to [V, K] in global memory; by 128 threads.
DEVICE void save_state(u16* to, const unsigned char* from, int thread) {
    const int row = thread % 8, first = BV / 4 * (row / 2) + row % 2 + thread / K * 2, piece = thread / 8 % (K / 8);
    #pragma unroll 2
    for (int i = 0; i < BV * K / 1024; i++) {  // 128 pieces of 16 bytes are 128 / K blocks of 8 rows
        const int column = first + 256 / K * i;
        *reinterpret_cast<uint4*>(to + column * K + saved_at(column, piece)) =
            reinterpret_cast<const uint4*>(from)[thread + 128 * i];
    }
}

// Save this CTA's share of a chunk that every CTA has prepared for itself; by 128 threads.
DEVICE void save_slice(unsigned char* to, const Stage& stage, int thread) {
    for (int piece = slice() * 128 + thread; piece < STAGE_BYTES / 16; piece += SLICES * 128) {
        reinterpret_cast<uint4*>(to)[piece] = reinterpret_cast<const uint4*>(stage.base)[piece];
    }
}

// Make what the four warps have written readable as an operand.
DEVICE void operand_sync() {
    fence_proxy_async_shared();
    barrier_sync(SCANNING, 128);
}

// v - Kg S, rounded.
DEVICE void subtract(u32 (&x)[TILES][2], const Values& v, const Columns& R) {
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float2 value = Io::unpack(v.x[r][i]);
            x[i][r] = Io::pack(value.x - R[i][2 * r], value.y - R[i][2 * r + 1]);
        }
    }
}

// Operands of a prepared chunk: K or 64 elements in a row, and Kr, MN-major.
struct Operands {
    Operand keys, tokens, channels;

    static DEVICE Operands of(const Stage& stage) {
        return {operand(stage.base, K * 16), operand(stage.base, CHUNK * 16), mn_major_operand(stage.Kr(), K * 16)};
    }
    DEVICE Operands at(int bytes) const {
        return {operand_at(keys, bytes), operand_at(tokens, bytes), operand_at(channels, bytes)};
    }
};

// R = Kg S, and O = Qg S, in flight on return: it overlaps with V'.
DEVICE void read_state(Columns& R, Columns& O, const Shared& shared, Operand keys, Operand state, u32 count) {
    wait_for(shared, ERRORS, count);
    wgmma_fence();
    multiply_rows<K / 16, true>(R, keys, state);
    wgmma_wait<0>();
    fence_operand(R);
    wait_for(shared, OUTPUT, count);
    wgmma_fence();
    multiply_rows<K / 16, true>(O, operand_at(keys, AT_QG), state);
}

// Save the state at the chunk's start and, unless it is in the chunk's row already, the prepared chunk.
DEVICE void save_chunk(Lane lane, const ForwardParams& p, const Shared& shared, const Stage& stage, u32 count, i64 row,
                       int column) {
    save_state(p.states + state_at(row, column), shared.state(), 32 * lane.warp + lane.id);
    if (SHARED_CHUNKS) return;
    wait_for(shared, UPDATE, count);
    save_slice(p.prepared + row * STAGE_BYTES, stage, 32 * lane.warp + lane.id);
}

// V' = T' (v - R), in flight on return.
DEVICE void start_errors(Lane lane, Columns& E, const Values& v, const Columns& R, const Shared& shared, Operand T,
                         Operand residuals) {
    u32 x[TILES][2];
    subtract(x, v, R);
    store_columns(lane, shared.residuals(), x, 2 * lane.warp, CHUNK / 8);
    operand_sync();
    wgmma_fence();
    multiply_rows<4, true>(E, T, residuals);
}

// Decay S while V' is in flight, then publish V', rounded to x.
DEVICE void finish_errors(Lane lane, u32 (&x)[TILES][2], Columns& E, State& state, const Shared& shared,
                          const Stage& stage, u32 count) {
    wait_for(shared, UPDATE, count);
    state.decay(lane, stage.gamma());
    wgmma_wait<0>();
    fence_operand(E);
    round_columns(x, E);
    store_columns(lane, shared.errors(), x, 2 * lane.warp, CHUNK / 8);
    operand_sync();
    if (lane.warp == 0) release(lane, shared, ERRORS, count);
}

// S += Kr^T V', O += Aqk V', in flight on return.
DEVICE void add_errors(State& state, Columns& O, Operand Kr, Operand Aqk, Operand errors) {
    wgmma_fence();
    #pragma unroll
    for (int m = 0; m < K / 64; m++) multiply_tokens(state.S[m], operand_at(Kr, m * 8 * 128), errors);
    multiply_rows<4, false>(O, Aqk, errors);
}

// Publish S and finish O, scaled.
DEVICE void finish_chunk(Lane lane, State& state, Values& values, Columns& O, const Shared& shared, const Stage& stage,
                         u32 count) {
    wgmma_wait<1>();
    #pragma unroll
    for (int m = 0; m < K / 64; m++) fence_operand(state.S[m]);
    state.publish(lane, shared.state());
    operand_sync();
    if (lane.warp == 0) release(lane, shared, UPDATE, count);
    wgmma_wait<0>();
    fence_operand(O);
    values.take_scaled(lane, O, stage.scale());
    release(lane, shared, OUTPUT, count);
}

// ---------------------------------------------------------------- the scan of a CTA

// The state before a segment.
DEVICE void load_start(Lane lane, State& state, const ForwardParams& p, const WorkTile& tile, int place) {
    const float* from = nullptr;
    if (tile.length > 0 && of_cut_sequence(p, tile)) from = p.starts + state_at(segment_row(lane, p, tile), 0);
    else if (tile.last && p.initial_state) from = p.initial_state + state_at(head_of(p, tile), 0);
    state.load(from ? from + place : nullptr);
}

DEVICE void scan(Lane lane, const ForwardParams& p, const Shared& shared) {
    const int stride = p.HV * V, v_stride = POOLED ? p.value_row : stride;
    const int column = slice() * BV, place = column * K + State::place(lane);
    const Operand state_operand = operand(shared.state(), K * 16), residuals = operand(shared.residuals(), CHUNK * 16);
    const Operand errors = operand(shared.errors(), CHUNK * 16);
    const Operands first = Operands::of(shared.stage(0));
    u32 count = 0;
    for (int index = cta_group(); index < p.tiles; index += cta_groups()) {
        const WorkTile tile = work_tile(p, index);
        if (is_none(tile)) break;
        i64 tokens_at = tile.row(p, 0) * V + column;  // offset of the chunk in v and o
        // The chunk's row in checkpoints and in per-chunk tensors
        int whole_row = !POOLED && p.checkpoints ? chunks_before(lane, p, tile.sequence, WHOLE) + tile.skipped : 0;
        int row = SAVES ? chunks_before(lane, p, tile.sequence, ALL) + tile.skipped : 0;
        const int stop = POOLED ? stop_of(p, tile) : NEVER;
        State state;
        if constexpr (POOLED) {
            const float* initial = pooled_state(p, tile);
            state.load(initial ? initial + place : nullptr);
        } else if constexpr (SEGMENTS) {
            load_start(lane, state, p, tile, place);
        } else {
            state.load(p.initial_state ? p.initial_state + state_at(head_of(p, tile), 0) + place : nullptr);
        }
        state.publish(lane, shared.state());
        operand_sync();
        Values next;
        if (tile.length > 0)
            next.load(lane, p.v + (POOLED ? pooled_values(p, tile, 0) : tokens_at), v_stride, tile.length);
        for (int left = tile.length; left > 0; left -= CHUNK, tokens_at += CHUNK * stride, count++) {
            const Stage stage = shared.stage(count);
            Values values = next;
            if (left > CHUNK)
                // Recomputed for slots: keeping the address in registers makes the scanning warps spill
                next.load(
                    lane,
                    p.v + (POOLED ? pooled_values(p, tile, tile.length - left + CHUNK) : tokens_at + CHUNK * stride),
                    v_stride, left - CHUNK);
            const Operands chunk = first.at(count % STAGES * STAGE_BYTES);
            Columns R, E, O;
            u32 x[TILES][2];
            read_state(R, O, shared, chunk.keys, state_operand, count);
            if constexpr (SAVES) save_chunk(lane, p, shared, stage, count, i64(row++) * p.HV + tile.head, column);
            start_errors(lane, E, values, R, shared, operand_at(chunk.tokens, AT_T), residuals);
            if constexpr (POOLED) {
                if (tile.length - left == stop) state.store(p.checkpoints + state_at(head_of(p, tile), 0) + place);
            } else if (p.checkpoints && left < tile.length) {  // the state at this chunk's start
                state.store(p.checkpoints + state_at(i64(whole_row++) * p.HV + tile.head, 0) + place);
            }
            finish_errors(lane, x, E, state, shared, stage, count);
            add_errors(state, O, chunk.channels, operand_at(chunk.tokens, AT_AQK), errors);
            if constexpr (SAVES) values.take(x), values.store(lane, p.errors + tokens_at, stride, left);
            finish_chunk(lane, state, values, O, shared, stage, count);
            if (POOLED && stop == PADDING) values = {};
            values.store(lane, p.o + tokens_at, stride, left);
        }
        if constexpr (POOLED) {
            if (tile.length == stop) state.store(p.checkpoints + state_at(head_of(p, tile), 0) + place);
            if (float* final = pooled_state(p, tile)) state.store(final + place);
        } else {
            if (p.checkpoints && tile.length >= CHUNK && tile.length % CHUNK == 0)
                state.store(p.checkpoints + state_at(i64(whole_row) * p.HV + tile.head, 0) + place);
            if (p.final_state && tile.last) state.store(p.final_state + state_at(head_of(p, tile), 0) + place);
        }
#if LAST_TOKENS
        if (p.before_last && tile.last && tile.length && has_last_tokens(p, tile.sequence))
            state.store(p.before_last + state_at(SEGMENTS ? head_of(p, tile) : index, 0) + place);
#endif
    }
}

// One warp copies every part of every chunk as soon as its stage is free.
DEVICE void fetch_chunks(Lane lane, const ForwardParams& p, const Shared& shared) {
    u32 all = SHARED_CHUNKS ? chunks_of_cta_group(lane, p) : 0, ready = 0;
    u32 copied = 0;
    Cursor at;
    if constexpr (KEEPS) at.start(lane, p, 0);
    for (u32 count = 0; count < all; count++) {
        if (PREPARES && ready <= count) ready = wait_for_chunks(lane, p, ready);
        const bool wanted = SEGMENTS != TRANSITIONS || !at.tile.last;
        const u32 place = SEGMENTS == TRANSITIONS ? copied : count;
        if (wanted && lane.id == 0) {
#if __CUDA_ARCH__ >= 900
            fence_proxy_async_global();
#endif
            for (int part = 0; part < (SEGMENTS == TRANSITIONS ? OUTPUT : PARTS); part++) {
                if (place >= STAGES) wait_for(shared, part, place - STAGES);
                expect(shared, part, place);
                fetch(ring_at(p, at, count), shared, part, place);
            }
            if (RECYCLES && count >= STAGES) write_counter(consumed(p, slice()), count - STAGES + 1);
        }
        copied += wanted;
        warp_sync();
        if constexpr (KEEPS) at.skip(lane, p, 1);
    }
}
