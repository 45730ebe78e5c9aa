// Wrappers of the PTX that the kernels use. All inline assembly is in this file.
// A pair of 16-bit elements is one 32-bit word, the lower index in the lower half.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

// ---------------------------------------------------------------- elements

// The 16-bit types of the tensors, operands of MMAs.
struct Bf16 {
    static DEVICE u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static DEVICE float2 unpack(u32 x) {
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    }
    static DEVICE float load(const u16* p) { return __uint_as_float(u32(*p) << 16); }
    static DEVICE u32 multiply(u32 x, u32 y) {  // before sm_90 there is no mul
        u32 r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(0x80008000u));
        return r;
    }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

struct Fp16 {
    static DEVICE u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static DEVICE float2 unpack(u32 x) {
        float2 r;
        asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
            : "=f"(r.x), "=f"(r.y)
            : "r"(x));
        return r;
    }
    static DEVICE float load(const u16* p) {
        float r;
        asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(*p));
        return r;
    }
    static DEVICE u32 multiply(u32 x, u32 y) {
        u32 r;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
        return r;
    }
    static DEVICE u32 multiply_add(u32 x, u32 y, u32 z) {
        u32 r;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
        return r;
    }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 b) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(b));
    }
};

// fp32, read by MMAs with 11 bits of mantissa: for operands that need the range of fp32.
struct Tf32 {
    static DEVICE float round(float x) {
        u32 r;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
        return __uint_as_float(r);
    }
    static DEVICE void mma(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
              "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
    }
};

// int8, with sums in int32, which are exact.
struct Int8 {
    static DEVICE void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float log2_fast(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float rsqrt_fast(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The nearest int; of NaN 0.
DEVICE int round_to_int(float x) { return __float2int_rn(x); }

// The bytes of y (4 to 7) and x (0 to 3) that the four digits of `which` name, the lowest first.
DEVICE u32 select_bytes(u32 x, u32 y, u32 which) { return __byte_perm(x, y, which); }

// Optimisation barrier: keeps values derived from x from being hoisted, which would cost registers.
template <class T> DEVICE T opt_barrier(T x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---------------------------------------------------------------- within a warp

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }  // that lane's x
// A lane's x, which the compiler then knows to be uniform.
DEVICE int broadcast(int x, int lane = 0) { return __shfl_sync(0xffffffffu, x, lane); }
// A bit for each lane.
DEVICE u32 ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE int count_ones(u32 x) { return __popc(x); }
// threadIdx.x through a shuffle, which ptxas does not look through: it cannot keep values computed from an earlier call
// in registers. Executed by a full warp.
DEVICE u32 read_thread_index() { return shuffle_xor(threadIdx.x, 0); }
DEVICE void warp_sync() { __syncwarp(); }

// Transpose an 8 x 8 matrix of 16-bit elements in the order of mma's accumulators.
DEVICE u32 transpose_8x8(u32 x) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Load four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, transposing each matrix.
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Store four 8 x 8 matrices in the order of mma's accumulators; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void stmatrix_x4(void* row, const u32 (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(shared_address(row)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#else
    u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 to = __shfl_sync(0xffffffffu, shared_address(row), 8 * i + lane / 4) + 4 * (lane % 4);
        asm volatile("st.shared.u32 [%0], %1;" : : "r"(to), "r"(x[i]) : "memory");
    }
#endif
}

// The same, transposing each matrix.
DEVICE void stmatrix_x4_trans(void* row, u32 a, u32 b, u32 c, u32 d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(shared_address(row)), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
#else
    stmatrix_x4(row, {transpose_8x8(a), transpose_8x8(b), transpose_8x8(c), transpose_8x8(d)});
#endif
}

// ---------------------------------------------------------------- shared memory: copies and barriers

DEVICE unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
}

// Copy 16 bytes from global to shared memory, or store zeros if not valid; complete after cp_async_wait.
DEVICE void cp_async_16(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
// A lane's own address in shared memory through a shuffle, which ptxas does not look through. The sum of a register and a
// uniform register would become an operand of cp.async, which ptxas 13.0 encodes wrongly for sm_90: see build.py.
template <class T> DEVICE T* hide_shared_address(T* p) {
    return static_cast<T*>(__cvta_shared_to_generic(shuffle_xor(shared_address(p), 0)));
}
// Copy 16 bytes that are read once, which L2 evicts first.
DEVICE void cp_async_16_once(void* to, const void* from) {
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "l"(once)
                 : "memory");
}
// Copy 4 bytes, or store zeros if not valid.
DEVICE void cp_async_4(void* to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int pending> DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
}

// Prefetch a cache line into L2.
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }

