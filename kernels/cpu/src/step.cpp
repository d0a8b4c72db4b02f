// Implements the kernels that prepare a step (kernels/contracts/step_ops.py): page tables and input tokens.

#include <algorithm>
#include <cstdint>

extern "C" {

void rootstock_update_page_table(int32_t* table, const int32_t* slots, const int32_t* firsts, const int32_t* counts,
                                 const int32_t* offsets, const int32_t* pages, int64_t updates, int64_t width, int) {
    for (int64_t update = 0; update < updates; ++update) {
        if (slots[update] < 0) continue;
        int32_t* row = table + slots[update] * width;
        const int64_t first = firsts[update], end = std::min<int64_t>(counts[update], width - first);
        for (int64_t i = std::max<int64_t>(0, -first); i < end; ++i) row[first + i] = pages[offsets[update] + i];
    }
}

// `known` and `unwritten` may be null.
void rootstock_resolve_tokens(int64_t* input_ids, int32_t* positions, int64_t* locations, const int32_t* table,
                              const int32_t* slots, const int32_t* starts, const int32_t* num_tokens,
                              const int32_t* offsets, const int32_t* given, const int64_t* relay, const int32_t* known,
                              int32_t* unwritten, int64_t rows, int64_t num_extend, int64_t page_size,
                              int64_t vocab_size, int64_t width, int) {
    int32_t missing = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t slot = slots[row];
        const int64_t last = row < num_extend || slot < 0 ? 0 : relay[slot];
        for (int64_t i = 0; i < num_tokens[row]; ++i) {
            const int64_t token = offsets[row] + i, position = starts[row] + i, entry = position / page_size;
            const bool inside = slot >= 0 && position >= 0 && entry < width;
            const int64_t page = inside ? table[slot * width + entry] : -1;
            int64_t id = row < num_extend ? given[token] : last;
            if (row >= num_extend) {
                const bool is_known = known != nullptr && known[token] >= 0;
                id = is_known ? known[token] : id;
                missing += id < 0;
            }
            input_ids[token] = std::min(std::max<int64_t>(id, 0), vocab_size - 1);
            positions[token] = static_cast<int32_t>(position);
            locations[token] = page < 0 ? -1 : page * page_size + position % page_size;
        }
    }
    if (unwritten != nullptr) *unwritten += missing;
}

}  // extern "C"
