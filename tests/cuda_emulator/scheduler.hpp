// Who goes on, and when: runs a grid, as many clusters at a time as are resident.
#pragma once

#include <csignal>
#include <dlfcn.h>
#include <ucontext.h>

#include "operations.hpp"

namespace emulator {

inline void run_lane() {
    in_kernel = true;
    machine.kernel();
    Lane& lane = *current;
    Warp& warp = *lane.warp;
    begin("exit", lane.site);
    if (!lane.stores.empty()) fail("it has not waited for its bulk copies from shared memory");
    warp.ready &= ~bit(lane);
    warp.exited |= bit(lane);
    if (warp.exited == all_lanes) {
        --warp.block->live_warps;
        release_cluster_if_complete(warp.block->cluster);
    }
    suspend();
}

inline void deliver_due() {
    for (size_t i = 0; i < machine.bulk_copies.size();) {
        BulkCopy& slot = machine.bulk_copies[i];
        if (slot.due > machine.now) {
            ++i;
            continue;
        }
        const BulkCopy copy = slot;
        slot = machine.bulk_copies.back();
        machine.bulk_copies.pop_back();
        deliver(copy);
    }
}

[[noreturn]] inline void fail_in_deadlock(const char* what) {
    report("%s:", what);
    for (const Block& block : machine.blocks)
        for (const Warp& warp : block.warps)
            for (u32 rest = ~warp.exited; rest;) {  // one line for all lanes that wait at the same place
                const Lane& lane = warp.lanes[__builtin_ctz(rest)];
                u32 same = 0;
                for (int i = 0; i < 32; ++i) {
                    const Lane& other = warp.lanes[i];
                    if (rest >> i & 1 && other.operation == lane.operation && other.site == lane.site &&
                        other.barrier == lane.barrier)
                        same |= 1u << i;
                }
                rest &= ~same;
                report("\n  block (%u, %u, %u) warp %u ", block.index.x, block.index.y, block.index.z, warp.index);
                report(same == all_lanes ? "all lanes: " : "lanes 0x%08x: ", same);
                report_operation(lane);
                if (lane.barrier) {
                    const Mbarrier& state = *reinterpret_cast<const Mbarrier*>(lane.barrier);
                    report(" (parity %u, %u arrivals and %lld bytes missing)", u32(state.phase), u32(state.pending),
                           i64(state.bytes));
                } else if (warp.arrived & same) {
                    report(" (lanes 0x%08x are missing, 0x%08x have exited)", ~warp.arrived, warp.exited);
                }
            }
    fail_plainly();
}

// Runs every ready lane once, in a random order, until it waits; true where the warp may go on at once.
inline bool step(Warp& warp) {
    machine.warp = &warp;
    machine.flip = random_below(32);
    machine.turn = 0;
    machine.interrupted = false;
    switch_stack(&machine.scheduler, next_stack());
    return warp.ready && !machine.interrupted;
}

// Block `number` of those that run at a time becomes block `index` of the grid.
inline void start_block(u32 number, uint3 index) {
    Block& block = machine.blocks[number];
    block.index = index;
    block.rank = number % machine.cluster;
    block.cluster = &block - block.rank;
    block.at_cluster_barrier.clear();
    block.live_warps = machine.threads / 32;
    block.shared = machine.shared.end(number) - machine.shared_capacity;
    for (NamedBarrier& barrier : block.barriers) barrier.waiting.clear();
    poison(block.shared, machine.shared_capacity);
    block.warps.resize(block.live_warps);
    for (u32 t = 0; t < machine.threads; ++t) {
        const u32 lane_number = number * machine.threads + t;
        Lane& lane = machine.lanes[lane_number];
        Warp& warp = block.warps[t / 32];
        if (t % 32 == 0) warp = {&block, t / 32, all_lanes, 0, 0, nullptr, &lane, 0, {}, {}};
        // Stack tops differ modulo a page, or 32 lanes would compete for the same lines of the cache.
        const auto top = reinterpret_cast<void**>(machine.stacks->end(lane_number) - t % 32 * 128);
        top[-2] = reinterpret_cast<void*>(run_lane);  // where switch_stack returns to, below it six registers
        const u32 clock = lane.order.clock;  // of the lane's number in an earlier block
        lane = {top - 8, &warp, {t, 0, 0}, "start", {}, {"", 0}, nullptr, nullptr, {}, 0, {}, false, {}};
        lane.order.clock = clock;
    }
}

// Lets a warp run for a time, or sends it to sleep instead: others may get far ahead of it, or keep in step with it.
inline void run_or_sleep(Warp& warp, bool must_run) {
    if (!must_run && !random_below(16)) {
        warp.asleep_until = machine.now + random_duration();
        return;
    }
    for (u32 steps = 1u << random_below(10); steps; --steps) {
        const bool ready = step(warp);
        ++machine.now;
        deliver_due();
        if (!ready) return;
    }
}

inline Warp& any_of(const std::vector<Warp*>& warps) { return *warps[random_below(warps.size())]; }

inline void wait_for_bulk_copy() {
    u64 due = ~0ull;
    for (const BulkCopy& copy : machine.bulk_copies) due = copy.due < due ? copy.due : due;
    machine.now = due;
    deliver_due();
}

// What lies behind the shared memory, up to where an access traps.
inline void check_padding(const Block& block) {
    for (u32 i = machine.shared_bytes; i < machine.shared_capacity; ++i) {
        if (block.shared[i] == 0xff) continue;
        report("block (%u, %u, %u) wrote byte %u of %u bytes of shared memory", block.index.x, block.index.y,
               block.index.z, i, machine.shared_bytes);
        fail_plainly();
    }
}

inline void run_blocks() {
    for (bool live = true; live || !machine.bulk_copies.empty();) {
        live = false;
        machine.awake.clear();
        machine.asleep.clear();
        for (Block& block : machine.blocks) {
            live |= block.live_warps > 0;
            for (Warp& warp : block.warps)
                if (warp.ready) (warp.asleep_until > machine.now ? machine.asleep : machine.awake).push_back(&warp);
        }
        const bool copying = !machine.bulk_copies.empty(), sleeping = !machine.asleep.empty();
        if (!machine.awake.empty()) run_or_sleep(any_of(machine.awake), false);
        else if (sleeping && !(copying && random_below(2))) run_or_sleep(any_of(machine.asleep), true);
        else if (copying) wait_for_bulk_copy();
        else if (live) fail_in_deadlock("deadlock");
        if (machine.idle_polls > most_idle_polls) fail_in_deadlock("warps only poll mbarriers and counters");
    }
    for (const Block& block : machine.blocks) check_padding(block);
}

inline void check_launch() {
    const uint3 grid = machine.grid;
    const bool valid = machine.threads && machine.threads % 32 == 0 && machine.threads <= 1024 && machine.cluster &&
                       machine.cluster <= 8 && grid.x % machine.cluster == 0 && machine.shared_bytes <= 227 * 1024;
    if (valid && machine.resident) return;
    report("got blocks of %u threads and %u bytes, in clusters of %u, of which %u are resident, and a grid of "
           "%u x %u x %u; expected 32, 64 ... 1024 threads, at most 232448 bytes, clusters of at most 8 blocks that "
           "divide the grid's x, and at least one of them resident",
           machine.threads, machine.shared_bytes, machine.cluster, machine.resident, grid.x, grid.y, grid.z);
    fail_plainly();
}

inline void prepare_machine(u32 block_count) {
    machine.now = machine.idle_polls = 0;
    machine.bulk_copies.clear();
    machine.blocks.clear();
    machine.blocks.resize(block_count);
    machine.lanes.clear();
    machine.lanes.resize(block_count * machine.threads);
    machine.shared_capacity = (machine.shared_bytes + 1023) / 1024 * 1024;
    if (machine.stacks->reserve(machine.lanes.size(), stack_bytes) &&
        machine.shared.map(block_count, (machine.shared_capacity + page - 1) / page * page))
        return reset_order(block_count);
    report("no memory for %zu threads", machine.lanes.size());
    fail_plainly();
}

inline void run_grid() {
    check_launch();
    const uint3 grid = machine.grid;
    const u32 all = grid.x * grid.y * grid.z, room = machine.resident * machine.cluster;
    prepare_machine(room < all ? room : all);
    for (u32 first = 0; first < all; first += room) {
        if (all - first < room) machine.blocks.resize(all - first);
        start_order();
        for (u32 i = 0; i < machine.blocks.size(); ++i) {
            const u32 block = first + i;
            start_block(i, {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y});
        }
        run_blocks();
    }
}

// ---------------------------------------------------------------- launch

inline void on_signal(int signal, siginfo_t* info, void* context) {
    machine.fault = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
    report_lane(*current);
    if (signal == SIGILL) report("misaligned access or array index out of range");
    else if (signal == SIGFPE) report("division by zero");
    else {
        const auto address = static_cast<unsigned char*>(info->si_addr);
        const i64 offset = address - current->warp->block->shared;
        const i64 below = machine.stacks->end(current - machine.lanes.data()) - stack_bytes - address;
        report("invalid access to %p", static_cast<void*>(address));
        if (offset >= -i64(page) && offset < i64(machine.shared_capacity + page))
            report(", byte %lld of %u bytes of shared memory", offset, machine.shared_bytes);
        else if (below > 0 && below <= i64(page)) report(", below the stack of %zu bytes", stack_bytes);
    }
    report("; after ");
    report_operation(*current);
    fail_plainly();
}

// Runs the grid; what failed, or null. The message is empty before.
inline const char* launch(void (*kernel)(), uint3 grid, u32 threads, u32 cluster, u32 resident, u32 shared_bytes,
                          u64 seed, GuardedMemory* stacks) {
    machine.kernel = kernel;
    machine.stacks = stacks;
    machine.grid = grid;
    machine.threads = threads;
    machine.cluster = cluster;
    machine.resident = resident;
    machine.shared_bytes = shared_bytes;
    machine.random_state = (seed + 1) * 0x9e3779b97f4a7c15ull;
    machine.fault = nullptr;
    in_kernel = false;
    Dl_info mine;
    machine.library = dladdr(&machine, &mine) ? static_cast<char*>(mine.dli_fbase) : nullptr;

    // Signals need a stack of their own: a lane's may be what overflowed.
    static char signal_stack[1 << 16];
    constexpr int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    static struct sigaction previous[4];
    static stack_t previous_stack;
    const stack_t stack = {signal_stack, 0, sizeof signal_stack};
    sigaltstack(&stack, &previous_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // not deferred: the handler does not return
    for (int i = 0; i < 4; ++i) sigaction(signals[i], &action, &previous[i]);
    if (!setjmp(machine.give_up)) run_grid();
    for (int i = 0; i < 4; ++i) sigaction(signals[i], &previous[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
    end_order();
    machine.shared.unmap();
    return machine.message[0] ? machine.message : nullptr;
}

inline u64 fault_offset() {
    Dl_info trapped;
    const bool here = machine.fault && dladdr(machine.fault, &trapped) && trapped.dli_fbase == machine.library;
    return here ? static_cast<char*>(machine.fault) - machine.library : 0;
}

}  // namespace emulator
