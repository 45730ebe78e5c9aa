// The names of kda_layers/kernels/cuda/ptx.cuh for the emulated machine, and what else of CUDA C++ the kernels use.
#pragma once

#include <array>
#include <cmath>
#include <type_traits>

#include "operations.hpp"

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define DEVICE __device__ __forceinline__

#define threadIdx (::emulator::current->thread)
#define blockIdx (::emulator::current->warp->block->index)
#define gridDim (::emulator::machine.grid)

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

DEVICE float __uint_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
DEVICE u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
DEVICE float __fmul_rn(float x, float y) { const volatile float r = x * y; return r; }  // in no FMA
DEVICE float __fmaf_rn(float x, float y, float z) { return std::fmaf(x, y, z); }

template <class A, class B> DEVICE constexpr std::common_type_t<A, B> min(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmin(a, b);
    else return b < a ? b : a;
}
template <class A, class B> DEVICE constexpr std::common_type_t<A, B> max(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmax(a, b);
    else return a < b ? b : a;
}

// ---------------------------------------------------------------- numbers

// mma.m16n8k16: lane 4 g + t holds, in the order of its registers and two numbers to a register,
//   A (16 x 16): (g, 2t), (g, 2t + 1); (g + 8, 2t), ...; (g, 2t + 8), ...; (g + 8, 2t + 8), ...
//   B (16 x 8):  (2t, g), (2t + 1, g); (2t + 8, g), ...
//   C (16 x 8):  (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
namespace emulator {
struct Mma {
    u32 a[4], b[2];
    float* d;

    template <class Number> void run(Site site) {
        begin("mma", site);
        together(*this, multiply<Number>);
    }

    // Without the checks of the compiler: most of the time is spent here.
    template <class Number> static void __attribute__((no_sanitize("alignment", "bounds"))) multiply(Mma** lanes) {
        typedef float Row __attribute__((vector_size(32)));
        float a[16][16];
        Row b[16], d[16];
        for (int lane = 0; lane < 32; ++lane) {
            const Mma& x = *lanes[lane];
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) {
                const float2 pair = Number::unpack(x.a[i]);
                memcpy(&a[g + i % 2 * 8][2 * t + i / 2 * 8], &pair, sizeof pair);
            }
            for (int i = 0; i < 2; ++i) {
                const float2 pair = Number::unpack(x.b[i]);
                b[2 * t + 8 * i][g] = pair.x;
                b[2 * t + 8 * i + 1][g] = pair.y;
            }
            for (int i = 0; i < 2; ++i) memcpy(&d[g + i * 8][2 * t], x.d + 2 * i, 8);
        }
        for (int k = 0; k < 16; ++k)
#pragma GCC unroll 16
            for (int row = 0; row < 16; ++row) d[row] += a[row][k] * b[k];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 2; ++i) memcpy(lanes[lane]->d + 2 * i, &d[lane / 4 + i * 8][2 * (lane % 4)], 8);
    }
};
}  // namespace emulator

struct Bf16 {
    static DEVICE u16 round(float x) {  // to the nearest, ties to even
        const u32 bits = __float_as_uint(x);
        return x != x ? 0x7fff : u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    static DEVICE u32 pack(float low, float high) { return round(low) | u32(round(high)) << 16; }
    static DEVICE float2 unpack(u32 x) {
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    }
    static DEVICE float load(const u16* p) { return __uint_as_float(u32(*p) << 16); }
    static DEVICE u32 multiply(u32 x, u32 y) {
        const float2 a = unpack(x), b = unpack(y);
        return pack(a.x * b.x, a.y * b.y);
    }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, CALLED_HERE) {
        emulator::Mma{{a0, a1, a2, a3}, {b0, b1}, d}.run<Bf16>(site);
    }
};

