// Weights of 8 or 4 bits per element, in blocks of 64 columns, and the products of a few rows with one block.
//
// A packed block has, for each step of the depth, 64 columns of 4 bytes. With 8 bits, byte j of step q is element 4 q + j. With 4 bits,
// its low half is element 8 q + j and its high half is element 8 q + 4 + j. An element is (code - zero) * scale or, with a table,
// table[code] * scale.
//
// There are two kinds of products:
// - exact: the codes are converted to float32 in registers. The activations keep their values.
// - int8 (VNNI, for bfloat16 activations): a row is rounded to int8, with a scale per group, and the products are integers.
// In both cases, a row's bits depend on no other row.
#pragma once

#include <algorithm>
#include <cstring>

#include "numeric.h"
#include "tile.h"
#include "vectors.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ROOTSTOCK_DOT_INT8 1
#include <immintrin.h>
#else
#define ROOTSTOCK_DOT_INT8 0
#endif

namespace rootstock {

constexpr int64_t kCodedColumns = 64;  // columns of a block

// A packed weight. The pointers address its first block.
struct Coded {
    const uint8_t* data;   // [blocks][depth / 4 or depth / 8][64][4]
    const void* scales;    // [blocks][groups][64], bfloat16 or float32
    const uint8_t* zeros;  // [blocks][groups][64], or null if all zero points are `zero`
    const float* bias;     // [blocks][64], or null
    const int8_t* table;   // number of each of the 16 codes, or null without a table
    int64_t columns;       // output features; of a gated weight, those of gate and up
    int64_t depth;
    int64_t group;         // elements of a column that share a scale
    int bits;              // 8 or 4
    bool narrow_scales;    // whether scales are bfloat16

    int64_t groups() const { return depth / group; }
    int64_t block_bytes() const { return kCodedColumns * depth * bits / 8; }
    int zero() const { return table != nullptr ? 0 : 1 << (bits - 1); }
};

// Copies the 64 scales of a group as float32.
inline void scales_of(float* scales, const Coded& w, int64_t block, int64_t group) {
    const int64_t first = (block * w.groups() + group) * kCodedColumns;
    if (w.narrow_scales) {
        const bf16* source = static_cast<const bf16*>(w.scales) + first;
        for (int64_t c = 0; c < kCodedColumns; ++c) scales[c] = widen(source[c]);
    } else {
        std::memcpy(scales, static_cast<const float*>(w.scales) + first, kCodedColumns * sizeof(float));
    }
}

typedef int32_t Whole __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

// Adds the products of ROWS rows with VECTORS vectors of columns, from `first` on, over one group to `sums`.
template <int ROWS, int VECTORS, int BITS>
inline void add_group_exact(float (*sums)[kCodedColumns], const Coded& w, int64_t block, int64_t group, int64_t first, const float* x) {
    constexpr int kDepth = 32 / BITS;  // elements in 4 bytes
    float table[16] = {}, scales[kCodedColumns];
    for (int code = 0; code < 16 && w.table != nullptr; ++code) table[code] = w.table[code];
    scales_of(scales, w, block, group);
    Vector totals[ROWS][VECTORS] = {}, zeros[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        for (int i = 0; i < kWidth; ++i) {
            const int64_t at = (block * w.groups() + group) * kCodedColumns + first + v * kWidth + i;
            zeros[v][i] = w.zeros != nullptr ? static_cast<float>(w.zeros[at]) : static_cast<float>(w.zero());
        }
    }
    const uint8_t* data = w.data + block * w.block_bytes() + (group * w.group / kDepth * kCodedColumns + first) * 4;
    for (int64_t step = 0; step < w.group / kDepth; ++step, data += kCodedColumns * 4) {
        for (int j = 0; j < kDepth; ++j) {
            // Byte j % 4; with 4 bits, first all low halves and then all high halves.
            const int shift = BITS == 8 ? 8 * j : 8 * (j % 4) + 4 * (j / 4);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                const Whole codes = (*reinterpret_cast<const Whole*>(data + 4 * v * kWidth) >> shift) & ((1 << BITS) - 1);
                Vector values = __builtin_convertvector(codes, Vector) - zeros[v];
                if (w.table != nullptr) {
                    for (int i = 0; i < kWidth; ++i) values[i] = table[codes[i]];
                }
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) totals[r][v] += values * x[r * w.depth + group * w.group + step * kDepth + j];
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            float* sum = sums[r] + first + v * kWidth;
            store(sum, load(sum) + totals[r][v] * load(scales + first + v * kWidth));
        }
    }
}

