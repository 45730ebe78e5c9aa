// What a thread may do beyond plain C++; ptx.cuh gives it its names.
#pragma once

#include "order.hpp"

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
    synchronize(warps);
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
inline void start_copy(void* to, const void* from, bool valid, size_t bytes) {
    if (valid) {
        check_global(from, bytes, bytes);
        operation_reads(*current, from, bytes);
    }
    operation_writes(*current, to, bytes);
    poison(to, bytes);
    current->copies.push_back({to, valid ? from : nullptr, bytes, current->groups});
}
inline void finish_copies(u32 pending) {
    std::vector<AsyncCopy>& copies = current->copies;
    size_t done = 0;  // they are plain writes of this thread
    for (; done < copies.size() && copies[done].group + pending < current->groups; ++done) {
        const AsyncCopy& copy = copies[done];
        if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
        operation_writes(*current, copy.to, copy.bytes);
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
    if (state.initialized != LOCAL && state.initialized != VISIBLE) fail("the mbarrier is not initialized");
    return state;
}

// For other blocks and for bulk copies.
inline void check_visible(u64* barrier) {
    if (checked(barrier).initialized == LOCAL) fail("no fence_mbarrier_init since the mbarrier was initialized");
}

inline void initialize(u64* barrier, int count) {
    if (count <= 0 || count > most_arrivals) fail("%d arrivals", count);
    *reinterpret_cast<Mbarrier*>(barrier) = {LOCAL, 0, u64(count), u64(count), 0};
    current->local_barriers.push_back(barrier);
}

inline void fence_initializations() {
    for (u64* barrier : current->local_barriers) reinterpret_cast<Mbarrier*>(barrier)->initialized = VISIBLE;
    current->local_barriers.clear();
}

inline bool phase_done(u64* barrier, u32 parity) { return checked(barrier).phase != (parity & 1); }

inline void end_phase_if_complete(Block& block, u64* barrier) {
    Mbarrier& state = checked(barrier);
    if (state.pending || state.bytes) return;
    complete_phase(barrier);
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
    release_to_mbarrier(barrier);
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
    acquire_from_mbarrier(barrier);
}

inline bool poll(u64* barrier, u32 parity) {
    if (!phase_done(barrier, parity)) {
        ++machine.idle_polls;
        machine.interrupted = true;
        suspend();
        if (!phase_done(barrier, parity)) return false;
    }
    acquire_from_mbarrier(barrier);
    return true;
}

inline void start_bulk_copies(void* to, const void* from, u32 bytes, u64* barrier, u16 ranks) {
    shared_offset(barrier, 8, 8);
    if (!bytes || bytes % 16) fail("%u bytes are not a positive multiple of 16", bytes);
    if (!ranks) fail("no ranks to copy to");
    check_global(from, bytes, 16);
    check_async(*current, "a bulk copy reads", from, bytes, GLOBAL);
    for (u32 rank = 0; rank < 16; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        Block& block = block_of_rank(rank);
        check_visible(same_place(barrier, block));
        check_async(*current, "a bulk copy writes", same_place(to, block), bytes, SHARED);
        overwrite(*current, same_place(to, block), bytes);
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

// Reads shared memory as late as it may, when the thread waits for that. Nothing of the kernel may read what it writes.
inline void start_bulk_store(void* to, const void* from, u32 bytes) {
    if (!bytes || bytes % 16) fail("%u bytes are not a positive multiple of 16", bytes);
    check_global(to, bytes, 16);
    check_async(*current, "a bulk copy reads", from, bytes, SHARED);
    if (check_order) start_reading(*current, from, bytes);
    poison(to, bytes);
    current->stores.push_back({to, from, bytes, current->store_groups});
    maybe_interrupt();
}
inline void finish_bulk_stores(u32 pending) {
    std::vector<AsyncCopy>& stores = current->stores;
    size_t done = 0;
    for (; done < stores.size() && stores[done].group + pending < current->store_groups; ++done) {
        const AsyncCopy& store = stores[done];
        memcpy(store.to, store.from, store.bytes);
        if (check_order) finish_reading(*current, store.from, u32(store.bytes));
    }
    stores.erase(stores.begin(), stores.begin() + done);
    maybe_interrupt();
}

// ---------------------------------------------------------------- products of a warpgroup

// 16 bytes of an operand: its rows of blocks are `stride` bytes apart, or if that is 0 it is swizzled. A line is a row, or
// of a standing operand, which is stored transposed, a column.
inline const unsigned char* piece_of(const unsigned char* operand, int stride, int line, int place) {
    if (stride) return operand + line / 8 * stride + place / 8 * 128 + line % 8 * 16;
    const auto at = reinterpret_cast<u64>(operand + line * 128 + place / 8 * 16);
    return reinterpret_cast<const unsigned char*>(at ^ (at / 128 % 8 * 16));
}

// Row i of an operand.
inline void load_row(float (&row)[16], const Product& product, const unsigned char* operand, int stride, bool stands,
                     int i) {
    for (int k = 0; k < 16; ++k) {
        const int line = stands ? k : i, place = stands ? i : k;
        const unsigned char* at = piece_of(operand, stride, line, place) + place % 8 * 2;
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

inline bool is_poisoned(const void* p, size_t bytes) {
    const auto first = static_cast<const unsigned char*>(p);
    return first[0] == 0xff && !memcmp(first, first + 1, bytes - 1);
}

inline Accumulator* find_accumulator(Warp& warp, int lane, const float* d) {
    for (Accumulator& accumulator : warp.accumulators)
        if (accumulator.d[lane] == d) return &accumulator;
    return nullptr;
}

// The lanes give the registers of a product away, until fence_operand.
inline Accumulator& take_registers(Warp& warp, const Product& product) {
    Accumulator accumulator;
    accumulator.count = product.columns / 2;
    accumulator.under_way = 0;
    accumulator.taken = all_lanes;
    for (int i = 0; i < 32; ++i) {
        Lane& lane = warp.lanes[i];
        if (accessed_since(lane.order.begun, product.d[i], accumulator.count, true) >= 0)
            fail("the accumulator's registers were accessed after the last wgmma_fence");
        accumulator.d[i] = product.d[i];
        accumulator.epoch[i] = ++lane.order.epoch;
        memcpy(accumulator.values[i], product.d[i], accumulator.count * sizeof(float));
        poison(product.d[i], accumulator.count * sizeof(float));
    }
    warp.accumulators.push_back(accumulator);
    return warp.accumulators.back();
}

// The 16-byte pieces of a product's operands that this warp reads: 16 rows of a, all of b, 16 numbers of each.
template <class F>
inline void each_piece(const unsigned char* operand, int stride, bool stands, int first, int count, F f) {
    for (int line = stands ? 0 : first; line < (stands ? 16 : first + count); ++line)
        for (int place = stands ? first : 0; place < (stands ? first + count : 16); place += 8)
            f(piece_of(operand, stride, line, place));
}
template <class F> inline void each_piece(const Warp& warp, const Product& product, F f) {
    if (product.a) each_piece(product.a, product.a_stride, product.a_mn_major, 16 * (warp.index % 4), 16, f);
    each_piece(product.b, product.b_stride, product.b_mn_major, 0, product.columns, f);
}

inline void check_operands(const Warp& warp, const Product& product) {
    const VectorClock* last = nullptr;
    for (int i = 0; i < 32; ++i) {
        const Lane& lane = warp.lanes[i];
        if (i && lane.order.clocks.get() == last) continue;  // lanes that share it
        last = lane.order.clocks.get();
        each_piece(warp, product, [&](const void* p) { check_async(lane, "wgmma reads", p, 16, SHARED); });
    }
    each_piece(warp, product, [&](const void* p) { start_reading(warp.lanes[0], p, 16); });
}

// By a whole warp, whose last lane acts for all.
inline void start_product(Product product) {
    Warp& warp = *current->warp;
    Accumulator* accumulator = find_accumulator(warp, 0, product.d[0]);
    for (int i = 0; i < 32; ++i) {
        Lane& lane = warp.lanes[i];
        if (!lane.begun && (!accumulator || !product.a))
            fail("no wgmma_fence since thread %u had the registers of this product", lane.thread.x);
        if (product.a) continue;
        if (accessed_since(lane.order.begun, product.held_at[i], 4, false) >= 0)
            fail("the registers of its first operand were written after the last wgmma_fence");
        product.epoch[i] = ++lane.order.epoch;
    }
    if (!accumulator) accumulator = &take_registers(warp, product);
    ++accumulator->under_way;
    if (check_order) check_operands(warp, product);
    warp.products.push_back(product);
}

inline void multiply(const Warp& warp, const Product& product, Accumulator& accumulator) {
    float a[16][16], b[16];
    for (int row = 0; row < 16; ++row) {
        const int line = 16 * (warp.index % 4) + row;
        if (product.a) load_row(a[row], product, product.a, product.a_stride, product.a_mn_major, line);
        else load_held_row(a[row], product, row);
    }
    for (int column = 0; column < product.columns; ++column) {
        load_row(b, product, product.b, product.b_stride, product.b_mn_major, column);
        for (int row = 0; row < 16; ++row) {
            const int lane = 4 * (row % 8) + column % 8 / 2, place = 4 * (column / 8) + 2 * (row / 8) + column % 2;
            float sum = 0, &d = accumulator.values[lane][place];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k];
            d = product.begins ? sum : d + sum;
        }
    }
}

// Products come as late as they may: when the warp waits for them.
inline void finish_products(Warp& warp, int pending) {
    size_t groups = 0, end = 0;
    for (const Product& product : warp.products) groups += !product.columns;
    for (; int(groups) > pending; ++end) groups -= !warp.products[end].columns;
    for (size_t n = 0; n < end; ++n) {
        const Product& product = warp.products[n];
        if (!product.columns) continue;
        for (int i = 0; !product.a && i < 32; ++i)
            if (accessed_since(product.epoch[i], product.held_at[i], 4, false) >= 0)
                fail("the registers of a product's first operand were written while it was under way");
        Accumulator& accumulator = *find_accumulator(warp, 0, product.d[0]);
        multiply(warp, product, accumulator);
        if (check_order) each_piece(warp, product, [&](const void* p) { finish_reading(warp.lanes[0], p, 16); });
        --accumulator.under_way;
    }
    warp.products.erase(warp.products.begin(), warp.products.begin() + end);
}

// The lane has its registers back, if their products are done.
inline void use_product(float* d) {
    Lane& lane = *current;
    Warp& warp = *lane.warp;
    const u32 i = lane.thread.x % 32;
    Accumulator* accumulator = find_accumulator(warp, i, d);
    if (!accumulator || accumulator->under_way || !(accumulator->taken >> i & 1)) return;
    const size_t bytes = accumulator->count * sizeof(float);
    if (!is_poisoned(d, bytes) || accessed_since(accumulator->epoch[i], d, accumulator->count, true) >= 0)
        fail("the accumulator's registers were accessed before wgmma_wait and fence_operand");
    memcpy(d, accumulator->values[i], bytes);
    lane.begun = false;
    accumulator->taken &= ~bit(lane);
    if (accumulator->taken) return;
    *accumulator = warp.accumulators.back();
    warp.accumulators.pop_back();
}

// ---------------------------------------------------------------- counters in global memory

inline void write_counter(u32* counter, u32 value) {
    write_relaxed(counter);
    *counter = value;
    machine.idle_polls = 0;
    maybe_interrupt();
}

inline u32 add_to_counter(u32* counter, u32 more, bool releases) {  // no other lane runs in between
    if (releases) release_to_counter(counter);
    else add_relaxed(counter);
    const u32 before = *counter;
    *counter += more;
    machine.idle_polls = 0;
    maybe_interrupt();
    return before;
}

inline u32 read_counter(const u32* counter) {  // who reads one waits for another value: let others run first
    ++machine.idle_polls;
    machine.interrupted = true;
    suspend();
    read_relaxed(counter);
    return *counter;
}

}  // namespace emulator
