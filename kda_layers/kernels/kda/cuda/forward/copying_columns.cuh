// The warp that copies prepared chunks to the scan by columns (scan_columns.cuh).
#pragma once
#include "scan_columns.cuh"

// Copy chunk `count` of the group when it is prepared and its stage is free. `ready` is the number of chunks known to be
// prepared; return the new number.
DEVICE u32 fetch_chunk(Lane lane, const ForwardParams& p, const ScanShared& shared, Stage from, u32 count, u32 ready) {
    const int group = scanning_group(p);
    if (ready <= count) ready = wait_for_chunks(lane, p, group, count);
    if (lane.id == 0) {
#if __CUDA_ARCH__ >= 900
        fence_proxy_async_global();
#endif
        if (!KEEPS) from = ring_at(p, group, count);
        if (count >= SCAN_STAGES) mbarrier_wait(shared.full(count), phase_of(count - SCAN_STAGES));
        for (int part = 0; part < FETCHED; part++) {
            expect(shared, part, count);
            fetch(from, shared, part, count);
        }
        if (!KEEPS && count >= SCAN_STAGES) write_counter(consumed(p, group, slice()), count - SCAN_STAGES + 1);
    }
    warp_sync();
    return ready;
}

DEVICE void fetch_chunks(Lane lane, const ForwardParams& p, const ScanShared& shared) {
    u32 count = 0, ready = 0;
#if PACKED
    GroupChunks at;
    for (at.start(p, scanning_group(p)); at.valid(p); at.skip(p), count++)
        ready = fetch_chunk(lane, p, shared, KEEPS ? kept_at(p, at.kept(p)) : Stage{}, count, ready);
#else
    PlainTiles tiles;
    for (tiles.start(p, scanning_group(p)); tiles.valid(p); tiles.skip(p)) {
        // The next ones are p.HV rows apart
        Stage kept = KEEPS ? kept_at(p, kept_index(p, tiles.at(p), tiles.first)) : Stage{};
        for (u32 chunk = tiles.first; chunk < tiles.end; chunk++, count++) {
            ready = fetch_chunk(lane, p, shared, kept, count, ready);
            kept.base += i64(p.HV) * STAGE_BYTES;
        }
    }
#endif
}
