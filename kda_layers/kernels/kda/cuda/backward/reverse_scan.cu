// The reverse scan of the backward, from a sequence's last chunk to its first. With dS the gradient of the state at a
// chunk's end, and dO' = scale dO:
//     dV' = Aqk^T dO' + Kr dS     bX = T'^T dV'     dS <- gamma dS + Qg^T dO' - Kg^T bX
// bX is the gradient of v; with it and dS all other gradients are parallel over chunks. Formulas and names:
// docs/internals/kernels/forward.md, whose prepared chunks this reads.
//
// A CTA has 64 columns of V, which are independent, and a warp 16 of them, as rows of every MMA: the result of one MMA,
// rounded, is operand A of the next in the same lane. So the chain from chunk to chunk does not pass through shared
// memory, and no warp waits for another. One more warp copies the chunks.
//
// Row 8 r + c of a warp's 16 is its column 4 (c / 2) + 2 r + c % 2: then a lane's columns of one token are contiguous
// in memory.
#include "ReverseScanParams.h"
#include "stage.cuh"

constexpr int STAGES = CLUSTER > 0 ? 3 : 2;  // as many as fit into shared memory
constexpr int SCAN_WARPS = 4, THREADS = 32 * (SCAN_WARPS + 1);
static_assert(BV == 16 * SCAN_WARPS, "a warp has 16 columns");

struct Shared {
    static constexpr int STAGES = ::STAGES;
    unsigned char* base;
    static constexpr int AT_ROWS = STAGES * STAGE_BYTES;
    static constexpr int AT_BARRIERS = AT_ROWS + BV * K * 2;
    static constexpr int BYTES = AT_BARRIERS + 2 * PARTS * STAGES * 8;

    DEVICE Stage stage(u32 count) const { return {base + (count % STAGES) * STAGE_BYTES}; }
    DEVICE unsigned char* rows(int w) const {
        return base + AT_ROWS + w * 16 * K * 2;
    }  // of dS: [16, K], each warp's own
    DEVICE u64* full(int part, u32 count) const {
        return reinterpret_cast<u64*>(base + AT_BARRIERS) + part * STAGES + count % STAGES;
    }
    DEVICE u64* empty(int part, u32 count) const { return full(part, count) + PARTS * STAGES; }

    static DEVICE constexpr int releases(int) { return SCAN_WARPS; }  // warps of a CTA that release a part

    DEVICE void init_barriers() const {
        init_part_barriers(*this);
#if __CUDA_ARCH__ >= 900
        fence_mbarrier_init();
#endif
    }
};

static_assert(Shared::BYTES == SHARED_BYTES, "the host's plan of shared memory");

// ---------------------------------------------------------------- operands

using Tokens = u32[CHUNK / 16][4];              // 16 columns by the chunk's tokens, rounded, as operand A
template <int N> using Sums = float[N / 8][4];  // 16 columns by N, in mma's accumulator order

template <int N> DEVICE void clear(Sums<N>& x) {
    #pragma unroll
    for (int i = 0; i < N / 2; i++) x[i / 4][i % 4] = 0.f;
}

template <int N> DEVICE void as_operand(u32 (&to)[N / 16][4], const Sums<N>& x, float sign) {
    #pragma unroll
    for (int i = 0; i < N / 4; i++)
        to[i / 4][i % 4] = Io::pack(sign * x[i / 2][i % 2 * 2], sign * x[i / 2][i % 2 * 2 + 1]);
}

// d += a b over the tokens 16 first to 16 last, b [64, N].
template <int N, int first = 0, int last = CHUNK / 16>
DEVICE void multiply_tokens(Sums<N>& d, const Tokens& a, Operand b) {
    #pragma unroll
    for (int s = first; s < last; s++) wgmma_rs<Io, N, true>(d, a[s], operand_at(b, s * N * 32));
    wgmma_commit();
}

