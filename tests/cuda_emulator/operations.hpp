// What a thread may do beyond plain C++; ptx.cuh gives it its names.
#pragma once

#include "machine.hpp"

namespace emulator {

// ---------------------------------------------------------------- operations of a warp

// Gathers the 32 lanes, which have begun an operation; true in the last one, which then acts for all.
inline bool gather() {
    Lane& lane = *current;
    Warp& warp = *lane.warp;
    if (!warp.arrived) warp.leader = &lane;
    const Lane& leader = *warp.leader;
    if (!(leader.site == lane.site) || leader.operation != lane.operation) {
        report("the lanes of a warp diverge: ");
        report_lane(leader);
        report_operation(leader);
        report("; ");
        report_lane(lane);
        report_operation(lane);
        fail_plainly();
    }
    warp.arrived |= bit(lane);
    warp.ready &= ~bit(lane);
    if (warp.arrived != all_lanes) {
        suspend();
        return false;
    }
    warp.arrived = 0;
    return true;
}

// One operation of all lanes: compute(operands) gets every lane's operands, in the order of the lanes.
template <class Operands, class Compute>
inline void together(Operands& mine, Compute compute) {
    current->operands = &mine;
    if (!gather()) return;
    Warp& warp = *current->warp;
    Operands* operands[32];
    for (int i = 0; i < 32; ++i) operands[i] = static_cast<Operands*>(warp.lanes[i].operands);
    compute(operands);
    warp.ready = all_lanes;
    machine.idle_polls = 0;
}

inline void wake(std::vector<Warp*>& warps) {
    for (Warp* warp : warps) warp->ready = all_lanes;
    warps.clear();
    machine.idle_polls = 0;
}

inline void release_cluster_if_complete(Block* cluster) {
    size_t live = 0;
    for (u32 rank = 0; rank < machine.cluster; ++rank) live += cluster[rank].live_warps;
    if (cluster->at_cluster_barrier.size() == live) wake(cluster->at_cluster_barrier);
}

inline void wait_at_named_barrier(int id, int threads) {
    if (id < 0 || id > 15 || threads <= 0 || threads % 32 || threads > int(machine.threads))
        fail("a barrier has an id below 16 and a multiple of 32 threads, at most the block's %u", machine.threads);
    if (!gather()) return;
    Warp& warp = *current->warp;
    for (int i = 0; i < 32; ++i)
        if (memcmp(warp.lanes[i].arguments, current->arguments, sizeof current->arguments))
            fail("thread %u comes with other arguments", warp.lanes[i].thread.x);
    NamedBarrier& barrier = warp.block->barriers[id];
    if (barrier.waiting.empty()) barrier.threads = threads;
    if (barrier.threads != u32(threads)) fail("others wait there among %u threads", barrier.threads);
    barrier.waiting.push_back(&warp);
    if (barrier.waiting.size() * 32 == barrier.threads) wake(barrier.waiting);
    else suspend();
}

inline void wait_at_cluster_barrier() {
    if (!gather()) return;
    Block* cluster = current->warp->block->cluster;
    cluster->at_cluster_barrier.push_back(current->warp);
    release_cluster_if_complete(cluster);
    if (!current->warp->ready) suspend();
}

// ---------------------------------------------------------------- shared memory

inline u32 shared_offset(const void* p, u32 bytes, u32 alignment) {
    const i64 offset = static_cast<const unsigned char*>(p) - current->warp->block->shared;
    if (offset < 0 || offset + bytes > machine.shared_bytes)
        fail("%u bytes at byte %lld are outside the %u bytes of shared memory", bytes, offset, machine.shared_bytes);
    if (offset % alignment) fail("byte %lld of shared memory is not aligned to %u bytes", offset, alignment);
    return u32(offset);
}

// An operation on `bytes` bytes at p, its first argument.
inline void begin_shared(const char* operation, Site site, const void* p, u32 bytes, u32 alignment, int argument = 0) {
    begin(operation, site, 0, argument);
    current->arguments[0] = int(shared_offset(p, bytes, alignment));
}

inline void check_global(const void* p, u32 bytes, u32 alignment) {
    if (reinterpret_cast<u64>(p) % alignment) fail("the address %p is not aligned to %u bytes", p, alignment);
    const volatile char* first = static_cast<const char*>(p);
    (void)first[0], (void)first[bytes - 1];  // a wrong address traps here, in the lane that gave it
}

inline void poison(void* p, size_t bytes) { memset(p, 0xff, bytes); }  // NaN in every format

// The bytes of a copy come as late as they may: when the thread waits for them.
inline void start_copy(void* to, const void* from, bool valid) {
    if (valid) check_global(from, 16, 16);
    poison(to, 16);
    current->copies.push_back({to, valid ? from : nullptr, current->groups});
}
inline void finish_copies(u32 pending) {
    std::vector<AsyncCopy>& copies = current->copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group + pending < current->groups; ++done) {
        if (copies[done].from) memcpy(copies[done].to, copies[done].from, 16);
        else memset(copies[done].to, 0, 16);
    }
    copies.erase(copies.begin(), copies.begin() + done);
    maybe_interrupt();
}

