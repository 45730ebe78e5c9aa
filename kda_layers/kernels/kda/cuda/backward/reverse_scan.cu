// The reverse scan of the backward, from a sequence's last chunk to its first. With dS the gradient of the state at a
// chunk's end, and dO' = scale dO:
//     dV' = Aqk^T dO' + Kr dS     bX = T'^T dV'     dS <- gamma dS + Qg^T dO' - Kg^T bX
// bX is the gradient of v; with it and dS all other gradients are parallel over chunks. Formulas and names:
// docs/internals/kernels/forward.md, whose prepared chunks this reads.
//
// A CTA has 64 columns of V, which are independent, and a scanning warp 16 of them, as rows of every MMA: the result of
// one MMA, rounded, is operand A of the next in the same lane. So the chain from chunk to chunk does not pass through
// shared memory. What a scanning warp issues is what a chunk takes, so in the loop it addresses no global memory: moving
// warps bring dO' to shared memory and take bX and dS from there, by complete rows of 128 bytes. One more warp copies the
// chunks. The gradients kernel runs beside this one, and takes chunks in the order of the scan: a warp tells it of them.
#include "ReverseScanParams.h"
#include "columns.cuh"
#if SEGMENTS
#include "join.cuh"
#endif

constexpr int STAGES = CLUSTER > 0 ? 3 : 2;         // as many as fit into shared memory
constexpr int THREADS = 32 * (WARPS + MOVERS + 4);  // of the last four warps one copies chunks, one tells of them
constexpr bool FOLLOWED = !SEGMENTS;                // by the gradients kernel
constexpr int TOLD = 4;                             // chunks that it is told of at once

// Registers per thread by role, where the arch has setmaxnreg.
enum Role { SCAN, MOVE, COPY };
template <int role> DEVICE void registers() {
#if HAS_SETMAXNREG
    if constexpr (role == SCAN) setmaxnreg_inc<240>();
    else setmaxnreg_dec<128>();
#endif
}

struct Shared {
    static constexpr int STAGES = ::STAGES;
    static constexpr int ROWS = BV * K * 2, TOKENS = CHUNK * BV * 2;
    unsigned char* base;
    static constexpr int AT_ROWS = STAGES * STAGE_BYTES, AT_TOKENS = AT_ROWS + ROWS;
    static constexpr int AT_BARRIERS = AT_TOKENS + 2 * TOKENS, MOVES = AT_BARRIERS + 2 * PARTS * STAGES * 8;
    static constexpr int BYTES = MOVES + 8 * 8;

    DEVICE Stage stage(u32 count) const { return {base + (count % STAGES) * STAGE_BYTES}; }
    DEVICE u64* full(int part, u32 count) const {
        return reinterpret_cast<u64*>(base + AT_BARRIERS) + part * STAGES + count % STAGES;
    }
    DEVICE u64* empty(int part, u32 count) const { return full(part, count) + PARTS * STAGES; }

    // Between the scanning and the moving warps: dS of a chunk, [BV, K]; its dO', then its -bX, [64, BV].
    DEVICE unsigned char* rows() const { return base + AT_ROWS; }
    DEVICE unsigned char* tokens(u32 count) const { return base + AT_TOKENS + count % 2 * TOKENS; }
    DEVICE u64* outputs_there(u32 count) const { return reinterpret_cast<u64*>(base + MOVES) + count % 2; }
    DEVICE u64* errors_there(u32 count) const { return outputs_there(count) + 2; }
    DEVICE u64* rows_there() const { return outputs_there(0) + 4; }
    DEVICE u64* rows_taken() const { return outputs_there(0) + 5; }
    // Between the moving warps and the one that tells of chunks: some are stored; that is noticed.
    DEVICE u64* stored() const { return outputs_there(0) + 6; }
    DEVICE u64* noticed() const { return outputs_there(0) + 7; }

    static DEVICE constexpr int releases(int) { return WARPS; }  // warps of a CTA that release a part

    DEVICE void init_barriers() const {
        init_part_barriers(*this);
        for (int i = 0; i < 7; i++) mbarrier_init(outputs_there(0) + i, WARPS);
        mbarrier_init(noticed(), 1);
#if __CUDA_ARCH__ >= 900
        fence_mbarrier_init();
#endif
    }
};

