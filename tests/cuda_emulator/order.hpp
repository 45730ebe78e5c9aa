// Which accesses to memory are ordered, and visible to asynchronous operations: checked where CHECK_ORDER is 1.
//
// Happens-before by vector clocks, at the grain of a thread and a 4-byte word; the rule for fences is that of Triton's
// ConSan. Every thread has a clock, which advances when it releases or fences. An access by the generic proxy (a plain
// load or store, ldmatrix, stmatrix, cp.async) stamps the word with the thread and its clock. A thread's vector clock
// has, for every other thread, the clock up to which its accesses happened before, and the one up to which a proxy
// fence has made its writes visible to the async proxy (wgmma, bulk copies), of shared and of global memory:
//
// * An arrive, a release or a barrier joins the thread's vector clock to the barrier's or counter's; a wait or an
//   acquire joins that one to the thread's.
// * fence_proxy_async_shared and fence_proxy_async_global make visible all that happened before the fence, by any thread, and nothing that
//   the thread synchronizes with later.
// * The write of a word must happen before a plain read of it: otherwise the two race, or fence_gpu is missing. In
//   shared memory the last read and the last write must happen before a write.
// * The write of a word must be visible to the wgmma or bulk copy that touches it.
//
// None of this depends on the schedule: a missing fence fails for every seed that gets as far.
//
// Registers are the words of a lane's own stack. wgmma_fence begins a new epoch of a lane's accesses to them: those
// that wgmma takes may not have been accessed in the epoch of the launch, nor until fence_operand.
//
// g++ -fsanitize=thread reports plain loads and stores to the callbacks below; its runtime is not linked. It reports the
// emulator's own accesses too, which are ignored because `in_kernel` is false.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "machine.hpp"

namespace emulator {

#define UNCHECKED __attribute__((no_sanitize("thread", "alignment", "bounds")))
#define FAST __attribute__((no_sanitize("thread", "alignment", "bounds"), optimize("O3")))

struct Stamp {  // of an access
    u32 thread, clock;  // clock 0: there was none
    const char* file;   // of an operation; without a line, the address of a plain access
    int line;
};
constexpr u32 under_way = ~0u;  // in the place of the clock, of a wgmma's reads

// By space the clocks up to which writes are fenced; in row 2 those up to which accesses happened before.
constexpr int BEFORE = 2;
struct VectorClock {
    std::vector<u32> clocks;
    VectorClock() : clocks(3 * machine.lanes.size()) {}
    UNCHECKED u32* row(int which) { return clocks.data() + which * machine.lanes.size(); }
};

template <class... Original> UNCHECKED inline SharedClocks new_clocks(const Original&... original) {
    return std::__make_shared<VectorClock, __gnu_cxx::_S_single>(original...);
}

struct Phases {  // of an mbarrier
    SharedClocks arrived, completed;
};

struct RegisterStamp { u32 read, written; };

struct Order {
    static constexpr u64 words = page / 4;
    struct Page { Stamp stamps[words]; };

    std::vector<Stamp> shared, reads;  // last writes and reads in all blocks, each of shared_capacity / 4 words
    std::unordered_map<u64, std::unique_ptr<Page>> global;
    struct { u64 number; Page* page; } recent[1024];
    std::unordered_map<const u64*, Phases> mbarriers;
    std::unordered_map<const u32*, SharedClocks> counters;
    RegisterStamp* registers = nullptr;
    SharedClocks joined[3], fenced[2][2];  // last results, followed by their arguments: of join; by space, of a fence

