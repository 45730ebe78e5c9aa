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
    wgmma_fence();
    wgmma_ss<Bf16, N, false, true>(d, a_operand(), b_operand());
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(d);
    store(p, d);
}

// From ordinary writes to wgmma: who has written fences before the barrier, or who multiplies behind it.
DEVICE void shared_to_wgmma(const Params& p) {
    if (p.variant == 2) fence_proxy_async_shared();
    write_operands(p);
    if (p.variant == 0 || (p.variant == 3 && threadIdx.x == 0)) fence_proxy_async_shared();
    if (p.variant != 4) barrier_sync(0, 128);
    if (p.variant == 5) fence_proxy_async_shared();
    multiply(p);
}

// The same by cp.async, whose writes are ordinary ones.
DEVICE void copies_to_wgmma(const Params& p) {
    for (int i = threadIdx.x; i < (A_WORDS + B_WORDS) / 4; i += 128)
        cp_async_16(shared_memory() + 16 * i, p.in + 4 * i, true);
    cp_async_commit();
    if (p.variant == 1) fence_proxy_async_shared();  // too early
    cp_async_wait<0>();
    if (p.variant == 0) fence_proxy_async_shared();
    barrier_sync(0, 128);
    multiply(p);
}

// From ordinary writes to global memory to a bulk copy, which one thread starts.
DEVICE void global_to_bulk_copy(const Params& p) {
    u64* barrier = reinterpret_cast<u64*>(shared_memory() + 512);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        if (p.variant != 4) fence_mbarrier_init();
    }
    p.out[threadIdx.x] = p.in[threadIdx.x];
    if (p.variant == 1) fence_proxy_async_shared();  // the wrong one
    if (p.variant == 2 && threadIdx.x == 0) fence_proxy_async_global();  // before it knows of the others' writes
    barrier_sync(0, 128);
    if (threadIdx.x == 0) {
        if (p.variant == 0 || p.variant == 4) fence_proxy_async_global();
        mbarrier_arrive_expect_tx(barrier, 512);
        cp_async_bulk_multicast(shared_memory(), p.out, 512, barrier, 1);
    }
    mbarrier_wait(barrier, 0);
    p.out[128 + threadIdx.x] = reinterpret_cast<u32*>(shared_memory())[127 - threadIdx.x];
}

// From ordinary writes to shared memory to a bulk copy that overwrites them.
DEVICE void shared_to_bulk_copy(const Params& p) {
    u64* barrier = reinterpret_cast<u64*>(shared_memory() + 512);
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    if (threadIdx.x == 0) mbarrier_init(barrier, 1), fence_mbarrier_init();
    shared[threadIdx.x] = 1;
    if (p.variant == 0) fence_proxy_async_shared();
    barrier_sync(0, 128);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, 512);
        cp_async_bulk_multicast(shared, p.in, 512, barrier, 1);
    }
    mbarrier_wait(barrier, 0);
    p.out[threadIdx.x] = shared[threadIdx.x];
}

// From ordinary writes to shared memory to bulk copies of it, which each lane of one warp starts, and then to writes again.
DEVICE void bulk_store(const Params& p) {
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    shared[threadIdx.x] = p.in[threadIdx.x];
    if (p.variant == 0) fence_proxy_async_shared();
    barrier_sync(0, 128);
    if (threadIdx.x < 32) {
        if (p.variant != 0 && p.variant != 2) fence_proxy_async_shared();
        cp_async_bulk_store(p.out + 4 * threadIdx.x, shared + 4 * threadIdx.x, 16);
        cp_async_bulk_commit();
        if (p.variant != 4) cp_async_bulk_wait_read<0>();
    }
    if (p.variant != 3) barrier_sync(0, 128);
    shared[threadIdx.x] = 0;
}

// A block's mbarrier, at which the other block of the cluster arrives.
DEVICE void initialize_for_cluster(const Params& p) {
    u64* barrier = reinterpret_cast<u64*>(shared_memory());
    if (threadIdx.x == 0) {
        if (p.variant == 2) fence_mbarrier_init();
        mbarrier_init(barrier, 1);
        if (p.variant == 0) fence_mbarrier_init();
    }
    cluster_sync();
    if (threadIdx.x == 0) mbarrier_arrive_cluster(barrier, 1 - cluster_rank());
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
        else red_add_release(counter, 1);
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
    fence_proxy_async_shared();
    barrier_sync(0, 128);
    Sums d = {};
    if (p.variant != 1) wgmma_fence();
    wgmma_ss<Bf16, N>(d, a_operand(), b_operand());
    wgmma_ss<Bf16, N>(d, a_operand(), b_operand());  // the next to the same registers needs no fence
    wgmma_commit();
    if (p.variant == 2) d[0][0] *= 2.f;
    if (p.variant == 8) d[0][0] = 2.f;
    if (p.variant == 3) p.out[threadIdx.x] = __float_as_uint(d[0][0]);
    if (p.variant == 9) reinterpret_cast<u32*>(shared_memory())[4 * threadIdx.x] = 0;  // of the warp's rows of a
    if (p.variant != 4) wgmma_wait<0>();
    if (p.variant != 5) fence_operand(d);
    if (p.variant == 6) wgmma_fence();
    for (int i = 0; i < N / 2; i++) d[i / 4][i % 4] *= 0.5f;
    if (p.variant != 6 && p.variant != 7) wgmma_fence();
    wgmma_ss<Bf16, N>(d, a_operand(), b_operand());
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(d);
    store(p, d);
}

// The first operand in registers: rows of a, as they lie in memory.
DEVICE void held_to_wgmma(const Params& p) {
    constexpr int WIDE = 64;
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    for (int i = threadIdx.x; i < WIDE * 16 / 2; i += 128) shared[i] = p.in[A_WORDS + i];
    fence_proxy_async_shared();
    barrier_sync(0, 128);
    float d[WIDE / 8][4] = {};
    u32 a[4];
    if (p.variant == 1) wgmma_fence();
    for (int i = 0; i < 4; i++) a[i] = p.in[threadIdx.x * 4 + i];
    if (p.variant == 0 || p.variant == 3) wgmma_fence();
    wgmma_rs<Bf16, WIDE>(d, a, operand(shared_memory(), STRIDE));
    wgmma_commit();
    if (p.variant == 3) a[p.in[0] % 4] = 0;
    wgmma_wait<0>();
    fence_operand(d);
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
        if (p.variant == 2) cp_async_16(shared + 4 * (lane % 8), p.in, true);
        else shared[lane] = 0;
    }
    if (p.variant == 3 && threadIdx.x >= 32) shared[lane] = 1;
    if (p.variant == 2) cp_async_wait<0>();
}

extern "C" __global__ void fences(const __grid_constant__ Params p) {
    switch (p.test) {
        case SHARED_TO_WGMMA: shared_to_wgmma(p); break;
        case COPIES_TO_WGMMA: copies_to_wgmma(p); break;
        case GLOBAL_TO_BULK_COPY: global_to_bulk_copy(p); break;
        case SHARED_TO_BULK_COPY: shared_to_bulk_copy(p); break;
        case BULK_STORE: bulk_store(p); break;
        case INITIALIZE_FOR_CLUSTER: initialize_for_cluster(p); break;
        case HAND_OVER: hand_over(p); break;
        case REGISTERS_TO_WGMMA: registers_to_wgmma(p); break;
        case HELD_TO_WGMMA: held_to_wgmma(p); break;
        case RACE: race(p); break;
        case OVERWRITE: overwrite(p); break;
    }
}
