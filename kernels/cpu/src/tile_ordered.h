// The inner loop of matrix products of any type and depth: a few rows times one block of 64 columns. Each element is one chain of
// products in the order of the depth. A packed block is [depth][64].
#pragma once

#include <algorithm>

#include "tile.h"
#include "vectors.h"

namespace rootstock {

constexpr int64_t kSegment = 256;           // number of elements of each row of a tile that are used at a time
constexpr int kAcross = kTileCols / kWidth;  // vectors of a block's columns

// Elements of the rows of a tile, as float32. Row r begins at first + r * stride.
struct Elements {
    const float* first;
    int64_t stride;
};

// Computes sums[r][v] += row r . w[:, v]. `segment(begin, n)` returns elements begin .. begin + n - 1 of each row.
template <typename T, int ROWS, int VECTORS, typename Segment>
inline void multiply_ordered(Vector (&sums)[ROWS][VECTORS], Segment&& segment, const T* w, int64_t depth) {
    for (int64_t begin = 0; begin < depth; begin += kSegment) {
        const int64_t n = std::min(kSegment, depth - begin);
        const Elements elements = segment(begin, n);
        const float* x = elements.first;
        const int64_t stride = elements.stride;
        const T* at = w + begin * kTileCols;
        for (int64_t k = 0; k < n; ++k) {
            // Without both pragmas, the compiler stores the sums in memory instead of registers.
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                const Vector columns = load(at + k * kTileCols + v * kWidth);
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; ++r) sums[r][v] += columns * x[r * stride + k];
            }
        }
    }
}

}  // namespace rootstock