template <int ROWS, int BITS>
inline void add_block_exact(float (*sums)[kCodedColumns], const Coded& w, int64_t block, const float* x) {
    constexpr int kVectorsAtOnce = kWidth == 16 ? 4 : 2;
    for (int64_t group = 0; group < w.groups(); ++group) {
        for (int64_t first = 0; first < kCodedColumns; first += kVectorsAtOnce * kWidth) {
            add_group_exact<ROWS, kVectorsAtOnce, BITS>(sums, w, block, group, first, x);
        }
    }
}

constexpr int kExactRows = 4;  // largest number of rows of a tile of exact products

// Sets sums[r] to the products of rows x [rows, depth] with the 64 columns of a block, without bias.
inline void sum_block_exact(float (*sums)[kCodedColumns], const Coded& w, int64_t block, const float* x, int64_t rows) {
    std::memset(sums, 0, static_cast<size_t>(rows) * kCodedColumns * sizeof(float));
    const auto add = [&]<int BITS>() {
        switch (rows) {
            case 1: add_block_exact<1, BITS>(sums, w, block, x); break;
            case 2: add_block_exact<2, BITS>(sums, w, block, x); break;
            case 3: add_block_exact<3, BITS>(sums, w, block, x); break;
            default: add_block_exact<kExactRows, BITS>(sums, w, block, x); break;
        }
    };
    if (w.bits == 8) {
        add.template operator()<8>();
    } else {
        add.template operator()<4>();
    }
}

#if ROOTSTOCK_DOT_INT8

// Activations as int8: element k of row r is codes[r][k] * scales[r][k / group].
struct Int8Rows {
    const int8_t* codes;   // [rows, depth]
    const float* scales;   // [rows, groups]
    const int32_t* sums;   // [rows, groups], sums of the codes
};

// Quantizes one row. The largest magnitude of a group becomes 127. A group with an infinity or a NaN gets the scale NaN.
__attribute__((noinline)) inline void quantize_row(int8_t* codes, float* scales, int32_t* sums, const bf16* x, int64_t depth,
                                                   int64_t group) {
    for (int64_t g = 0; g < depth / group; ++g) {
        const bf16* source = x + g * group;
        int8_t* target = codes + g * group;
        uint16_t most = 0;
        for (int64_t k = 0; k < group; ++k) most = std::max<uint16_t>(most, source[k].bits & 0x7fffu);
        const bool finite = most < 0x7f80u;
        const float largest = widen(bf16{most});
        scales[g] = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
        const float factor = finite && largest > 1e-35f ? 127.0f / largest : 0.0f;
        int32_t total = 0;
        for (int64_t k = 0; k < group; ++k) {
            const float rounded = std::nearbyint(widen(source[k]) * factor);
            target[k] = finite ? static_cast<int8_t>(static_cast<int32_t>(rounded)) : int8_t{0};
            total += target[k];
        }
        sums[g] = total;
    }
}

constexpr int kInt8Rows = 6;  // 6 x 4 sums, 4 vectors of columns and a broadcast fit the 32 registers
constexpr int kAcross16 = 4;  // vectors of 16 columns in a block

inline __m512i four_of(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, sizeof(four));
    return _mm512_set1_epi32(four);
}

// Adds the four products of an unsigned and a signed byte to each lane of `totals`. This is the instruction of
// _mm512_dpbusd_epi32. For the intrinsic, GCC 12 keeps two copies of each sum and moves them to the stack.
inline void add_four(__m512i& totals, __m512i columns, __m512i row) {
    asm("vpdpbusd %2, %1, %0" : "+v"(totals) : "v"(columns), "v"(row));
}

// Returns the codes in the low halves of 64 bytes, or their numbers in the table, with 8 bits each.
template <bool TABLE> inline __m512i numbers_of(__m512i codes, __m512i table) {
    const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi8(15));
    return TABLE ? _mm512_shuffle_epi8(table, low) : low;
}

template <int ROWS>
inline void add_products(__m512i (&totals)[ROWS][kAcross16], const __m512i (&columns)[kAcross16], const int8_t* x, int64_t depth) {
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
        const __m512i row = four_of(x + r * depth);
#pragma GCC unroll 6
        for (int v = 0; v < kAcross16; ++v) add_four(totals[r][v], columns[v], row);
    }
}