// d += a b^T over the channels, b [64, K].
DEVICE void multiply_channels(Sums<CHUNK>& d, const u32 (&a)[K / 16][4], Operand b) {
    #pragma unroll
    for (int s = 0; s < K / 16; s++) wgmma_rs<Io, CHUNK>(d, a[s], operand_at(b, s * 256));
    wgmma_commit();
}

// A lane's four columns of tokens id / 4 + 8 i of dO or of the gradient of v, contiguous in memory.
struct Values {
    uint2 x[CHUNK / 8];

    DEVICE void load(Lane lane, const u16* from, i64 stride, int tokens) {
        #pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            int token = lane.id / 4 + 8 * i;
            x[i] = token < tokens ? *reinterpret_cast<const uint2*>(from + token * stride) : make_uint2(0, 0);
        }
    }
    DEVICE void scaled(Lane lane, Tokens& to, const float* scale) const {
        #pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            float by = scale[lane.id / 4 + 8 * i];
            float2 a = Io::unpack(x[i].x), b = Io::unpack(x[i].y);
            to[i / 2][i % 2 * 2] = transpose_8x8(Io::pack(a.x * by, a.y * by));
            to[i / 2][i % 2 * 2 + 1] = transpose_8x8(Io::pack(b.x * by, b.y * by));
        }
    }
};

DEVICE void store_negated(Lane lane, u16* to, const Tokens& x, i64 stride, int tokens) {
    constexpr u32 SIGNS = 0x80008000u;
    #pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        u32 a = transpose_8x8(x[i / 2][i % 2 * 2] ^ SIGNS), b = transpose_8x8(x[i / 2][i % 2 * 2 + 1] ^ SIGNS);
        int token = lane.id / 4 + 8 * i;
        if (token < tokens)
            *reinterpret_cast<u64*>(to + token * stride) = a | u64(b) << 32;  // ptxas splits the store of a uint2
    }
}

// ---------------------------------------------------------------- the state's gradient

struct Gradient {
    Sums<K> S;  // its transpose: columns of V by K

    // Call f with each pair of neighbours and its offset in the warp's [16, K].
    template <class F> DEVICE void each(Lane lane, F f) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int column = lane.id / 8 * 4 + 2 * r + lane.id / 4 % 2;
            #pragma unroll
            for (int i = 0; i < K / 8; i++) f(S[i][2 * r], S[i][2 * r + 1], column * K + 8 * i + lane.id % 4 * 2);
        }
    }
    DEVICE void load(Lane lane, const float* from) {
        each(lane, [&](float& a, float& b, int at) {
            float2 x = from ? *reinterpret_cast<const float2*>(from + at) : make_float2(0.f, 0.f);
            a = x.x, b = x.y;
        });
    }
    DEVICE void add(Lane lane, const float* from) {
        each(lane, [&](float& a, float& b, int at) {
            float2 x = *reinterpret_cast<const float2*>(from + at);
            a += x.x, b += x.y;
        });
    }
    DEVICE void store(Lane lane, float* to) {
        each(lane, [&](float& a, float& b, int at) { *reinterpret_cast<float2*>(to + at) = make_float2(a, b); });
    }
    DEVICE void decay(Lane lane, const float* gamma) {
        #pragma unroll
        for (int i = 0; i < K / 8; i++) {
            float2 x = *reinterpret_cast<const float2*>(gamma + 8 * i + lane.id % 4 * 2);
            S[i][0] *= x.x, S[i][1] *= x.y, S[i][2] *= x.x, S[i][3] *= x.y;
        }
    }
};

// Store a warp's 16 columns of dS, an operand, 16 bytes at a time. In shared memory the pieces of row m are permuted by
// m % 8: neither the stores nor the loads have bank conflicts.
DEVICE void store_rows(Lane lane, u16* to, unsigned char* rows, const u32 (&x)[K / 16][4]) {
    constexpr int PIECES = K / 8;  // of a row
    warp_sync();                   // the previous chunk's have been read
    #pragma unroll
    for (int s = 0; s < K / 16; s++) {
        int m = lane.id % 16, piece = 2 * s + lane.id / 16;
        stmatrix_x4(rows + (m * PIECES + (piece ^ m % 8)) * 16, x[s]);
    }
    warp_sync();
    #pragma unroll
    for (int i = 0; i < PIECES / 2; i++) {
        int m = (32 * i + lane.id) / PIECES, piece = lane.id % PIECES, column = m % 8 / 2 * 4 + m / 8 * 2 + m % 2;
        *reinterpret_cast<uint4*>(to + column * K + 8 * piece) =
            *reinterpret_cast<const uint4*>(rows + (m * PIECES + (piece ^ m % 8)) * 16);
    }
}

