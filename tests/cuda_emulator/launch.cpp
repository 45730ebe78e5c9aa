// The library of one kernel: KERNEL_SOURCE and KERNEL_ENTRY name it.
#include "scheduler.hpp"  // g++ accepts only the first header precompiled

#include "kernel.h"  // the kernel's macros

#include KERNEL_SOURCE

#define EXPORTED extern "C" __attribute__((visibility("default")))

template <class Params> Params only_argument(void (*)(Params));
static decltype(only_argument(KERNEL_ENTRY)) kernel_params;

// What failed, or null.
EXPORTED const char* launch(const void* params, size_t bytes, u32 grid_x, u32 grid_y, u32 grid_z, u32 threads,
                            u32 cluster, u32 resident, u32 shared_bytes, u64 seed, emulator::GuardedMemory* stacks) {
    emulator::machine.message[0] = 0;
    if (bytes != sizeof kernel_params) {
        emulator::report("got %zu bytes of parameters; expected %zu", bytes, sizeof kernel_params);
        return emulator::machine.message;
    }
    memcpy(&kernel_params, params, bytes);
    const auto kernel = [] { KERNEL_ENTRY(kernel_params); };
    return emulator::launch(kernel, {grid_x, grid_y, grid_z}, threads, cluster, resident, shared_bytes, seed, stacks);
}

// Where in this library the last launch trapped, or 0.
EXPORTED u64 fault_offset() { return emulator::fault_offset(); }
