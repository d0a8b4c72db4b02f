// The inner loop of every bfloat16 matrix product: a few rows times one block of 64 packed columns, in dot products of pairs.
//
// A packed block is [K / 2][64][2]. One 64-byte load has a pair of the depth for 16 columns, and a 32-bit broadcast has the same pair
// of a row. The accumulators are rows x 4 vectors of 16 float32.
#pragma once

#include "numeric.h"
#include "tile.h"

#if ROOTSTOCK_DOT_BF16
#include <immintrin.h>

namespace rootstock {

constexpr int kVectors = kTileCols / 16;

inline __m512bh pair_at(const bf16* row, int64_t pair) {
    int32_t bits;
    std::memcpy(&bits, row + 2 * pair, sizeof(bits));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

inline __m512bh load_pairs(const bf16* source) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(source)); }

// Memory to prefetch into the second-level cache during a tile: `lines` cache lines per pair, from `next` on.
struct Ahead {
    const bf16* next = nullptr;
    int lines = 0;
};

// Computes sums[r][v] += row_at(r) . w[:, v] over `pairs` pairs. Successive pairs of a row are STEP pairs apart.
template <int ROWS, int STEP = 1, typename RowAt>
inline void multiply_rows(__m512 (&sums)[ROWS][kVectors], RowAt&& row_at, const bf16* w, int64_t pairs, Ahead ahead) {
    for (int64_t pair = 0; pair < pairs; ++pair) {
        __m512bh columns[kVectors];
        for (int v = 0; v < kVectors; ++v) columns[v] = load_pairs(w + (pair * kVectors + v) * 32);
        for (int line = 0; line < ahead.lines; ++line, ahead.next += 32) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead.next), _MM_HINT_T1);
        }
        for (int row = 0; row < ROWS; ++row) {
            const __m512bh value = pair_at(row_at(row), pair * STEP);
            for (int v = 0; v < kVectors; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], columns[v], value);
        }
    }
}

// Computes multiply_rows() for rows that are `stride` elements apart.
template <int ROWS, int STEP = 1>
inline void multiply_tile(__m512 (&sums)[ROWS][kVectors], const bf16* a, int64_t stride, const bf16* w, int64_t pairs,
                          Ahead ahead = {}) {
    multiply_rows<ROWS, STEP>(sums, [=](int row) { return a + row * stride; }, w, pairs, ahead);
}

template <int ROWS> inline void clear(__m512 (&sums)[ROWS][kVectors]) {
    for (int row = 0; row < ROWS; ++row) {
        for (int v = 0; v < kVectors; ++v) sums[row][v] = _mm512_setzero_ps();
    }
}

}  // namespace rootstock
#endif
