// Linear layers with packed bfloat16 weights. Memory limits the speed for one row, and the dot-product unit for thousands of rows.
//
// A block of 64 columns stays in the second-level cache while all rows are multiplied by it, and the next block is prefetched.

#include <algorithm>

#include "schedule.h"
#include "tile_bf16.h"
#include "vector16.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rootstock {

constexpr int64_t kHugePage = int64_t{1} << 21;

// Asks for huge pages, which save most address translation misses of a pass over the weights. A failure has no effect.
static void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const int64_t begin = (reinterpret_cast<int64_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
    const int64_t end = (reinterpret_cast<int64_t>(data) + bytes) / kHugePage * kHugePage;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

#if ROOTSTOCK_DOT_BF16
namespace {

enum class Finish { kStore, kGated };

struct Linear {
    void* out;         // [rows, columns]
    const bf16* x;     // [rows, depth]
    const bf16* w;     // packed
    const bf16* bias;  // in packed column order, or null
    int64_t rows, columns, depth;
    bool wide;         // whether out is float32; otherwise bfloat16
};

inline void store16(const Linear& job, int64_t row, int64_t column, __m512 values, int64_t width) {
    const int64_t left = width - column;
    if (left <= 0) return;
    const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const int64_t index = row * width + column;
    if (job.wide) {
        _mm512_mask_storeu_ps(static_cast<float*>(job.out) + index, mask, values);
    } else {
        const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values));
        _mm256_mask_storeu_epi16(static_cast<bf16*>(job.out) + index, mask, bits);
    }
}

template <int ROWS, Finish FINISH>
void run_tile(const Linear& job, int64_t row, int64_t block, Ahead ahead) {
    __m512 sums[ROWS][kVectors];
    clear(sums);
    multiply_tile<ROWS>(sums, job.x + row * job.depth, job.depth, job.w + block * kTileCols * job.depth, job.depth / 2, ahead);
    if (job.bias != nullptr) {
        for (int v = 0; v < kVectors; ++v) {
            const __m512 bias = widen16(job.bias + block * kTileCols + v * 16);
            for (int r = 0; r < ROWS; ++r) sums[r][v] = _mm512_add_ps(sums[r][v], bias);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        if constexpr (FINISH == Finish::kGated) {
            for (int v = 0; v < 2; ++v) {
                const __m512 gated = _mm512_mul_ps(silu16(sums[r][v]), sums[r][v + 2]);
                store16(job, row + r, block * 32 + v * 16, gated, job.columns / 2);
            }
        } else {
            for (int v = 0; v < kVectors; ++v) {
                store16(job, row + r, block * kTileCols + v * 16, sums[r][v], job.columns);
            }
        }
    }
}

// Multiplies all rows by one block, in tiles of nearly equal height. A single tile reads the block from memory and prefetches its
// lines. Several tiles prefetch `after`, the block that this thread takes next or null, at an even rate.
template <Finish FINISH>
void run_block(const Linear& job, int64_t begin, int64_t end, int64_t block, const bf16* after) {
    const int64_t tiles = (end - begin + kTileRows - 1) / kTileRows, pairs = job.depth / 2;
    const Ahead own{job.w + block * kTileCols * job.depth + kStreamAhead / sizeof(bf16), kVectors};  // for a single tile
    const int lines = tiles <= 3 ? 2 : 1;
    int64_t left = after != nullptr ? kVectors * pairs : 0;
    for (int64_t row = begin, tile = 0; tile < tiles; ++tile) {
        const int64_t count = (end - row + tiles - tile - 1) / (tiles - tile);
        const Ahead ahead{after, left > 0 ? lines : 0};
        with_rows(count, [&]<int ROWS>() { run_tile<ROWS, FINISH>(job, row, block, tiles == 1 ? own : ahead); });
        row += count;
        left -= ahead.lines * pairs;
        after += ahead.lines * pairs * 32;
    }
}

// Splits the rows only if there are too few column blocks for the threads.
template <Finish FINISH> void run_linear(const Linear& job, int threads) {
    const int64_t blocks = (job.columns + kTileCols - 1) / kTileCols;
    const int64_t tiles = (job.rows + kTileRows - 1) / kTileRows;
    const int64_t parts = std::min(tiles, std::max<int64_t>(1, 4 * threads / blocks));
    const int64_t rows_per_part = (tiles + parts - 1) / parts * kTileRows;
    for_each_piece(parts * blocks, threads, [&](int64_t piece, int64_t last) {
        const int64_t block = piece % blocks, begin = piece / blocks * rows_per_part;
        const bool follows = piece + 1 < last && block + 1 < blocks;
        const bf16* after = follows ? job.w + (block + 1) * kTileCols * job.depth : nullptr;
        run_block<FINISH>(job, begin, std::min(job.rows, begin + rows_per_part), block, after);
    });
}

}  // namespace
#endif
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

void rootstock_prefer_huge_pages(void* data, int64_t bytes) { rootstock::prefer_huge_pages(data, bytes); }

// Sets *result to 1 if the packed linear layers below are compiled in.
void rootstock_has_packed_linear(int32_t* result) { *result = ROOTSTOCK_DOT_BF16; }

// Packs a weight [rows, depth] as [ceil(rows / 64)][depth / 2][64][2], padded with 0. depth and the rows of a gated weight are even.
void rootstock_pack_linear(bf16* packed, const bf16* weight, int64_t rows, int64_t depth, int gated, int threads) {
#if ROOTSTOCK_DOT_BF16
    const int64_t columns = rootstock::packed_columns(rows, gated != 0);
    rootstock::prefer_huge_pages(packed, columns * depth * 2);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < columns / 64; ++block) {
        bf16* target = packed + block * 64 * depth;
        for (int64_t c = 0; c < 64; ++c) {
            const int64_t row = rootstock::source_row(block * 64 + c, rows, gated != 0);
            for (int64_t k = 0; k < depth; ++k) {
                target[(k / 2) * 128 + c * 2 + k % 2] = row < 0 ? bf16{0} : weight[row * depth + k];
            }
        }
    }
#else
    (void)packed, (void)weight, (void)rows, (void)depth, (void)gated, (void)threads;
#endif
}

// out [rows, columns] = x [rows, depth] . w + bias; gated: out [rows, columns / 2] = silu(gate) * up.
void rootstock_linear(void* out, const bf16* x, const bf16* w, const bf16* bias, int64_t rows, int64_t columns, int64_t depth,
                      int wide, int gated, int threads) {
#if ROOTSTOCK_DOT_BF16
    const rootstock::Linear job{out, x, w, bias, rows, columns, depth, wide != 0};
    if (gated) {
        rootstock::run_linear<rootstock::Finish::kGated>(job, threads);
    } else {
        rootstock::run_linear<rootstock::Finish::kStore>(job, threads);
    }
#else
    (void)out, (void)x, (void)w, (void)bias, (void)rows, (void)columns, (void)depth, (void)wide, (void)gated, (void)threads;
#endif
}

}  // extern "C"