// ---------------------------------------------------------------- mbarriers and bulk copies

inline Block& own_block() { return *current->warp->block; }

inline Block& block_of_rank(u32 rank) {
    if (rank >= machine.cluster) fail("there is no rank %u in a cluster of %u blocks", rank, machine.cluster);
    Block& block = own_block().cluster[rank];
    if (!block.live_warps) fail("block %u of the cluster has exited", rank);
    return block;
}
template <class T> inline T* same_place(T* p, const Block& block) {
    return reinterpret_cast<T*>(block.shared + (reinterpret_cast<unsigned char*>(p) - own_block().shared));
}

inline Mbarrier& checked(u64* barrier) {
    Mbarrier& state = *reinterpret_cast<Mbarrier*>(barrier);
    if (state.initialized != 1) fail("the mbarrier is not initialized");
    return state;
}

inline void initialize(u64* barrier, int count) {
    if (count <= 0 || count > most_arrivals) fail("%d arrivals", count);
    *reinterpret_cast<Mbarrier*>(barrier) = {1, 0, u64(count), u64(count), 0};
}

inline bool phase_done(u64* barrier, u32 parity) { return checked(barrier).phase != (parity & 1); }

inline void end_phase_if_complete(Block& block, u64* barrier) {
    Mbarrier& state = checked(barrier);
    if (state.pending || state.bytes) return;
    state.phase ^= 1;
    state.pending = state.count;
    machine.idle_polls = 0;
    for (Warp& warp : block.warps)
        for (int i = 0; i < 32; ++i)
            if (warp.lanes[i].barrier == barrier) warp.ready |= 1u << i;
}

inline void add_bytes(u64* barrier, i64 bytes) {
    Mbarrier& state = checked(barrier);
    const i64 sum = state.bytes + bytes;
    if (sum < -most_bytes || sum > most_bytes) fail("%lld pending bytes in an mbarrier", sum);
    state.bytes = sum;
}

inline void arrive(Block& block, u64* barrier) {
    Mbarrier& state = checked(barrier);
    if (!state.pending) fail("more than %u arrivals in a phase of an mbarrier", u32(state.count));
    --state.pending;
    end_phase_if_complete(block, barrier);
    maybe_interrupt();
}

// Looks again when it runs again, as the hardware does: a phase that comes and goes meanwhile is missed.
inline void wait_for_phase(u64* barrier, u32 parity) {
    while (!phase_done(barrier, parity)) {
        current->barrier = barrier;
        current->warp->ready &= ~bit(*current);
        suspend();
        current->barrier = nullptr;
    }
}

