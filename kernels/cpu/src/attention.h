// Arguments of the attention kernels: a ragged batch over a paged pool. See kernels/contracts/ops.py for shapes.
#pragma once

#include <algorithm>

#include "numeric.h"

namespace rootstock {

template <typename T> struct Attention {
    T* out;          // [tokens, heads * head_dim]
    const T* qkv;    // [tokens, (heads + 2 kv_heads) * head_dim]
    const T* keys;   // [pages, kv_heads, page_size, head_dim]
    const T* values;
    const int32_t* page_table;  // [slots, table_width]
    const int32_t* slots;
    const int32_t* starts;
    const int32_t* num_tokens;
    const int32_t* offsets;
    int64_t rows, table_width, heads, kv_heads, head_dim, page_size, window;
    float scale;
    bool ordered;  // whether each bit of a token's result must be independent of the other tokens of its tile

    int64_t group() const { return heads / kv_heads; }
    const T* query(int64_t token, int64_t head) const {
        return qkv + token * (heads + 2 * kv_heads) * head_dim + head * head_dim;
    }
    T* result(int64_t token, int64_t head) const { return out + (token * heads + head) * head_dim; }

    // Returns the offset, in elements, of a position's key and value in the pools.
    int64_t pool_offset(int64_t row, int64_t position, int64_t kv_head) const {
        const int64_t slot = std::max(slots[row], 0);  // a padding row reads an existing page
        const int64_t page = std::max(page_table[slot * table_width + position / page_size], 0);
        return ((page * kv_heads + kv_head) * page_size + position % page_size) * head_dim;
    }
    // Returns the first position that a token at `position` attends to.
    int64_t first_seen(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Runs the bfloat16 kernels with dot products. If the CPU or the head size does not allow them, does nothing and returns false.
bool attend_bf16(const Attention<bf16>& job, int threads);

}  // namespace rootstock
