// The machine that runs a kernel on the host: some clusters of blocks at a time, every CUDA thread a fiber of its own.
//
// It is meant to be an adversary: the order of warps, lanes and bulk copies is random (seeded), and what a copy or a
// product has not yet delivered reads as NaN. README.md lists which undefined behavior it finds and which it does not.
// Here is its state and how it switches between threads, in operations.hpp what the threads do, in order.hpp what
// orders their accesses, in scheduler.hpp who goes on and when.
#pragma once

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <sys/mman.h>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct uint3 { u32 x, y, z; };

namespace emulator {

constexpr u32 all_lanes = 0xffffffffu;
constexpr size_t page = 4096, stack_bytes = 32 * page;
constexpr u32 most_idle_polls = 1000000;

#ifndef CHECK_ORDER
#define CHECK_ORDER 0  // 1: see order.hpp
#endif
constexpr bool check_order = CHECK_ORDER;

// Where the kernel calls an operation: every operation takes one as its last argument, by default.
struct Site {
    const char* file;
    int line;
    bool operator==(const Site& other) const { return line == other.line && file == other.file; }
};
#if CHECK_ORDER
struct Call : Site { ~Call(); };  // the operation ends where the argument is destroyed
#else
using Call = Site;
#endif
#define CALLED_HERE ::emulator::Call site = {__builtin_FILE(), __builtin_LINE()}

// An mbarrier's 64 bits; poisoned and zeroed memory do not look initialized. LOCAL: other blocks and bulk copies may
// not use it before fence_mbarrier_init.
enum Initialized { LOCAL = 1, VISIBLE = 2 };
struct Mbarrier {
    u64 initialized : 2, phase : 1, count : 20, pending : 20;
    i64 bytes : 21;
};
static_assert(sizeof(Mbarrier) == sizeof(u64));
constexpr int most_arrivals = (1 << 20) - 1, most_bytes = (1 << 20) - 1;

struct AsyncCopy {  // of one thread
    void* to;
    const void* from;  // null: zeros
    size_t bytes;
    u32 group;
};

struct Warp;
struct VectorClock;
using SharedClocks = std::__shared_ptr<VectorClock, __gnu_cxx::_S_single>;  // counts without atomics

enum Space { SHARED, GLOBAL };

struct LaneOrder {  // see order.hpp
    u32 clock = 1, fenced[2] = {};  // by space: its own accesses up to this clock are fenced
    SharedClocks clocks, observed, released;
    u32 epoch = 1, begun = 0;  // of register accesses; the epoch that the last wgmma_fence began
};

struct Lane {  // a CUDA thread
    void* stack_pointer;
    Warp* warp;
    uint3 thread;
    const char* operation;  // what it waits for, or did last: a format of its arguments
    int arguments[2];
    Site site;
    void* operands;  // of a warp's operation
    u64* barrier;    // the mbarrier it waits for
    std::vector<AsyncCopy> copies;
    u32 groups;  // committed
    std::vector<AsyncCopy> stores;  // bulk copies from shared to global memory
    u32 store_groups;               // committed
    std::vector<u64*> local_barriers;  // initialized since its last fence_mbarrier_init
    bool begun;                        // wgmma_fence came after its last fence_operand
    LaneOrder order;
};

struct Block;

struct Product {  // of a warpgroup, this warp's 16 rows; without operands: the end of a committed group
    const unsigned char *a, *b;  // without a: its rows are held by the lanes
    int a_stride, b_stride, columns;
    bool a_mn_major, b_mn_major, begins;
    float (*load)(const u16*);
    float* d[32];
    u32 held[32][4];  // by lane, as A of mma
    const u32* held_at[32];
    u32 epoch[32];  // of the lanes' register accesses, from the launch on
};

// Registers that products write: poisoned from the first launch until fence_operand after the wait for the last.
struct Accumulator {
    float* d[32];
    int count, under_way;  // registers of a lane; products
    u32 taken;             // lanes that wait for fence_operand
    u32 epoch[32];
    float values[32][64];
};

struct Warp {
    Block* block;
    u32 index, ready, arrived, exited;  // masks of lanes; arrived: in the operation that the warp is gathering for
    Lane* leader;                       // the first of those
    Lane* lanes;
    u64 asleep_until;
    std::vector<Product> products;  // under way
    std::vector<Accumulator> accumulators;
};

struct NamedBarrier {
    u32 threads;
    std::vector<Warp*> waiting;
};

struct Block {
    uint3 index;
    u32 rank, live_warps;
    std::vector<Warp> warps;
    unsigned char* shared;
    NamedBarrier barriers[16];
    Block* cluster;                         // its first block
    std::vector<Warp*> at_cluster_barrier;  // in the first block
};

struct BulkCopy {
    Lane* issuer;
    void* to;
    const void* from;
    u32 bytes;
    Block* block;
    u64* barrier;
    u64 due;
};

// Memory for `count` items of `bytes` bytes, each between two pages that trap.
struct GuardedMemory {
    unsigned char* base = nullptr;
    size_t count, bytes;

