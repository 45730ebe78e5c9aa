// Small kernels for test_emulator.py, which numbers them: `test` chooses. They are valid CUDA, but for the broken ones.
#include "ptx.cuh"

struct Params {
    const u32* in;
    u32* out;
    int test;
    int variant;
};

// in: per lane A's 4 registers, B's 2 and C's 4; out: per lane D's 4.
template <class Number, class Sum = float> DEVICE void mma(const Params& p) {
    const u32* x = p.in + threadIdx.x * 10;
    Sum d[4];
    memcpy(d, x + 6, sizeof d);
    for (int i = 0; i < p.variant; ++i) Number::mma(d, x[0], x[1], x[2], x[3], x[4], x[5]);
    memcpy(p.out + threadIdx.x * 4, d, sizeof d);
}

// The same of m16n8k8: A's 2 registers, B's 1 and C's 4.
DEVICE void mma_of_8(const Params& p) {
    const u32* x = p.in + threadIdx.x * 7;
    float d[4];
    memcpy(d, x + 3, sizeof d);
    Fp16::mma(d, x[0], x[1], x[2]);
    memcpy(p.out + threadIdx.x * 4, d, sizeof d);
}

// in: pairs of floats; out: per pair packed, and unpacked again.
template <class Number> DEVICE void convert(const Params& p) {
    const u32 i = threadIdx.x;
    const u32 packed = Number::pack(__uint_as_float(p.in[2 * i]), __uint_as_float(p.in[2 * i + 1]));
    const float2 pair = Number::unpack(packed);
    p.out[3 * i] = packed;
    p.out[3 * i + 1] = __float_as_uint(pair.x);
    p.out[3 * i + 2] = __float_as_uint(pair.y);
}

// in: four row-major 8 x 8 matrices of 16-bit numbers; out: per lane its four registers.
DEVICE void load(const Params& p) {
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    for (int i = 0; i < 4; ++i) shared[threadIdx.x + 32 * i] = p.in[threadIdx.x + 32 * i];
    warp_sync();
    u32 r[4];
    u32* row = shared + threadIdx.x * 4;
    if (p.variant == 2) ldmatrix_x4_trans(r, row);
    else ldmatrix_x4(r, row);
    if (p.variant == 1) {  // stored transposed, and loaded again
        warp_sync();
        stmatrix_x4_trans(row, r[0], r[1], r[2], r[3]);
        warp_sync();
        ldmatrix_x4(r, row);
    }
    for (int i = 0; i < 4; ++i) p.out[threadIdx.x * 4 + i] = r[i];
}

// Warp 0 writes a buffer, warp 1 reads it, again and again; without the barriers (variant 1) they race.
DEVICE void hand_over(const Params& p) {
    volatile u32* shared = reinterpret_cast<u32*>(shared_memory());
    const u32 lane = threadIdx.x % 32;
    for (int i = 0; i < 10; ++i) {
        if (threadIdx.x < 32) {
            if (!p.variant && i) barrier_sync(2, 64);
            warp_sync();
            shared[lane] = p.in[lane] + i;
            if (!p.variant) barrier_sync(1, 64);
        } else {
            if (!p.variant) barrier_sync(1, 64);
            warp_sync();
            p.out[i * 32 + lane] = shared[31 - lane];
            if (!p.variant && i < 9) barrier_sync(2, 64);
        }
    }
}

DEVICE void copy(const Params& p) {
    u32* shared = reinterpret_cast<u32*>(shared_memory()) + threadIdx.x * 8;
    cp_async_16(shared, p.in + threadIdx.x * 8, true);
    cp_async_commit();
    cp_async_16(shared + 4, p.in + threadIdx.x * 8 + 4, threadIdx.x % 2);
    cp_async_commit();
    if (p.variant == 1) cp_async_wait<1>();
    if (p.variant == 0) cp_async_wait<0>();
    for (int i = 0; i < 8; ++i) p.out[threadIdx.x * 8 + i] = shared[i];
}

// A ring of two stages that rank 0 fills for all blocks: 64 threads of each read, and give the stage back to rank 0.
// Without the wait for that (variant 1) or for the bytes (variant 2) data is lost.
DEVICE void multicast(const Params& p) {
    constexpr int stages = 2, tiles = 9, words = 64;
    unsigned char* shared = shared_memory();
    u64* full = reinterpret_cast<u64*>(shared + stages * words * 4);
    u64* empty = full + stages;
    const u32 ranks = gridDim.x, rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, ranks * 2);
        }
        fence_mbarrier_init();
    }
    cluster_sync();
    if (threadIdx.x < 32) {
        for (int tile = 0; threadIdx.x == 0 && tile < tiles; ++tile) {
            const int s = tile % stages;
            if (tile >= stages && p.variant != 1) mbarrier_wait(empty + s, tile / stages % 2 ^ 1);
            mbarrier_arrive_expect_tx(full + s, words * 4);
            if (rank) continue;
            cp_async_bulk_multicast(shared + s * words * 4, p.in + tile * words, words * 4, full + s, (1 << ranks) - 1);
        }
    } else {
        for (int tile = 0; tile < tiles; ++tile) {
            const int s = tile % stages;
            if (p.variant != 2) mbarrier_wait(full + s, tile / stages % 2);
            const u32 i = threadIdx.x - 32;
            p.out[(rank * tiles + tile) * words + i] = reinterpret_cast<u32*>(shared)[s * words + i];
            warp_sync();
            // Every block's leader waits for all readers of the stage, as rank 0's copies write to all blocks.
            if (i % 32 == 0)
                for (u32 r = 0; r < ranks; ++r) mbarrier_arrive_cluster(empty + s, r);
        }
    }
    cluster_sync();
}