struct Fp16 {
    static DEVICE u16 round(float x) { const _Float16 h = x; u16 r; memcpy(&r, &h, 2); return r; }
    static DEVICE float load(const u16* p) { _Float16 h; memcpy(&h, p, 2); return h; }
    static DEVICE u32 pack(float low, float high) { return round(low) | u32(round(high)) << 16; }
    static DEVICE float2 unpack(u32 x) {
        const u16 low = x, high = x >> 16;
        return make_float2(load(&low), load(&high));
    }
    static DEVICE u32 multiply(u32 x, u32 y) {
        const float2 a = unpack(x), b = unpack(y);
        return pack(a.x * b.x, a.y * b.y);
    }
    static DEVICE u32 multiply_add(u32 x, u32 y, u32 z) {  // exact in fp64 but for the last rounding
        const float2 a = unpack(x), b = unpack(y), c = unpack(z);
        return pack(double(a.x) * b.x + c.x, double(a.y) * b.y + c.y);
    }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, CALLED_HERE) {
        emulator::Mma{{a0, a1, a2, a3}, {b0, b1}, d}.run<Fp16>(site);
    }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 b, CALLED_HERE) {  // m16n8k8: the first half of the above
        emulator::Mma{{a0, a1, 0, 0}, {b, 0}, d}.run<Fp16>(site);
    }
};

// mma.m16n8k8: lane 4 g + t holds, in the order of its registers,
//   A (16 x 8): (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);  B (8 x 8): (t, g), (t + 4, g);  C as above
// The products see the upper 19 bits of a number.
struct Tf32 {
    static DEVICE float round(float x) {  // to the nearest, ties away from zero
        return x != x ? x : __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fffu);
    }
    static DEVICE void mma(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1, CALLED_HERE) {
        struct Operands { float a[4], b[2]; float* d; } mine = {{a0, a1, a2, a3}, {b0, b1}, d};
        emulator::begin("mma", site);
        emulator::together(mine, [](Operands** lanes) {
            const auto seen = [](float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fffu); };
            float a[16][8], b[8][8], d[16][8];
            for (int lane = 0; lane < 32; ++lane) {
                const int g = lane / 4, t = lane % 4;
                for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = seen(lanes[lane]->a[i]);
                for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = seen(lanes[lane]->b[i]);
                for (int i = 0; i < 2; ++i) memcpy(&d[g + i * 8][2 * t], lanes[lane]->d + 2 * i, 8);
            }
            for (int k = 0; k < 8; ++k)
                for (int row = 0; row < 16; ++row)
                    for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
            for (int lane = 0; lane < 32; ++lane)
                for (int i = 0; i < 2; ++i) memcpy(lanes[lane]->d + 2 * i, &d[lane / 4 + i * 8][2 * (lane % 4)], 8);
        });
    }
};

// mma.m16n8k32: lane 4 g + t holds, in the order of its registers and four numbers to a register,
//   A (16 x 32): (g, 4t), ...; (g + 8, 4t), ...; (g, 4t + 16), ...; (g + 8, 4t + 16), ...
//   B (32 x 8):  (4t, g), ...; (4t + 16, g), ...;  C as above
struct Int8 {
    static DEVICE void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, CALLED_HERE) {
        struct Operands { u32 a[4], b[2]; int* d; } mine = {{a0, a1, a2, a3}, {b0, b1}, d};
        emulator::begin("mma", site);
        emulator::together(mine, [](Operands** lanes) {
            signed char a[16][32], b[8][32];
            for (int lane = 0; lane < 32; ++lane) {
                const int g = lane / 4, t = lane % 4;
                for (int i = 0; i < 4; ++i) memcpy(&a[g + i % 2 * 8][4 * t + i / 2 * 16], &lanes[lane]->a[i], 4);
                for (int i = 0; i < 2; ++i) memcpy(&b[g][4 * t + i * 16], &lanes[lane]->b[i], 4);
            }
            for (int lane = 0; lane < 32; ++lane)
                for (int i = 0; i < 4; ++i)
                    for (int k = 0; k < 32; ++k)
                        lanes[lane]->d[i] += a[lane / 4 + i / 2 * 8][k] * b[lane % 4 * 2 + i % 2][k];
        });
    }
};

DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float log2_fast(float x) { return std::log2(x); }
DEVICE float reciprocal(float x) { return 1 / x; }
DEVICE float rsqrt_fast(float x) { return 1 / std::sqrt(x); }

DEVICE int round_to_int(float x) {  // the nearest in range; of NaN 0
    return x != x ? 0 : int(std::nearbyint(std::fmin(std::fmax(x, -0x1p31f), 0x1.fffffep30f)));
}