// Adds the products of ROWS rows, from `row` on, with a block to `sums`. With `streams`, the block is read from memory, and its lines
// are prefetched. Not inlined, because GCC 12 then moves sums to the stack.
template <int ROWS, int BITS, bool TABLE>
__attribute__((noinline)) void add_block_int8(float (*sums)[kCodedColumns], const Coded& w, int64_t block, const Int8Rows& rows, int64_t row,
                                              bool streams) {
    const int64_t groups = w.groups();
    __m512i table = _mm512_setzero_si512();
    int zero = w.zero();
    if (TABLE) {  // the instruction needs unsigned numbers, so 127 is added to the table
        const __m128i shifted = _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.table)), _mm_set1_epi8(127));
        table = _mm512_broadcast_i32x4(shifted);
        zero = 127;
    }
    const uint8_t* data = w.data + block * w.block_bytes();
    const int8_t* x = rows.codes + row * w.depth;
    for (int64_t group = 0; group < groups; ++group) {
        __m512i totals[ROWS][kAcross16];
        const int64_t at = (block * groups + group) * kCodedColumns;
#pragma GCC unroll 6
        for (int v = 0; v < kAcross16; ++v) {
            __m512i zeros = _mm512_set1_epi32(zero);
            if (w.zeros != nullptr) {
                zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.zeros + at + v * 16)));
            }
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                totals[r][v] = _mm512_mullo_epi32(zeros, _mm512_set1_epi32(-rows.sums[(row + r) * groups + group]));
            }
        }
        for (int64_t k = 0; k < w.group; k += 32 / BITS, data += 4 * kCodedColumns, x += 32 / BITS) {
            __m512i columns[kAcross16];
            if (streams) {
#pragma GCC unroll 6
                for (int v = 0; v < kAcross16; ++v) _mm_prefetch(data + kStreamAhead + v * 64, _MM_HINT_T1);
            }
            if (BITS == 8) {
#pragma GCC unroll 6
                for (int v = 0; v < kAcross16; ++v) columns[v] = _mm512_loadu_si512(data + v * 64);
                add_products(totals, columns, x, w.depth);
            } else {
#pragma GCC unroll 6
                for (int v = 0; v < kAcross16; ++v) columns[v] = numbers_of<TABLE>(_mm512_loadu_si512(data + v * 64), table);
                add_products(totals, columns, x, w.depth);
#pragma GCC unroll 6
                for (int v = 0; v < kAcross16; ++v) {
                    columns[v] = numbers_of<TABLE>(_mm512_srli_epi16(_mm512_loadu_si512(data + v * 64), 4), table);
                }
                add_products(totals, columns, x + 4, w.depth);
            }
        }
        float scales[kCodedColumns];
        scales_of(scales, w, block, group);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const __m512 scale = _mm512_set1_ps(rows.scales[(row + r) * groups + group]);
#pragma GCC unroll 6
            for (int v = 0; v < kAcross16; ++v) {
                const __m512 factor = _mm512_mul_ps(_mm512_loadu_ps(scales + v * 16), scale);
                const __m512 sum = _mm512_loadu_ps(sums[r] + v * 16);
                _mm512_storeu_ps(sums[r] + v * 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[r][v]), factor, sum));
            }
        }
    }
}

// Sets sums[r] to the products of `count` rows, from `row` on, with the 64 columns of a block, without bias. For `streams` see
// add_block_int8().
inline void sum_block_int8(float (*sums)[kCodedColumns], const Coded& w, int64_t block, const Int8Rows& rows, int64_t row, int64_t count,
                           bool streams) {
    std::memset(sums, 0, static_cast<size_t>(count) * kCodedColumns * sizeof(float));
    const auto add = [&]<int BITS, bool TABLE>() {
        switch (count) {
            case 1: add_block_int8<1, BITS, TABLE>(sums, w, block, rows, row, streams); break;
            case 2: add_block_int8<2, BITS, TABLE>(sums, w, block, rows, row, streams); break;
            case 3: add_block_int8<3, BITS, TABLE>(sums, w, block, rows, row, streams); break;
            case 4: add_block_int8<4, BITS, TABLE>(sums, w, block, rows, row, streams); break;
            case 5: add_block_int8<5, BITS, TABLE>(sums, w, block, rows, row, streams); break;
            default: add_block_int8<kInt8Rows, BITS, TABLE>(sums, w, block, rows, row, streams); break;
        }
    };
    if (w.bits == 8) {
        add.template operator()<8, false>();
    } else if (w.table == nullptr) {
        add.template operator()<4, false>();
    } else {
        add.template operator()<4, true>();
    }
}

#endif

// Adds the bias of a block to the sums of one row and applies silu(gate) * up to its 32 gate columns and 32 up columns, in place.
// Without `gated`, only the bias is added.
__attribute__((noinline)) inline void finish_sums(float* sums, const Coded& w, int64_t block, bool gated) {
    if (w.bias != nullptr) {
        for (int64_t c = 0; c < kCodedColumns; ++c) sums[c] += w.bias[block * kCodedColumns + c];
    }
    if (!gated) return;
    for (int64_t c = 0; c < kCodedColumns / 2; c += kWidth) {
        store(sums + c, silu(load(sums + c)) * load(sums + kCodedColumns / 2 + c));
    }
}

}  // namespace rootstock
