// Which tile of which row each thread takes.

#include <vector>

#include "attention_tile.h"
#include "schedule.h"

namespace rootstock {

#if ROOTSTOCK_DOT_BF16
namespace {

struct Task {
    int32_t row, first, count;  // tokens of the row
};

// Longest first, so that the last tasks are short.
std::vector<Task> split(const Attention<bf16>& job) {
    const int32_t most = static_cast<int32_t>(std::max<int64_t>(1, kTileQueries / job.group()));
    std::vector<Task> tasks;
    for (int32_t row = 0; row < job.rows; ++row) {
        for (int32_t first = 0; first < job.num_tokens[row]; first += most) {
            tasks.push_back({row, first, std::min(most, job.num_tokens[row] - first)});
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
        attend_tile(job, task.row, task.first, task.count, piece % job.kv_heads);
    }
    return true;
}

#else

bool attend_bf16(const Attention<bf16>&, int) { return false; }

#endif
}  // namespace rootstock
