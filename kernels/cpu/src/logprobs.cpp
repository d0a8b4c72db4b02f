// Implements measure_logprobs (kernels/contracts/sample_ops.py). A piece of work is one row of logits.

#include <algorithm>
#include <cmath>
#include <limits>

#include "draw.h"
#include "numeric.h"
#include "schedule.h"

namespace rootstock {
namespace {

constexpr int64_t kBlock = 64;
constexpr float kNone = -std::numeric_limits<float>::infinity();

float largest_of(const float* x, int64_t count) {
    float most = kNone;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

// Returns the log of the sum of exp, or the largest value if it is not finite.
float log_mass(const float* x, int64_t size) {
    const float peak = x[argmax_row(x, size)];
    if (!std::isfinite(peak)) return peak;
    double total = 0.0;
    for (int64_t first = 0; first < size; first += kBlock) {
        const int64_t end = std::min(size, first + kBlock);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < end; ++i) sum += exponential(x[i] - peak);
        total += sum;
    }
    return static_cast<float>(peak + std::log(total));
}

// Finds the num largest logits in descending order, the lower id first among equal logits; -1 and -inf beyond the vocabulary.
void rank(int32_t* ids, float* values, int64_t num, const float* x, int64_t size) {
    int64_t found = 0;
    for (int64_t first = 0; first < size; first += kBlock) {
        const int64_t end = std::min(size, first + kBlock);
        if (found == num && !(largest_of(x + first, end - first) > values[num - 1])) continue;
        for (int64_t i = first; i < end; ++i) {
            if (found == num && !(x[i] > values[num - 1])) continue;
            int64_t at = found < num ? found++ : num - 1;
            for (; at > 0 && x[i] > values[at - 1]; --at) ids[at] = ids[at - 1], values[at] = values[at - 1];
            ids[at] = static_cast<int32_t>(i);
            values[at] = x[i];
        }
    }
    std::fill(ids + found, ids + num, -1);
    std::fill(values + found, values + num, kNone);
}

}  // namespace
}  // namespace rootstock

// own, mass: [count]; top_ids, top: [count, num_top]; logits: [any, size]. A row below 0 is skipped.
extern "C" void rootstock_measure_logprobs(float* own, int32_t* top_ids, float* top, float* mass, const float* logits,
                                           const int32_t* tokens, const int32_t* rows, int64_t count, int64_t num_top,
                                           int64_t size, int threads) {
    using namespace rootstock;
    for_each_piece(count, threads, [&](int64_t i, int64_t) {
        if (rows[i] < 0) return;
        const float* x = logits + rows[i] * size;
        const float whole = log_mass(x, size);
        mass[i] = whole;
        own[i] = tokens[i] >= 0 && tokens[i] < size ? x[tokens[i]] - whole : kNone;
        if (num_top == 0) return;
        rank(top_ids + i * num_top, top + i * num_top, num_top, x, size);
        for (int64_t k = 0; k < num_top; ++k) top[i * num_top + k] -= whole;
    });
}
