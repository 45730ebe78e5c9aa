// The warp that copies prepared chunks to the scan by columns (scan_columns.cuh).
#pragma once
#include "scan_columns.cuh"

// Copies a CTA's chunks, `count` so far, and counts each as arrived when its copy has completed. `counters`, of lane 0, are
// those of the chunks in shared memory, oldest first.
template <class Shared> struct Copies {
    u32 count = 0;
    u32* counters[Shared::STAGES];

    // Copy chunk `in_group` of a CTA group when it is prepared and its stage is free, from the ring or, if chunks are kept,
    // `from` its row. `ready` is the number of chunks of the group known to be prepared; return the new number.
    DEVICE u32 start(Lane lane, const ForwardParams& p, const Shared& shared, Stage from, int group, u32 in_group,
                     u32 ready) {
        if (ready <= in_group) ready = wait_for_chunks(lane, p, group, in_group);
        if (lane.id == 0) {
#if __CUDA_ARCH__ >= 900
            fence_proxy_async_global();
#endif
            if (!KEEPS) from = ring_at(p, group, in_group);
            if (count >= Shared::STAGES) wait_for(shared, 0, count - Shared::STAGES);
            for (int part = 0; part < Shared::FETCHED; part++) {
                expect(shared, part, count);
                fetch(from, shared, part, count);
            }
            if (!KEEPS && count >= Shared::STAGES)
                red_add(counters[0], 1);  // after the copies, as the next fence waits for it
            for (u32 i = 1; i < Shared::STAGES; i++) counters[i - 1] = counters[i];
            if (!KEEPS) counters[Shared::STAGES - 1] = arrived(p, group, in_group);
        }
        warp_sync();
        count++;
        return ready;
    }
};

template <class Tiles, class Shared> DEVICE void fetch_chunks(Lane lane, const ForwardParams& p, const Shared& shared) {
    Copies<Shared> copies;
    u32 ready = 0;
#if PACKED
    GroupChunks at;
    for (at.start(p, scanning_group(p)); at.valid(p); at.skip(p)) {
        const Stage kept = KEEPS ? kept_at(p, at.kept(p)) : Stage{};
        ready = copies.start(lane, p, shared, kept, scanning_group(p), copies.count, ready);
    }
#else
    Tiles tiles;
    for (tiles.start(p, scanning_group(p)); tiles.valid(p); tiles.skip(p)) {
        // The next ones are p.HV rows apart
        Stage kept = KEEPS ? kept_at(p, kept_index(p, tiles.at(p), tiles.first)) : Stage{};
        if (tiles.changes_group()) ready = 0;
        for (u32 chunk = tiles.first; chunk < tiles.end; chunk++) {
            ready = copies.start(lane, p, shared, kept, tiles.group(p), tiles.in_group(chunk, copies.count), ready);
            kept.base += i64(p.HV) * STAGE_BYTES;
        }
    }
#endif
}
