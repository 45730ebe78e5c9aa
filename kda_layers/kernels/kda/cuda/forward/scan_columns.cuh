// The scan over prepared chunks with columns of V as rows of every MMA (columns.cuh), whose chain from chunk to chunk
// stays in registers. Per chunk
//     R = Kg S     V' = T' (v - R)     O = scale (Qg S + Aqk V')     S = gamma S + Kr^T V'
// One warpgroup issues all MMAs, in the order R, O = Qg S, V', S, O += Aqk V': v - R is rounded while Qg S is computed,
// and S while Aqk V' is. What reads or writes shared memory waits for every MMA that its warp has issued before, and the
// next MMA waits for that. So all of it is done at one place, at the end of a chunk.
#pragma once
#include "columns.cuh"
#include "shared.cuh"

// The last CTAs of a group that scans transitions of segments have no values (state_columns.cuh).
DEVICE bool has_values() { return SEGMENTS != TRANSITIONS || slice() < V / BV; }

constexpr int AHEAD = 8;  // chunks of v that are brought into L2 before they are loaded
// They scan, move, copy chunks, and store states or tell of them.
constexpr int SCAN_THREADS = 32 * (WARPS + MOVERS + 1 + (SAVES || STRETCH));

// Outputs' scales are powers of two: in bf16, which has the range of fp32, what is rounded can be scaled by the moving
// warps. The result is that of rounding last, unless either is below 2^-126 or what is rounded overflows.
template <class Type> constexpr bool HAS_RANGE = false;
template <> constexpr bool HAS_RANGE<Bf16> = true;
constexpr bool SCALES_LATE = HAS_RANGE<Io>;

// Of a scan with outputs, or of states alone (state_columns.cuh), which reads no operands of outputs.
template <bool has_outputs> struct ScanSharedOf {
    static constexpr int FETCHED = has_outputs ? PARTS : OUTPUT, STAGE = part_at(FETCHED);  // parts of a chunk, bytes
    // Chunks in shared memory, and of how many the v and the outputs; with SAVES see saved_columns.cuh
    static constexpr int STAGES = has_outputs ? 3 : 4, VALUES = !has_outputs ? 4 : SAVES ? 1 : 2;
    static constexpr int OUTPUTS = !has_outputs ? 0 : SAVES ? 1 : 2, TOKENS = CHUNK * BV * 2;
    unsigned char* base;
    static constexpr int AT_VALUES = STAGES * STAGE, AT_OUTPUTS = AT_VALUES + VALUES * TOKENS;
    static constexpr int AT_STATE = AT_OUTPUTS + OUTPUTS * TOKENS, STATE = has_outputs && SAVES ? BV * K * 2 : 0;
    static constexpr int AT_BARRIERS = AT_STATE + STATE, MOVES = AT_BARRIERS + (PARTS + 1) * STAGES * 8;
    static constexpr bool GIVES_STATES = has_outputs ? SAVES : STRETCH > 0;
    static constexpr int BYTES = MOVES + (VALUES + 4 * GIVES_STATES) * 8;

    DEVICE Stage stage(u32 count) const { return {base + (count % STAGES) * STAGE}; }
    // All parts of a chunk and its v.
    DEVICE u64* full(int, u32 count) const { return reinterpret_cast<u64*>(base + AT_BARRIERS) + count % STAGES; }
    DEVICE u64* full(u32 count) const { return full(0, count); }
    DEVICE u64* empty(int part, u32 count) const { return full(count) + (part + 1) * STAGES; }

    // Between the scanning and the moving warps: a chunk's v and o, [64, BV].
    DEVICE unsigned char* values(u32 count) const { return base + AT_VALUES + count % VALUES * TOKENS; }
    DEVICE unsigned char* outputs(u32 count) const { return base + AT_OUTPUTS + count % OUTPUTS * TOKENS; }
    DEVICE u64* moved(u32 count) const { return reinterpret_cast<u64*>(base + MOVES) + count % VALUES; }
    // If GIVES_STATES, see saved_columns.cuh and state_columns.cuh.
    DEVICE u64* all_taken() const { return reinterpret_cast<u64*>(base + MOVES) + VALUES; }
    DEVICE u64* state_there() const { return all_taken() + 1; }
    DEVICE u64* state_taken() const { return all_taken() + 2; }
    DEVICE u32* chunks() const { return reinterpret_cast<u32*>(all_taken() + 3); }  // of this CTA group
    DEVICE unsigned char* state() const { return base + AT_STATE; }  // rounded, at a chunk's start, see saved_at

    // warps of a CTA that release a part; moving warps read the outputs' scale
    static DEVICE constexpr int releases(int part) { return part == OUTPUT && SCALES_LATE ? WARPS + MOVERS : WARPS; }

    DEVICE void init_barriers() const {
        for (u32 i = 0; i < STAGES; i++) {
            mbarrier_init(full(i), FETCHED + (has_values() ? MOVERS : 0));
            for (int part = 0; part < PARTS; part++) mbarrier_init(empty(part, i), RANKS * releases(part));
        }
        for (int i = 0; i < VALUES; i++) mbarrier_init(moved(i), WARPS);
        if (GIVES_STATES)
            mbarrier_init(all_taken(), MOVERS), mbarrier_init(state_there(), WARPS), mbarrier_init(state_taken(), 1);
#if __CUDA_ARCH__ >= 900
        fence_mbarrier_init();
#endif
    }
};