static_assert(Shared::BYTES == SHARED_BYTES, "the host's plan of shared memory");

// Offset of 16 bytes of a column's channels in rows(), permuted like those of tokens().
DEVICE int row_at(int column, int piece) { return (column * (K / 8) + (piece ^ column % 8)) * 16; }

// ---------------------------------------------------------------- the state's gradient

struct Gradient : StateColumns {
    DEVICE void add(Lane lane, const float* from) {
        each(lane, [&](float& a, float& b, int at) {
            float2 x = *reinterpret_cast<const float2*>(from + at);
            a += x.x, b += x.y;
        });
    }
    DEVICE void decay(Lane lane, const float* gamma) {
        #pragma unroll
        for (int i = 0; i < K / 8; i++) {
            float2 x = *reinterpret_cast<const float2*>(gamma + 8 * i + lane.id % 4 * 2);
            S[i][0] *= x.x, S[i][1] *= x.y, S[i][2] *= x.x, S[i][3] *= x.y;
        }
    }
};

// ---------------------------------------------------------------- the scan

// What a warp passes from chunk to chunk.
struct Carried {
    Gradient d;  // dS
    Tokens O;    // dO', an operand
};

// Operands of a prepared chunk.
struct Operands {
    Operand first_Kr, Kg, T;  // Kr of stage 0: computing it late saves registers
    int stage_at;

    static DEVICE Operands of(const Stage& stage) {
        return {operand(stage.Kr(), K * 16), mn_major_operand(stage.Kg(), K * 16),
                mn_major_operand(stage.T(), CHUNK * 16), 0};
    }
    DEVICE Operands at(int bytes) const { return {first_Kr, operand_at(Kg, bytes), operand_at(T, bytes), bytes}; }
    DEVICE Operand Kr() const { return operand_at(first_Kr, stage_at); }
    DEVICE Operand Qg() const { return operand_at(Kg, AT_QG); }
    DEVICE Operand Aqk() const { return operand_at(T, AT_AQK - AT_T); }
};

// Wait for chunk `count`'s operands that read the outputs' gradient, and for that.
DEVICE void load_outputs(Lane lane, Tokens& O, const Shared& shared, u32 count) {
    wait_for(shared, OUTPUT, count);
    wait_in_turn(shared.outputs_there(count), count);
    #pragma unroll
    for (int s = 0; s < CHUNK / 16; s++) ldmatrix_x4_trans(O[s], operand_row(lane, shared.tokens(count), s));
}

// dV' = Aqk^T dO' + Kr dS, in flight on return; S: dS, rounded.
DEVICE void error_gradients(Sums<CHUNK>& V1, u32 (&S)[K / 16][4], Carried& x, const Shared& shared,
                            const Operands& operands, u32 count) {
    wgmma_fence();
    multiply_tokens<CHUNK, 0, 4, true>(V1, x.O, operands.Aqk());
    wgmma_wait<1>();  // does not wait, but without it ptxas serializes all wgmma
    fence_operand(x.d.S);
    as_operand<K>(S, x.d.S);
    wait_for(shared, UPDATE, count);
    wgmma_fence();
    multiply_rows(V1, S, operands.Kr());
}

// Give dS, rounded, to the moving warps.
DEVICE void give_rows(Lane lane, const u32 (&S)[K / 16][4], const Shared& shared, u32 count) {
    if (count > 0) mbarrier_wait(shared.rows_taken(), (count - 1) & 1);
    #pragma unroll
    for (int s = 0; s < K / 16; s++)
        stmatrix_x4(shared.rows() + row_at(16 * lane.warp + lane.id % 16, 2 * s + lane.id / 16), S[s]);
    signal(lane, shared.rows_there());
}

// dS <- gamma dS + Qg^T dO' over half of the tokens. The other half is in value_gradients: both fill gaps of the
// dependency chain. Gives dS as it was, S, and waits for dV'.
DEVICE void decay_state(Lane lane, Sums<CHUNK>& V1, const u32 (&S)[K / 16][4], Carried& x, const Shared& shared,
                        const Operands& operands, u32 count) {
    give_rows(lane, S, shared, count);
    x.d.decay(lane, shared.stage(count).gamma());
    wgmma_fence();
    multiply_tokens<K, 0, 2>(x.d.S, x.O, operands.Qg());
    wgmma_wait<1>();
    fence_operand(V1);
    release(lane, shared, UPDATE, count);
}

