// The warps of a block that only prepares (two_roles.cu): one gives tasks, eight prepare, three invert.
#pragma once
#include "prepare.cuh"

// ---------------------------------------------------------------- the warp that gives tasks

DEVICE Task task_of(const ForwardParams& p, const Search& at) {
    Task task = {};
    if (!at.valid(p)) return task;
    const int before = at.chunk * CHUNK;
    task.keys = at.keys + i64(before) * key_row(p), task.head = at.tile.head;
    task.first = at.tile.first + before, task.left = at.tile.length - before;
    task.place = (KEEPS ? kept_at(p, at.kept(p)) : ring_at(p, at.group, at.count)).base;
    task.T_fp16 = T_FP16 ? p.T_fp16 + at.kept(p) * SQUARE : nullptr;
    task.filled = at.group >= 0 ? filled(p, at.group, at.count) : nullptr;
    task.A = p.A_log ? exp2_fast(p.A_log[at.tile.head] * LOG2_E) : 1.f;
    return task;
}

// Give the block's warps one task after the other, and with each the place for the chunk before, as they need a task before
// they end the one before it. The rows of kept chunks are free.
DEVICE void give_tasks(Lane lane, const ForwardParams& p, const Shared& shared) {
    const Tasks tasks = shared.tasks();
    Search at;
    at.start(lane, p);
    int group = 0;
    u32 count = 0;  // of the chunk before
    for (u32 iteration = 0;; iteration++, at.skip(lane, p)) {
        if (iteration >= Tasks::AHEAD) tasks.wait_for(Tasks::WRITTEN, iteration - Tasks::AHEAD);
        if (lane.id == 0) {
            tasks[iteration] = task_of(p, at);
            mbarrier_arrive(tasks.barrier(Tasks::GIVEN, iteration));
        }
        if (!KEEPS && iteration > 0) {
            wait_for_slot(lane, p, group, count);
            if (lane.id == 0) mbarrier_arrive(tasks.barrier(Tasks::PLACED, iteration - 1));
        }
        if (!at.valid(p)) return;
        group = at.group, count = at.count;
    }
}

// ---------------------------------------------------------------- the warps that prepare

// A CTA changes its head with every chunk. So biases are loaded a chunk ahead by cp.async: they are there with the inputs,
// whose copies are committed after them.
DEVICE void fetch_biases(Lane lane, const ForwardParams& p, const Shared& shared, const WorkTile& tile, u32 iteration) {
    if constexpr (HEAD_GATES) {
        if (lane.id == 0) cp_async_4(shared.bias(lane.warp, iteration), p.dt_bias + tile.head, p.dt_bias);
        return;
    }
    const float* from = p.dt_bias + tile.head * K + 64 * (lane.warp % HALVES);
    if (lane.id < 16) cp_async_16(shared.bias(lane.warp, iteration) + 4 * lane.id, from + 4 * lane.id, p.dt_bias);
}

DEVICE void prepare(Lane lane, const ForwardParams& p, const Shared& shared) {
    const Tasks tasks = shared.tasks();
    tasks.wait_for(Tasks::GIVEN, 0);
    Cursor at(tasks[0]);
    if (!at.valid(p)) return;
    fetch_biases(lane, p, shared, at.tile, 0);
    Raw raw;
    fetch_inputs(lane, raw, p, shared, at);
    for (u32 iteration = 0; at.valid(p); iteration++) {
        tasks.wait_for(Tasks::GIVEN, iteration + 1);
        const Cursor next(tasks[iteration + 1]);
        const Gates<GATE> gates(tasks[iteration].A, p.lower_bound);
        warp_sync();  // all lanes have read the biases of the chunk before
        if (next.valid(p)) fetch_biases(lane, p, shared, next.tile, iteration + 1);
        prepare_chunk(lane, p, shared, gates, raw, at, next, 0, iteration);
        arrive_by_warp(lane, tasks.barrier(Tasks::WRITTEN, iteration));
        at = next;
    }
}

// The warps that invert. The last inverter publishes the chunk, so that only one warp waits for the writes to become visible.
DEVICE void invert_chunks(Lane lane, const ForwardParams& p, const Shared& shared) {
    const Tasks tasks = shared.tasks();
    float* beta = shared.beta(lane.warp);
    for (u32 iteration = 0;; iteration++) {
        tasks.wait_for(Tasks::GIVEN, iteration);
        const Task& task = tasks[iteration];
        if (task.left == 0) return;
        u32* const filled = task.filled;
        warp_sync();
        load_write_strengths(lane, beta, p, Cursor(task));
        mbarrier_wait(shared.summed(), iteration & 1);
        warp_sync();
        invert_chunk(lane, shared, {task.place}, task.T_fp16, beta);
        arrive_by_warp(lane, shared.inverted());
        arrive_by_warp(lane, tasks.barrier(Tasks::WRITTEN, iteration));
        if (lane.warp != INVERTERS - 1) continue;
        tasks.wait_for(Tasks::WRITTEN, iteration);
        if (lane.id == 0 && filled) red_add_release(filled, 1);
        warp_sync();
    }
}