DEVICE u32 select_bytes(u32 x, u32 y, u32 which) {
    const u64 bytes = u64(y) << 32 | x;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= u32(bytes >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}

template <class T> DEVICE T opt_barrier(T x) { return x; }
DEVICE u32 read_thread_index() { return threadIdx.x; }

// ---------------------------------------------------------------- within a warp

template <class T> DEVICE T shuffle_xor(T x, int mask, CALLED_HERE) {
    struct Operands { T x, result; int mask; } mine = {x, x, mask};
    emulator::begin("shuffle_xor", site);
    emulator::together(mine, [](Operands** lanes) {
        for (int i = 0; i < 32; ++i)
            if (const int other = i ^ lanes[i]->mask; other >= 0 && other < 32) lanes[i]->result = lanes[other]->x;
    });
    return mine.result;
}
template <class T> DEVICE T shuffle(T x, int lane, CALLED_HERE) {
    struct Operands { T x, result; int lane; } mine = {x, x, lane};
    emulator::begin("shuffle", site);
    emulator::together(mine, [](Operands** lanes) {
        for (int i = 0; i < 32; ++i) lanes[i]->result = lanes[lanes[i]->lane & 31]->x;
    });
    return mine.result;
}
DEVICE int broadcast(int x, int lane = 0, CALLED_HERE) { return shuffle(x, lane, site); }
DEVICE u32 ballot(bool x, CALLED_HERE) {
    struct Operands { bool x; u32 result; } mine = {x, 0};
    emulator::begin("ballot", site);
    emulator::together(mine, [](Operands** lanes) {
        u32 bits = 0;
        for (int i = 0; i < 32; ++i) bits |= u32(lanes[i]->x) << i;
        for (int i = 0; i < 32; ++i) lanes[i]->result = bits;
    });
    return mine.result;
}
DEVICE int count_ones(u32 x) { return __builtin_popcount(x); }
DEVICE void warp_sync(CALLED_HERE) {
    struct Operands {} mine;
    emulator::begin("warp_sync", site);
    emulator::together(mine, [](Operands**) { emulator::synchronize(std::array{emulator::current->warp}); });
}

namespace emulator {
// Lane 4 i + j gets the elements 2 j and 2 j + 1 of row i, or of column i.
inline u32 matrix_pair(const u16 (&matrix)[8][8], int lane, bool transposed) {
    const int i = lane / 4, j = lane % 4 * 2;
    return transposed ? matrix[j][i] | u32(matrix[j + 1][i]) << 16 : matrix[i][j] | u32(matrix[i][j + 1]) << 16;
}

inline void load_four_matrices(u32* r, const void* row, bool transposed) {
    struct Operands { const void* row; u32* r; } mine = {row, r};
    together(mine, [transposed](Operands** lanes) {
        u16 matrices[4][8][8];
        for (int i = 0; i < 32; ++i) {
            operation_reads(current->warp->lanes[i], lanes[i]->row, 16);
            memcpy(matrices[i / 8][i % 8], lanes[i]->row, 16);
        }
        for (int i = 0; i < 32; ++i)
            for (int m = 0; m < 4; ++m) lanes[i]->r[m] = matrix_pair(matrices[m], i, transposed);
    });
}
}  // namespace emulator

DEVICE u32 transpose_8x8(u32 x, CALLED_HERE) {
    emulator::begin("transpose_8x8", site);
    emulator::together(x, [](u32** lanes) {
        u16 matrix[8][8];
        for (int i = 0; i < 32; ++i) memcpy(&matrix[i / 4][i % 4 * 2], lanes[i], 4);
        for (int i = 0; i < 32; ++i) *lanes[i] = emulator::matrix_pair(matrix, i, true);
    });
    return x;
}

DEVICE u32 shared_address(const void* p) { return emulator::shared_offset(p, 0, 1); }

DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row, CALLED_HERE) {
    emulator::begin_shared("ldmatrix_x4(byte %d)", site, row, 16, 16);
    emulator::load_four_matrices(r, row, false);
}

DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row, CALLED_HERE) {
    emulator::begin_shared("ldmatrix_x4_trans(byte %d)", site, row, 16, 16);
    emulator::load_four_matrices(r, row, true);
}

DEVICE void stmatrix_x4(void* row, const u32 (&x)[4], CALLED_HERE) {
    emulator::begin_shared("stmatrix_x4(byte %d)", site, row, 16, 16);
    struct Operands { void* row; const u32* x; } mine = {row, x};
    emulator::together(mine, [](Operands** lanes) {
        for (int i = 0; i < 32; ++i) {  // lane i has row i % 8 of matrix i / 8, whose numbers four lanes hold
            emulator::operation_writes(emulator::current->warp->lanes[i], lanes[i]->row, 16);
            for (int j = 0; j < 4; ++j) static_cast<u32*>(lanes[i]->row)[j] = lanes[4 * (i % 8) + j]->x[i / 8];
        }
    });
}

