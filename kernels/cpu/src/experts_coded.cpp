// Experts whose weights have 8 or 4 bits per element. The pieces of work are those of experts.cpp. The inputs of all pairs are
// converted once for all blocks: to float32, or to int8 if the products are integers.

#include "coded.h"

#include <vector>

#include "expert_pairs.h"
#include "schedule.h"

namespace rootstock {
namespace {

// One call. T is the type of inputs and outputs.
template <typename T> struct CodedExperts {
    T* out;                // [rows, width], may be x
    const T* x;            // [rows, width]
    const int32_t* ids;    // [rows, choices]
    const float* weights;  // [rows, choices]
    Coded gate_up, down;   // weights of the first expert; blocks of gate_up have 32 columns of the gate, then the same columns of up
    T* hidden;             // [rows * choices, inner], scratch
    float* sums;           // [threads][part * choices][64], scratch
    int64_t rows, experts, choices, part;  // part: largest number of rows that are grouped together
    Activation activation;

    int64_t width() const { return down.columns; }
    int64_t inner() const { return down.depth; }
};

// Returns the weight of one expert.
Coded expert_of(Coded w, int64_t expert, int64_t blocks) {
    const int64_t scales = expert * blocks * w.groups() * kCodedColumns;
    w.data += expert * blocks * w.block_bytes();
    w.scales = static_cast<const uint8_t*>(w.scales) + scales * (w.narrow_scales ? sizeof(bf16) : sizeof(float));
    if (w.zeros != nullptr) w.zeros += scales;
    if (w.bias != nullptr) w.bias += expert * blocks * kCodedColumns;
    return w;
}

// Rows of inputs as float32.
struct ExactInputs {
    static constexpr int64_t kRows = kExactRows;
    std::vector<float> values;
    int64_t depth;

    ExactInputs(int64_t rows, const Coded& w) : values(static_cast<size_t>(rows * w.depth)), depth(w.depth) {}

    template <typename T> void set(int64_t row, const T* x) {
        for (int64_t k = 0; k < depth; ++k) values[row * depth + k] = widen(x[k]);
    }

    void sum(float (*sums)[kCodedColumns], const Coded& w, int64_t block, int64_t row, int64_t count, bool) const {
        sum_block_exact(sums, w, block, values.data() + row * depth, count);
    }
};

#if ROOTSTOCK_DOT_INT8
// Rows of inputs as int8.
struct Int8Inputs {
    static constexpr int64_t kRows = kInt8Rows;
    std::vector<int8_t> codes;
    std::vector<float> scales;
    std::vector<int32_t> totals;
    int64_t depth, group;

    Int8Inputs(int64_t rows, const Coded& w)
        : codes(static_cast<size_t>(rows * w.depth)), scales(static_cast<size_t>(rows * w.groups())), totals(scales.size()),
          depth(w.depth), group(w.group) {}

    void set(int64_t row, const bf16* x) {
        const int64_t first = row * (depth / group);
        quantize_row(codes.data() + row * depth, scales.data() + first, totals.data() + first, x, depth, group);
    }

