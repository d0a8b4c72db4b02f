// Draws tokens: temperature, top-n-sigma, top-k, top-p, min-p and the inverse of the cumulated mass. Also finds the maximum.

#include "draw.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "numeric.h"

namespace rootstock {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kLikely = 256;  // top-p first ranks this number of most likely tokens, and all tokens if these are too few
constexpr float kNone = -std::numeric_limits<float>::infinity();

// The row from which a token is drawn: mass[i] = exp((x[i] - peak) / temperature). `sums` has the mass of each block of kBlock tokens,
// and `highest` has the largest logit of each block.
struct Row {
    const float* x;
    int64_t size;
    std::vector<float> mass, highest;
    std::vector<double> sums;
    double total = 0.0;
    float peak = kNone;
};

void weigh(Row& row, float temperature) {
    const int64_t blocks = (row.size + kBlock - 1) / kBlock;
    row.mass.resize(row.size), row.highest.resize(blocks), row.sums.resize(blocks);
    row.peak = kNone;
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t end = std::min(row.size, (block + 1) * kBlock);
        float most = kNone;
#pragma omp simd reduction(max : most)
        for (int64_t i = block * kBlock; i < end; ++i) most = row.x[i] > most ? row.x[i] : most;
        row.highest[block] = most;
        row.peak = std::max(row.peak, most);
    }
    row.total = 0.0;
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t end = std::min(row.size, (block + 1) * kBlock);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = block * kBlock; i < end; ++i) {
            row.mass[i] = exponential((row.x[i] - row.peak) / temperature);
            sum += row.mass[i];
        }
        row.sums[block] = sum;
        row.total += sum;
    }
}

// Returns the standard deviation of the finite logits. The other logits are -inf.
float sigma_of(const float* x, int64_t size) {
    double sum = 0.0, squares = 0.0;
    int64_t number = 0;
#pragma omp simd reduction(+ : sum, number)
    for (int64_t i = 0; i < size; ++i) {
        sum += x[i] > kNone ? static_cast<double>(x[i]) : 0.0;
        number += x[i] > kNone;
    }
    const double mean = sum / static_cast<double>(number);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) {
        const double away = x[i] > kNone ? static_cast<double>(x[i]) - mean : 0.0;
        squares += away * away;
    }
    return static_cast<float>(std::sqrt(squares / static_cast<double>(number)));
}

// Applies top-n-sigma: a token below the bound gets mass 0.
void apply_top_n_sigma(Row& row, const Rule& rule) {
    const float least = -(rule.top_n_sigma * sigma_of(row.x, row.size) / rule.temperature);
    row.total = 0.0;
    for (int64_t block = 0; block < static_cast<int64_t>(row.sums.size()); ++block) {
        float sum = 0.0f;
        for (int64_t i = block * kBlock; i < std::min(row.size, (block + 1) * kBlock); ++i) {
            if ((row.x[i] - row.peak) / rule.temperature < least) row.mass[i] = 0.0f;
            sum += row.mass[i];
        }
        row.sums[block] = sum;
        row.total += sum;
    }
}

// Of the tokens with any mass, returns the first one whose cumulated mass exceeds the target; the last one if rounding prevents that.
int64_t draw_from_all(const Row& row, double uniform) {
    const double target = uniform * row.total;
    double before = 0.0;
    int64_t last = 0;
    for (int64_t block = 0; block < static_cast<int64_t>(row.sums.size()); ++block) {
        if (row.sums[block] <= 0.0) continue;
        double within = before;
        for (int64_t i = block * kBlock; before + row.sums[block] > target && i < std::min(row.size, (block + 1) * kBlock); ++i) {
            if (row.mass[i] <= 0.0f) continue;  // `before` alone may exceed the target, because `sums` are rounded
            within += row.mass[i];
            last = i;
            if (within > target) return i;
        }
        before += row.sums[block];
        if (before <= target) {
            for (int64_t i = block * kBlock; i < std::min(row.size, (block + 1) * kBlock); ++i) last = row.mass[i] > 0.0f ? i : last;
        }
    }
    return last;
}

// Returns the k-th largest of the block maxima: at least k logits are as large or larger.
float bound_of_top(const Row& row, int64_t k) {
    if (k >= static_cast<int64_t>(row.highest.size())) return kNone;
    std::vector<float> highest = row.highest;
    std::nth_element(highest.begin(), highest.begin() + k - 1, highest.end(), std::greater<float>());
    return highest[k - 1];
}

