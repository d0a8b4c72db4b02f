// Chooses experts by a router's logits, in float32. A row does not depend on other rows.

#include <algorithm>
#include <vector>

#include "numeric.h"

namespace rootstock {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int64_t kParallelLogits = 8192;  // smaller inputs are computed by one thread

struct Router {
    float* weights;       // [rows, choices]
    int32_t* ids;         // [rows, choices]
    const float* logits;  // [rows, experts]
    const float* bias;    // [experts], or null
    int64_t rows, experts, choices, groups, top_groups;
    float scale;
    bool sigmoid, two_best, renormalize;
};

inline float comparable(float score) { return score != score ? kLowest : score; }

// Returns the index of the largest score of all open entries, the lowest one of equal scores, and closes this entry.
int64_t take_best(const float* scores, std::vector<char>& open) {
    int64_t best = -1;
    for (int64_t i = 0; i < static_cast<int64_t>(open.size()); ++i) {
        if (open[i] && (best < 0 || scores[i] > scores[best])) best = i;
    }
    open[best] = 0;
    return best;
}

void to_scores(float* scores, const float* logits, int64_t count, bool sigmoid) {
    if (sigmoid) {
        for (int64_t i = 0; i < count; ++i) scores[i] = 1.0f / (1.0f + exponential(-logits[i]));
        return;
    }
    float largest = logits[0], sum = 0.0f;
    for (int64_t i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
    for (int64_t i = 0; i < count; ++i) {
        const float distance = logits[i] - largest;
        scores[i] = distance != distance ? distance : exponential(distance);
    }
    for (int64_t i = 0; i < count; ++i) sum += scores[i];
    for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
}

struct Row {
    std::vector<float> scores, selection, group_scores;
    std::vector<char> open, open_groups;
};

// Closes the experts of all expert groups except the top_groups best ones.
void close_groups(const Router& job, Row& row) {
    const int64_t size = job.experts / job.groups;
    for (int64_t group = 0; group < job.groups; ++group) {
        float first = kLowest, second = kLowest;
        for (int64_t i = group * size; i < (group + 1) * size; ++i) {
            const float score = row.selection[i];
            second = score > first ? first : std::max(second, score);
            first = std::max(first, score);
        }
        row.group_scores[group] = job.two_best && size > 1 ? comparable(first + second) : first;
    }
    std::fill(row.open_groups.begin(), row.open_groups.end(), 1);
    std::fill(row.open.begin(), row.open.end(), 0);
    for (int64_t taken = 0; taken < job.top_groups; ++taken) {
        const int64_t group = take_best(row.group_scores.data(), row.open_groups);
        std::fill_n(row.open.begin() + group * size, size, 1);
    }
}

void route_row(const Router& job, int64_t number, Row& row) {
    const float* logits = job.logits + number * job.experts;
    float* weights = job.weights + number * job.choices;
    int32_t* ids = job.ids + number * job.choices;
    to_scores(row.scores.data(), logits, job.experts, job.sigmoid);
    for (int64_t i = 0; i < job.experts; ++i) {
        row.selection[i] = comparable(job.bias == nullptr ? row.scores[i] : row.scores[i] + job.bias[i]);
    }
    std::fill(row.open.begin(), row.open.end(), 1);
    if (job.top_groups < job.groups) close_groups(job, row);
    float sum = 0.0f;
    for (int64_t choice = 0; choice < job.choices; ++choice) {
        const int64_t expert = take_best(row.selection.data(), row.open);
        ids[choice] = static_cast<int32_t>(expert);
        weights[choice] = row.scores[expert];
        sum += row.scores[expert];
    }
    const float divisor = job.renormalize ? sum + 1e-20f : 1.0f;
    for (int64_t choice = 0; choice < job.choices; ++choice) weights[choice] = weights[choice] / divisor * job.scale;
}

}  // namespace
}  // namespace rootstock

extern "C" {

// Computes Kernels.route(). Each expert belongs to one of `groups` equal groups, and top_groups of them have at least `choices` experts.
void rootstock_route(float* weights, int32_t* ids, const float* logits, const float* bias, int64_t rows, int64_t experts,
                     int64_t choices, int64_t groups, int64_t top_groups, float scale, int sigmoid, int two_best, int renormalize,
                     int threads) {
    const rootstock::Router job{weights, ids,    logits, bias,         rows,          experts,         choices,
                                groups,  top_groups, scale,  sigmoid != 0, two_best != 0, renormalize != 0};
#pragma omp parallel num_threads(threads) if (rows * experts > rootstock::kParallelLogits)
    {
        rootstock::Row row;
        for (auto* values : {&row.scores, &row.selection}) values->resize(experts);
        row.group_scores.resize(groups);
        row.open.resize(experts);
        row.open_groups.resize(groups);
#pragma omp for schedule(static)
        for (int64_t number = 0; number < rows; ++number) rootstock::route_row(job, number, row);
    }
}

}  // extern "C"