using ScanShared = ScanSharedOf<true>;
using StateShared = ScanSharedOf<false>;

static_assert((SEGMENTS == TRANSITIONS ? StateShared::BYTES : ScanShared::BYTES) == SHARED_BYTES,
              "the host's plan of shared memory");
static_assert(Shared::BYTES <= SHARED_BYTES && (!STRETCH || StateShared::BYTES <= SHARED_BYTES));
static_assert(!STRETCH || STRETCH > ScanShared::STAGES, "when a stretch has been copied, its state has been read");

// ---------------------------------------------------------------- the scanning warps

// gamma of a lane's channels, in the order of gamma_at.
struct Decays {
    float4 x[K / 16];

    DEVICE void load(Lane lane, const float* gamma) {
        #pragma unroll
        for (int i = 0; i < K / 16; i++) {
            if constexpr (LANE_ORDER) x[i] = *reinterpret_cast<const float4*>(gamma + 16 * i + lane.id % 4 * 4);
            else {
                const float2 a = *reinterpret_cast<const float2*>(gamma + 16 * i + lane.id % 4 * 2);
                const float2 b = *reinterpret_cast<const float2*>(gamma + 16 * i + 8 + lane.id % 4 * 2);
                x[i] = make_float4(a.x, a.y, b.x, b.y);
            }
        }
    }
};

template <class Accumulators> struct StateOf : ColumnsOf<Accumulators> {
    DEVICE void decay(const Decays& gamma) {
        #pragma unroll
        for (int i = 0; i < K / 8; i++) {
            const float4 two = gamma.x[i / 2];
            const float2 by = i % 2 ? make_float2(two.z, two.w) : make_float2(two.x, two.y);
            float (&x)[4] = this->eight(i);
            x[0] *= by.x, x[1] *= by.y, x[2] *= by.x, x[3] *= by.y;
        }
    }
};
using State = StateOf<Whole>;

using Channels = u32[K / 16][4];  // 16 columns of S, rounded, as operand A

template <class Shared> DEVICE void load_values(Lane lane, Tokens& v, const Shared& shared, u32 count) {
    #pragma unroll
    for (int s = 0; s < CHUNK / 16; s++) ldmatrix_x4_trans(v[s], operand_row(lane, shared.values(count), s));
}

DEVICE void zero(Tokens& x) {
    #pragma unroll
    for (int i = 0; i < CHUNK / 4; i++) x[i / 4][i % 4] = 0;
}

// v becomes v - R, rounded.
DEVICE void subtract(Tokens& v, const Sums<CHUNK>& R) {
    #pragma unroll
    for (int i = 0; i < CHUNK / 4; i++) {
        u32& x = v[i / 4][i % 4];
        const float2 value = Io::unpack(x);
        x = Io::pack(value.x - R[i / 2][i % 2 * 2], value.y - R[i / 2][i % 2 * 2 + 1]);
    }
}

DEVICE void scale_outputs(Lane lane, Sums<CHUNK>& O, const float* scale) {
    #pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        const float2 by = *reinterpret_cast<const float2*>(scale + 8 * i + lane.id % 4 * 2);
        O[i][0] *= by.x, O[i][1] *= by.y, O[i][2] *= by.x, O[i][3] *= by.y;
    }
}

#if SAVES
#include "saved_columns.cuh"
#endif

// Round O for the moving warps.
DEVICE void store_outputs(Lane lane, const Sums<CHUNK>& O, const ScanShared& shared, u32 count) {
    #pragma unroll
    for (int s = 0; s < CHUNK / 16; s++) {
        u32 x[4];
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* sums = O[2 * s + j / 2] + j % 2 * 2;
            x[j] = Io::pack(sums[0], sums[1]);
        }
        stmatrix_x4_trans(operand_row(lane, shared.outputs(count), s), x[0], x[1], x[2], x[3]);
    }
}