// Lets a kernel that was launched to overlap with this one start when every block has come here; it waits for the end of
// this one before it reads what this one writes. Below sm_90 there is no such launch.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In a kernel that was launched to overlap with earlier ones: wait until these have ended and their writes are visible.
DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// A barrier among `threads` threads of a block, a multiple of 32; id 0 is __syncthreads'.
DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory"); }

// mbarriers in shared memory: a phase completes after `count` arrivals and all expected bytes.
DEVICE void mbarrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(count) : "memory");
}
DEVICE void mbarrier_arrive(u64* barrier) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" : : "r"(shared_address(barrier)) : "memory");
}
DEVICE bool mbarrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
    return done;
}
// Whether the phase of this parity has completed; does not wait.
DEVICE bool mbarrier_test_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}
// Wait for the phase of this parity to complete; the first phase has parity 0.
DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {}
}

// One store to global memory. The compiler splits a plain assignment whose words are computed separately.
DEVICE void store_global(void* to, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
                 :
                 : "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Global memory that is read or written once. L2 evicts it first, so that it keeps what blocks hand to each other.
template <class T> DEVICE T load_once(const void* from) { return __ldcs(static_cast<const T*>(from)); }
template <class T> DEVICE void store_once(void* to, T x) { __stcs(static_cast<T*>(to), x); }

// Counters in global memory. `red_add_release` releases earlier writes of the thread; a thread that reads the new count
// and then executes `fence_gpu` acquires them. The others are relaxed.
DEVICE void red_add_release(u32* counter, u32 more) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(counter), "r"(more) : "memory");
}
DEVICE void red_add(u32* counter, u32 more) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" : : "l"(counter), "r"(more) : "memory");
}
DEVICE u32 atomic_add(u32* counter, u32 more) {  // what it was before
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(more) : "memory");
    return before;
}
DEVICE void write_counter(u32* counter, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(counter), "r"(value) : "memory");
}
DEVICE u32 read_counter(const u32* counter) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}
// Called between two polls of a counter, to leave memory bandwidth to the CTAs that increment it.
DEVICE void back_off() { asm volatile("nanosleep.u32 50;"); }
DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }

// ---------------------------------------------------------------- clusters (sm_90 and newer)

#if __CUDA_ARCH__ >= 900
DEVICE u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" : : : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Arrive at the same barrier in the shared memory of CTA `rank` of the cluster.
DEVICE void mbarrier_arrive_cluster(u64* barrier, u32 rank) {
    asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [a];}"
                 :
                 : "r"(shared_address(barrier)), "r"(rank)
                 : "memory");
}
// Makes earlier generic-proxy writes to global memory visible to bulk copies issued after it.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" : : : "memory"); }
// Copy from global memory to the same address in the shared memory of every CTA in `ranks`; completes on the same
// barrier of each.
DEVICE void cp_async_bulk_multicast(void* to, const void* from, u32 bytes, u64* barrier, u16 ranks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;"
        :
        : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(ranks)
        : "memory");
}
// Copy from shared memory to global memory that is written once, which L2 evicts first. Shared memory was written before a
// fence_proxy_async_shared, and is read until cp_async_bulk_wait_read, of the thread that copies.
DEVICE void cp_async_bulk_store(void* to, const void* from, u32 bytes) {
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                 :
                 : "l"(to), "r"(shared_address(from)), "r"(bytes), "l"(once)
                 : "memory");
}
DEVICE void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
template <int pending> DEVICE void cp_async_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(pending) : "memory");
}
#endif

// ---------------------------------------------------------------- wgmma, or mma.sync by four warps

// Makes earlier generic-proxy writes to shared memory visible to wgmma and bulk copies issued after it (and after a barrier).
DEVICE void fence_proxy_async_shared() {
#if HAS_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
#endif
}

// An operand in shared memory, without swizzle: 8 x 8 blocks of 16-bit elements, 128 bytes each, neighbours along K 128
// bytes apart, neighbours along M or N `stride` bytes apart. The rows of a block run along K (K-major), or along M or N
// if the operand is MN-major (transposed).
//
// A swizzled operand has rows of 64 elements, 128 bytes each, whose pieces of 16 bytes are permuted by the row (wgmma's
// swizzle of 128 bytes), and begins at a multiple of 1,024 bytes; along K 16 elements are 32 bytes apart if it is
// K-major, 2,048 if it is MN-major.
//
// wgmma_ss: d[64, N] += a[64, 16] b[N, 16]^T for N of 16, 32 or 64 (= instead of += if `overwrites`), 16 rows
// of d per warp, in the order of mma's accumulators. Asynchronous, from wgmma_fence to wgmma_wait.
// wgmma_rs: the same with the warp's 16 rows of a in registers, as mma's A, and N of 64 or 128; b may be MN-major.