#if T_FP16
// dV' as operand A in fp16. Each row, a column of V, is scaled by a power of two, as gradients have any scale: the sum of
// its magnitudes becomes 2^14 to 2^15. Sums have twice the rate of maxima, and keep NaN. The four lanes of a row add the
// same pairs, so that they agree on the power.
struct ScaledErrors {
    using Type = Fp16;
    Tokens x;
    u32 restoring[2];  // of each row, as a pair: minus the power of two that undoes this and T_FP16_SHIFT

    DEVICE ScaledErrors(const Sums<CHUNK>& V1) {
        constexpr u32 ONE = 1u << 23;  // in the exponent
        float scale[2];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = 0.f;
            #pragma unroll
            for (int i = 0; i < CHUNK / 8; i++) sum += fabsf(V1[i][2 * r]) + fabsf(V1[i][2 * r + 1]);
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            // The sum's, at least that of 2^-104, with which both factors are normal numbers
            const u32 exponent = max(__float_as_uint(sum) & 0xff * ONE, (127 - 104) * ONE);
            scale[r] = __uint_as_float((2 * 127 + 14) * ONE - exponent);
            const u32 back = (exponent - (14 + T_FP16_SHIFT) * ONE) | 0x80000000u;
            restoring[r] = back | back >> 16;
        }
        #pragma unroll
        for (int i = 0; i < CHUNK / 4; i++) {
            const float by = scale[i % 2];
            x[i / 4][i % 4] = Fp16::pack(V1[i / 2][i % 2 * 2] * by, V1[i / 2][i % 2 * 2 + 1] * by);
        }
    }
    // -bX as operand A from the MMA's result.
    DEVICE void negate(Tokens& X, const Sums<CHUNK>& X1) const {
        as_operand<CHUNK>(X, X1);
        #pragma unroll
        for (int i = 0; i < CHUNK / 4; i++) X[i / 4][i % 4] = Bf16::multiply(X[i / 4][i % 4], restoring[i % 2]);
    }
};
#else
// dV' as operand A.
struct ScaledErrors {
    using Type = Io;
    Tokens x;

    DEVICE ScaledErrors(const Sums<CHUNK>& V1) { as_operand<CHUNK>(x, V1); }
    DEVICE void negate(Tokens& X, const Sums<CHUNK>& X1) const { as_operand<CHUNK>(X, X1, SIGNS); }
};
#endif

// bX = T'^T dV'.
DEVICE void value_gradients(Sums<CHUNK>& X1, const ScaledErrors& V0, Carried& x, const Shared& shared,
                            const Operands& operands, u32 count) {
    wait_for(shared, ERRORS, count);
    wgmma_fence();
    multiply_tokens<CHUNK, 0, 4, true, ScaledErrors::Type>(X1, V0.x, operands.T);
    multiply_tokens<K, 2, 4>(x.d.S, x.O, operands.Qg());
    wgmma_wait<1>();
    fence_operand(X1);
}

// dS <- dS - Kg^T bX, in flight on return; X: -bX, rounded, also given to the moving warps.
DEVICE void subtract_errors(Lane lane, Carried& x, Tokens& X, const Sums<CHUNK>& X1, const ScaledErrors& V0,
                            const Shared& shared, const Operands& operands, u32 count) {
    V0.negate(X, X1);
    wgmma_fence();
    multiply_tokens<K>(x.d.S, X, operands.Kg);
    #pragma unroll
    for (int s = 0; s < CHUNK / 16; s++)
        stmatrix_x4_trans(operand_row(lane, shared.tokens(count), s), X[s][0], X[s][1], X[s][2], X[s][3]);
    signal(lane, shared.errors_there(count));
    wgmma_wait<1>();
    release(lane, shared, OUTPUT, count);
}

