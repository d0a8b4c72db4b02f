// Linear layers whose weights have 8 or 4 bits per element.

#include "coded.h"

#include <vector>

#include "schedule.h"

namespace rootstock {
namespace {

constexpr int64_t kParallelElements = 1 << 14;  // from this number of activations on, all threads convert them

struct CodedLinear {
    void* out;    // [rows, width]
    Coded w;
    int64_t rows, width;
    bool wide;    // whether out is float32; otherwise bfloat16
    bool gated;

    void finish(float* sums, int64_t row, int64_t block) const {
        finish_sums(sums, w, block, gated);
        const int64_t columns = gated ? kCodedColumns / 2 : kCodedColumns, first = block * columns;
        const int64_t count = std::min(columns, width - first);
        if (wide) {
            std::memcpy(static_cast<float*>(out) + row * width + first, sums, static_cast<size_t>(count) * sizeof(float));
        } else {
            bf16* target = static_cast<bf16*>(out) + row * width + first;
            for (int64_t c = 0; c < count; ++c) target[c] = narrow<bf16>(sums[c]);
        }
    }
};

// Calls tile(row, count, block, is_first) for all rows and blocks, with at most `most` rows at a time. is_first: whether the call is the
// first one with the block. Rows are split between threads only if there are too few blocks.
template <typename Tile> void for_each_tile(const CodedLinear& job, int64_t most, int threads, Tile&& tile) {
    const int64_t columns = job.gated ? kCodedColumns / 2 : kCodedColumns;
    const int64_t blocks = (job.width + columns - 1) / columns, tiles = (job.rows + most - 1) / most;
    const int64_t parts = std::min(tiles, std::max<int64_t>(1, 4 * threads / blocks));
    const int64_t part = (tiles + parts - 1) / parts * most;
    for_each_piece(parts * blocks, threads, [&](int64_t piece, int64_t) {
        const int64_t begin = piece / blocks * part, end = std::min(job.rows, begin + part);
        const int64_t steps = (end - begin + most - 1) / most;
        for (int64_t row = begin, step = 0; step < steps; ++step) {
            const int64_t count = (end - row + steps - step - 1) / (steps - step);
            tile(row, count, piece % blocks, step == 0);
            row += count;
        }
    });
}

template <typename Convert> void for_each_row(const CodedLinear& job, int threads, Convert&& convert) {
    const bool parallel = job.rows > 1 && job.rows * job.w.depth >= kParallelElements;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
    for (int64_t row = 0; row < job.rows; ++row) convert(row);
}

void run_exact(const CodedLinear& job, const float* x, int threads) {
    for_each_tile(job, kExactRows, threads, [&](int64_t row, int64_t count, int64_t block, bool) {
        float sums[kExactRows][kCodedColumns];
        sum_block_exact(sums, job.w, block, x + row * job.w.depth, count);
        for (int64_t r = 0; r < count; ++r) job.finish(sums[r], row + r, block);
    });
}

#if ROOTSTOCK_DOT_INT8
void run(const CodedLinear& job, const bf16* x, int threads) {
    const int64_t groups = job.w.groups();
    // Memory of the calling thread, which later calls reuse.
    static thread_local std::vector<int8_t> codes;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> sums_of_codes;
    codes.resize(std::max(codes.size(), static_cast<size_t>(job.rows * job.w.depth)));
    scales.resize(std::max(scales.size(), static_cast<size_t>(job.rows * groups)));
    sums_of_codes.resize(scales.size());
    int8_t* const row_codes = codes.data();
    float* const row_scales = scales.data();
    int32_t* const row_sums = sums_of_codes.data();
    for_each_row(job, threads, [&](int64_t row) {
        quantize_row(row_codes + row * job.w.depth, row_scales + row * groups, row_sums + row * groups, x + row * job.w.depth,
                     job.w.depth, job.w.group);
    });
    const Int8Rows rows{row_codes, row_scales, row_sums};
    for_each_tile(job, kInt8Rows, threads, [&](int64_t row, int64_t count, int64_t block, bool is_first) {
        float sums[kInt8Rows][kCodedColumns];
        sum_block_int8(sums, job.w, block, rows, row, count, is_first);
        for (int64_t r = 0; r < count; ++r) job.finish(sums[r], row + r, block);
    });
}
#else
void run(const CodedLinear& job, const bf16* x, int threads) {
    static thread_local std::vector<float> wide;
    wide.resize(std::max(wide.size(), static_cast<size_t>(job.rows * job.w.depth)));
    float* const target = wide.data();
    for_each_row(job, threads, [&](int64_t row) {
        for (int64_t k = row * job.w.depth; k < (row + 1) * job.w.depth; ++k) target[k] = widen(x[k]);
    });
    run_exact(job, target, threads);
}
#endif

template <typename T>
void read_rows(T* out, const uint8_t* data, const float* scales, const int64_t* ids, int64_t rows, int64_t depth, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; ++row) {
        const uint8_t* first = data + ids[row] / kCodedColumns * depth * kCodedColumns + ids[row] % kCodedColumns * 4;
        for (int64_t k = 0; k < depth; ++k) {
            const int code = first[k / 4 * 4 * kCodedColumns + k % 4];
            out[row * depth + k] = narrow<T>(static_cast<float>(code - 128) * scales[ids[row]]);
        }
    }
}

}  // namespace
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