#if HAS_WGMMA
using Operand = u64;
DEVICE Operand operand(const void* p, int stride) {
    return u64((shared_address(p) & 0x3ffff) >> 4) | u64(128 >> 4) << 16 | u64(stride >> 4) << 32;
}
DEVICE Operand mn_major_operand(const void* p, int stride) {
    return u64((shared_address(p) & 0x3ffff) >> 4) | u64(stride >> 4) << 16 | u64(128 >> 4) << 32;
}
DEVICE Operand swizzled_operand(const void* p) {
    return u64((shared_address(p) & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
DEVICE Operand operand_at(Operand operand, int bytes) { return operand + u64(bytes >> 4); }

template <class T, int N, bool a_mn_major = false, bool overwrites = false>
DEVICE void wgmma_ss(float (&d)[N / 8][4], Operand a, Operand b);
#define SUM4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_SS(TYPE, NAME, MN_MAJOR, OVERWRITES, SCALE_D)                                                            \
    template <> DEVICE void wgmma_ss<TYPE, 16, MN_MAJOR, OVERWRITES>(float (&d)[2][4], Operand a, Operand b) {         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." NAME "." NAME                                       \
                     " {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, " SCALE_D ", 1, 1, %10, 0;"                                  \
                     : SUM4(0), SUM4(1)                                                                                \
                     : "l"(a), "l"(b), "n"(MN_MAJOR));                                                                 \
    }                                                                                                                  \
    template <> DEVICE void wgmma_ss<TYPE, 32, MN_MAJOR, OVERWRITES>(float (&d)[4][4], Operand a, Operand b) {         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME                                       \
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, " SCALE_D ", 1, 1, %18, 0;"  \
                     : SUM4(0), SUM4(1), SUM4(2), SUM4(3)                                                              \
                     : "l"(a), "l"(b), "n"(MN_MAJOR));                                                                 \
    }                                                                                                                  \
    template <> DEVICE void wgmma_ss<TYPE, 64, MN_MAJOR, OVERWRITES>(float (&d)[8][4], Operand a, Operand b) {         \
        asm volatile(                                                                                                  \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME                                                \
            " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
            "%28,%29,%30,%31}, %32, %33, " SCALE_D ", 1, 1, %34, 0;"                                                   \
            : SUM4(0), SUM4(1), SUM4(2), SUM4(3), SUM4(4), SUM4(5), SUM4(6), SUM4(7)                                   \
            : "l"(a), "l"(b), "n"(MN_MAJOR));                                                                          \
    }
WGMMA_SS(Bf16, "bf16", 0, 0, "1")
WGMMA_SS(Bf16, "bf16", 0, 1, "0")
WGMMA_SS(Bf16, "bf16", 1, 0, "1")
WGMMA_SS(Fp16, "f16", 0, 0, "1")
WGMMA_SS(Fp16, "f16", 0, 1, "0")
WGMMA_SS(Fp16, "f16", 1, 0, "1")
#undef WGMMA_SS

template <class T, int N, bool b_mn_major = false, bool overwrites = false>
DEVICE void wgmma_rs(float (&d)[N / 8][4], const u32 (&a)[4], Operand b);
#define WGMMA_RS(TYPE, NAME, MN_MAJOR, OVERWRITES, SCALE_D)                                                           \
    template <> DEVICE void wgmma_rs<TYPE, 32, MN_MAJOR, OVERWRITES>(float (&d)[4][4], const u32(&a)[4], Operand b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME                                      \
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, " SCALE_D     \
                     ", 1, 1, %21;"                                                                                   \
                     : SUM4(0), SUM4(1), SUM4(2), SUM4(3)                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MN_MAJOR));                            \
    }                                                                                                                 \
    template <> DEVICE void wgmma_rs<TYPE, 64, MN_MAJOR, OVERWRITES>(float (&d)[8][4], const u32(&a)[4], Operand b) { \
        asm volatile(                                                                                                 \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME                                               \
            " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                \
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, " SCALE_D      \
            ", 1, 1, %37;"                                                                                            \
            : SUM4(0), SUM4(1), SUM4(2), SUM4(3), SUM4(4), SUM4(5), SUM4(6), SUM4(7)                                  \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MN_MAJOR));                                     \
    }                                                                                                                 \
    template <>                                                                                                       \
    DEVICE void wgmma_rs<TYPE, 128, MN_MAJOR, OVERWRITES>(float (&d)[16][4], const u32(&a)[4], Operand b) {           \
        asm volatile(                                                                                                 \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME                                              \
            " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                \
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                        \
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                        \
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, " SCALE_D      \
            ", 1, 1, %69;"                                                                                            \
            : SUM4(0), SUM4(1), SUM4(2), SUM4(3), SUM4(4), SUM4(5), SUM4(6), SUM4(7), SUM4(8), SUM4(9), SUM4(10),     \
              SUM4(11), SUM4(12), SUM4(13), SUM4(14), SUM4(15)                                                        \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MN_MAJOR));                                     \
    }
WGMMA_RS(Bf16, "bf16", 0, 0, "1")
WGMMA_RS(Bf16, "bf16", 0, 1, "0")
WGMMA_RS(Bf16, "bf16", 1, 0, "1")
WGMMA_RS(Bf16, "bf16", 1, 1, "0")
WGMMA_RS(Fp16, "f16", 0, 0, "1")
WGMMA_RS(Fp16, "f16", 0, 1, "0")
WGMMA_RS(Fp16, "f16", 1, 0, "1")
WGMMA_RS(Fp16, "f16", 1, 1, "0")
#undef WGMMA_RS
#undef SUM4

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
// Wait until at most `pending` committed groups are in flight.
template <int pending> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(pending) : "memory");
}
// Keeps the compiler from moving accesses to `d` before the preceding wait.
template <int N> DEVICE void fence_operand(float (&d)[N][4]) {
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(d[i / 4][i % 4]) : : "memory");
}
#else
struct Operand {
    const unsigned char* p;
    int stride;  // 0: swizzled
};
// Row `line` of block (group, piece); of an MN-major operand, of block (piece, group) transposed.
DEVICE const unsigned char* block_row(Operand operand, int group, int piece, int line) {
    if (operand.stride) return operand.p + group * operand.stride + piece * 128 + 16 * line;
    const u64 at = reinterpret_cast<u64>(operand.p + group * 1024 + line * 128 + piece * 16);
    return reinterpret_cast<const unsigned char*>(at ^ (at / 128 % 8 * 16));
}
DEVICE Operand operand(const void* p, int stride) { return {static_cast<const unsigned char*>(p), stride}; }
DEVICE Operand mn_major_operand(const void* p, int stride) { return operand(p, stride); }
DEVICE Operand swizzled_operand(const void* p) { return operand(p, 0); }
DEVICE Operand operand_at(Operand operand, int bytes) { return {operand.p + bytes, operand.stride}; }

template <class T, int N, bool a_mn_major = false, bool overwrites = false>
DEVICE void wgmma_ss(float (&d)[N / 8][4], Operand a, Operand b) {
    #pragma unroll
    for (int i = 0; overwrites && i < N / 2; i++) d[i / 4][i % 4] = 0.f;
    int lane = threadIdx.x % 32, w = threadIdx.x / 32 % 4;
    u32 x[4], y[4];
    int row = 2 * w + lane / 8 % 2, step = lane / 16, line = lane % 8;
    if constexpr (a_mn_major) ldmatrix_x4_trans(x, block_row(a, step, row, line));
    else ldmatrix_x4(x, block_row(a, row, step, line));
    #pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
        ldmatrix_x4(y, block_row(b, i + lane / 16, lane / 8 % 2, line));
        T::mma(d[i], x[0], x[1], x[2], x[3], y[0], y[1]);
        T::mma(d[i + 1], x[0], x[1], x[2], x[3], y[2], y[3]);
    }
}
template <class T, int N, bool b_mn_major = false, bool overwrites = false>
DEVICE void wgmma_rs(float (&d)[N / 8][4], const u32 (&a)[4], Operand b) {
    #pragma unroll
    for (int i = 0; overwrites && i < N / 2; i++) d[i / 4][i % 4] = 0.f;
    int lane = threadIdx.x % 32, row = lane / 16, step = lane / 8 % 2;
    u32 y[4];
    #pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
        if constexpr (b_mn_major) ldmatrix_x4_trans(y, b.p + step * b.stride + (i + row) * 128 + 16 * (lane % 8));
        else ldmatrix_x4(y, block_row(b, i + row, step, lane % 8));
        T::mma(d[i], a[0], a[1], a[2], a[3], y[0], y[1]);
        T::mma(d[i + 1], a[0], a[1], a[2], a[3], y[2], y[3]);
    }
}
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int pending> DEVICE void wgmma_wait() {}
template <int N> DEVICE void fence_operand(float (&)[N][4]) {}
#endif

// Change the number of registers of each thread of the warpgroup.
#if HAS_SETMAXNREG
template <int n> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(n)); }
template <int n> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(n)); }
#endif
