// Lists the sequences of a packed call that have chunks, the longest first. The forward visits these alone (the decode
// kernel computes the few tokens of the others) and does not end with a long one. One CTA.
//
//     order      [sequences]: their indices, by classes of length, then -1
//     positions  [sequences]: where in that list a sequence is; of the others, unwritten
//
// It also lists sequences without tokens, whose final state is the initial one, unless states are updated in place, and
// those whose state at token 0 an engine asks for.
#define IO Bf16
#include "OrderParams.h"
#include "ptx.cuh"
#include "chunk.cuh"

constexpr int THREADS = 256, CLASSES = 6;  // 4^(c - 1) chunks or more are class c

DEVICE int length_of(const OrderParams& p, int sequence) { return offset_of(p, sequence + 1) - offset_of(p, sequence); }

// The class of a sequence, or -1.
DEVICE int class_of(const OrderParams& p, int sequence) {
    const int length = length_of(p, sequence), last = length % CHUNK <= LAST_TOKENS ? length % CHUNK : 0;
    int chunks = (length - last + CHUNK - 1) / CHUNK, c = 0;
    if (chunks == 0 && (last > 0 || p.in_place)) {
        if (!p.stops) return -1;
        const i64 stop =
            p.int64_stops ? static_cast<const i64*>(p.stops)[sequence] : static_cast<const int*>(p.stops)[sequence];
        return stop == 0 ? 0 : -1;
    }
    if (length < CHUNK) return 0;  // behind all that have a whole chunk: a state is handed over after those alone
    for (; chunks > 0 && c + 1 < CLASSES; chunks /= 4) c++;
    return c;
}

extern "C" __global__ void __launch_bounds__(THREADS) kda_order(const __grid_constant__ OrderParams p) {
    u32* const sums = reinterpret_cast<u32*>(shared_memory());  // [2][THREADS]
    const int thread = threadIdx.x, each = (p.sequences + THREADS - 1) / THREADS;
    const int first = thread * each, end = min(first + each, p.sequences);
    u32 listed = 0;
    for (int c = CLASSES - 1; c >= 0; c--) {
        u32 mine = 0;
        for (int i = first; i < end; i++) mine += class_of(p, i) == c;
        u32 sum = mine;  // of threads up to this one
        int buffer = 0;
        #pragma unroll 1
        for (int step = 1; step < THREADS; step *= 2, buffer ^= THREADS) {
            sums[buffer + thread] = sum;
            barrier_sync(0, THREADS);
            if (thread >= step) sum += sums[buffer + thread - step];
        }
        sums[buffer + thread] = sum;
        barrier_sync(0, THREADS);
        u32 place = listed + sum - mine;
        listed += sums[buffer + THREADS - 1];
        for (int i = first; i < end; i++) {
            if (class_of(p, i) == c) p.order[place] = i, p.positions[i] = place++;
        }
        barrier_sync(0, THREADS);
    }
    for (int i = int(listed) + thread; i < p.sequences; i += THREADS) p.order[i] = -1;
}