// Wait for dS.
DEVICE void finish_chunk(Lane lane, Carried& x, const Shared& shared, u32 count) {
    wgmma_wait<0>();
    fence_operand(x.d.S);
    release(lane, shared, ERRORS, count);
}

// The scan that is to find d_starts alone has no use for a sequence's first segment, and stores nothing else.
DEVICE bool finds_starts(const ReverseScanParams& p) { return SEGMENTS && p.d_starts; }
DEVICE bool is_left_out(const ReverseScanParams& p, const WorkTile& tile) {
    return finds_starts(p) && tile.segment == 0;
}

DEVICE void scan(Lane lane, const ReverseScanParams& p, const Shared& shared) {
    const int column = slice() * BV + 16 * lane.warp;
    const Operands first = Operands::of(shared.stage(0));
    u32 count = 0;
    for (int index = cta_group(); index < p.tiles; index += cta_groups()) {
        const WorkTile tile = work_tile(p, index);
        if (is_left_out(p, tile)) continue;
        const i64 first_checkpoint =
            i64(chunks_before(lane, p, tile.sequence, WHOLE) + tile.skipped) * p.HV + tile.head;
        int chunk = tile.chunks() - 1;
        Carried x;
        const float* end = p.d_final;
        i64 of_end = index;
#if SEGMENTS
        if (tile.length == 0 && !tile.last) continue;
        const i64 row = of_cut_sequence(p, tile) ? segment_row(lane, p, tile) : 0;
        of_end = i64(tile.sequence) * p.HV + tile.head;
        if (!tile.last) end = p.d_ends, of_end = row;
#endif
        x.d.load(lane, end ? end + state_at(of_end, column) : nullptr);
        if (chunk >= 0) load_outputs(lane, x.O, shared, count);
        for (; chunk >= 0; chunk--, count++) {
            const Operands operands = first.at(count % STAGES * STAGE_BYTES);
            Sums<CHUNK> V1, X1;  // dV', bX
            u32 S[K / 16][4];
            Tokens X;  // read by MMAs until the chunk's end
            if (p.d_checkpoints && (chunk + 1) * CHUNK <= tile.length)
                x.d.add(lane, p.d_checkpoints + state_at(first_checkpoint + i64(chunk) * p.HV, column));
            error_gradients(V1, S, x, shared, operands, count);
            decay_state(lane, V1, S, x, shared, operands, count);
            const ScaledErrors V0(V1);
            value_gradients(X1, V0, x, shared, operands, count);
            subtract_errors(lane, x, X, X1, V0, shared, operands, count);
            if (chunk > 0) load_outputs(lane, x.O, shared, count + 1);
            finish_chunk(lane, x, shared, count);
        }
#if SEGMENTS
        if (finds_starts(p)) x.d.store(lane, p.d_starts + state_at(row, column));
        if (tile.segment > 0) continue;
        const i64 of_start = i64(tile.sequence) * p.HV + tile.head;
#else
        const i64 of_start = index;
#endif
        if (p.d_initial) x.d.store(lane, p.d_initial + state_at(of_start, column));
    }
}

// ---------------------------------------------------------------- the moving warps

// A warp's 16 tokens of a chunk of dO, complete rows of it, on their way to the scanning warps.
struct Outputs : Rows {
    // Give them, scaled, to the scanning warps.
    DEVICE void give(Lane lane, const Shared& shared, u32 count) const {
        wait_for(shared, OUTPUT, count);
        const float* scale = shared.stage(count).scale();
        each(lane, [&](int i, int token, int piece) {
            float by = scale[token];
            auto scaled = [by](u32 pair) {
                float2 y = Io::unpack(pair);
                return Io::pack(y.x * by, y.y * by);
            };
            *reinterpret_cast<uint4*>(shared.tokens(count) + token_at(token, piece)) =
                make_uint4(scaled(x[i].x), scaled(x[i].y), scaled(x[i].z), scaled(x[i].w));
        });
        signal(lane, shared.outputs_there(count));
    }
};