    void sum(float (*sums)[kCodedColumns], const Coded& w, int64_t block, int64_t row, int64_t count, bool is_first) const {
        sum_block_int8(sums, w, block, Int8Rows{codes.data(), scales.data(), totals.data()}, row, count, is_first);
    }
};
#endif

// Calls finish(row, sums) with the sums and the bias of each row from `begin` to `end` - 1.
template <typename Inputs, typename Finish>
void run_rows(const Inputs& inputs, const Coded& w, int64_t block, int64_t begin, int64_t end, Finish&& finish) {
    float sums[Inputs::kRows][kCodedColumns];
    for (int64_t row = begin; row < end; row += Inputs::kRows) {
        const int64_t count = std::min(Inputs::kRows, end - row);
        inputs.sum(sums, w, block, row, count, row == begin);
        for (int64_t r = 0; r < count; ++r) {
            finish_sums(sums[r], w, block, false);
            finish(row + r, sums[r]);
        }
    }
}

template <typename Inputs, typename T> void run_gate_up(const CodedExperts<T>& job, const Pairs& pairs, int threads) {
    Inputs inputs(job.rows * job.choices, job.gate_up);
#pragma omp parallel for num_threads(threads) schedule(static) if (job.rows > 4)
    for (int64_t i = 0; i < job.rows * job.choices; ++i) inputs.set(i, job.x + pairs.order[i] / job.choices * job.gate_up.depth);
    const int64_t blocks = (job.inner() + 31) / 32, groups = pairs.groups.size();
    for_each_piece(groups * blocks, threads, [&](int64_t piece, int64_t) {
        const Group& group = pairs.groups[piece / blocks];
        const int64_t block = piece % blocks, count = std::min<int64_t>(32, job.inner() - block * 32);
        run_rows(inputs, expert_of(job.gate_up, group.expert, blocks), block, group.begin, group.end, [&](int64_t row, float* sums) {
            for (int i = 0; i < 32; i += kWidth) store(sums + i, joined_by(job.activation, load(sums + i), load(sums + 32 + i)));
            T* target = job.hidden + row * job.inner() + block * 32;
            for (int64_t i = 0; i < count; ++i) target[i] = narrow<T>(sums[i]);
        });
    });
}

template <typename Inputs, typename T> void run_down(const CodedExperts<T>& job, const Pairs& pairs, int threads) {
    Inputs inputs(job.rows * job.choices, job.down);
#pragma omp parallel for num_threads(threads) schedule(static) if (job.rows > 4)
    for (int64_t i = 0; i < job.rows * job.choices; ++i) inputs.set(i, job.hidden + i * job.inner());
    const int64_t blocks = (job.width() + kCodedColumns - 1) / kCodedColumns, parts = pairs.first.size() - 1;
    for_each_piece(parts * blocks, threads, [&](int64_t piece, int64_t) {
        const int64_t block = piece % blocks, number = piece / blocks, column = block * kCodedColumns;
        const int64_t begin = number * job.part, end = std::min(job.rows, begin + job.part), first = begin * job.choices;
        float* results = job.sums + thread_number() * std::min(job.part, job.rows) * job.choices * kCodedColumns;
        for (int64_t g = pairs.first[number]; g < pairs.first[number + 1]; ++g) {
            const Group& group = pairs.groups[g];
            run_rows(inputs, expert_of(job.down, group.expert, blocks), block, group.begin, group.end, [&](int64_t row, float* sums) {
                std::memcpy(results + (row - first) * kCodedColumns, sums, kCodedColumns * sizeof(float));
            });
        }
        const int64_t count = std::min(kCodedColumns, job.width() - column);
        for (int64_t row = begin; row < end; ++row) {  // in the order of a row's choices; the experts' ids do not matter
            float total[kCodedColumns] = {};
            for (int64_t pair = row * job.choices; pair < (row + 1) * job.choices; ++pair) {
                const float* part = results + (pairs.index[pair] - first) * kCodedColumns;
                for (int64_t c = 0; c < kCodedColumns; ++c) total[c] += part[c] * job.weights[pair];
            }
            T* target = job.out + row * job.width() + column;
            for (int64_t c = 0; c < count; ++c) target[c] = narrow<T>(total[c]);
        }
    });
}

template <typename Inputs, typename T> void run_experts(const CodedExperts<T>& job, int threads) {
    const Pairs pairs = grouped(job.ids, job.rows, job.choices, job.part, job.experts);
    run_gate_up<Inputs>(job, pairs, threads);
    run_down<Inputs>(job, pairs, threads);
}

}  // namespace
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

// Computes Kernels.experts(). `gate_up` and `down` have the pointers of a Coded: data, scales, zeros, bias and table. Their sizes are
// columns, depth, group, bits and narrow_scales. For the other arguments see CodedExperts.
void rootstock_experts_coded(void* out, const void* x, const int32_t* ids, const float* weights, const void* const* gate_up,
                             const int64_t* gate_up_sizes, const void* const* down, const int64_t* down_sizes, void* hidden, float* sums,
                             int64_t rows, int64_t experts, int64_t choices, int64_t part, float alpha, float limit, float shift,
                             int bfloat16, int threads) {
    using namespace rootstock;
    const auto coded = [](const void* const* at, const int64_t* sizes) {
        return Coded{static_cast<const uint8_t*>(at[0]), at[1], static_cast<const uint8_t*>(at[2]), static_cast<const float*>(at[3]),
                     static_cast<const int8_t*>(at[4]), sizes[0], sizes[1], sizes[2], static_cast<int>(sizes[3]), sizes[4] != 0};
    };
    const Activation activation{alpha, limit, shift};
    const Coded first = coded(gate_up, gate_up_sizes), second = coded(down, down_sizes);
    if (!bfloat16) {
        run_experts<ExactInputs>(CodedExperts<float>{static_cast<float*>(out), static_cast<const float*>(x), ids, weights, first, second,
                                                     static_cast<float*>(hidden), sums, rows, experts, choices, part, activation},
                                 threads);
        return;
    }
    const CodedExperts<bf16> job{static_cast<bf16*>(out), static_cast<const bf16*>(x), ids, weights, first, second,
                                 static_cast<bf16*>(hidden), sums, rows, experts, choices, part, activation};
#if ROOTSTOCK_DOT_INT8
    run_experts<Int8Inputs>(job, threads);
#else
    run_experts<ExactInputs>(job, threads);
#endif
}

}  // extern "C"
