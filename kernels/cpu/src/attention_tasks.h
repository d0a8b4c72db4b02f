// Distributes the tiles of all rows over the threads.
#pragma once

#include <vector>

#include "attention.h"

namespace rootstock {

// Calls work(row, first, count, kv_head) for tiles of `count` tokens from `first` on, on any thread. The tiles cover all tokens.
// most(row, first) is the largest number of tokens of a tile, at least 1. The longest tiles run first, so that the threads end at
// nearly the same time.
template <typename T, typename Most, typename Work>
void for_each_tile(const Attention<T>& job, int threads, Most&& most, Work&& work) {
    struct Task {
        int64_t row, first, count;
    };
    std::vector<Task> tasks;
    for (int64_t row = 0; row < job.rows; ++row) {
        for (int64_t first = 0; first < job.num_tokens[row];) {
            const int64_t count = std::min<int64_t>(most(row, first), job.num_tokens[row] - first);
            tasks.push_back({row, first, count});
            first += count;
        }
    }
    const auto cost = [&](const Task& t) {
        const int64_t start = job.starts[t.row] + t.first;
        return t.count * (start + t.count - job.first_seen(start));
    };
    std::sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    const int64_t pieces = static_cast<int64_t>(tasks.size()) * job.kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (pieces > 1)
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const Task& task = tasks[piece / job.kv_heads];
        work(task.row, task.first, task.count, piece % job.kv_heads);
    }
}

}  // namespace rootstock
