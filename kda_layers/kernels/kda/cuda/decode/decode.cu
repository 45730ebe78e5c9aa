// Decode: one or a few tokens of many sequences, the states [slots, HV, V, K] updated in place.
//
// Per value head, with S [V, K] and a token's q, k, decay d = e^g [K], v [V] and beta:
//
//     S <- S d        y_k = S k, y_q = S q         (one pass over the state, which is in registers)
//     e = beta (v - y_k)        o = scale (y_q + (q.k) e)        S <- S + e k^T
//
// The rows of S are independent: a CTA has BLOCK_ROWS of them (state.cuh). With more than a few tokens the kernel is
// bound by instructions, which more rows per lane reduce. A bf16 state is rounded when stored, and after every p.stage
// tokens; an int8 state after every token. With p.initial, states are read there and `state` is only written.
//
// Chosen by the build: what state.cuh names, IO (Bf16 or Fp16), HEAD_GATES (see gates.cuh), and the shape of the work:
// ROWS, WARPS and LANES. With LAST_TOKENS > 0 the kernel computes only the tokens after a sequence's full chunks, if there
// are at most LAST_TOKENS of them. It starts from p.after, the state after the chunks, or from p.before if there are none.
#include "tokens.cuh"

#if LAST_TOKENS
constexpr u32 CHUNK = 64;
#endif

// ---------------------------------------------------------------- the kernel

#if STATE_BYTES == 1
// The scales of a warp's rows.
struct Scales {
    float x[(WARP_ROWS + 31) / 32];

    DEVICE void load(const float* from, u32 lane) {
        #pragma unroll
        for (u32 i = 0; i < WARP_ROWS; i += 32)
            if (i + lane < WARP_ROWS) x[i / 32] = from[i + lane];
    }
    DEVICE void store(float* to, u32 lane) const {
        #pragma unroll
        for (u32 i = 0; i < WARP_ROWS; i += 32)
            if (i + lane < WARP_ROWS) to[i + lane] = x[i / 32];
    }
};
#endif

// The tokens from `first` on that are in shared memory: their outputs, and the states after them that are kept.
#if STATE_BYTES == 1
DEVICE void advance_tokens(State&, const Place& at, const DecodeParams& p, u16* o, const Pool& pool, u32 n, u32 first,
                           u32 count, u32 tokens, u32& slot) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    #pragma unroll 1
    for (u32 t = 0; t < count; t++) {
        const bool kept = destination_of(p, n, first + t, tokens, slot);
        const Token& token = shared.tokens[t];
        unsigned char* to = pool.state_at(slot);
        u16* out = o + u64(first + t) * at.heads * V;
        Tile S = {shared.state[at.warp], shared.scales[at.warp] + at.group};
        #pragma unroll 1
        for (u32 row = at.row; row < at.row + WARP_ROWS; row += OUTPUT_ROWS) {
            uint4 words[Tile::HEIGHT][PIECES];
            float e;
            const float y = S.read(words, e, token, row, at.lane, at.group);
            if (at.lane % COPIES == 0) *out = u16(IO::pack(y, 0.f));
            const float e_other = shuffle_xor(e, COPIES);
            const bool upper = at.lane / COPIES;
            const float errors[Tile::HEIGHT] = {upper ? e_other : e, upper ? e : e_other};
            S.update(words, errors, token, at.lane, at.group);
            #pragma unroll
            for (u32 r = 0; r < Tile::HEIGHT; r++) {
                #pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    if (kept) *reinterpret_cast<uint4*>(to + piece_offset(r, i)) = words[r][i];
                    if (first + t + 1 < tokens) S.piece(r, i) = words[r][i];
                }
            }
            S.pieces += Tile::HEIGHT * PIECES, S.scales += OUTPUT_ROWS;
            to += piece_offset(Tile::HEIGHT, 0), out += OUTPUT_ROWS;
        }
        warp_sync();
        if (kept) {
            Scales scales;
            scales.load(shared.scales[at.warp], threadIdx.x % 32);
            scales.store(pool.scales_at(slot), threadIdx.x % 32);
        }
    }
}
#else
DEVICE void advance_tokens(State& S, const Place& at, const DecodeParams& p, u16* o, const Pool& pool, u32 n, u32 first,
                           u32 count, u32 tokens, u32& slot) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    #pragma unroll 1
    for (u32 t = 0; t < count; t++) {
        const bool kept = destination_of(p, n, first + t, tokens, slot);
        const float y = advance(S, shared.tokens[t], shared.errors[t % 2][at.warp], at.row, at.lane, at.group);
        if (at.lane % COPIES == 0) o[u64(first + t) * at.heads * V] = u16(IO::pack(y, 0.f));
        if (kept && (!LAST_TOKENS || p.state)) S.store(pool.state_at(slot));
    }
}
#endif

// Grid: x = HV * SLICES, y z >= sequences. CTA: 32 WARPS threads. Dynamic shared memory: Shared with p.stage tokens.
// A sequence without tokens changes nothing. Neither does one whose slot or number of accepted tokens is out of
// range, such as -1 where a batch is padded; its outputs are 0.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    kda_decode(const __grid_constant__ DecodeParams p) {
    const u32 n = blockIdx.z * gridDim.y + blockIdx.y;
    if (n >= p.sequences) return;
    const Place at = Place::of_thread();
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());

    auto [batch, start, tokens, output] = Sequence(p, n);
    if (tokens == 0) return;
#if LAST_TOKENS
    if (!p.offsets) batch = 0, start = n * tokens;  // all tokens are rows at one stride
    const u32 in_chunks = tokens / CHUNK * CHUNK;
    start += in_chunks, output += in_chunks, tokens -= in_chunks;
    if (tokens == 0 || tokens > LAST_TOKENS) return;
#endif
    u16* o = p.o + (output * at.heads + at.head) * V + at.block_row + at.row;

    // Load the first tokens before the states: they need more work after they arrive.
    const u32 lane = threadIdx.x % 32;
    const bool prepares = WARPS == 1 || at.warp < min(p.stage, tokens);
    Raw raw;
    if (prepares) fetch(raw, p, batch, start + at.warp, at.head, at.block_row, lane);
    u32 slot;
    if (!source_of(p, n, slot) || (p.initial && !initial_of(p, n, slot))) return clear_outputs(o, tokens, at.heads);
    const Pool pool(p, at);
    State S;
#if LAST_TOKENS
    const unsigned char* from = pool.before(n, slot, in_chunks);
    S.copy(shared.state[at.warp], from, from);
#else
    S.copy(shared.state[at.warp], p.initial ? pool.initial_at(slot, at) : pool.state_at(slot));
#endif
#if STATE_BYTES == 1
    Scales scales;
    scales.load(pool.scales_at(slot), lane);
#endif
    if (prepares) prepare_token(shared.tokens[at.warp], raw, p, lane);
#if STATE_BYTES == 1
    scales.store(shared.scales[at.warp], lane);  // not before: the token must not wait for them
#endif
    for (u32 first = 0; first < tokens; first += p.stage) {
        const u32 count = min(p.stage, tokens - first);
        prepare_tokens(shared, p, first ? at.warp : at.warp + WARPS, count, batch, start + first, at.head, at.block_row,
                       lane);
        barrier_sync(0, 32 * WARPS);
        S.take(shared.state[at.warp]);
        advance_tokens(S, at, p, o, pool, n, first, count, tokens, slot);
        if (first + p.stage < tokens) {
            S.put_back(shared.state[at.warp]);
            barrier_sync(0, 32 * WARPS);
        }
    }
}
