// Prepare one chunk: the decays, the triangles L and Aqk, and the decayed keys and queries Kg, Kr and Qg; invert.cuh
// computes the inverse.
//
// Warp w holds 16 tokens (block b = w / HALVES) by 64 channels (half h) in registers: lane (g, t) = (id / 4, id % 4)
// has tokens g and g + 8 and 16 channels, in the order of mma's fragments, so that one register serves as A and as B.
// Decays of channels scale the products' operands (channel_decays.cuh), those of heads the products (head_decays.cuh).
#pragma once
#include "invert.cuh"

// ---------------------------------------------------------------- loading

// One arrival of a warp, after what all of its lanes have done.
DEVICE void arrive_by_warp(Lane lane, u64* barrier) {
    warp_sync();
    if (lane.id == 0) mbarrier_arrive(barrier);
}

// A lane's tokens g and g + 8 of a chunk; rows after the sequence's end read its last token.
DEVICE int token_of(Lane lane, const Cursor& at, int r) {
    return at.chunk * CHUNK + 16 * (lane.warp / HALVES) + lane.id / 4 + 8 * r;
}
DEVICE int row_of(int warp, int id, const Cursor& at, int r) {
    return min(token_of({warp, id}, at, r), at.tile.length - 1);
}
DEVICE int channel_of(Lane lane) { return 64 * (lane.warp % HALVES) + 8 * (lane.id % 4); }  // a lane's first

DEVICE i64 key_at(const ForwardParams& p, const Cursor& at, int row) { return at.keys + i64(row) * key_row(p); }
DEVICE const Logit* logits_at(const ForwardParams& p, const Cursor& at, int row) {
    if constexpr (HEAD_GATES && POOLED)
        return static_cast<const Logit*>(p.g) + i64(at.tile.first + row) * p.gate_row + at.tile.head;
    return static_cast<const Logit*>(p.g) + at.tile.row(p, row) * (HEAD_GATES ? 1 : K);
}

// A lane's q and k as loaded, and with HEAD_GATES its tokens' logits; a member that is not used would change the SASS.
struct Raw {
    uint4 q[2][2], k[2][2];  // [token][8 channels]
#if HEAD_GATES
    Logit g[2];
#endif
};

// Load the next chunk's q and k to registers early, where shared memory has no room and there are enough registers.
constexpr bool LOADS_AHEAD = HAS_WGMMA && !BLOCK_ROLES && (SAVES || !SEGMENTS);

// The row of a lane's inputs that has the first of the logits of 8 channels of token r.
DEVICE constexpr int logit_row(int r, int c) { return Shared::KEY_ROWS + (2 * r + c) * LOGIT_PIECES; }

// Logits of heads are two elements of a lane.
DEVICE void load_head_logits(Lane lane, Raw& raw, const ForwardParams& p, const Cursor& at) {
#if HEAD_GATES
    #pragma unroll
    for (int r = 0; r < 2; r++) raw.g[r] = *logits_at(p, at, row_of(lane.warp, lane.id, at, r));
#endif
}

DEVICE void fetch_piece(uint4* to, const void* from) {
    if (BLOCK_ROLES) cp_async_16_once(to, from);
    else cp_async_16(to, from, true);
}

// Copy inputs to shared memory one chunk ahead. Each lane copies what it reads itself. With BLOCK_ROLES logits of heads are
// loaded to registers.
DEVICE void fetch_inputs(Lane lane, Raw& raw, const ForwardParams& p, const Shared& shared, const Cursor& at) {
    uint4* to = shared.inputs(lane.warp) + lane.id;
    if (BLOCK_ROLES) to = hide_shared_address(to);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = row_of(lane.warp, lane.id, at, r);
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const int channel = channel_of(lane) + 32 * c;
            if (BLOCK_ROLES) {
                const i64 key = key_at(p, at, row) + channel;
                fetch_piece(to + (2 * r + c) * 32, p.q + key);
                fetch_piece(to + (2 * r + c + 4) * 32, p.k + key);
            }
            #pragma unroll
            for (int i = 0; i < LOGIT_PIECES; i++)
                fetch_piece(to + (logit_row(r, c) + i) * 32, logits_at(p, at, row) + channel + 4 * i);
        }
    }
    cp_async_commit();
    if (BLOCK_ROLES) load_head_logits(lane, raw, p, at);
}

