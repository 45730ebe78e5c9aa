// What the kernels over chunks share: a thread's place, packed sequences, and matrices in 8 x 8 blocks.
#pragma once
#include "ptx.cuh"

// A thread's warp, counted from the first one of its role, and its place in the warp. In the fragments of mma, lane
// (g, t) = (id / 4, id % 4) has rows g and g + 8 and columns 2 t and 2 t + 1.
struct Lane {
    int warp, id;

    // Keeps what is derived from the lane from being held in registers.
    DEVICE void opt_barrier() { id = ::opt_barrier(id), warp = ::opt_barrier(warp); }
};

using Io = IO;  // chosen by the build: Bf16 or Fp16
constexpr int CHUNK = 64;

#if G_FP32  // chosen by the build, where a kernel reads gate logits
using Logit = float;
#else
using Logit = u16;
#endif

// Where a packed sequence begins among all tokens.
template <class Params> DEVICE int offset_of(const Params& p, int sequence) {
    return p.int64_offsets ? int(static_cast<const i64*>(p.cu_seqlens)[sequence])
                           : static_cast<const int*>(p.cu_seqlens)[sequence];
}

// Matrices of 16-bit elements are stored in 8 x 8 blocks of 128 bytes, 8 adjacent elements of a row: the byte of
// block (i, j) of a matrix that is `columns` blocks wide.
DEVICE constexpr int block_at(int i, int j, int columns) { return (i * columns + j) * 128; }

// Element in a column of a saved state where `piece`, 8 channels of it, begins. Swizzled, so that neither what writes whole
// states to shared memory nor what reads them has bank conflicts, and one bulk copy stores a block's columns.
DEVICE int saved_at(int column, int piece) { return (piece ^ column % 8) * 8; }