DEVICE void stmatrix_x4_trans(void* row, u32 a, u32 b, u32 c, u32 d, CALLED_HERE) {
    emulator::begin_shared("stmatrix_x4_trans(byte %d)", site, row, 16, 16);
    struct Operands { void* row; u32 x[4]; } mine = {row, {a, b, c, d}};
    emulator::together(mine, [](Operands** lanes) {
        for (int i = 0; i < 32; ++i) {  // lane i has row i % 8 of what is stored of matrix i / 8: a column of its numbers
            u16* to = static_cast<u16*>(lanes[i]->row);
            emulator::operation_writes(emulator::current->warp->lanes[i], to, 16);
            for (int j = 0; j < 8; ++j) to[j] = u16(lanes[4 * j + i % 8 / 2]->x[i / 8] >> 16 * (i % 2));
        }
    });
}

// ---------------------------------------------------------------- shared memory: copies and barriers

DEVICE unsigned char* shared_memory() { return emulator::own_block().shared; }

DEVICE void cp_async_16(void* to, const void* from, bool valid, CALLED_HERE) {
    emulator::begin_shared("cp_async_16(byte %d)", site, to, 16, 16);
    emulator::start_copy(to, from, valid, 16);
}
template <class T> DEVICE T* hide_shared_address(T* p, CALLED_HERE) {
    shuffle_xor(0, 0, site);  // every lane must come
    return p;
}
DEVICE void cp_async_16_once(void* to, const void* from, CALLED_HERE) {
    emulator::begin_shared("cp_async_16_once(byte %d)", site, to, 16, 16);
    emulator::start_copy(to, from, true, 16);
}
DEVICE void cp_async_4(void* to, const void* from, bool valid, CALLED_HERE) {
    emulator::begin_shared("cp_async_4(byte %d)", site, to, 4, 4);
    emulator::start_copy(to, from, valid, 4);
}
DEVICE void cp_async_commit() { ++emulator::current->groups; }
template <int pending> DEVICE void cp_async_wait(CALLED_HERE) {
    emulator::begin("cp_async_wait<%d>", site, pending);
    emulator::finish_copies(pending);
}

DEVICE void prefetch(const void*) {}

DEVICE void barrier_sync(int id, int threads, CALLED_HERE) {
    emulator::begin("barrier_sync(%d, %d)", site, id, threads);
    emulator::wait_at_named_barrier(id, threads);
}

DEVICE void mbarrier_init(u64* barrier, int count, CALLED_HERE) {
    emulator::begin_shared("mbarrier_init(byte %d, %d)", site, barrier, 8, 8, count);
    emulator::initialize(barrier, count);
}
DEVICE void mbarrier_arrive(u64* barrier, CALLED_HERE) {
    emulator::begin_shared("mbarrier_arrive(byte %d)", site, barrier, 8, 8);
    emulator::arrive(emulator::own_block(), barrier);
}
DEVICE bool mbarrier_try_wait(u64* barrier, u32 parity, CALLED_HERE) {
    emulator::begin_shared("mbarrier_try_wait(byte %d, parity %d)", site, barrier, 8, 8, parity);
    return emulator::poll(barrier, parity);
}
DEVICE bool mbarrier_test_wait(u64* barrier, u32 parity, CALLED_HERE) {
    emulator::begin_shared("mbarrier_test_wait(byte %d, parity %d)", site, barrier, 8, 8, parity);
    return emulator::poll(barrier, parity);
}
DEVICE void mbarrier_wait(u64* barrier, u32 parity, CALLED_HERE) {
    emulator::begin_shared("mbarrier_wait(byte %d, parity %d)", site, barrier, 8, 8, parity);
    emulator::wait_for_phase(barrier, parity);
}

