// What the kernels that join segments share: a state, or the gradient of one, is handed from segment to segment, in fp32.
//
// A CTA has JOIN_ROWS rows [K] of a matrix [V, K], which are independent, and 2 K threads: a thread has half of the rows,
// of one column. Grid: N * HV * V / JOIN_ROWS. Dynamic shared memory: [2][JOIN_ROWS][K] floats, then [2][K][K], where F of
// the next segment arrives while this one's is multiplied.
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
    static DEVICE void load(float (&to)[ROWS], const float* from) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) to[r] = from[r * K];
    }
    // Start to copy F of the segment to the place of `which`. Of row r, piece i of four floats goes to piece i ^ r % 8: lanes
    // read neighbours in a row as well as in a column without bank conflicts.
    DEVICE void fetch(int which, const float* F) const {
        float* to = factors(which);
        #pragma unroll 4
        for (int i = threadIdx.x; i < K * K / 4; i += JOIN_THREADS) {
            const int row = i / (K / 4), piece = i % (K / 4);
            cp_async_16(to + row * K + (piece ^ row % 8) * 4, F + 4 * i, true);
        }
        cp_async_commit();
    }
    // What was fetched is there, and so is what all threads have put into buffers.
    DEVICE void wait() const {
        cp_async_wait<0>();
        barrier_sync(0, JOIN_THREADS);
    }
    // s += rows times F, or times its transpose.
    template <bool transposed> DEVICE void multiply(float (&s)[ROWS], const float* rows, int which) const {
        const float* F = factors(which);
        #pragma unroll 2
        for (int k = 0; k < K; k += 4) {
            float f[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = transposed ? column : k + j, at = transposed ? k + j : column;
                f[j] = F[row * K + (at / 4 ^ row % 8) * 4 + at % 4];
            }
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float4 x = *reinterpret_cast<const float4*>(rows + r * K + k);
                s[r] += x.x * f[0], s[r] += x.y * f[1], s[r] += x.z * f[2], s[r] += x.w * f[3];
            }
        }
    }

private:
    DEVICE float* factors(int which) const {
        return reinterpret_cast<float*>(shared_memory()) + 2 * JOIN_ROWS * K + which % 2 * K * K;
    }
};
