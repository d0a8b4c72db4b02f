// Sizes of the tiles of all matrix products, and the order of packed columns. A tile is a few rows times a block of 64 columns.
#pragma once

#include <cstdint>

namespace rootstock {

constexpr int kTileRows = 6;   // 6 x 4 accumulators, 4 vectors of columns and a broadcast fit 32 registers
constexpr int kTileCols = 64;
// Number of bytes by which a tile that reads its block from memory prefetches ahead of its loads. At the block's end, these bytes
// belong to the next block. Without these prefetches, the prefetcher of some CPUs stops at the end of each page of 4 KB.
constexpr int64_t kStreamAhead = 4096;

// Calls work.template operator()<ROWS>() with rows, 1 to kTileRows, as a constant.
template <typename Work> inline void with_rows(int64_t rows, Work&& work) {
    switch (rows) {
        case 1: work.template operator()<1>(); break;
        case 2: work.template operator()<2>(); break;
        case 3: work.template operator()<3>(); break;
        case 4: work.template operator()<4>(); break;
        case 5: work.template operator()<5>(); break;
        default: work.template operator()<kTileRows>(); break;
    }
}

// Returns the number of packed columns of a weight with this number of rows.
inline int64_t packed_columns(int64_t rows, bool gated) {
    return (gated ? (rows / 2 + 31) / 32 : (rows + kTileCols - 1) / kTileCols) * kTileCols;
}

// Returns the weight row of a packed column, -1 for padding. A gated block has 32 gate columns and then their 32 up columns.
inline int64_t source_row(int64_t column, int64_t rows, bool gated) {
    if (!gated) return column < rows ? column : -1;
    const int64_t half = rows / 2, index = column / 64 * 32 + column % 32;
    if (index >= half) return -1;
    return column % 64 < 32 ? index : half + index;
}

}  // namespace rootstock
