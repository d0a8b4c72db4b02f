// Linear layers of any type and depth whose rows get the same bits in any company: each number is one chain of products, in the
// order of the depth, however many rows there are. Portable vectors: the compiler makes of them what the CPU has.

#include <algorithm>

#include "numeric.h"
#include "schedule.h"

namespace rootstock {
namespace {

constexpr int64_t kRows = 6;      // 6 x 4 sums, a vector of columns and a number fit 32 registers
constexpr int64_t kColumns = 64;  // of a block
constexpr int kVectors = 4;
typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));  // 16 columns

inline Vector load(const float* source) { return *reinterpret_cast<const Vector*>(source); }

inline Vector load(const bf16* source) {
    Vector values;
    for (int i = 0; i < 16; ++i) values[i] = widen(source[i]);
    return values;
}

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

template <typename T, int ROWS> void run_tile(const Ordered<T>& job, int64_t row, int64_t block) {
    Vector sums[ROWS][kVectors] = {};
    const T* x = job.x + row * job.depth;
    const T* w = job.w + block * kColumns * job.depth;
    for (int64_t k = 0; k < job.depth; ++k) {
        for (int v = 0; v < kVectors; ++v) {
            const Vector columns = load(w + k * kColumns + v * 16);
            for (int r = 0; r < ROWS; ++r) sums[r][v] += columns * widen(x[r * job.depth + k]);
        }
    }
    const int64_t first = block * kColumns, count = std::min(kColumns, job.columns - first);
    for (int r = 0; r < ROWS; ++r) {
        for (int64_t c = 0; c < count; ++c) job.store(row + r, first + c, sums[r][c / 16][c % 16]);
    }
}

template <typename T> void run_block(const Ordered<T>& job, int64_t begin, int64_t end, int64_t block) {
    for (int64_t row = begin; row < end; row += kRows) {
        switch (std::min(kRows, end - row)) {
            case 1: run_tile<T, 1>(job, row, block); break;
            case 2: run_tile<T, 2>(job, row, block); break;
            case 3: run_tile<T, 3>(job, row, block); break;
            case 4: run_tile<T, 4>(job, row, block); break;
            case 5: run_tile<T, 5>(job, row, block); break;
            default: run_tile<T, 6>(job, row, block); break;
        }
    }
}

template <typename T> void run_linear(const Ordered<T>& job, int threads) {
    const int64_t blocks = (job.columns + kColumns - 1) / kColumns, tiles = (job.rows + kRows - 1) / kRows;
    const int64_t parts = std::min(tiles, std::max<int64_t>(1, 4 * threads / blocks));
    const int64_t rows = (tiles + parts - 1) / parts * kRows;
    for_each_piece(parts * blocks, threads, [&](int64_t piece, int64_t) {
        const int64_t begin = piece / blocks * rows;
        run_block(job, begin, std::min(job.rows, begin + rows), piece % blocks);
    });
}

template <typename T> void pack(T* packed, const T* weight, int64_t rows, int64_t depth, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < (rows + kColumns - 1) / kColumns; ++block) {
        for (int64_t c = 0; c < kColumns; ++c) {
            const int64_t row = block * kColumns + c;
            for (int64_t k = 0; k < depth; ++k) {
                packed[(block * depth + k) * kColumns + c] = row < rows ? weight[row * depth + k] : T{};
            }
        }
    }
}

}  // namespace
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

// weight [rows, depth] -> [ceil(rows / 64)][depth][64], padded with zeros. bfloat16 as below.
void rootstock_pack_ordered(void* packed, const void* weight, int64_t rows, int64_t depth, int bfloat16, int threads) {
    if (bfloat16) {
        rootstock::pack(static_cast<bf16*>(packed), static_cast<const bf16*>(weight), rows, depth, threads);
    } else {
        rootstock::pack(static_cast<float*>(packed), static_cast<const float*>(weight), rows, depth, threads);
    }
}

// out [rows, columns] = x [rows, depth] . w + bias. bfloat16 is 1 where the tensors are bfloat16, 0 where they are float32; wide: out
// is float32 in any case.
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
