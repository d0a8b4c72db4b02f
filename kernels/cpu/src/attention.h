// Arguments of the attention kernels: a ragged batch over a paged pool. See kernels/contracts/ops.py for shapes.
#pragma once

#include <algorithm>
#include <limits>

#include "numeric.h"

namespace rootstock {

template <typename T> struct Attention {
    T* out;          // [tokens, heads * value_dim]
    const T* q;      // [tokens, q_stride], first the heads * head_dim elements of the queries
    const T* keys;   // [pages, kv_heads, page_size, head_dim]
    const T* values; // [pages, kv_heads, page_size, value_dim]
    const int32_t* page_table;  // [slots, table_width]
    const int32_t* slots;
    const int32_t* starts;
    const int32_t* num_tokens;
    const int32_t* offsets;
    const float* sinks;  // [heads], an additional score of each head; null for no sinks
    int64_t rows, table_width, heads, kv_heads, head_dim, value_dim, q_stride, page_size, window;
    float scale, softcap;  // softcap 0: no cap
    bool ordered;  // whether each bit of a token's result must be independent of the other tokens of its tile

    int64_t group() const { return heads / kv_heads; }
    const T* query(int64_t token, int64_t head) const { return q + token * q_stride + head * head_dim; }
    T* result(int64_t token, int64_t head) const { return out + (token * heads + head) * value_dim; }
    // Returns the sink of a head, minus infinity without sinks.
    float sink(int64_t head) const { return sinks != nullptr ? sinks[head] : -std::numeric_limits<float>::infinity(); }

    // Returns the index of a position's key and value among all keys and values of the pools.
    int64_t pool_index(int64_t row, int64_t position, int64_t kv_head) const {
        const int64_t slot = std::max(slots[row], 0);  // a padding row reads an existing page
        const int64_t page = std::max(page_table[slot * table_width + position / page_size], 0);
        return (page * kv_heads + kv_head) * page_size + position % page_size;
    }
    // Returns the first position that a token at `position` attends to.
    int64_t first_seen(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Runs the bfloat16 kernels with dot products. If the CPU or the sizes do not allow them, does nothing and returns false.
bool attend_bf16(const Attention<bf16>& job, int threads);

}  // namespace rootstock