// ---------------------------------------------------------------- the scan

// What a warp passes from chunk to chunk.
struct Carried {
    Gradient d;   // dS
    Values next;  // the next chunk's dO
    Tokens O;     // dO', an operand
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

// dV' = Aqk^T dO' + Kr dS, in flight on return; S: dS, rounded.
DEVICE void error_gradients(Sums<CHUNK>& V1, u32 (&S)[K / 16][4], Carried& x, const Shared& shared,
                            const Operands& operands, u32 count) {
    wgmma_fence();
    multiply_tokens<CHUNK>(V1, x.O, operands.Aqk());
    wgmma_wait<1>();  // does not wait, but without it ptxas serializes all wgmma
    fence_operand(x.d.S);
    as_operand<K>(S, x.d.S, 1.f);
    wait_for(shared, UPDATE, count);
    wgmma_fence();
    multiply_channels(V1, S, operands.Kr());
}

// dS <- gamma dS + Qg^T dO' over half of the tokens. The other half is in value_gradients: both fill gaps of the
// dependency chain. Saves dS as it was, S, and waits for dV'.
DEVICE void decay_state(Lane lane, Sums<CHUNK>& V1, const u32 (&S)[K / 16][4], Carried& x, const ReverseScanParams& p,
                        const Shared& shared, const Operands& operands, u32 count, i64 row, int column) {
    x.d.decay(lane, shared.stage(count).gamma());
    wgmma_fence();
    multiply_tokens<K, 0, 2>(x.d.S, x.O, operands.Qg());
    store_rows(lane, p.d_states + state_at(row, column), shared.rows(lane.warp), S);
    wgmma_wait<1>();
    fence_operand(V1);
    release(lane, shared, UPDATE, count);
}

// bX = T'^T dV'.
DEVICE void value_gradients(Sums<CHUNK>& X1, const Sums<CHUNK>& V1, Carried& x, const Shared& shared,
                            const Operands& operands, u32 count) {
    Tokens V0;
    as_operand<CHUNK>(V0, V1, 1.f);
    wait_for(shared, ERRORS, count);
    wgmma_fence();
    multiply_tokens<CHUNK>(X1, V0, operands.T);
    multiply_tokens<K, 2, 4>(x.d.S, x.O, operands.Qg());
    wgmma_wait<1>();
    fence_operand(X1);
}

// dS <- dS - Kg^T bX, in flight on return; X: -bX, rounded. Stores bX.
DEVICE void subtract_errors(Lane lane, Carried& x, Tokens& X, const Sums<CHUNK>& X1, u16* d_v, i64 stride, int tokens,
                            const Shared& shared, const Operands& operands, u32 count) {
    as_operand<CHUNK>(X, X1, -1.f);
    wgmma_fence();
    multiply_tokens<K>(x.d.S, X, operands.Kg);
    store_negated(lane, d_v, X, stride, tokens);
    wgmma_wait<1>();
    release(lane, shared, OUTPUT, count);
}

// Wait for dS.
DEVICE void finish_chunk(Lane lane, Carried& x, const Shared& shared, u32 count) {
    wgmma_wait<0>();
    fence_operand(x.d.S);
    release(lane, shared, ERRORS, count);
}

DEVICE void scan(Lane lane, const ReverseScanParams& p, const Shared& shared) {
    const i64 stride = i64(p.HV) * V;
    const int column = slice() * BV + 16 * lane.warp;
    const Operands first = Operands::of(shared.stage(0));
    u32 count = 0;
    for (int index = cta_group(); index < p.tiles; index += cta_groups()) {
        const WorkTile tile = work_tile(p, index);
        int chunk = tile.chunks() - 1;
        i64 row = i64(chunks_before(lane, p, tile.sequence, ALL) + chunk) * p.HV + tile.head;  // in per-chunk tensors
        const i64 first_checkpoint = i64(chunks_before(lane, p, tile.sequence, WHOLE)) * p.HV + tile.head;
        i64 at = tile.row(p, chunk * CHUNK) * V + column + lane.id % 4 * 4;  // offset in dO and d_v
        Carried x;
        x.d.load(lane, p.d_final ? p.d_final + state_at(index, column) : nullptr);
        if (chunk >= 0) {
            x.next.load(lane, p.d_o + at, stride, tile.length - chunk * CHUNK);
            wait_for(shared, OUTPUT, count);
            x.next.scaled(lane, x.O, shared.stage(count).scale());
            if (chunk > 0) x.next.load(lane, p.d_o + at - CHUNK * stride, stride, CHUNK);
        }
        for (; chunk >= 0; chunk--, count++, row -= p.HV, at -= CHUNK * stride) {
            const Operands operands = first.at(count % STAGES * STAGE_BYTES);
            Sums<CHUNK> V1, X1;  // dV', bX
            u32 S[K / 16][4];
            Tokens X;  // read by MMAs until the chunk's end
            clear<CHUNK>(V1), clear<CHUNK>(X1);
            if (p.d_checkpoints && (chunk + 1) * CHUNK <= tile.length)
                x.d.add(lane, p.d_checkpoints + state_at(first_checkpoint + i64(chunk) * p.HV, column));
            error_gradients(V1, S, x, shared, operands, count);
            decay_state(lane, V1, S, x, p, shared, operands, count, row, column);
            value_gradients(X1, V1, x, shared, operands, count);
            subtract_errors(lane, x, X, X1, p.d_v + at, stride, tile.length - chunk * CHUNK, shared, operands, count);
            if (chunk > 0) {
                wait_for(shared, OUTPUT, count + 1);
                x.next.scaled(lane, x.O, shared.stage(count + 1).scale());
            }
            if (chunk > 1) x.next.load(lane, p.d_o + at - 2 * CHUNK * stride, stride, CHUNK);
            finish_chunk(lane, x, shared, count);
        }
        if (p.d_initial) x.d.store(lane, p.d_initial + state_at(index, column));
    }
}

// ---------------------------------------------------------------- the warp that copies chunks

// Without bulk copies.
DEVICE void copy_parts(Lane lane, const Stage& from, const Shared& shared, u32 count) {
    for (int part : {UPDATE, OUTPUT, ERRORS}) {
        wait_for_release(shared, part, count);
        for (int i = part_at(part) + 16 * lane.id; i < part_at(part + 1); i += 512)
            cp_async_16(shared.stage(count).base + i, from.base + i, true);
    }
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
        const int row = chunks_before(lane, p, tile.sequence, ALL);
        for (int chunk = tile.chunks() - 1; chunk >= 0; chunk--, count++) {
            for (int token = chunk * CHUNK + lane.id; token < min((chunk + 1) * CHUNK, tile.length); token += 32) {
                prefetch(p.d_o + tile.row(p, token) * V + slice() * BV);
            }
            const Stage from{p.prepared + (i64(row + chunk) * p.HV + tile.head) * STAGE_BYTES};
            if constexpr (CLUSTER == 0) {
                copy_parts(lane, from, shared, count);
            } else if (lane.id == 0) {
                for (int part : {UPDATE, OUTPUT, ERRORS}) {  // in the order of their release
                    if (count >= STAGES) wait_for(shared, part, count - STAGES);
                    expect(shared, part, count);
                    fetch(from, shared, part, count);
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
    block_or_cluster_sync(THREADS);
    if (lane.warp < SCAN_WARPS) scan(lane, p, shared);
    else fetch_chunks(lane, p, shared);
    block_or_cluster_sync(THREADS);
}
