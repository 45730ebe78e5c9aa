// Calls every function of ptx.cuh once, so that each is compiled for each arch; test_build.py knows if one is missing.
#include "ptx.cuh"

struct Params {
    const u16* halves;
    const float* floats;
    u32* out;
};

template <class Element> DEVICE float elements(const Params& p) {
    float d[4] = {Element::load(p.halves), 0.f, 0.f, 0.f};
    const float2 pair = Element::unpack(Element::pack(p.floats[1], p.floats[2]));
    Element::mma(d, 1, 2, 3, 4, 5, 6);
    return d[0] + d[3] + pair.x + pair.y;
}

#if __CUDA_ARCH__ >= 900
DEVICE void clusters(const Params& p, u64* barrier) {
    fence_mbarrier_init();
    cluster_sync();
    mbarrier_arrive_expect_tx(barrier, 16);
    mbarrier_arrive_cluster(barrier, cluster_rank());
    fence_proxy_async_global();
    cp_async_bulk_multicast(shared_memory() + 16, p.floats, 16, barrier, u16(1));
    cp_async_bulk_store(p.out, shared_memory() + 16, 16);
    cp_async_bulk_commit();
    cp_async_bulk_wait_read<0>();
}
#endif

// Four warps.
DEVICE float products(const Params& p) {
    float d[2][4] = {};
    const Operand a = operand(shared_memory() + 1024, 256), b = operand_at(a, 1024);
    fence_proxy_async_shared();
    wgmma_fence();
    wgmma_ss<Bf16, 16, false, true>(d, a, b);
    wgmma_ss<Bf16, 16>(d, a, b);
    wgmma_ss<Bf16, 16, true>(d, mn_major_operand(shared_memory() + 1024, 256), b);
    float e[8][4] = {}, f[16][4] = {};
    const u32 held[4] = {p.out[0], p.out[1], p.out[2], p.out[3]};
    wgmma_ss<Fp16, 64, true>(e, mn_major_operand(shared_memory() + 1024, 256), b);
    wgmma_rs<Fp16, 64, true, true>(e, held, mn_major_operand(shared_memory() + 1024, 1024));
    wgmma_rs<Fp16, 64>(e, held, b);
    wgmma_rs<Bf16, 64, false, true>(e, held, b);
    wgmma_rs<Fp16, 128, true>(f, held, mn_major_operand(shared_memory() + 1024, 2048));
    wgmma_ss<Fp16, 64>(e, swizzled_operand(shared_memory() + 1024), swizzled_operand(shared_memory() + 2048));
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(d), fence_operand(e), fence_operand(f);
    Tf32::mma(d[0], e[0][0], e[1][0], e[2][0], e[3][3], Tf32::round(e[7][3]), 1.f);
    return d[0][0] + d[1][3] + e[0][0] + f[15][3];
}

extern "C" __global__ void __launch_bounds__(128) every_wrapper(const __grid_constant__ Params p) {
    u64* barrier = reinterpret_cast<u64*>(shared_memory());
    float x = elements<Bf16>(p) + elements<Fp16>(p);
    x += exp2_fast(x) + log2_fast(x) + reciprocal(x) + rsqrt_fast(x) + shuffle_xor(x, 1) + shuffle(x, 2);
    int sums[4] = {round_to_int(x)};
    Int8::mma(sums, 1, 2, 3, 4, 5, 6);
    u32 r[4], word = Fp16::multiply(__float_as_uint(x), 7) + Fp16::multiply_add(p.out[1], 7, 8) +
                     Bf16::multiply(p.out[2], 7) + transpose_8x8(p.out[0]) + sums[0] + sums[3];
    cp_async_16(shared_memory() + 16, p.floats, threadIdx.x > 3);
    cp_async_16_once(hide_shared_address(shared_memory() + 48 + 16 * threadIdx.x), p.floats);
    cp_async_4(shared_memory() + 32, p.floats, read_thread_index() > 3);
    prefetch(p.halves);
    launch_dependents();
    wait_for_earlier_kernels();
    cp_async_commit();
    cp_async_wait<0>();
    warp_sync();
    word += broadcast(int(word), 5) + ballot(word > 7) + count_ones(word);
    ldmatrix_x4(r, shared_memory() + 16);
    word += r[0] + r[1] + r[2] + r[3];
    ldmatrix_x4_trans(r, shared_memory() + 16);
    word += r[0] + r[1] + r[2] + r[3];
    word += shared_address(barrier);
    stmatrix_x4_trans(shared_memory() + 512 + 16 * (threadIdx.x % 32), r[0], r[1], r[2], r[3]);
    stmatrix_x4(shared_memory() + 512 + 16 * (threadIdx.x % 32), r);
    store_global(p.out + 128, make_uint4(r[0], r[1], r[2], r[3]));
    store_once(p.out + 132, load_once<uint4>(p.out + 128));
    red_add_release(p.out, word);
    red_add(p.out, word);
    word += atomic_add(p.out, word);
    write_counter(p.out, word);
    word += read_counter(p.out) + u32(products(p));
    word += opt_barrier(word) + broadcast(word) + select_bytes(word, 7, 0x7540);
    back_off();
    fence_gpu();
#if HAS_SETMAXNREG
    setmaxnreg_dec<64>();
    setmaxnreg_inc<72>();
#endif
    if (threadIdx.x == 0) mbarrier_init(barrier, 2);
    barrier_sync(1, 64);
    mbarrier_arrive(barrier);
    word += mbarrier_try_wait(barrier, 0) + mbarrier_test_wait(barrier, 0);
    mbarrier_wait(barrier, 0);
#if __CUDA_ARCH__ >= 900
    clusters(p, barrier);
#endif
    p.out[threadIdx.x] = word;
}