// Sets *result to 1 if layers with codes round bfloat16 activations to int8, otherwise to 0.
void rootstock_has_int8_products(int32_t* result) { *result = ROOTSTOCK_DOT_INT8; }

// Packs codes [rows, depth] as coded.h describes. Packed column c has the row order[c], or is padding if order[c] is not below
// `rows`. `columns` is a multiple of 64.
void rootstock_pack_coded(uint8_t* packed, const uint8_t* codes, const int64_t* order, int64_t columns, int64_t rows, int64_t depth,
                          int bits, int threads) {
    const int64_t steps = bits == 8 ? depth / 4 : depth / 8;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < columns / 64; ++block) {
        uint8_t* target = packed + block * steps * 256;
        for (int64_t c = 0; c < 64; ++c) {
            const int64_t row = order[block * 64 + c];
            const uint8_t* source = codes + row * depth;
            for (int64_t step = 0; step < steps; ++step) {
                uint8_t* four = target + step * 256 + c * 4;
                for (int64_t j = 0; j < 4; ++j) {
                    if (row >= rows) {
                        four[j] = 0;
                    } else if (bits == 8) {
                        four[j] = source[4 * step + j];
                    } else {
                        four[j] = static_cast<uint8_t>((source[8 * step + j] & 15) | (source[8 * step + 4 + j] << 4));
                    }
                }
            }
        }
    }
}

// Computes out [rows, width] = x [rows, depth] . w + bias; with `gated`, silu(gate) * up. `columns` is width, or 2 width with `gated`.
// For the other parameters see Coded in coded.h.
void rootstock_linear_coded(void* out, const void* x, const uint8_t* data, const void* scales, const uint8_t* zeros, const float* bias,
                            const int8_t* table, int64_t rows, int64_t columns, int64_t depth, int64_t group, int bits,
                            int narrow_scales, int wide, int gated, int bfloat16, int threads) {
    const rootstock::Coded w{data, scales, zeros, bias, table, columns, depth, group, bits, narrow_scales != 0};
    const rootstock::CodedLinear job{out, w, rows, gated ? columns / 2 : columns, wide != 0, gated != 0};
    if (bfloat16) {
        rootstock::run(job, static_cast<const bf16*>(x), threads);
    } else {
        rootstock::run_exact(job, static_cast<const float*>(x), threads);
    }
}

// Copies rows of a weight of 8 bits with a scale per channel, float32, to out [rows, depth], float32 or bfloat16.
void rootstock_embedding_coded(void* out, const uint8_t* data, const float* scales, const int64_t* ids, int64_t rows, int64_t depth,
                               int bfloat16, int threads) {
    if (bfloat16) {
        rootstock::read_rows(static_cast<bf16*>(out), data, scales, ids, rows, depth, threads);
    } else {
        rootstock::read_rows(static_cast<float*>(out), data, scales, ids, rows, depth, threads);
    }
}

}  // extern "C"
