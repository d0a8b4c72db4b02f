// Linear layers of any type and depth. A row's bits do not depend on other rows, because each element is one chain of products in the
// order of the depth.

#include <algorithm>
#include <type_traits>

#include "numeric.h"
#include "schedule.h"
#include "tile_ordered.h"

namespace rootstock {
namespace {

template <typename T> struct Ordered {
    void* out;      // [rows, columns]
    const T* x;     // [rows, depth]
    const T* w;     // [blocks][depth][64]
    const T* bias;  // [columns], or null
    int64_t rows, columns, depth;
    bool wide;      // out is float32, else T

    void store(int64_t row, int64_t column, float sum) const {
        const float value = bias == nullptr ? sum : sum + widen(bias[column]);
        if (wide) {
            static_cast<float*>(out)[row * columns + column] = value;
        } else {
            static_cast<T*>(out)[row * columns + column] = narrow<T>(value);
        }
    }
};

// Returns n elements of each row as float32: x itself if it is float32, otherwise a copy in `wide`.
template <int ROWS> const float* widened(const float* x, int64_t, int64_t, float*) { return x; }

template <int ROWS> const float* widened(const bf16* x, int64_t depth, int64_t n, float* wide) {
    for (int r = 0; r < ROWS; ++r) {
        for (int64_t k = 0; k < n; ++k) wide[r * kSegment + k] = widen(x[r * depth + k]);
    }
    return wide;
}

template <typename T, int ROWS> void run_tile(const Ordered<T>& job, int64_t row, int64_t block, int64_t first) {
    constexpr int kVectors = vectors_of(ROWS, kAcross);
    Vector sums[ROWS][kVectors] = {};
    float wide[std::is_same_v<T, float> ? 1 : ROWS * kSegment];
    const int64_t stride = std::is_same_v<T, float> ? job.depth : kSegment;
    const auto segment = [&](int64_t begin, int64_t n) {
        return Elements{widened<ROWS>(job.x + row * job.depth + begin, job.depth, n, wide), stride};
    };
    multiply_ordered(sums, segment, job.w + block * job.depth * kTileCols + first, job.depth);
    const int64_t column = block * kTileCols + first, count = std::min<int64_t>(kWidth * kVectors, job.columns - column);
    for (int r = 0; r < ROWS; ++r) {
        for (int64_t c = 0; c < count; ++c) job.store(row + r, column + c, sums[r][c / kWidth][c % kWidth]);
    }
}

template <typename T, int ROWS> void run_tiles(const Ordered<T>& job, int64_t row, int64_t block) {
    constexpr int kColumnsOfTile = kWidth * vectors_of(ROWS, kAcross);
    for (int64_t first = 0; first < kTileCols; first += kColumnsOfTile) run_tile<T, ROWS>(job, row, block, first);
}

template <typename T> void run_block(const Ordered<T>& job, int64_t begin, int64_t end, int64_t block) {
    for (int64_t row = begin; row < end; row += kTileRows) {
        with_rows(std::min<int64_t>(kTileRows, end - row), [&]<int ROWS>() { run_tiles<T, ROWS>(job, row, block); });
    }
}

template <typename T> void run_linear(const Ordered<T>& job, int threads) {
    const int64_t blocks = (job.columns + kTileCols - 1) / kTileCols, tiles = (job.rows + kTileRows - 1) / kTileRows;
    const int64_t parts = std::min(tiles, std::max<int64_t>(1, 4 * threads / blocks));
    const int64_t rows = (tiles + parts - 1) / parts * kTileRows;
    for_each_piece(parts * blocks, threads, [&](int64_t piece, int64_t) {
        const int64_t begin = piece / blocks * rows;
        run_block(job, begin, std::min(job.rows, begin + rows), piece % blocks);
    });
}

template <typename T> void pack(T* packed, const T* weight, int64_t rows, int64_t depth, bool gated, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < packed_columns(rows, gated) / kTileCols; ++block) {
        for (int64_t c = 0; c < kTileCols; ++c) {
            const int64_t row = source_row(block * kTileCols + c, rows, gated);
            for (int64_t k = 0; k < depth; ++k) {
                packed[(block * depth + k) * kTileCols + c] = row < 0 ? T{} : weight[row * depth + k];
            }
        }
    }
}

}  // namespace
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

// Packs a weight [rows, depth] as [blocks][depth][64], padded with 0. A gated weight has an even number of rows, and its columns
// have the order of source_row(). `bfloat16`: see rootstock_linear_ordered().
void rootstock_pack_ordered(void* packed, const void* weight, int64_t rows, int64_t depth, int gated, int bfloat16, int threads) {
    if (bfloat16) {
        rootstock::pack(static_cast<bf16*>(packed), static_cast<const bf16*>(weight), rows, depth, gated != 0, threads);
    } else {
        rootstock::pack(static_cast<float*>(packed), static_cast<const float*>(weight), rows, depth, gated != 0, threads);
    }
}

// Computes out [rows, columns] = x [rows, depth] . w + bias. `bfloat16` is 1 if the tensors are bfloat16, 0 if they are float32.
// If `wide` is not 0, `out` is float32 in both cases.
void rootstock_linear_ordered(void* out, const void* x, const void* w, const void* bias, int64_t rows, int64_t columns,
                              int64_t depth, int wide, int bfloat16, int threads) {
    if (bfloat16) {
        const rootstock::Ordered<bf16> job{out, static_cast<const bf16*>(x), static_cast<const bf16*>(w),
                                           static_cast<const bf16*>(bias), rows, columns, depth, wide != 0};
        rootstock::run_linear(job, threads);
    } else {
        const rootstock::Ordered<float> job{out, static_cast<const float*>(x), static_cast<const float*>(w),
                                            static_cast<const float*>(bias), rows, columns, depth, wide != 0};
        rootstock::run_linear(job, threads);
    }
}

}  // extern "C"
