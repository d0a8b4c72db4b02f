// The two bfloat16 attention kernels. Both: one key/value head, head_dim 64, 96, 128 or 256, weights rounded to bfloat16.
#pragma once

#include "attention.h"

namespace rootstock {

constexpr int64_t kTileQueries = 96;  // queries (tokens x heads of a group) of one tile

// One token of a row: reads keys and values once, straight from the pool.
void attend_direct(const Attention<bf16>& job, int64_t row, int64_t index, int64_t kv_head);

// `count` tokens of a row from `first` on, at most kTileQueries / group or 1: 64 keys at a time, softmax kept running.
void attend_tile(const Attention<bf16>& job, int64_t row, int64_t first, int64_t count, int64_t kv_head);

}  // namespace rootstock
