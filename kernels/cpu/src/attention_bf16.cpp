// Which bfloat16 attention kernel takes which rows: few queries read the pool directly, many go tile by tile.

#include "attention_bf16.h"

#include <vector>

#include "schedule.h"

namespace rootstock {

#if ROOTSTOCK_DOT_BF16
namespace {

constexpr int64_t kDirectQueries = 8;  // queries of one key/value head from which tiles pay for their packing

struct Task {
    int32_t row, first, count;  // tokens of the row
};

// Longest first, so that the last tasks are short.
std::vector<Task> split(const Attention<bf16>& job) {
    const int32_t most = static_cast<int32_t>(std::max<int64_t>(1, kTileQueries / job.group()));
    std::vector<Task> tasks;
    for (int32_t row = 0; row < job.rows; ++row) {
        const bool direct = job.num_tokens[row] * job.group() < kDirectQueries;
        const int32_t step = direct ? 1 : most;
        for (int32_t first = 0; first < job.num_tokens[row]; first += step) {
            tasks.push_back({row, first, std::min(step, job.num_tokens[row] - first)});
        }
    }
    const auto cost = [&](const Task& t) { return int64_t{t.count} * (job.starts[t.row] + t.first + t.count); };
    std::sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    return tasks;
}

}  // namespace

bool attend_bf16(const Attention<bf16>& job, int threads) {
    const int64_t dim = job.head_dim;
    if (dim != 64 && dim != 96 && dim != 128 && dim != 256) return false;
    const std::vector<Task> tasks = split(job);
    const int64_t pieces = static_cast<int64_t>(tasks.size()) * job.kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (pieces > 1)
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const Task& task = tasks[piece / job.kv_heads];
        const int64_t kv_head = piece % job.kv_heads;
        if (job.num_tokens[task.row] * job.group() < kDirectQueries) {
            attend_direct(job, task.row, task.first, kv_head);
        } else {
            attend_tile(job, task.row, task.first, task.count, kv_head);
        }
    }
    return true;
}

#else

bool attend_bf16(const Attention<bf16>&, int) { return false; }

#endif
}  // namespace rootstock
