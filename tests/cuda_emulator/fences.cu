// A small kernel for each fence, for test_order.py, which numbers them: `test` chooses. Valid CUDA in variant 0; the
// others leave out, or misplace, what the test's table says.
#include "ptx.cuh"

struct Params {
    const u32* in;
    u32* out;
    int test, variant;
};

constexpr int N = 16, STRIDE = 256;  // d[64, 16] = a[64, 16] b[16, 16]^T, in blocks of 8 x 8
constexpr int A_WORDS = 64 * 16 / 2, B_WORDS = N * 16 / 2;
using Sums = float[N / 8][4];

DEVICE void store(const Params& p, const Sums& d) {
    for (int i = 0; i < N / 2; i++) p.out[threadIdx.x * N / 2 + i] = __float_as_uint(d[i / 4][i % 4]);
}

// Operands in shared memory, written by all threads.
DEVICE void write_operands(const Params& p) {
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    for (int i = threadIdx.x; i < A_WORDS + B_WORDS; i += 128) shared[i] = p.in[i];
}
DEVICE Operand a_operand() { return operand(shared_memory(), STRIDE); }
DEVICE Operand b_operand() { return operand(shared_memory() + 4 * A_WORDS, STRIDE); }

DEVICE void multiply(const Params& p) {
    Sums d;
    product_begin();
    multiply_group<Bf16, N, false, true>(d, a_operand(), b_operand());
    product_commit();
    product_wait<0>();
    product_use(d);
    store(p, d);
}

// From ordinary writes to wgmma: who has written fences before the barrier, or who multiplies behind it.
DEVICE void shared_to_wgmma(const Params& p) {
    if (p.variant == 2) fence_shared();
    write_operands(p);
    if (p.variant == 0 || (p.variant == 3 && threadIdx.x == 0)) fence_shared();
    if (p.variant != 4) barrier_sync(0, 128);
    if (p.variant == 5) fence_shared();
    multiply(p);
}

// The same by cp.async, whose writes are ordinary ones.
DEVICE void copies_to_wgmma(const Params& p) {
    for (int i = threadIdx.x; i < (A_WORDS + B_WORDS) / 4; i += 128)
        copy_16(shared_memory() + 16 * i, p.in + 4 * i, true);
    copy_commit();
    if (p.variant == 1) fence_shared();  // too early
    copy_wait<0>();
    if (p.variant == 0) fence_shared();
    barrier_sync(0, 128);
    multiply(p);
}

// From ordinary writes to global memory to a bulk copy, which one thread starts.
DEVICE void global_to_bulk_copy(const Params& p) {
    u64* barrier = reinterpret_cast<u64*>(shared_memory() + 512);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        if (p.variant != 4) mbarrier_init_fence();
    }
    p.out[threadIdx.x] = p.in[threadIdx.x];
    if (p.variant == 1) fence_shared();  // the wrong one
    if (p.variant == 2 && threadIdx.x == 0) fence_bulk_copies();  // before it knows of the others' writes
    barrier_sync(0, 128);
    if (threadIdx.x == 0) {
        if (p.variant == 0 || p.variant == 4) fence_bulk_copies();
        mbarrier_arrive_expecting(barrier, 512);
        bulk_copy_to_cluster(shared_memory(), p.out, 512, barrier, 1);
    }
    mbarrier_wait(barrier, 0);
    p.out[128 + threadIdx.x] = reinterpret_cast<u32*>(shared_memory())[127 - threadIdx.x];
}

// From ordinary writes to shared memory to a bulk copy that overwrites them.
DEVICE void shared_to_bulk_copy(const Params& p) {
    u64* barrier = reinterpret_cast<u64*>(shared_memory() + 512);
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    if (threadIdx.x == 0) mbarrier_init(barrier, 1), mbarrier_init_fence();
    shared[threadIdx.x] = 1;
    if (p.variant == 0) fence_shared();
    barrier_sync(0, 128);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expecting(barrier, 512);
        bulk_copy_to_cluster(shared, p.in, 512, barrier, 1);
    }
    mbarrier_wait(barrier, 0);
    p.out[threadIdx.x] = shared[threadIdx.x];
}

// A block's mbarrier, at which the other block of the cluster arrives.
DEVICE void initialize_for_cluster(const Params& p) {
    u64* barrier = reinterpret_cast<u64*>(shared_memory());
    if (threadIdx.x == 0) {
        if (p.variant == 2) mbarrier_init_fence();
        mbarrier_init(barrier, 1);
        if (p.variant == 0) mbarrier_init_fence();
    }
    cluster_sync();
    if (threadIdx.x == 0) mbarrier_arrive_at(barrier, 1 - cluster_rank());
    mbarrier_wait(barrier, 0);
    cluster_sync();
    p.out[blockIdx.x * 32 + threadIdx.x] = p.in[threadIdx.x];
}

