// A thread's place in its block.
#pragma once
#include "ptx.cuh"

// A thread's warp, counted from the first one of its role, and its place in the warp. In the fragments of mma, lane
// (g, t) = (id / 4, id % 4) has rows g and g + 8 and columns 2 t and 2 t + 1.
struct Lane {
    int warp, id;

    // Keeps what is derived from the lane from being held in registers.
    DEVICE void opt_barrier() { id = ::opt_barrier(id), warp = ::opt_barrier(warp); }
};