// Returns the ids of the logits >= bound that may remain after the cuts: most likely first, and the lower id first among equal logits.
// `ranked` tells whether top_k cuts. Without top_k, the tokens with a mass below `least` are omitted. All tokens with a mass below
// `outside` together have less than 1 - top_p of the mass, so they are not in the nucleus. min_p cuts the tokens below min_p.
// Tokens without mass are omitted, because a grammar may forbid nearly all tokens, and to sort these would take most of the time.
std::vector<int64_t> candidates(const Row& row, const Rule& rule, bool ranked, float bound) {
    const double outside = (1.0 - rule.top_p) * row.total / static_cast<double>(row.size) * 0.999;
    const double least = ranked ? 0.0 : std::max<double>(outside, rule.min_p);
    std::vector<int64_t> ids;
    for (int64_t block = 0; block < static_cast<int64_t>(row.highest.size()); ++block) {
        if (row.highest[block] < bound) continue;
        for (int64_t i = block * kBlock; i < std::min(row.size, (block + 1) * kBlock); ++i) {
            if (row.x[i] >= bound && row.mass[i] > 0.0f && row.mass[i] >= least) ids.push_back(i);
        }
    }
    std::sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return row.x[a] != row.x[b] ? row.x[a] > row.x[b] : a < b; });
    if (ranked) ids.resize(std::min<size_t>(ids.size(), rule.top_k));
    return ids;
}

double mass_of(const Row& row, const std::vector<int64_t>& ids) {
    double sum = 0.0;
    for (const int64_t id : ids) sum += row.mass[id];
    return sum;
}

int64_t draw_filtered(const Row& row, const Rule& rule) {
    const bool ranked = rule.top_k > 0 && rule.top_k < row.size;
    std::vector<int64_t> ids = candidates(row, rule, ranked, bound_of_top(row, ranked ? rule.top_k : kLikely));
    double total = mass_of(row, ids), before = 0.0;
    if (!ranked) {
        if (total < rule.top_p * row.total || rule.top_p >= 1.0f) ids = candidates(row, rule, ranked, kNone);
        total = row.total;
    }
    size_t kept = 0;
    while (kept < ids.size() && (kept == 0 || rule.top_p >= 1.0f || before < rule.top_p * total)) before += row.mass[ids[kept++]];
    ids.resize(kept);
    std::sort(ids.begin(), ids.end());
    double mass = 0.0, reached = 0.0;
    for (const int64_t id : ids) mass += row.mass[id] >= rule.min_p ? row.mass[id] : 0.0f;
    int64_t last = ids.front();
    for (const int64_t id : ids) {
        if (row.mass[id] < rule.min_p || row.mass[id] <= 0.0f) continue;
        reached += row.mass[id];
        last = id;
        if (reached > rule.uniform * mass) return id;
    }
    return last;
}

}  // namespace

int64_t draw_row(const float* x, int64_t size, const Rule& rule) {
    thread_local Row row;
    row.x = x;
    row.size = size;
    weigh(row, rule.temperature);
    if (rule.top_n_sigma > 0.0f) apply_top_n_sigma(row, rule);
    const bool ranked = rule.top_k > 0 && rule.top_k < size;
    return ranked || rule.top_p < 1.0f || rule.min_p > 0.0f ? draw_filtered(row, rule) : draw_from_all(row, rule.uniform);
}

// Works in chunks, so that the pass that finds the index of a chunk's maximum reads the chunk from the cache.
int64_t argmax_row(const float* x, int64_t size) {
    constexpr int64_t kChunk = 4096;
    float best = -std::numeric_limits<float>::infinity();
    int64_t index = 0;
    for (int64_t begin = 0; begin < size; begin += kChunk) {
        const int64_t count = std::min(kChunk, size - begin);
        const float* chunk = x + begin;
        float peak = -std::numeric_limits<float>::infinity();
        int nans = 0;
#pragma omp simd reduction(max : peak) reduction(+ : nans)
        for (int64_t i = 0; i < count; ++i) {
            peak = chunk[i] > peak ? chunk[i] : peak;
            nans += chunk[i] != chunk[i];
        }
        if (nans > 0) return begin + (std::find_if(chunk, chunk + count, [](float v) { return v != v; }) - chunk);
        if (peak > best) {
            best = peak;
            index = begin + (std::find(chunk, chunk + count, peak) - chunk);
        }
    }
    return index;
}

}  // namespace rootstock
