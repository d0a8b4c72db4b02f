// Runs the bfloat16 attention kernels with dot products if the CPU has them.

#include "attention_tasks.h"
#include "attention_tile.h"

namespace rootstock {

#if ROOTSTOCK_DOT_BF16

bool attend_bf16(const Attention<bf16>& job, int threads) {
    if (job.head_dim % 32 || job.value_dim % 32) return false;
    const auto most = [&](int64_t, int64_t) { return std::max<int64_t>(1, kTileQueries / job.group()); };
    for_each_tile(job, threads, most, [&](int64_t row, int64_t first, int64_t count, int64_t kv_head) {
        attend_tile(job, row, first, count, kv_head);
    });
    return true;
}

#else

bool attend_bf16(const Attention<bf16>&, int) { return false; }

#endif
}  // namespace rootstock