// Load q and k, from shared memory if they were fetched.
DEVICE void load_raw(Lane lane, Raw& raw, const ForwardParams& p, const Shared& shared, const Cursor& at) {
    const uint4* keys = shared.inputs(lane.warp) + lane.id;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const i64 key = key_at(p, at, row_of(lane.warp, lane.id, at, r)) + channel_of(lane);
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const int i = 2 * r + c;
            raw.q[r][c] = BLOCK_ROLES ? keys[i * 32] : load_once<uint4>(p.q + key + 32 * c);
            raw.k[r][c] = BLOCK_ROLES ? keys[(i + 4) * 32] : load_once<uint4>(p.k + key + 32 * c);
        }
    }
    if (!BLOCK_ROLES) load_head_logits(lane, raw, p, at);
}

// Bring what load_raw will read from global memory into L2. Two integers, not a Lane: it keeps the SASS of every arch.
DEVICE void prefetch_raw(int warp, int id, const ForwardParams& p, const Cursor& at) {
    if (id % 4 > 1) return;
    int row = row_of(warp, id, at, id % 4), channel = 64 * (warp % HALVES);
    i64 key = key_at(p, at, row) + channel;
    prefetch(p.q + key), prefetch(p.k + key);
    if constexpr (HEAD_GATES) {
        if (channel == 0) prefetch(logits_at(p, at, row));
        return;
    }
    const Logit* g = logits_at(p, at, row) + channel;
    if (G_FP32) prefetch(g), prefetch(g + 32);
}

DEVICE void unpack_8(float (&to)[8], uint4 w) {
    float2 a = Io::unpack(w.x), b = Io::unpack(w.y), c = Io::unpack(w.z), d = Io::unpack(w.w);
    to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y, to[4] = c.x, to[5] = c.y, to[6] = d.x, to[7] = d.y;
}

// Eight floats from two places of four.
DEVICE void load_8(float (&to)[8], const float* from, int second = 4) {
    float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + second);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
DEVICE void load_8(float (&to)[8], const u16* from, int = 0) { unpack_8(to, *reinterpret_cast<const uint4*>(from)); }

DEVICE float as_float(float x) { return x; }
DEVICE float as_float(u16 x) { return Io::unpack(x).x; }

// ---------------------------------------------------------------- scales

// Reduce x to a power of two; return what it is multiplied by, in [1, 2).
DEVICE float take_mantissa(float& x) {
    const u32 bits = __float_as_uint(x);
    x = __uint_as_float(bits & 0xff800000u);
    return __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
}

DEVICE u32 word(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// A token's factors of q, k and the output.
struct Scales {
    float q, k, o;

    // From <q, q> and <k, k>. q gets a length in [1, 2), and a power of two is the factor of the output: the gradient of
    // the output, which the backward multiplies by it, is then not rounded again. The length of k is at most 1.
    DEVICE Scales(const ForwardParams& p, float q_q, float k_k, bool valid) {
        q = rsqrt_fast(q_q + (p.qk_l2norm ? 1e-6f : 1e-37f));
        k = p.qk_l2norm ? rsqrt_fast(k_k + 1e-6f) : 1.f;
        o = p.qk_l2norm ? p.scale : p.scale * q_q * q;
        q *= take_mantissa(o);
        if (!valid) q = k = 0.f;  // rows after the end are zeros
    }
};

#if HEAD_GATES
#include "head_decays.cuh"
#else
#include "channel_decays.cuh"
#endif

// ---------------------------------------------------------------- the chunk

DEVICE void store_scale(Lane lane, const Stage& stage, const float* scale) {
    stage.scale()[lane.id] = scale[lane.id], stage.scale()[lane.id + 32] = scale[lane.id + 32];
}

// L and Aqk left of the diagonal block; `between` becomes the decay from the chunk's start to the block's.
DEVICE void multiply_blocks(Lane lane, Tile& L, Tile (&A)[3], Between& between, const Decayed& x, const Shared& shared,
                            u32 iteration, bool gives) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES;
    #pragma unroll
    for (int j = 2; j >= 0; j--) {
        if (j >= b) continue;
        multiply_block(lane, L, A[j], x, shared, iteration, between, j);
        send_sums(shared.sums_of_L(h, b, j) + lane.id, L);
        if (gives) send_sums(shared.sums_of_A(iteration, b, j) + lane.id, A[j]);
        between.add_block(lane, shared, iteration, j);
    }
}

