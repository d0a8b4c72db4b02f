// Experts are gated layers, and each row uses a few of them. The pairs of a row and one of its experts are grouped by expert.
// Each group is multiplied by the weights of its expert.
//
//     x ─► gate and up of the expert ─► activation ─► hidden, one per pair ─► down of the expert ─► weighted sum over a row's pairs
//
// The first product has a piece of work for each group and block of columns. The second product has a piece for each part of the
// rows and block of columns. It adds the results of a row in the order of its choices. The sum therefore does not depend on the
// experts' ids.

#include "expert_pairs.h"

#include "schedule.h"
#include "tile_bf16.h"
#include "tile_ordered.h"

namespace rootstock {
namespace {

// One call. T is the type of weights, inputs and outputs. Blocks of gate_up have 32 columns of the gate, then the same columns of up.
template <typename T> struct Experts {
    T* out;                // [rows, width], may be x
    const T* x;            // [rows, width]
    const int32_t* ids;    // [rows, choices]
    const float* weights;  // [rows, choices]
    const T* gate_up;      // [experts][blocks of inner / 32][width][64]
    const T* gate_up_bias;  // [experts][columns of all blocks], or null
    const T* down;          // [experts][blocks of width / 64][inner][64]
    const T* down_bias;     // [experts][columns of all blocks], or null
    T* hidden;              // [rows * choices, inner], scratch
    float* sums;            // [threads][part * choices][64], scratch
    int64_t rows, width, inner, experts, choices, part;  // part: largest number of rows that are grouped together
    Activation activation;
};

// Products in the order of the depth. Blocks are [depth][64].
template <typename T> struct OrderedTile {
    template <int ROWS> static void multiply(float* sums, const T* const (&rows)[ROWS], const T* w, int64_t depth, const T*, int) {
        constexpr int kVectors = vectors_of(ROWS, kAcross);
        float wide[ROWS * kSegment];
        for (int first = 0; first < kTileCols; first += kWidth * kVectors) {
            Vector part[ROWS][kVectors] = {};
            const auto segment = [&](int64_t begin, int64_t n) {
                for (int r = 0; r < ROWS; ++r) {
                    for (int64_t k = 0; k < n; ++k) wide[r * kSegment + k] = widen(rows[r][begin + k]);
                }
                return Elements{wide, kSegment};
            };
            multiply_ordered(part, segment, w + first, depth);
            for (int r = 0; r < ROWS; ++r) {
                for (int v = 0; v < kVectors; ++v) store(sums + r * kTileCols + first + v * kWidth, part[r][v]);
            }
        }
    }
};

#if ROOTSTOCK_DOT_BF16
// Dot products of pairs. Blocks are [depth / 2][64][2].
struct DotTile {
    template <int ROWS>
    static void multiply(float* sums, const bf16* const (&rows)[ROWS], const bf16* w, int64_t depth, const bf16* next, int lines) {
        __m512 part[ROWS][kVectors];
        clear(part);
        multiply_rows<ROWS>(part, [&](int row) { return rows[row]; }, w, depth / 2, Ahead{next, lines});
        for (int r = 0; r < ROWS; ++r) {
            for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(sums + r * kTileCols + v * 16, part[r][v]);
        }
    }
};
#endif

// Multiplies `count` rows, given by row_at(i), by one block. finish(i, sums) gets the 64 sums of row i. `after` is the block that this
// thread takes next, or null. Blocks are prefetched as in linear_bf16.cpp.
template <typename Tile, typename T, typename RowAt, typename Finish>
void run_block(int64_t count, RowAt&& row_at, const T* w, int64_t depth, const T* after, Finish&& finish) {
    constexpr int64_t kLine = 64 / sizeof(T);  // elements of a cache line
    const int64_t tiles = (count + kTileRows - 1) / kTileRows;
    const T* const own = w + kStreamAhead / sizeof(T);  // for a single tile
    const int lines = tiles <= 3 ? 2 : 1;
    int64_t left = after != nullptr ? depth * kTileCols / kLine : 0;
    float sums[kTileRows * kTileCols];
    for (int64_t begin = 0, tile = 0; tile < tiles; ++tile) {
        const int64_t rows = (count - begin + tiles - tile - 1) / (tiles - tile);
        const int ahead = left > 0 ? lines : 0;
        with_rows(rows, [&]<int ROWS>() {
            const T* at[ROWS];
            for (int r = 0; r < ROWS; ++r) at[r] = row_at(begin + r);
            Tile::template multiply<ROWS>(sums, at, w, depth, tiles == 1 ? own : after, tiles == 1 ? kTileCols / 16 : ahead);
        });
        for (int64_t r = 0; r < rows; ++r) finish(begin + r, sums + r * kTileCols);
        begin += rows;
        left -= ahead * (depth / 2);
        after += ahead * (depth / 2) * kLine;
    }
}

// Writes the activation of 32 columns of the gate and the same columns of up. Only the first `count` columns exist.
template <typename T> void activate(const Experts<T>& job, T* out, const float* sums, const T* bias, int64_t count) {
    float joined[32];
    for (int i = 0; i < 32; i += kWidth) {
        Vector gate = load(sums + i), up = load(sums + 32 + i);
        if (bias != nullptr) {
            gate += load(bias + i);
            up += load(bias + 32 + i);
        }
        store(joined + i, joined_by(job.activation, gate, up));
    }
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(joined[i]);
}

// Computes the hidden values of all pairs.
template <typename Tile, typename T> void run_gate_up(const Experts<T>& job, const Pairs& pairs, int threads) {
    const int64_t blocks = packed_columns(2 * job.inner, true) / kTileCols, groups = pairs.groups.size();
    const auto block_of = [&](int64_t piece) {
        return job.gate_up + (pairs.groups[piece / blocks].expert * blocks + piece % blocks) * kTileCols * job.width;
    };
    for_each_piece(groups * blocks, threads, [&](int64_t piece, int64_t last) {
        const Group& group = pairs.groups[piece / blocks];
        const int64_t column = piece % blocks * 32, count = std::min<int64_t>(32, job.inner - column);
        const T* bias =
            job.gate_up_bias == nullptr ? nullptr : job.gate_up_bias + (group.expert * blocks + piece % blocks) * kTileCols;
        run_block<Tile>(
            group.end - group.begin, [&](int64_t i) { return job.x + pairs.order[group.begin + i] / job.choices * job.width; },
            block_of(piece), job.width, piece + 1 < last ? block_of(piece + 1) : nullptr, [&](int64_t i, const float* sums) {
                activate(job, job.hidden + (group.begin + i) * job.inner + column, sums, bias, count);
            });
    });
}

// Writes the weighted sums of rows begin .. end - 1 for the 64 columns from `column` on. `parts` has the results of the part's pairs.
template <typename T>
void add_choices(const Experts<T>& job, const Pairs& pairs, const float* parts, int64_t begin, int64_t end, int64_t column) {
    const int64_t count = std::min<int64_t>(kTileCols, job.width - column), first = begin * job.choices;
    for (int64_t row = begin; row < end; ++row) {
        Vector total[kAcross] = {};
        for (int64_t pair = row * job.choices; pair < (row + 1) * job.choices; ++pair) {
            const float* part = parts + (pairs.index[pair] - first) * kTileCols;
            for (int v = 0; v < kAcross; ++v) total[v] += load(part + v * kWidth) * job.weights[pair];
        }
        T* out = job.out + row * job.width + column;
        for (int64_t c = 0; c < count; ++c) out[c] = narrow<T>(total[c / kWidth][c % kWidth]);
    }
}

// Computes the outputs of all rows from the hidden values.
template <typename Tile, typename T> void run_down(const Experts<T>& job, const Pairs& pairs, int threads) {
    const int64_t blocks = packed_columns(job.width, false) / kTileCols, parts = pairs.first.size() - 1;
    for_each_piece(parts * blocks, threads, [&](int64_t piece, int64_t last) {
        const int64_t block = piece % blocks, number = piece / blocks;
        const int64_t begin = number * job.part, end = std::min(job.rows, begin + job.part);
        float* results = job.sums + thread_number() * std::min(job.part, job.rows) * job.choices * kTileCols;
        const auto block_of = [&](int64_t group, int64_t column_block) {
            return job.down + (pairs.groups[group].expert * blocks + column_block) * kTileCols * job.inner;
        };
        const int64_t last_group = pairs.first[number + 1] - 1;
        for (int64_t g = pairs.first[number]; g <= last_group; ++g) {
            const Group& group = pairs.groups[g];
            const T* after = g < last_group                             ? block_of(g + 1, block)
                             : piece + 1 < last && block + 1 < blocks ? block_of(pairs.first[number], block + 1)
                                                                        : nullptr;
            const T* bias = job.down_bias == nullptr ? nullptr : job.down_bias + (group.expert * blocks + block) * kTileCols;
            run_block<Tile>(
                group.end - group.begin, [&](int64_t i) { return job.hidden + (group.begin + i) * job.inner; },
                block_of(g, block), job.inner, after, [&](int64_t i, const float* sums) {
                    float* target = results + (group.begin + i - begin * job.choices) * kTileCols;
                    for (int c = 0; c < kTileCols; c += kWidth) {
                        store(target + c, bias == nullptr ? load(sums + c) : load(sums + c) + load(bias + c));
                    }
                });
        }
        add_choices(job, pairs, results, begin, end, block * kTileCols);
    });
}

template <typename Tile, typename T> void run_experts(const Experts<T>& job, int threads) {
    const Pairs pairs = grouped(job.ids, job.rows, job.choices, job.part, job.experts);
    run_gate_up<Tile>(job, pairs, threads);
    run_down<Tile>(job, pairs, threads);
}

template <typename T>
Experts<T> experts_of(void* out, const void* x, const int32_t* ids, const float* weights, const void* gate_up,
                      const void* gate_up_bias, const void* down, const void* down_bias, void* hidden, float* sums, int64_t rows,
                      int64_t width, int64_t inner, int64_t experts, int64_t choices, int64_t part, float alpha, float limit,
                      float shift) {
    return {static_cast<T*>(out), static_cast<const T*>(x), ids, weights, static_cast<const T*>(gate_up),
            static_cast<const T*>(gate_up_bias), static_cast<const T*>(down), static_cast<const T*>(down_bias),
            static_cast<T*>(hidden), sums, rows, width, inner, experts, choices, part, {alpha, limit, shift}};
}

}  // namespace
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

// Computes Kernels.experts(). `dots`: whether rootstock_pack_linear() packed the weights; if not, rootstock_pack_ordered() did. gate_up
// was packed with `gated`. `bfloat16`: see rootstock_linear_ordered(). For the other arguments see Experts.
void rootstock_experts(void* out, const void* x, const int32_t* ids, const float* weights, const void* gate_up,
                       const void* gate_up_bias, const void* down, const void* down_bias, void* hidden, float* sums, int64_t rows,
                       int64_t width, int64_t inner, int64_t experts, int64_t choices, int64_t part, float alpha, float limit,
                       float shift, int dots, int bfloat16, int threads) {
    using namespace rootstock;
    if (!bfloat16) {
        run_experts<OrderedTile<float>>(experts_of<float>(out, x, ids, weights, gate_up, gate_up_bias, down, down_bias, hidden, sums,
                                                          rows, width, inner, experts, choices, part, alpha, limit, shift),
                                        threads);
        return;
    }
    const Experts<bf16> job = experts_of<bf16>(out, x, ids, weights, gate_up, gate_up_bias, down, down_bias, hidden, sums, rows,
                                               width, inner, experts, choices, part, alpha, limit, shift);
#if ROOTSTOCK_DOT_BF16
    if (dots) {
        run_experts<DotTile>(job, threads);
        return;
    }
#endif
    (void)dots;
    run_experts<OrderedTile<bf16>>(job, threads);
}

}  // extern "C"