// A chunk's stage; kept, as computing it from the count takes longer than what it is needed for.
template <class Shared> struct Place {
    u32 count, stage, phase;

    DEVICE Place next() const {
        const bool wraps = stage == Shared::STAGES - 1;
        return {count + 1, wraps ? 0 : stage + 1, phase ^ wraps};
    }
    DEVICE int bytes() const { return stage * Shared::STAGE; }
};

template <class Shared> DEVICE void release(Lane lane, const Shared& shared, int part, const Place<Shared>& at) {
    release_at(lane, shared.empty(part, at.stage), at.count + Shared::STAGES);
}

// Operands of a chunk in shared memory: Kg, T', and Kr, MN-major.
struct ChunkOperands {
    Operand rows, T, Kr;

    explicit DEVICE ChunkOperands(const Stage& stage)
        : rows(operand(stage.base, K * 16)),
          T(operand(stage.T(), CHUNK * 16)),
          Kr(mn_major_operand(stage.Kr(), K * 16)) {}
};

// What a warp has at a chunk's start.
template <class State> struct Carried {
    State state;
    Channels S;    // the state, rounded
    Tokens v;      // then v - R
    Decays gamma;  // of the chunk

    // Load what is in shared memory.
    template <class Shared> DEVICE void load(Lane lane, const Shared& shared, const Place<Shared>& at) {
        if (has_values()) load_values(lane, v, shared, at.count);
        else zero(v);
        gamma.load(lane, shared.stage(at.stage).gamma());
    }
};

// Wait for a chunk and its v, and load them.
DEVICE void enter(Lane lane, Carried<State>& x, const ScanShared& shared, const Place<ScanShared>& at, bool is_there) {
    if (!is_there) mbarrier_wait(shared.full(at.stage), at.phase);
    x.load(lane, shared, at);
}

// E = V', rounded, from W = R, whose MMAs are done; W and v are overwritten. The next MMA may follow. Return whether the
// next chunk and its v have arrived.
DEVICE bool compute_errors(Tokens& E, Sums<CHUNK>& W, Tokens& v, Operand T, const ScanShared& shared,
                           const Place<ScanShared>& next) {
    fence_operand(W);
    subtract(v, W);
    wgmma_fence();
    multiply_rows<4, 0, 4, true>(W, v, T);
    wgmma_wait<0>();
    fence_operand(W);
    const bool next_there = mbarrier_test_wait(shared.full(next.stage), next.phase);
    as_operand<CHUNK>(E, W);
    wgmma_fence();
    return next_there;
}

// Where a warp stores states of a group's part of a tile. With CHECKPOINTS after each whole chunk, in consecutive rows; with
// POOLED once, where so many chunks are left of the part as `stop`.
struct Checkpoints {
    float* next;
    i64 step;
    int stop;

    DEVICE void start(Lane lane, const ForwardParams& p, const Tiles& tiles, const WorkTile& tile, int column) {
        if constexpr (POOLED) {
            const int after = stop_of(p, tile);
            stop = after < 0 ? -1 : tiles.before_run() + tiles.in_run() - after / CHUNK;
            next = p.checkpoints + state_at(head_of(p, tile), column), step = 0;
            return;
        }
        const i64 row = chunks_before(lane, p, tile.sequence, WHOLE) + tiles.before_run();
        next = p.checkpoints + state_at(row * p.HV + tile.head, column), step = i64(p.HV) * V * K;
    }
    DEVICE bool is_due(int left, int chunks) const { return POOLED ? left == stop : CHECKPOINTS && left < chunks; }
    DEVICE bool is_due_at_end(const Tiles& tiles, const WorkTile& tile) const {
        if constexpr (POOLED) return stop == 0 && tiles.ends();
        return CHECKPOINTS && tiles.in_run() > 0 && (!tiles.ends() || tile.length % CHUNK == 0);
    }
    DEVICE void store(Lane lane, State& state) {
        state.each(lane, [&](float& a, float& b, int at) { store_once(next + at, make_float2(a, b)); });
        next += step;
    }
};

// The state at the start of a group's part of a tile.
template <class State, class Tiles>
DEVICE void begin_tile(Lane lane, State& state, const ForwardParams& p, const Tiles& tiles, int column) {
    if (tiles.begins()) {
        if constexpr (POOLED) state.load(lane, pooled_state(p, tiles.at(p), column));
        else state.load(lane, p.initial_state ? p.initial_state + state_at(tiles.state(p), column) : nullptr);
        return;
    }
#if !PACKED
    const int group = tiles.handed_by(p);
    const u32 before = tiles.handed_before();
    while (read_counter(handed(p, group, slice())) < WARPS * (before + 1)) back_off();
    fence_gpu();
    warp_sync();
    state.take(lane, handed_state(p, group, before) + state_at(0, column));
#endif
}