// Add the other half's sums to Aqk.
DEVICE void add_other_half(Lane lane, Tile (&A)[3], Tile& own, const Shared& shared, u32 iteration, int b) {
    #pragma unroll
    for (int j = 0; j < 3; j++) {
        if (j < b) add_sums(A[j], shared.sums_of_A(iteration, b, j) + lane.id);
    }
    add_sums(own, shared.sums_of_A(iteration, b, b) + lane.id);
}

// Prepare the chunk at the cursor, whose q and k are loaded to `raw` or fetched, and fetch the next one.
DEVICE void prepare_chunk(Lane lane, const ForwardParams& p, const Shared& shared, const Gates<GATE>& gates, Raw& raw,
                          const Cursor& at, const Cursor& next, u32 count, u32 iteration) {
    int b = lane.warp / HALVES, h = lane.warp % HALVES;
    Pairs near, far;
    cp_async_wait<0>();
    if (BLOCK_ROLES) {
        warp_sync();  // other lanes have copied biases
        load_raw(lane, raw, p, shared, at);
    }
    start_decays(lane, near, far, gates, raw, p, shared, at, iteration);
    Tile L = {}, own = {};  // diagonal blocks of L and Aqk
    const Directions d(lane, L, own, raw, p, shared, at, iteration);
    // L and Aqk among the block's 16 tokens: binary anchoring
    anchor<1>(lane, L, own, near, far, d);
    if (next.valid(p)) {
        fetch_inputs(lane, raw, p, shared, next);
        if (!BLOCK_ROLES) prefetch_raw(lane.warp, lane.id, p, next);
    }
    anchor<2>(lane, L, own, near, far, d);
    anchor<4>(lane, L, own, near, far, d);
    Pairs &after = near, &before = far;  // as g / 8 is even, as if all 8 tokens were a lower half
    anchor_8(lane, L, own, before, after, d);
    // Exchange columns with the warps of later blocks, and sums of Aqk with the other half of the channels
    bool gives = HALVES > 1 && h == iteration % 2;  // this warp sends its sums of Aqk to the other half
    if (!HAS_WGMMA) lane.opt_barrier();             // without it, sm_100a spills in one variant
    if (iteration > 0) mbarrier_wait(shared.inverted(), (iteration - 1) & 1);
    send_sums(shared.sums_of_L(h, b, b) + lane.id, L);
    const Decayed decayed(d, before, after);
    decayed.store_columns(lane, shared, iteration);
    barrier_sync(PREPARED, 32 * PREPARE_WARPS);
    wait_for_room(shared, iteration);
    const Stage stage = room(p, shared, at, count, iteration);
    if (gives) send_sums(shared.sums_of_A(iteration, b, b) + lane.id, own);
    if (lane.warp == 0) store_scale(lane, stage, shared.scale(iteration));
    store_Kr(lane, shared, stage, decayed, iteration);
    Tile A[3] = {};
    Between between;
    multiply_blocks(lane, L, A, between, decayed, shared, iteration, gives);
    arrive_by_warp(lane, shared.summed());
    store_Kg_Qg(lane, stage, decayed, between);
    if (LOADS_AHEAD && next.valid(p)) load_raw(lane, raw, p, shared, next);
    if (HALVES > 1) barrier_sync(TOKENS + b, 32 * HALVES);
    if (gives) return;
    if (HALVES > 1) add_other_half(lane, A, own, shared, iteration, b);
    store_row(lane, stage.Aqk(), A, own, b);
}