// Store the gradient of v, which the scanning warps gave negated.
DEVICE void take_errors(Lane lane, u16* to, i64 stride, int tokens, const Shared& shared, u32 count) {
    wait_in_turn(shared.errors_there(count), count);
    Rows::each(lane, [&](int, int token, int piece) {
        uint4 x = *reinterpret_cast<const uint4*>(shared.tokens(count) + token_at(token, piece));
        if (token < tokens)
            store_global(to + token * stride + 8 * piece,
                         make_uint4(x.x ^ SIGNS, x.y ^ SIGNS, x.z ^ SIGNS, x.w ^ SIGNS));
    });
}

// Store dS, if wanted.
DEVICE void take_rows(Lane lane, u16* to, bool stores, const Shared& shared, u32 count) {
    constexpr int PIECES = K / 8;  // of a row
    mbarrier_wait(shared.rows_there(), count & 1);
    #pragma unroll
    for (int i = 0; i < PIECES / 2; i++) {
        int column = 16 * lane.warp + (32 * i + lane.id) / PIECES, piece = lane.id % PIECES;
        if (stores)
            *reinterpret_cast<uint4*>(to + column * K + 8 * piece) =
                *reinterpret_cast<const uint4*>(shared.rows() + row_at(column, piece));
    }
    signal(lane, shared.rows_taken());
}

DEVICE void move(Lane lane, const ReverseScanParams& p, const Shared& shared) {
    const i64 stride = i64(p.HV) * V;
    const int column = slice() * BV;
    u32 count = 0, told = 0;
    for (int index = cta_group(); index < p.tiles; index += cta_groups()) {
        const WorkTile tile = work_tile(p, index);
        if (is_left_out(p, tile)) continue;
        int chunk = tile.chunks() - 1;
        const int before = chunks_before(lane, p, tile.sequence, ALL) + tile.skipped;
        i64 row = i64(before + chunk) * p.HV + tile.head;  // in per-chunk tensors
        i64 at = tile.row(p, chunk * CHUNK) * V + column;  // in dO and d_v
        Outputs next;
        if (chunk >= 0) {
            next.load(lane, p.d_o + at, stride, tile.length - chunk * CHUNK);
            next.give(lane, shared, count);
        }
        if (chunk >= 1) next.load(lane, p.d_o + at - CHUNK * stride, stride, CHUNK);
        for (; chunk >= 0; chunk--, count++, row -= p.HV, at -= CHUNK * stride) {
            const bool stores = !finds_starts(p);
            take_rows(lane, p.d_states + state_at(row, column), stores, shared, count);
            if (chunk >= 1) next.give(lane, shared, count + 1);
            if (chunk >= 2) next.load(lane, p.d_o + at - 2 * CHUNK * stride, stride, CHUNK);
            take_errors(lane, p.d_v + at, stride, stores ? tile.length - chunk * CHUNK : 0, shared, count);
            if (FOLLOWED && chunk % TOLD == 0) {
                if (told > 0) mbarrier_wait(shared.noticed(), told - 1 & 1);
                signal(lane, shared.stored()), told++;
            }
        }
    }
}

// ---------------------------------------------------------------- the warp that tells of chunks

DEVICE u32* scanned(const ReverseScanParams& p, int index) { return p.scanned + i64(index) * SLICES + slice(); }

// Before the gradients kernel may start.
DEVICE void reset_counters(const ReverseScanParams& p, bool all_are_scanned) {
    if (blockIdx.x == 0 && threadIdx.x == 0) write_counter(p.taken, 0);
    const u32 chunks = all_are_scanned ? 1u << 30 : 0;
    const int first = cta_group() + int(threadIdx.x) * cta_groups();
    if constexpr (FOLLOWED)
        for (int index = first; index < p.tiles; index += THREADS * cta_groups())
            write_counter(scanned(p, index), chunks);
    fence_gpu();
}

// A warp of its own, so that the moving warps need not wait until what they have stored can be seen.
DEVICE void tell(Lane lane, const ReverseScanParams& p, const Shared& shared) {
    u32 told = 0;
    for (int index = cta_group(); index < p.tiles; index += cta_groups()) {
        for (int left = work_tile(p, index).chunks(); left > 0; told++) {
            const int before = left;
            left = (left - 1) / TOLD * TOLD;
            mbarrier_wait(shared.stored(), told & 1);
            signal(lane, shared.noticed());
            if (lane.id == 0) red_add_release(scanned(p, index), before - left);
        }
    }
}