// Block 0 writes, block 1 reads, and a counter says when: by a releasing addition, or by a relaxed write after a fence.
DEVICE void hand_over(const Params& p) {
    u32* counter = p.out + 64;
    if (blockIdx.x == 0) {
        p.out[threadIdx.x] = p.in[threadIdx.x];
        if (p.variant != 2) warp_sync();
        if (threadIdx.x) return;
        if (p.variant == 3) fence_gpu();
        if (p.variant == 3 || p.variant == 4) write_counter(counter, 1);
        else publish_more(counter, 1);
    } else {
        while (threadIdx.x == 0 && !read_counter(counter)) back_off();
        if (p.variant != 1) fence_gpu();
        if (p.variant == 5) broadcast(0);  // the lanes wait for each other, but it orders no accesses
        else warp_sync();
        p.out[32 + threadIdx.x] = p.out[31 - threadIdx.x];
    }
}

// One product after the other to the same registers, which are scaled in between; read what a wait has delivered.
DEVICE void registers_to_wgmma(const Params& p) {
    write_operands(p);
    fence_shared();
    barrier_sync(0, 128);
    Sums d = {};
    if (p.variant != 1) product_begin();
    multiply_group<Bf16, N>(d, a_operand(), b_operand());
    multiply_group<Bf16, N>(d, a_operand(), b_operand());  // the next to the same registers needs no fence
    product_commit();
    if (p.variant == 2) d[0][0] *= 2.f;
    if (p.variant == 8) d[0][0] = 2.f;
    if (p.variant == 3) p.out[threadIdx.x] = __float_as_uint(d[0][0]);
    if (p.variant == 9) reinterpret_cast<u32*>(shared_memory())[4 * threadIdx.x] = 0;  // of the warp's rows of a
    if (p.variant != 4) product_wait<0>();
    if (p.variant != 5) product_use(d);
    if (p.variant == 6) product_begin();
    for (int i = 0; i < N / 2; i++) d[i / 4][i % 4] *= 0.5f;
    if (p.variant != 6 && p.variant != 7) product_begin();
    multiply_group<Bf16, N>(d, a_operand(), b_operand());
    product_commit();
    product_wait<0>();
    product_use(d);
    store(p, d);
}

// The first operand in registers: rows of a, as they lie in memory.
DEVICE void held_to_wgmma(const Params& p) {
    constexpr int WIDE = 64;
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    for (int i = threadIdx.x; i < WIDE * 16 / 2; i += 128) shared[i] = p.in[A_WORDS + i];
    fence_shared();
    barrier_sync(0, 128);
    float d[WIDE / 8][4] = {};
    u32 a[4];
    if (p.variant == 1) product_begin();
    for (int i = 0; i < 4; i++) a[i] = p.in[threadIdx.x * 4 + i];
    if (p.variant == 0 || p.variant == 3) product_begin();
    multiply_held<Bf16, WIDE>(d, a, operand(shared_memory(), STRIDE));
    product_commit();
    if (p.variant == 3) a[p.in[0] % 4] = 0;
    product_wait<0>();
    product_use(d);
    for (int i = 0; i < WIDE / 2; i++) p.out[threadIdx.x * WIDE / 2 + i] = __float_as_uint(d[i / 4][i % 4]);
    if (p.variant == 3) p.out[0] = a[1];
}

// Words that one warp writes and another reads.
DEVICE void race(const Params& p) {
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    u64* barrier = reinterpret_cast<u64*>(shared_memory() + 512);
    if (threadIdx.x == 0) mbarrier_init(barrier, 1);
    barrier_sync(0, 64);
    if (threadIdx.x < 32) {
        shared[threadIdx.x] = p.in[threadIdx.x];
        if (p.variant != 1) warp_sync();  // else the other lanes' words are not covered by this lane's arrival
        if (threadIdx.x == 0) mbarrier_arrive(barrier);
        if (p.variant == 2) shared[31] = p.in[31];
    } else {
        mbarrier_wait(barrier, 0);
        p.out[threadIdx.x - 32] = shared[63 - threadIdx.x];
    }
}

// A word for each lane, which one warp writes, another reads, and the first writes again.
DEVICE void overwrite(const Params& p) {
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    const u32 lane = threadIdx.x % 32;
    if (threadIdx.x < 32) shared[lane] = p.in[lane];
    barrier_sync(0, 64);
    if (threadIdx.x >= 32) p.out[lane] = shared[lane];
    if (p.variant == 0) barrier_sync(0, 64);
    if (threadIdx.x < 32) {
        if (p.variant == 2) copy_16(shared + 4 * (lane % 8), p.in, true);
        else shared[lane] = 0;
    }
    if (p.variant == 3 && threadIdx.x >= 32) shared[lane] = 1;
    if (p.variant == 2) copy_wait<0>();
}

extern "C" __global__ void fences(const __grid_constant__ Params p) {
    switch (p.test) {
        case SHARED_TO_WGMMA: shared_to_wgmma(p); break;
        case COPIES_TO_WGMMA: copies_to_wgmma(p); break;
        case GLOBAL_TO_BULK_COPY: global_to_bulk_copy(p); break;
        case SHARED_TO_BULK_COPY: shared_to_bulk_copy(p); break;
        case INITIALIZE_FOR_CLUSTER: initialize_for_cluster(p); break;
        case HAND_OVER: hand_over(p); break;
        case REGISTERS_TO_WGMMA: registers_to_wgmma(p); break;
        case HELD_TO_WGMMA: held_to_wgmma(p); break;
        case RACE: race(p); break;
        case OVERWRITE: overwrite(p); break;
    }
}
