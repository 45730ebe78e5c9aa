// What the kernels over chunks share: packed sequences, and matrices in 8 x 8 blocks.
#pragma once
#include "lane.cuh"

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
