// What the kernels that join segments share: a state, or the gradient of one, is handed from segment to segment, in fp32.
//
// A CTA has JOIN_ROWS rows [K] of a matrix [V, K], which are independent, and a warp 32 columns of their product with F.
// Lane 4 g + q multiplies all rows by 8 columns over an eighth of k, so that 16 floats from shared memory serve 64 FMAs;
// the eighths are then summed, and the lane keeps row g of its columns. Fewer rows would not help: a CTA reads all of F,
// which takes about as long as its FMAs, and twice the CTAs would read twice as much from L2.
//
// Grid: V / JOIN_ROWS for each value head and sequence, if packed of as many sequences as may be cut. Dynamic shared memory:
// JOIN_STAGES times F, [K, K], copied two steps ahead; the rows, [2][JOIN_ROWS][K]; and an mbarrier for each stage.
#pragma once
#include "stage.cuh"

constexpr int JOIN_ROWS = 8, JOIN_STAGES = 3, JOIN_THREADS = K;

// Matrices in global memory, one for each step.
template <class T> struct Series {
    T* first;
    i64 stride;
    DEVICE T* at(int step) const { return first + step * stride; }
};

struct Join {
    static constexpr u32 ROW = K * 4, MATRIX = K * ROW;
    int sequence, head, segments;  // 0 segments if the sequence is not cut, or there is none
    i64 row;                       // of the first segment
    u32 g, q;
    u32 own;    // byte offset of the thread's first 4 elements in the CTA's rows; the other 4 are at own ^ 16
    int first;  // offset of the CTA's rows in [V, K]

    template <class Params> static DEVICE Join of_thread(const Params& p) {
        constexpr int BLOCKS = V / JOIN_ROWS;
        const Lane lane = {int(threadIdx.x / 32), int(threadIdx.x % 32)};
        Join at;
        const int before = blockIdx.x / BLOCKS / p.HV;  // sequences that are cut
        at.sequence = p.cu_seqlens ? cut_sequence(lane, p, before) : before;
        at.head = blockIdx.x / BLOCKS % p.HV, at.segments = 0;
        if (at.sequence < 0) return at;
        const WorkTile tile = work_tile(p, at.sequence * p.segments * p.HV + at.head);
        const int length = in_chunks(p, p.cu_seqlens ? offset_of(p, at.sequence + 1) - tile.first : p.T);
        at.segments = tile.last ? 0 : (length - 1) / tile.length + 1;
        at.row = i64(before) * p.segments * p.HV + at.head;
        at.g = lane.id / 4, at.q = lane.id % 4;
        // Odd g have their two pieces in the other order: 8 lanes then read two rows of F without bank conflicts.
        at.own = at.g * ROW + 128 * lane.warp + 32 * at.q + 16 * (at.g % 2);
        at.first = blockIdx.x % BLOCKS * JOIN_ROWS * K;
        return at;
    }
    // Load the thread's elements of a matrix [V, K].
    DEVICE void load(float (&s)[2][4], const float* from) const {
        #pragma unroll
        for (int b = 0; b < 2; b++) load(s[b], from + first, own ^ 16 * b);
    }

    // Store s, a state, to `states` before each of `steps` steps and after the last; a step takes it to s F + B, or
    // s F^T + B.
    template <bool transposed> DEVICE void join(float (&s)[2][4], int steps, Series<float> states,
                                                Series<const float> F, Series<const float> B) const {
        const auto fetch = [&](int step) {
            if (threadIdx.x != 0 || step >= steps) return;
            mbarrier_arrive_expect_tx(full(step), MATRIX);
            cp_async_bulk_multicast(factors(step), F.at(step), MATRIX, full(step), 1);
        };
        if (threadIdx.x == 0) {
            for (int i = 0; i < JOIN_STAGES; i++) mbarrier_init(full(i), 1);
            fence_mbarrier_init();
        }
        for (int step = 0; step < JOIN_STAGES - 1; step++) fetch(step);
        for (int step = 0;; step++) {
            unsigned char* rows = shared_memory() + JOIN_STAGES * MATRIX + step % 2 * JOIN_ROWS * ROW;
            #pragma unroll
            for (int b = 0; b < 2; b++) {
                store(rows, own ^ 16 * b, s[b]);
                store(states.at(step) + first, own ^ 16 * b, s[b]);
            }
            if (step == steps) break;
            load(s, B.at(step));
            barrier_sync(0, JOIN_THREADS);  // rows are complete, and the stage of the previous step is free
            fetch(step + JOIN_STAGES - 1);
            mbarrier_wait(full(step), step / JOIN_STAGES & 1);
            multiply<transposed>(s, rows, factors(step));
        }
    }

private:
    static DEVICE unsigned char* factors(int step) { return shared_memory() + step % JOIN_STAGES * MATRIX; }
    static DEVICE u64* full(int step) {
        return reinterpret_cast<u64*>(shared_memory() + JOIN_STAGES * MATRIX + 2 * JOIN_ROWS * ROW) +
               step % JOIN_STAGES;
    }
    static DEVICE void load(float (&to)[4], const void* from, u32 at) {
        const float4 x = *reinterpret_cast<const float4*>(static_cast<const unsigned char*>(from) + at);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    static DEVICE void store(void* to, u32 at, const float (&x)[4]) {
        *reinterpret_cast<float4*>(static_cast<unsigned char*>(to) + at) = make_float4(x[0], x[1], x[2], x[3]);
    }
    // s += rows F, or rows F^T.
    template <bool transposed> DEVICE void multiply(float (&s)[2][4], const void* rows, const void* F) const {
        float sums[8][2][4] = {};  // sums[r] is of row r ^ g: lanes then exchange sums of constant index
        #pragma unroll
        for (int i = 0; i < K / 32; i++) {
            // Byte offset of 4 k in row g. Their order depends on q, so that 8 lanes have no bank conflicts.
            const u32 at = (g * (ROW + ROW / 8) + q % (K / 32) * 16) ^ 16 * i;
            float x[8][4], f[2][4][4];
            #pragma unroll
            for (int r = 0; r < 8; r++) load(x[r], rows, at ^ r * ROW);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                const u32 k = at % ROW, column = (own ^ j / 4 * 16) % ROW, line = j % 4 * ROW;
                load(f[j / 4][j % 4], F, transposed ? column * K + line + k : k * K + line + column);
            }
            #pragma unroll
            for (int e = 0; e < 256; e++) {
                const int j = e / 64, r = e / 8 % 8, b = e / 4 % 2, c = e % 4;
                sums[r][b][c] += x[r][j] * (transposed ? f[b][c][j] : f[b][j][c]);
            }
        }
        // Of two lanes each keeps half of the rows; neighbouring g have the other order of pieces.
        #pragma unroll
        for (int e = 0; e < 56; e++) {
            const int left = e < 32 ? 4 : e < 48 ? 2 : 1, r = e / 8 % left, b = e / 4 % 2, c = e % 4;
            sums[r][b][c] += shuffle_xor(sums[r + left][left == 1 ? 1 - b : b][c], 4 * left);
        }
        #pragma unroll
        for (int e = 0; e < 8; e++) s[e / 4][e % 4] += sums[0][e / 4][e % 4];
    }
};