DEVICE void red_add_release(u32* counter, u32 more, CALLED_HERE) {
    emulator::begin("red_add_release(%d)", site, more);
    emulator::add_to_counter(counter, more, true);
}
DEVICE void red_add(u32* counter, u32 more, CALLED_HERE) {
    emulator::begin("red_add(%d)", site, more);
    emulator::add_to_counter(counter, more, false);
}
DEVICE u32 atomic_add(u32* counter, u32 more, CALLED_HERE) {
    emulator::begin("atomic_add(%d)", site, more);
    return emulator::add_to_counter(counter, more, false);
}
DEVICE void write_counter(u32* counter, u32 value, CALLED_HERE) {
    emulator::begin("write_counter(%d)", site, value);
    emulator::write_counter(counter, value);
}
DEVICE u32 read_counter(const u32* counter, CALLED_HERE) {
    emulator::begin("read_counter", site);
    return emulator::read_counter(counter);
}
template <class T> DEVICE T load_once(const void* from) { return *static_cast<const T*>(from); }
template <class T> DEVICE void store_once(void* to, T x) { *static_cast<T*>(to) = x; }
DEVICE void store_global(void* to, uint4 x) { *static_cast<uint4*>(to) = x; }
DEVICE void back_off() {}
DEVICE void launch_dependents() {}
DEVICE void wait_for_earlier_kernels() {}
DEVICE void fence_gpu(CALLED_HERE) {
    emulator::begin("fence_gpu", site);
    emulator::fence_scope_gpu();
}

// ---------------------------------------------------------------- clusters of blocks (sm_90 and newer)

#if __CUDA_ARCH__ >= 900
DEVICE u32 cluster_rank() { return emulator::own_block().rank; }
DEVICE void cluster_sync(CALLED_HERE) {
    emulator::begin("cluster_sync", site);
    emulator::wait_at_cluster_barrier();
}
DEVICE void fence_mbarrier_init(CALLED_HERE) {
    emulator::begin("fence_mbarrier_init", site);
    emulator::fence_initializations();
}
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes, CALLED_HERE) {
    emulator::begin_shared("mbarrier_arrive_expect_tx(byte %d, %d bytes)", site, barrier, 8, 8, bytes);
    emulator::add_bytes(barrier, bytes);
    emulator::arrive(emulator::own_block(), barrier);
}
DEVICE void mbarrier_arrive_cluster(u64* barrier, u32 rank, CALLED_HERE) {
    emulator::begin_shared("mbarrier_arrive_cluster(byte %d, rank %d)", site, barrier, 8, 8, rank);
    emulator::Block& block = emulator::block_of_rank(rank);
    if (&block != &emulator::own_block()) emulator::check_visible(emulator::same_place(barrier, block));
    emulator::arrive(block, emulator::same_place(barrier, block));
}
DEVICE void fence_proxy_async_global(CALLED_HERE) {
    emulator::begin("fence_proxy_async_global", site);
    emulator::fence_proxy(*emulator::current, emulator::GLOBAL);
}
DEVICE void cp_async_bulk_multicast(void* to, const void* from, u32 bytes, u64* barrier, u16 ranks, CALLED_HERE) {
    emulator::begin_shared("cp_async_bulk_multicast(byte %d, %d bytes)", site, to, bytes, 16, bytes);
    emulator::start_bulk_copies(to, from, bytes, barrier, ranks);
}
DEVICE void cp_async_bulk_store(void* to, const void* from, u32 bytes, CALLED_HERE) {
    emulator::begin_shared("cp_async_bulk_store(byte %d, %d bytes)", site, from, bytes, 16, bytes);
    emulator::start_bulk_store(to, from, bytes);
}
DEVICE void cp_async_bulk_commit() { ++emulator::current->store_groups; }
template <int pending> DEVICE void cp_async_bulk_wait_read(CALLED_HERE) {
    emulator::begin("cp_async_bulk_wait_read<%d>", site, pending);
    emulator::finish_bulk_stores(pending);
}
#endif

// ---------------------------------------------------------------- products of four warps

#if HAS_WGMMA
DEVICE void fence_proxy_async_shared(CALLED_HERE) {
    emulator::begin("fence_proxy_async_shared", site);
    emulator::fence_proxy(*emulator::current, emulator::SHARED);
}
#else
DEVICE void fence_proxy_async_shared() {}
#endif

