// What the kernels that join segments share: a state, or the gradient of one, is handed from segment to segment, in fp32.
//
// A CTA has JOIN_ROWS rows [K] of a matrix [V, K], which are independent, and 2 K threads: a thread has half of the rows,
// of one column. Grid: N * HV * V / JOIN_ROWS. Dynamic shared memory: [2][JOIN_ROWS][K] floats.
#pragma once
#include "stage.cuh"

constexpr int JOIN_ROWS = 8, JOIN_THREADS = 2 * K;

struct Join {
    static constexpr int ROWS = JOIN_ROWS / 2;  // of a thread
    int sequence, head, column, first;          // first: of the thread's rows in the CTA
    int place;                                  // of the thread's first element in [V, K]
    Lane lane;

    template <class Params> static DEVICE Join of_thread(const Params& p) {
        constexpr int BLOCKS = V / JOIN_ROWS;
        Join at;
        at.sequence = blockIdx.x / BLOCKS / p.HV, at.head = blockIdx.x / BLOCKS % p.HV;
        at.column = threadIdx.x % K, at.first = threadIdx.x / K * ROWS;
        at.place = (blockIdx.x % BLOCKS * JOIN_ROWS + at.first) * K + at.column;
        at.lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
        return at;
    }
    template <class Params> DEVICE WorkTile tile(const Params& p, int segment) const {
        return work_tile(p, (sequence * p.segments + segment) * p.HV + head);
    }
    // The thread's rows in one of two buffers.
    DEVICE float* buffer(int which) const {
        return reinterpret_cast<float*>(shared_memory()) + (which % 2 * JOIN_ROWS + first) * K;
    }
    // s += rows of a buffer times f, the factors of 4 columns from k on.
    static DEVICE void multiply(float (&s)[ROWS], const float* rows, int k, float4 f) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float4 x = *reinterpret_cast<const float4*>(rows + r * K + k);
            s[r] += x.x * f.x, s[r] += x.y * f.y, s[r] += x.z * f.z, s[r] += x.w * f.w;
        }
    }
};
