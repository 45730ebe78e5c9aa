// What the warps of a block that only prepares do next (preparing_block.cuh). One warp finds out, so that those that prepare
// have more registers and fewer instructions.
#pragma once

// A chunk: its tokens and its place.
struct Task {
    i64 keys;                       // offset of its first token in q and k
    unsigned char *place, *T_fp16;  // where it is stored, and T' in fp16 if that is kept
    u32* filled;                    // the counter that tells the scan of it; null if it is not scanned
    int first, left, head;          // first token, tokens from it to the end of its tile, 0 after the last chunk
    float A;                        // e^A_log
};

struct Tasks {
    static constexpr u32 AHEAD = 4;  // chunks
    static constexpr int AT_STEPS = AHEAD * sizeof(Task), BYTES = AT_STEPS + 3 * AHEAD * 8;
    enum Step { GIVEN, PLACED, WRITTEN };  // it can be read; its place is free; its chunk has been written
    unsigned char* base;

    DEVICE Task& operator[](u32 iteration) const { return reinterpret_cast<Task*>(base)[iteration % AHEAD]; }
    DEVICE u64* barrier(Step step, u32 iteration) const {
        return reinterpret_cast<u64*>(base + AT_STEPS) + step * AHEAD + iteration % AHEAD;
    }
    DEVICE void wait_for(Step step, u32 iteration) const {
        mbarrier_wait(barrier(step, iteration), iteration / AHEAD & 1);
    }
    DEVICE void init_barriers(int writers) const {
        for (u32 i = 0; i < AHEAD; i++) {
            mbarrier_init(barrier(GIVEN, i), 1), mbarrier_init(barrier(PLACED, i), 1);
            mbarrier_init(barrier(WRITTEN, i), writers);
        }
    }
};