// ---------------------------------------------------------------- the warp that copies chunks

// Without bulk copies.
DEVICE void copy_parts(Lane lane, const Stage& from, const Shared& shared, u32 count, const unsigned char* T) {
    for (int part : {UPDATE, OUTPUT, ERRORS}) {
        wait_for_release(shared, part, count);
        const int end = T && part == ERRORS ? AT_T : part_at(part + 1);
        for (int i = part_at(part) + 16 * lane.id; i < end; i += 512)
            cp_async_16(shared.stage(count).base + i, from.base + i, true);
    }
    for (int i = 16 * lane.id; T && i < SQUARE; i += 512) cp_async_16(shared.stage(count).T() + i, T + i, true);
    cp_async_commit();
    cp_async_wait<0>();
    warp_sync();
    if (lane.id != 0) return;
    for (int part = 0; part < PARTS; part++) mbarrier_arrive(shared.full(part, count));
}

DEVICE void fetch_chunks(Lane lane, const ReverseScanParams& p, const Shared& shared) {
    u32 count = 0;
    for (int index = cta_group(); index < p.tiles; index += cta_groups()) {
        const WorkTile tile = work_tile(p, index);
        if (is_left_out(p, tile)) continue;
        const int row = chunks_before(lane, p, tile.sequence, ALL) + tile.skipped;
        for (int chunk = tile.chunks() - 1; chunk >= 0; chunk--, count++) {
            for (int token = chunk * CHUNK + lane.id; token < min((chunk + 1) * CHUNK, tile.length); token += 32) {
                prefetch(p.d_o + tile.row(p, token) * V + slice() * BV);
            }
            const i64 at = i64(row + chunk) * p.HV + tile.head;
            const Stage from{p.prepared + at * STAGE_BYTES};
            const unsigned char* T = T_FP16 ? p.T_fp16 + at * SQUARE : nullptr;
            if constexpr (CLUSTER == 0) {
                copy_parts(lane, from, shared, count, T);
            } else if (lane.id == 0) {
                for (int part : {UPDATE, OUTPUT, ERRORS}) {  // in the order of their release
                    if (count >= STAGES) wait_for(shared, part, count - STAGES);
                    expect(shared, part, count);
                    fetch(from, shared, part, count, T);
                }
            }
            warp_sync();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda_reverse_scan(const __grid_constant__ ReverseScanParams p) {
    const Shared shared{shared_memory()};
    const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
    if (threadIdx.x == 0) shared.init_barriers();
    wait_for_earlier_kernels();
    const bool idle = is_idle(lane, p);
    reset_counters(p, idle);
    block_or_cluster_sync(THREADS);
    launch_dependents();
    if (idle) return;
    if (lane.warp < WARPS) {
        registers<SCAN>();
        scan(lane, p, shared);
    } else if (lane.warp < WARPS + MOVERS) {
        registers<MOVE>();
        move({lane.warp - WARPS, lane.id}, p, shared);
    } else {
        registers<COPY>();
        if (lane.warp == WARPS + MOVERS) fetch_chunks(lane, p, shared);
        if (FOLLOWED && lane.warp == WARPS + MOVERS + 1) tell(lane, p, shared);
    }
    block_or_cluster_sync(THREADS);
}

#if SEGMENTS

// Gradients of the states after segments, from those of the states before the next ones, which the scan has computed
// from zeros: a state's gradient is d_starts + d_ends F^T.
extern "C" __global__ void __launch_bounds__(JOIN_THREADS, 1)
    kda_join_gradients(const __grid_constant__ ReverseScanParams p) {
    const Join at = Join::of_thread(p);
    if (at.segments == 0) return;
    float s[2][4];
    at.load(s, p.d_starts + state_at(at.row + (at.segments - 1) * p.HV, 0));
    const i64 row = at.row + (at.segments - 2) * p.HV, before = -state_at(p.HV, 0);
    at.join<true>(s, at.segments - 2, {p.d_ends + state_at(row, 0), before},
                  {p.transitions + (row * (V + K) + V) * K, -p.HV * ((V + K) * K)},
                  {p.d_starts + state_at(row, 0), before});
}

#endif