struct Operand {
    const unsigned char* p;
    int stride;
};
DEVICE Operand operand(const void* p, int stride) { return {static_cast<const unsigned char*>(p), stride}; }
DEVICE Operand mn_major_operand(const void* p, int stride) { return operand(p, stride); }
DEVICE Operand operand_at(Operand operand, int bytes) { return {operand.p + bytes, operand.stride}; }
DEVICE Operand swizzled_operand(const void* p) { return operand(p, 0); }
DEVICE const unsigned char* block_row(Operand operand, int group, int piece, int line) {
    return emulator::piece_of(operand.p, operand.stride, 8 * group + line, 8 * piece);
}

#if HAS_WGMMA
template <class T, int N, bool a_mn_major = false, bool begins = false>
DEVICE void wgmma_ss(float (&d)[N / 8][4], Operand a, Operand b, CALLED_HERE) {
    struct Operands { float* d; } mine = {d[0]};
    emulator::begin("wgmma_ss", site);
    emulator::together(mine, [a, b](Operands** lanes) {
        emulator::Product product{a.p, b.p, a.stride, b.stride, N, a_mn_major, false, begins, T::load, {}, {}, {}, {}};
        for (int i = 0; i < 32; ++i) product.d[i] = lanes[i]->d;
        emulator::start_product(product);
    });
}
template <class T, int N, bool b_mn_major = false, bool begins = false>
DEVICE void wgmma_rs(float (&d)[N / 8][4], const u32 (&a)[4], Operand b, CALLED_HERE) {
    struct Operands { float* d; const u32* a; } mine = {d[0], a};
    emulator::begin("wgmma_rs", site);
    emulator::together(mine, [b](Operands** lanes) {
        emulator::Product product{nullptr, b.p, 0, b.stride, N, false, b_mn_major, begins, T::load, {}, {}, {}, {}};
        for (int i = 0; i < 32; ++i) {
            product.d[i] = lanes[i]->d, product.held_at[i] = lanes[i]->a;
            memcpy(product.held[i], lanes[i]->a, sizeof product.held[i]);
        }
        emulator::start_product(product);
    });
}
DEVICE void wgmma_fence(CALLED_HERE) {
    emulator::begin("wgmma_fence", site);
    emulator::fence_registers(*emulator::current);
}
DEVICE void wgmma_commit(CALLED_HERE) {
    struct Operands {} mine;
    emulator::begin("wgmma_commit", site);
    emulator::together(mine, [](Operands**) { emulator::current->warp->products.push_back({}); });
}
template <int pending> DEVICE void wgmma_wait(CALLED_HERE) {
    struct Operands {} mine;
    emulator::begin("wgmma_wait<%d>", site, pending);
    emulator::together(mine, [](Operands**) { emulator::finish_products(*emulator::current->warp, pending); });
}
template <int N> DEVICE void fence_operand(float (&d)[N][4], CALLED_HERE) {
    emulator::begin("fence_operand", site);
    emulator::use_product(d[0]);
}
#else
template <class T, int N, bool a_mn_major = false, bool begins = false>
DEVICE void wgmma_ss(float (&d)[N / 8][4], Operand a, Operand b) {
    for (int i = 0; begins && i < N / 2; i++) d[i / 4][i % 4] = 0.f;
    int lane = threadIdx.x % 32, w = threadIdx.x / 32 % 4;
    u32 x[4], y[4];
    int row = 2 * w + lane / 8 % 2, step = lane / 16, line = lane % 8;
    if constexpr (a_mn_major) ldmatrix_x4_trans(x, block_row(a, step, row, line));
    else ldmatrix_x4(x, block_row(a, row, step, line));
    for (int i = 0; i < N / 8; i += 2) {
        ldmatrix_x4(y, block_row(b, i + lane / 16, lane / 8 % 2, line));
        T::mma(d[i], x[0], x[1], x[2], x[3], y[0], y[1]);
        T::mma(d[i + 1], x[0], x[1], x[2], x[3], y[2], y[3]);
    }
}
template <class T, int N, bool b_mn_major = false, bool begins = false>
DEVICE void wgmma_rs(float (&d)[N / 8][4], const u32 (&a)[4], Operand b) {
    for (int i = 0; begins && i < N / 2; i++) d[i / 4][i % 4] = 0.f;
    int lane = threadIdx.x % 32, row = lane / 16, step = lane / 8 % 2;
    u32 y[4];
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

#if HAS_SETMAXNREG
template <int n> DEVICE void setmaxnreg_inc() {}
template <int n> DEVICE void setmaxnreg_dec() {}
#endif