    size_t whole() const { return count * (bytes + page) + page; }
    unsigned char* end(size_t i) const { return base + (i + 1) * (bytes + page); }
    bool map(size_t new_count, size_t new_bytes) {
        count = new_count;
        bytes = new_bytes;
        void* p = mmap(nullptr, whole(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return false;
        base = static_cast<unsigned char*>(p);
        for (size_t i = 0; i < count; ++i)
            if (bytes && mprotect(end(i) - bytes, bytes, PROT_READ | PROT_WRITE)) return false;
        return true;
    }
    // Keep an existing mapping: page faults of a new one would take more than a third of a launch.
    bool reserve(size_t least, size_t item_bytes) {
        if (base && count >= least && bytes == item_bytes) return true;
        unmap();
        return map(least, item_bytes);
    }
    void unmap() {
        if (base) munmap(base, whole());
        base = nullptr;
    }
};
static_assert(sizeof(GuardedMemory) == 24, "as __init__.py has it");

struct Machine {
    uint3 grid;
    u32 threads, cluster, resident, shared_bytes;  // resident: clusters that run at a time
    void (*kernel)();
    u64 random_state, now;  // now: steps so far
    void* scheduler;        // its stack pointer while a lane runs
    Warp* warp;             // in this step: the warp that runs, its lanes in the order of turn ^ flip
    u32 flip, turn;
    bool interrupted;  // the lane that stopped last wants another warp to go on
    u32 idle_polls;  // since anything came to an end
    std::vector<Lane> lanes;
    std::vector<Block> blocks;
    std::vector<Warp*> awake, asleep;  // of the warps that are ready
    std::vector<BulkCopy> bulk_copies;
    GuardedMemory shared, *stacks;  // stacks: one for all libraries of the process, for at least as many lanes
    u32 shared_capacity;  // shared_bytes, rounded up to what shared_memory() is aligned to
    jmp_buf give_up;
    char message[1 << 14];
    void* fault;  // the instruction that trapped
    char* library;  // where the kernel's library is loaded
};
static Machine machine;
static Lane* current;
static bool in_kernel;  // the kernel's own code runs, not an operation of the machine

// ---------------------------------------------------------------- failures

[[noreturn]] __attribute__((noinline)) inline void fail_plainly() { longjmp(machine.give_up, 1); }

inline void report(const char* format, ...) {
    const size_t used = strlen(machine.message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(machine.message + used, sizeof machine.message - used, format, arguments);
    va_end(arguments);
}

inline void report_lane(const Lane& lane) {
    const Block& block = *lane.warp->block;
    report("block (%u, %u, %u) thread %u: ", block.index.x, block.index.y, block.index.z, lane.thread.x);
}
inline void report_operation(const Lane& lane) {
    report(lane.operation, lane.arguments[0], lane.arguments[1]);
    if (lane.site.line) report(" at %s:%d", lane.site.file, lane.site.line);
}

// What is wrong with what the current lane does.
template <class... Arguments> [[noreturn]] inline void fail(const char* format, Arguments... arguments) {
    report_lane(*current);
    report(format, arguments...);
    report("; in ");
    report_operation(*current);
    fail_plainly();
}

// ---------------------------------------------------------------- fibers

// Push what a callee must keep, store the stack pointer, and go on where the other stack stopped (not by `ret`, which
// the processor would predict to return to the caller on this stack).
asm(R"(
    .text
    .p2align 4
    .local switch_stack
    .type switch_stack, @function
switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    pop %rcx
    jmp *%rcx
    .size switch_stack, . - switch_stack
)");
extern "C" __attribute__((visibility("hidden"))) void switch_stack(void** from, void* to);

inline u32 random_below(u32 n) {
    u64& x = machine.random_state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return u32((x >> 32) * n >> 32);
}

// In steps, on any scale from a few to most of a kernel.
inline u64 random_duration() { return random_below(1u << random_below(20)); }

inline u32 bit(const Lane& lane) { return 1u << lane.thread.x % 32; }

// Where this step goes on: in the next ready lane of the warp, or in the scheduler.
inline void* next_stack() {
    while (!machine.interrupted && machine.turn < 32) {
        const u32 i = machine.turn++ ^ machine.flip;
        if (!(machine.warp->ready >> i & 1)) continue;
        current = &machine.warp->lanes[i];
        return current->stack_pointer;
    }
    return machine.scheduler;
}

inline void suspend() {
    Lane& lane = *current;
    switch_stack(&lane.stack_pointer, next_stack());
}

// Let another warp go first, sometimes: where others may act on what this lane has just done.
inline void maybe_interrupt() {
    if (random_below(8)) return;
    machine.interrupted = true;
    suspend();
}

#if CHECK_ORDER
inline Call::~Call() { in_kernel = true; }
#endif

inline void begin(const char* operation, Site site, int argument_0 = 0, int argument_1 = 0) {
    in_kernel = false;
    current->operation = operation;
    current->site = site;
    current->arguments[0] = argument_0;
    current->arguments[1] = argument_1;
}

}  // namespace emulator
