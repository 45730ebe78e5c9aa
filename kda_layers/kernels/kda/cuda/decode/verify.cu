// Verification of drafts: the outputs of a few tokens of many sequences, whose states stay as they are.
//
// Per token and value head, what the state needs to advance by the token is kept in fp32 (struct Update): the decay d, the
// key k and the error e of decode.cu. First the states advance by the tokens of the last call that were accepted,
// S <- S d + e k^T, by the operations of decode.cu and so with its bits. Without tokens, this is all that happens.
//
// A CTA has a whole head: all updates of the last call are read before the first is overwritten.
#include "tokens.cuh"

static_assert(SLICES == 1 && STATE_BYTES > 1, "a CTA has a whole head, of a state without scales");

struct Update {  // of a token and value head
    float decay[K], k[K], error[V];
};
constexpr u32 UPDATE_PIECES = sizeof(Update) / 16, LINE = 128;
constexpr u32 FIT = sizeof(Shared::state) / sizeof(Update);  // updates that are read at a time, into the states' memory

DEVICE Update* update_at(const DecodeParams& p, u32 slot, u32 token, u32 head) {
    return reinterpret_cast<Update*>(p.updates + start(p.updates_at, slot, token, head));
}

// The slot of the updates of sequence n, whose state is in `slot`; false if there is none.
DEVICE bool update_slot_of(const DecodeParams& p, u32 n, u32 slot, u32& found) {
    const u64 s = p.update_slots ? u64(value_at(p.update_slots_at, p.update_slots, n, 0)) : slot;
    found = u32(s);
    return s < p.update_count;
}

// By how many tokens the state of sequence n advances first; false if that is out of range.
DEVICE bool commits_of(const DecodeParams& p, u32 n, u32& commits) {
    const u64 count = p.commits ? u64(value_at(p.commits_at, p.commits, n, 0)) : 0;
    commits = u32(count);
    return count <= p.most_tokens;
}

// Advance a state in registers by the first `count` updates, and write it to `state`.
DEVICE void commit(State& S, Shared& shared, const DecodeParams& p, const Place& at, u32 slot, u32 count,
                   unsigned char* state) {
    Update* const updates = reinterpret_cast<Update*>(shared.state);
    #pragma unroll 1
    for (u32 first = 0; first < count; first += FIT) {
        const u32 read = min(FIT, count - first);
        barrier_sync(0, 32 * WARPS);  // the states in this memory, or the updates before, are read
        for (u32 i = threadIdx.x; i < read * UPDATE_PIECES; i += 32 * WARPS) {
            const u32 token = i / UPDATE_PIECES, piece = i % UPDATE_PIECES;
            cp_async_16(reinterpret_cast<uint4*>(updates + token) + piece,
                        reinterpret_cast<const uint4*>(update_at(p, slot, first + token, at.head)) + piece, true);
        }
        cp_async_commit();
        cp_async_wait<0>();
        barrier_sync(0, 32 * WARPS);
        #pragma unroll 1
        for (u32 t = 0; t < read; t++) {
            const float* errors = updates[t].error + at.warp * WARP_ROWS + at.group;
            float k[WIDTH], d[WIDTH];
            spread(k, updates[t].k, at.lane), spread(d, updates[t].decay, at.lane);
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float e = errors[r * GROUPS];
                #pragma unroll
                for (int i = 0; i < WIDTH; i++) S.x[r][i] = written(decayed(S.x[r][i], d[i]), e, k[i]);
            }
        }
    }
    S.store(state), S.round();
}

// Grid: x = HV, y z >= sequences. CTA: 32 WARPS threads. Dynamic shared memory: Shared with p.stage tokens.
// A sequence with a slot, a number of accepted tokens or a number of tokens out of range, such as slot -1 where a batch
// is padded, changes nothing; its outputs are 0.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    kda_verify(const __grid_constant__ DecodeParams p) {
    const u32 n = blockIdx.z * gridDim.y + blockIdx.y;
    if (n >= p.sequences) return;
    const Place at = Place::of_thread();
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const u32 lane = threadIdx.x % 32;
    const auto [batch, start, tokens, output] = Sequence(p, n);
    u16* o = p.o + (output * at.heads + at.head) * V + at.row;

    const bool prepares = at.warp < tokens;
    Raw raw;
    if (prepares) fetch(raw, p, batch, start + at.warp, at.head, 0, lane);
    u32 slot, update_slot, first, commits;
    bool in_range = commits_of(p, n, commits) & (tokens <= p.stage);
    in_range &= source_of(p, n, slot);
    in_range &= update_slot_of(p, n, slot, update_slot);
    if (p.initial) in_range &= initial_of(p, n, first);
    if (!in_range) return clear_outputs(o, tokens, at.heads);
    if (tokens == 0 && commits == 0 && !p.initial) return;
    const Pool pool(p, at);
    State S;
    S.copy(shared.state[at.warp], p.initial ? pool.initial_at(first, at) : pool.state_at(slot));
    for (u32 i = threadIdx.x; i < commits * (UPDATE_PIECES * 16 / LINE); i += 32 * WARPS)
        prefetch(reinterpret_cast<const unsigned char*>(
                     update_at(p, update_slot, i / (UPDATE_PIECES * 16 / LINE), at.head)) +
                 i % (UPDATE_PIECES * 16 / LINE) * LINE);
    if (prepares) prepare_token(shared.tokens[at.warp], raw, p, lane);
    prepare_tokens(shared, p, at.warp + WARPS, tokens, batch, start, at.head, 0, lane);
    S.take(shared.state[at.warp]);
    if (commits || p.initial) commit(S, shared, p, at, update_slot, commits, pool.state_at(slot));
    barrier_sync(0, 32 * WARPS);  // tokens are prepared, and updates of the last call read by every warp

    #pragma unroll 1
    for (u32 t = at.warp; t < tokens; t += WARPS) {
        Update* const to = update_at(p, update_slot, t, at.head);
        put_words(to->decay + lane * PER_LANE, shared.tokens[t].decay + lane * PER_LANE);
        put_words(to->k + lane * PER_LANE, shared.tokens[t].k + lane * PER_LANE);
    }
    #pragma unroll 1
    for (u32 t = 0; t < tokens; t++) {
        float* errors = shared.errors[t % 2][at.warp];
        const float y = advance(S, shared.tokens[t], errors, at.row, at.lane, at.group);
        if (at.lane % COPIES == 0) {
            o[u64(t) * at.heads * V] = u16(IO::pack(y, 0.f));
            update_at(p, update_slot, t, at.head)->error[at.row] = errors[at.group * ROWS + at.lane / COPIES];
        }
    }
}