// Store the state at the end of a group's part of a tile.
DEVICE void end_tile(Lane lane, State& state, const ForwardParams& p, const Tiles& tiles, const WorkTile& tile,
                     int column) {
    if (!tiles.ends()) {
#if !STRETCH
        state.give(lane, handed_state(p, scanning_group(p), 0) + state_at(0, column));
        warp_sync();
        if (lane.id == 0) red_add_release(handed(p, scanning_group(p), slice()), 1);
#endif
        return;
    }
    if constexpr (POOLED) {
        if (float* to = pooled_state(p, tile, column)) state.store(lane, to);
    } else if (p.final_state) {
        state.store(lane, p.final_state + state_at(tiles.state(p), column));
    }
#if LAST_TOKENS
    if (p.before_last && (!PACKED || tile.length > 0) && has_last_tokens(p, tile.sequence))
        state.store(lane, p.before_last + state_at(tiles.index, column));
#endif
}

DEVICE void scan_columns(Lane lane, const ForwardParams& p, const ScanShared& shared) {
    constexpr int STEPS = K / 16;
    const int column = slice() * BV + 16 * lane.warp;
    const ChunkOperands first(shared.stage(0));
    Place<ScanShared> at = {0, 0, 0};
    Tiles tiles;
    tiles.start(p, scanning_group(p));
    Carried<State> x;
    const u32 all = SAVES ? *shared.chunks() : 0;
    if (SAVES && all > 0) enter(lane, x, shared, at, false), signal(lane, shared.moved(0));
    for (; tiles.valid(p); tiles.skip(p)) {
        const WorkTile tile = tiles.at(p);
        begin_tile(lane, x.state, p, tiles, column);
        as_operand<K>(x.S, x.state.S);
        if (!SAVES && (!PACKED || tile.length > 0)) enter(lane, x, shared, at, false);
        const int chunks = tiles.in_run();
#if SAVES
        if (chunks > 0) give_state(lane, x.S, shared, at.count);
#endif
        Checkpoints checkpoints;
        if constexpr (CHECKPOINTS || POOLED) checkpoints.start(lane, p, tiles, tile, column);
        for (int left = chunks; left > 0; left--) {
            const Place<ScanShared> next = at.next();
            const Operand rows = operand_at(first.rows, at.bytes()), T = operand_at(first.T, at.bytes());
            Sums<CHUNK> W, O;  // R, then V'; outputs
            Tokens E;          // V', rounded
            fence_operand(x.state.S);
            wgmma_fence();
            multiply_rows<STEPS, 0, STEPS, true>(W, x.S, rows);
            if (checkpoints.is_due(left, chunks)) checkpoints.store(lane, x.state);  // after the previous chunk
            if (opt_barrier(left) > 0) x.state.decay(x.gamma);  // always; a branch keeps it behind these MMAs
            wgmma_fence();
            multiply_rows<STEPS, 0, STEPS, true>(O, x.S, operand_at(rows, AT_QG));
            wgmma_wait<1>();
            const bool next_there = compute_errors(E, W, x.v, T, shared, next);
            multiply_tokens<K>(x.state.S, E, operand_at(first.Kr, at.bytes()));
            multiply_rows<4>(O, E, operand_at(T, AT_AQK - AT_T));
            release(lane, shared, ERRORS, at);
            wgmma_wait<1>();
            fence_operand(x.state.S);
            as_operand<K>(x.S, x.state.S);
            if (SAVES ? next.count < all : left > 1) enter(lane, x, shared, next, next_there);
#if SAVES
            else mbarrier_wait(shared.all_taken(), 0);
            if (left > 1) give_state(lane, x.S, shared, next.count);
#endif
            wgmma_wait<0>();
            fence_operand(O);
            if constexpr (!SCALES_LATE) scale_outputs(lane, O, shared.stage(at.stage).scale());
#if SAVES
            give_errors(lane, E, shared, at.count);
#endif
            store_outputs(lane, O, shared, at.count);
            signal(lane, shared.moved(at.count + SAVES));
            release(lane, shared, UPDATE, at);
            release(lane, shared, OUTPUT, at);
            at = next;
        }
        if (checkpoints.is_due_at_end(tiles, tile)) checkpoints.store(lane, x.state);
        end_tile(lane, x.state, p, tiles, tile, column);
    }
}