DEVICE u32 deep(volatile u32 x) { return x == ~0u ? 0 : deep(x + 1) ^ x; }

// Blocks take turns, the last first: each adds its number to what its successor left.
DEVICE void relay(const Params& p) {
    u32 *turn = p.out, *sum = p.out + 1;
    const u32 before = gridDim.x - 1 - blockIdx.x;  // blocks whose turn is earlier
    if (threadIdx.x) return;
    while (read_counter(turn) < before) back_off();
    fence_gpu();
    *sum = *sum * 3 + blockIdx.x;
    fence_gpu();
    write_counter(turn, before + 1);
}

// What the emulator must refuse.
DEVICE void broken(const Params& p) {
    unsigned char* shared = shared_memory();
    u64* barrier = reinterpret_cast<u64*>(shared);
    volatile int index = 4;
    volatile float array[4];
    switch (p.variant) {
        case 0:  // lanes in different operations
            if (threadIdx.x < 7) warp_sync();
            else p.out[threadIdx.x] = __float_as_uint(shuffle_xor(1.0f, 1));
            break;
        case 1:  // lanes that left
            if (threadIdx.x < 7) return;
            warp_sync();
            break;
        case 2:  // barriers in another order
            barrier_sync(threadIdx.x < 32 ? 1 : 2, 64);
            break;
        case 3:  // a phase that never ends
            if (threadIdx.x == 0) mbarrier_init(barrier, 2);
            barrier_sync(0, 64);
            if (threadIdx.x == 0) mbarrier_arrive(barrier);
            mbarrier_wait(barrier, 0);
            break;
        case 4:  // the same, polled
            if (threadIdx.x == 0) mbarrier_init(barrier, 2);
            barrier_sync(0, 64);
            while (!mbarrier_try_wait(barrier, 0)) {}
            break;
        case 5: mbarrier_arrive(barrier); break;
        case 6: cp_async_16(shared + 1016, p.in, true); break;
        case 7: cp_async_16(shared + 8, p.in, true); break;
        case 8: shared[4096 + threadIdx.x] = 1; break;
        case 9: shared[992 + threadIdx.x] = 1; break;
        case 10: p.out[threadIdx.x] = *reinterpret_cast<u32*>(shared + p.variant - 8); break;
        case 11: array[index] = 1; break;
        case 12: p.out[threadIdx.x] = p.in[1 + threadIdx.x]; break;
        case 13: mbarrier_arrive_cluster(barrier, 2); break;
        case 14:  // more arrivals than the phase has
            if (threadIdx.x) break;
            mbarrier_init(barrier, 1);
            mbarrier_arrive_expect_tx(barrier, 16);
            mbarrier_arrive(barrier);
            break;
        case 15:  // nobody waits for the copy
            if (threadIdx.x) break;
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(barrier, 16);
            cp_async_bulk_multicast(shared + 16, p.in, 16, barrier, 1);
            break;
        case 16: p.out[threadIdx.x] = deep(threadIdx.x); break;
    }
}

extern "C" __global__ void __launch_bounds__(128) self_test(const __grid_constant__ Params p) {
    const u32 i = threadIdx.x;
    switch (p.test) {
        case MMA_BF16: mma<Bf16>(p); break;
        case MMA_FP16: mma<Fp16>(p); break;
        case MMA_FP16_OF_8: mma_of_8(p); break;
        case MMA_INT8: mma<Int8, int>(p); break;
        case CONVERT_BF16: convert<Bf16>(p); break;
        case CONVERT_FP16: convert<Fp16>(p); break;
        case MULTIPLY: p.out[i] = Fp16::multiply(p.in[2 * i], p.in[2 * i + 1]); break;
        case MULTIPLY_ADD: p.out[i] = Fp16::multiply_add(p.in[3 * i], p.in[3 * i + 1], p.in[3 * i + 2]); break;
        case LOAD: load(p); break;
        case TRANSPOSE: p.out[i] = transpose_8x8(p.in[i]); break;
        case SHUFFLE: p.out[i] = __float_as_uint(shuffle_xor(__uint_as_float(p.in[i]), p.variant)); break;
        case HAND_OVER: hand_over(p); break;
        case COPY: copy(p); break;
        case MULTICAST: multicast(p); break;
        case RELAY: relay(p); break;
        case BROKEN: broken(p); break;
    }
}