inline bool poll(u64* barrier, u32 parity) {
    if (phase_done(barrier, parity)) return true;
    ++machine.idle_polls;
    machine.interrupted = true;
    suspend();
    return phase_done(barrier, parity);
}

inline void start_bulk_copies(void* to, const void* from, u32 bytes, u64* barrier, u16 ranks) {
    shared_offset(barrier, 8, 8);
    if (!bytes || bytes % 16) fail("%u bytes are not a positive multiple of 16", bytes);
    if (!ranks) fail("no ranks to copy to");
    check_global(from, bytes, 16);
    for (u32 rank = 0; rank < 16; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        Block& block = block_of_rank(rank);
        poison(same_place(to, block), bytes);
        machine.bulk_copies.push_back({current, same_place(to, block), from, bytes, &block, same_place(barrier, block),
                                       machine.now + random_duration()});
    }
    maybe_interrupt();
}

inline void deliver(const BulkCopy& copy) {
    current = copy.issuer;  // for messages
    if (!copy.block->live_warps) fail("block %u of the cluster exited before its bulk copy came", copy.block->rank);
    memcpy(copy.to, copy.from, copy.bytes);
    add_bytes(copy.barrier, -i64(copy.bytes));
    end_phase_if_complete(*copy.block, copy.barrier);
}

// ---------------------------------------------------------------- products of a warpgroup

// Row i of an operand, whose rows of blocks are `stride` bytes apart; a standing one is stored transposed.
inline void load_row(float (&row)[16], const Product& product, const unsigned char* operand, int stride, bool stands, int i) {
    for (int k = 0; k < 16; ++k) {
        const int line = stands ? k : i, place = stands ? i : k;
        const unsigned char* at = operand + (line / 8) * stride + (place / 8) * 128 + (line % 8) * 16 + (place % 8) * 2;
        shared_offset(at, 2, 2);
        row[k] = product.load(reinterpret_cast<const u16*>(at));
    }
}

// Row i of this warp's 16 of a that its lanes hold.
inline void load_held_row(float (&row)[16], const Product& product, int i) {
    for (int k = 0; k < 16; ++k) {
        const u16 number = product.held[4 * (i % 8) + k % 8 / 2][i / 8 + k / 8 * 2] >> 16 * (k % 2);
        row[k] = product.load(&number);
    }
}

// Products come as late as they may: when the warp waits for them.
inline void finish_products(Warp& warp, int pending) {
    size_t groups = 0, end = 0;
    for (const Product& product : warp.products) groups += !product.columns;
    for (; int(groups) > pending; ++end) groups -= !warp.products[end].columns;
    for (size_t n = 0; n < end; ++n) {
        const Product& product = warp.products[n];
        float a[16][16], b[16];
        for (int row = 0; row < (product.columns ? 16 : 0); ++row) {
            if (product.a) load_row(a[row], product, product.a, product.a_stride, product.a_stands, 16 * (warp.index % 4) + row);
            else load_held_row(a[row], product, row);
        }
        for (int column = 0; column < product.columns; ++column) {
            load_row(b, product, product.b, product.b_stride, product.b_stands, column);
            for (int row = 0; row < 16; ++row) {
                float sum = 0;
                for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k];
                float& d = product.d[4 * (row % 8) + column % 8 / 2][4 * (column / 8) + 2 * (row / 8) + column % 2];
                d = product.begins ? sum : d + sum;
            }
        }
    }
    warp.products.erase(warp.products.begin(), warp.products.begin() + end);
}

// ---------------------------------------------------------------- counters in global memory

inline void write_counter(u32* counter, u32 value) {
    *counter = value;
    machine.idle_polls = 0;
    maybe_interrupt();
}

inline u32 read_counter(const u32* counter) {  // who reads one waits for another value: let others run first
    ++machine.idle_polls;
    machine.interrupted = true;
    suspend();
    return *counter;
}

}  // namespace emulator