    size_t register_bytes() const { return machine.stacks->whole() * 2; }
};
static Order order;

// ---------------------------------------------------------------- vector clocks

inline u32 number_of(const Lane& lane) { return u32(&lane - machine.lanes.data()); }

FAST inline bool take_larger(u32* to, const u32* from, size_t n) {
    u32 changed = 0;
    for (size_t i = 0; i < n; ++i) {
        const u32 larger = to[i] < from[i] ? from[i] : to[i];
        changed |= larger ^ to[i];
        to[i] = larger;
    }
    return changed;
}

// `to` becomes the maximum of both. The last one is remembered: lanes of a warp mostly have the same.
UNCHECKED inline void join(SharedClocks& to, const SharedClocks& from) {
    if (!from || to == from) return;
    if (!to) {
        to = from;
        return;
    }
    SharedClocks* last = order.joined;
    if (last[1] == to && last[2] == from) {
        to = last[0];
        return;
    }
    auto both = new_clocks(*to);
    last[1] = to, last[2] = from;
    if (take_larger(both->clocks.data(), from->clocks.data(), both->clocks.size())) to = both;
    last[0] = to;
}

// The same, in place; nothing else shares `to` then.
UNCHECKED inline void add(SharedClocks& to, const SharedClocks& from) {
    const bool more = from && from != to;
    if (!to) to = more ? new_clocks(*from) : new_clocks();
    else if (to.use_count() > 1) to = new_clocks(*to);
    if (more) take_larger(to->clocks.data(), from->clocks.data(), to->clocks.size());
}

// Adds a lane's own accesses up to now.
UNCHECKED inline void add_own(SharedClocks& to, Lane& lane) {
    const u32 i = number_of(lane);
    for (int space : {SHARED, GLOBAL}) take_larger(&to->row(space)[i], &lane.order.fenced[space], 1);
    to->row(BEFORE)[i] = lane.order.clock++;
}

UNCHECKED inline void release(Lane& lane, SharedClocks& to) {
    add(to, lane.order.clocks);
    add_own(to, lane);
}

// All lanes of some warps release and then acquire.
template <class Warps> UNCHECKED inline void synchronize(const Warps& warps) {
    if (!check_order) return;
    SharedClocks all, last;
    for (const Warp* warp : warps)
        for (int i = 0; i < 32; ++i) {
            Lane& lane = warp->lanes[i];
            if (!all || lane.order.clocks != last) add(all, last = lane.order.clocks);
            add_own(all, lane);
        }
    for (const Warp* warp : warps)
        for (int i = 0; i < 32; ++i) warp->lanes[i].order.clocks = all;
}

UNCHECKED inline void fence_proxy(Lane& lane, Space space) {
    if (!check_order) return;
    lane.order.fenced[space] = lane.order.clock++;
    SharedClocks& clocks = lane.order.clocks;
    if (!clocks) return;
    SharedClocks(&last)[2] = order.fenced[space];
    if (last[1] != clocks) {
        last[1] = clocks;
        last[0] = new_clocks(*clocks);
        take_larger(last[0]->row(space), last[0]->row(BEFORE), machine.lanes.size());
    }
    clocks = last[0];
}

UNCHECKED inline void release_to_mbarrier(const u64* barrier) {
    if (check_order) release(*current, order.mbarriers[barrier].arrived);
}
UNCHECKED inline void complete_phase(const u64* barrier) {
    if (!check_order) return;
    Phases& phases = order.mbarriers[barrier];
    phases.completed = phases.arrived;
}
UNCHECKED inline void acquire_from_mbarrier(const u64* barrier) {
    if (check_order) join(current->order.clocks, order.mbarriers[barrier].completed);
}

// Counters in global memory. An addition continues what others have released; if it is relaxed, or a write is, it releases
// what happened before the thread's last fence_gpu. A relaxed read acquires at the next fence_gpu.
UNCHECKED inline void release_to_counter(const u32* counter) {
    if (check_order) release(*current, order.counters[counter]);
}
UNCHECKED inline void add_relaxed(const u32* counter) {
    if (check_order) join(order.counters[counter], current->order.released);
}
UNCHECKED inline void write_relaxed(const u32* counter) {
    if (check_order) order.counters[counter] = current->order.released;
}
UNCHECKED inline void read_relaxed(const u32* counter) {
    if (check_order) join(current->order.observed, order.counters[counter]);
}
UNCHECKED inline void fence_scope_gpu() {
    if (!check_order) return;
    LaneOrder& mine = current->order;
    join(mine.clocks, mine.observed);
    mine.released = nullptr;
    release(*current, mine.released);
}

// ---------------------------------------------------------------- words of memory

UNCHECKED inline Stamp* stamps_of_shared(const Block& block, u32 offset) {
    return &order.shared[(size_t(&block - machine.blocks.data()) * machine.shared_capacity + offset) / 4];
}

UNCHECKED inline Stamp* stamp_of_global(u64 address, bool make) {
    const u64 number = address / page;
    auto& recent = order.recent[number % 1024];
    if (recent.number != number || (make && !recent.page)) {
        recent.number = number;
        auto& slot = order.global[number];
        if (make && !slot) slot = std::make_unique<Order::Page>();
        recent.page = slot.get();
    }
    return recent.page ? &recent.page->stamps[address % page / 4] : nullptr;
}

// The block in whose shared memory an address is, and its offset there; -1 where it is not in shared memory.
UNCHECKED inline i64 find_shared(u64 address, const Block*& block) {
    const u64 place = address - reinterpret_cast<u64>(machine.shared.base), each = machine.shared.bytes + page;
    if (place >= machine.shared.whole()) return -1;
    const u64 number = place / each;
    if (number >= machine.blocks.size()) return -1;
    block = &machine.blocks[number];
    const i64 offset = i64(address - reinterpret_cast<u64>(block->shared));
    return offset < 0 || offset >= machine.shared_capacity ? -1 : offset;
}

UNCHECKED inline Stamp* stamp_of(u64 address, bool make) {
    const Block* block;
    const i64 offset = find_shared(address, block);
    return offset < 0 ? stamp_of_global(address, make) : stamps_of_shared(*block, u32(offset));
}

// Of the last read; null outside shared memory.
UNCHECKED inline Stamp* stamp_of_read(u64 address) {
    const Block* block;
    const i64 offset = find_shared(address, block);
    return offset < 0 ? nullptr : stamps_of_shared(*block, u32(offset)) - order.shared.data() + order.reads.data();
}

UNCHECKED inline void report_place(u64 address) {
    const Block* block;
    const i64 offset = find_shared(address, block);
    if (offset < 0) report("global memory at 0x%llx", address);
    else report("byte %lld of shared memory", offset);
}

// [+0x12] is an offset in the library, which Python replaces by source lines.
UNCHECKED inline void report_address(u64 address) {
    report(" at [+0x%llx]", address - reinterpret_cast<u64>(machine.library));
}

UNCHECKED inline void report_access(const char* what, const Stamp& stamp) {
    const Lane& lane = machine.lanes[stamp.thread];
    const uint3 block = lane.warp->block->index;
    report(", %s by block (%u, %u, %u) thread %u", what, block.x, block.y, block.z, lane.thread.x);
    if (stamp.line) report(" at %s:%d", stamp.file, stamp.line);
    else report_address(reinterpret_cast<u64>(stamp.file));
}

UNCHECKED inline bool happened_before(const Lane& lane, const Stamp& stamp) {
    const u32 mine = number_of(lane);
    return !stamp.clock || stamp.thread == mine ||
           (lane.order.clocks && lane.order.clocks->row(BEFORE)[stamp.thread] >= stamp.clock);
}

UNCHECKED inline bool is_fenced(const Lane& lane, const Stamp& stamp, Space space) {
    if (!stamp.clock) return true;
    if (stamp.thread == number_of(lane) && lane.order.fenced[space] >= stamp.clock) return true;
    return lane.order.clocks && lane.order.clocks->row(space)[stamp.thread] >= stamp.clock;
}

[[noreturn]] UNCHECKED inline void fail_in_race(const Lane& lane, const char* does, u64 word, const void* where,
                                                const char* did, const Stamp& other) {
    report_lane(lane);
    report("race: %s ", does);
    report_place(word);
    if (where) report_address(reinterpret_cast<u64>(where));
    report_access(did, other);
    report(", and nothing orders the two; %s ", where ? "after" : "in");
    report_operation(lane);
    fail_plainly();
}

UNCHECKED inline Stamp stamp_by(const Lane& lane, const void* where) {
    if (where) return {number_of(lane), lane.order.clock, static_cast<const char*>(where), 0};
    return {number_of(lane), lane.order.clock, lane.site.file, lane.site.line};
}

// A plain read by `lane`; `where`: the address of the code, or null in an operation.
UNCHECKED inline void on_read(const Lane& lane, u64 address, u32 bytes, const void* where) {
    for (u64 word = address & ~3ull; word < address + bytes; word += 4) {
        const Stamp* stamp = stamp_of(word, false);
        if (stamp && !happened_before(lane, *stamp)) fail_in_race(lane, "reads", word, where, "written", *stamp);
        if (Stamp* read = stamp_of_read(word)) *read = stamp_by(lane, where);
    }
}

// Before a write to shared memory. Lanes of a warp may write the same word together.
UNCHECKED inline void check_overwritten(const Lane& lane, u64 word, const void* where) {
    const Stamp* read = stamp_of_read(word);
    if (!read) return;
    if (read->clock == under_way || !happened_before(lane, *read))
        fail_in_race(lane, "writes", word, where, read->clock == under_way ? "being read" : "read", *read);
    const Stamp& written = *stamp_of(word, true);
    if (!happened_before(lane, written) && machine.lanes[written.thread].warp != lane.warp)
        fail_in_race(lane, "writes", word, where, "written", written);
}

UNCHECKED inline void on_write(const Lane& lane, u64 address, u32 bytes, const void* where) {
    for (u64 word = address & ~3ull; word < address + bytes; word += 4) {
        check_overwritten(lane, word, where);
        *stamp_of(word, true) = stamp_by(lane, where);
    }
}

// What an operation reads or writes in the place of a lane's own load or store.
inline void operation_reads(const Lane& lane, const void* p, u32 bytes) {
    if (check_order) on_read(lane, reinterpret_cast<u64>(p), bytes, nullptr);
}
inline void operation_writes(const Lane& lane, const void* p, u32 bytes) {
    if (check_order) on_write(lane, reinterpret_cast<u64>(p), bytes, nullptr);
}

// What wgmma or a bulk copy is about to touch.
UNCHECKED inline void check_async(const Lane& lane, const char* what, const void* p, u32 bytes, Space space) {
    if (!check_order) return;
    const u64 first = reinterpret_cast<u64>(p);
    for (u64 word = first; word < first + bytes; word += 4) {
        const Stamp* stamp = stamp_of(word, false);
        if (!stamp || is_fenced(lane, *stamp, space)) continue;
        report_lane(lane);
        report("%s ", what);
        report_place(word);
        report_access("written", *stamp);
        const bool ordered = happened_before(lane, *stamp);
        report(ordered ? ", without %s in between; in " : ", and nothing orders the two (%s); in ",
               space == SHARED ? "fence_proxy_async_shared" : "fence_proxy_async_global");
        report_operation(lane);
        fail_plainly();
    }
}

// Where a bulk copy goes: who may read it is decided by its mbarrier, and until then it is NaN.
UNCHECKED inline void overwrite(const Lane& lane, const void* p, u32 bytes) {
    if (!check_order) return;
    const u64 first = reinterpret_cast<u64>(p);
    for (u64 word = first; word < first + bytes; word += 4) {
        check_overwritten(lane, word, nullptr);
        *stamp_of(word, true) = *stamp_of_read(word) = {};
    }
}

// A wgmma reads from its launch to the wait for it; then it counts as a read of the warp's first lane.
UNCHECKED inline void start_reading(const Lane& lane, const void* p, u32 bytes) {
    const u64 first = reinterpret_cast<u64>(p);
    for (u64 word = first; word < first + bytes; word += 4)
        *stamp_of_read(word) = {number_of(lane), under_way, lane.site.file, lane.site.line};
}
UNCHECKED inline void finish_reading(const Lane& lane, const void* p, u32 bytes) {
    const u64 first = reinterpret_cast<u64>(p);
    for (u64 word = first; word < first + bytes; word += 4) {
        Stamp& read = *stamp_of_read(word);
        if (read.thread == number_of(lane) && read.clock == under_way) read.clock = lane.order.clock;
    }
}

// ---------------------------------------------------------------- registers

UNCHECKED inline RegisterStamp* register_stamp(const void* p) {
    return order.registers + (static_cast<const unsigned char*>(p) - machine.stacks->base) / 4;
}

UNCHECKED inline void fence_registers(Lane& lane) {
    lane.begun = true;
    if (check_order) lane.order.begun = ++lane.order.epoch;
}

// The first of `count` registers that a lane has written (or read) since the epoch began, or -1.
UNCHECKED inline int accessed_since(u32 epoch, const void* registers, int count, bool reads_count) {
    if (!check_order) return -1;
    const RegisterStamp* stamp = register_stamp(registers);
    for (int i = 0; i < count; ++i)
        if (stamp[i].written >= epoch || (reads_count && stamp[i].read >= epoch)) return i;
    return -1;
}

// ---------------------------------------------------------------- the launch

UNCHECKED inline void reset_order(size_t block_count) {
    if (!check_order) return;
    order.shared.assign(block_count * machine.shared_capacity / 4, {});
    order.reads.assign(order.shared.size(), {});
    order.global.clear();
    memset(order.recent, 0, sizeof order.recent);
    order.mbarriers.clear();
    order.counters.clear();
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* p = mmap(nullptr, order.register_bytes(), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) {
        report("no memory for the stamps of registers");
        fail_plainly();
    }
    order.registers = static_cast<RegisterStamp*>(p);
}

// Blocks that start take the places of others.
UNCHECKED inline void start_order() {
    if (!check_order) return;
    for (std::vector<Stamp>* stamps : {&order.shared, &order.reads}) std::fill(stamps->begin(), stamps->end(), Stamp{});
    order.mbarriers.clear();
}

UNCHECKED inline void end_order() {
    if (order.registers) munmap(order.registers, order.register_bytes());
    order.registers = nullptr;
    for (SharedClocks& clocks : order.joined) clocks = nullptr;
    for (auto& space : order.fenced) space[0] = space[1] = nullptr;
}

#if CHECK_ORDER
UNCHECKED inline void access_register(const void* p, u32 bytes, bool writes) {
    RegisterStamp* stamp = register_stamp(p);
    for (u32 i = 0; i < (bytes + 3) / 4; ++i) (writes ? stamp[i].written : stamp[i].read) = current->order.epoch;
}

UNCHECKED inline void on_access(const void* p, u32 bytes, bool writes, const void* where) {
    if (!in_kernel) return;
    in_kernel = false;
    const u64 address = reinterpret_cast<u64>(p), on_stacks = address - reinterpret_cast<u64>(machine.stacks->base);
    if (on_stacks < machine.stacks->whole()) access_register(p, bytes, writes);
    else if (writes) on_write(*current, address, bytes, where);
    else on_read(*current, address, bytes, where);
    in_kernel = true;
}

#define CALLBACK extern "C" __attribute__((visibility("hidden"))) UNCHECKED void
#define ACCESS(name, bytes, writes) \
    CALLBACK __tsan_##name(void* p) { on_access(p, bytes, writes, __builtin_return_address(0)); }
#define ACCESSES(bytes) ACCESS(read##bytes, bytes, false) ACCESS(write##bytes, bytes, true)
#define UNALIGNED(bytes) ACCESS(unaligned_read##bytes, bytes, false) ACCESS(unaligned_write##bytes, bytes, true)
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
UNALIGNED(2) UNALIGNED(4) UNALIGNED(8) UNALIGNED(16)
CALLBACK __tsan_read_range(void* p, size_t n) { on_access(p, u32(n), false, __builtin_return_address(0)); }
CALLBACK __tsan_write_range(void* p, size_t n) { on_access(p, u32(n), true, __builtin_return_address(0)); }
CALLBACK __tsan_init() {}
CALLBACK __tsan_vptr_update(void*, void*) {}
#endif

}  // namespace emulator
