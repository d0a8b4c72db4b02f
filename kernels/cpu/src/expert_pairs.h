// Shared by experts.cpp and experts_coded.cpp: the pairs of a row and one of its experts, grouped by expert, and the activation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace rootstock {

// The parameters of Activation in kernels/contracts/ops.py.
struct Activation {
    float alpha, limit, shift;
};

// Returns the activation's result for some columns of gate and up.
inline Vector joined_by(const Activation& activation, Vector gate, Vector up) {
    // These comparisons are false for a NaN, which therefore stays.
    const Vector high = Vector{} + activation.limit, low = Vector{} - activation.limit;
    gate = gate > high ? high : gate;
    up = up > high ? high : up < low ? low : up;
    return (up + activation.shift) * gate / (exponential(gate * -activation.alpha) + 1.0f);
}

// The pairs of one part of the rows that use the same expert. A pair is row * choices + choice.
struct Group {
    int64_t expert;
    int64_t begin, end;  // range in Pairs::order
};

struct Pairs {
    std::vector<int32_t> order;    // pairs, sorted by part and expert
    std::vector<int32_t> index;    // index in `order` of each pair
    std::vector<Group> groups;     // groups that are not empty, in the order of `order`
    std::vector<int64_t> first;    // index of each part's first group, and the number of groups
};

inline Pairs grouped(const int32_t* ids, int64_t rows, int64_t choices, int64_t part, int64_t experts) {
    Pairs pairs;
    pairs.order.resize(rows * choices);
    pairs.index.resize(rows * choices);
    std::vector<int64_t> next(experts + 1);
    for (int64_t begin = 0; begin < rows * choices; begin += part * choices) {
        const int64_t end = std::min(rows * choices, begin + part * choices);
        std::fill(next.begin(), next.end(), 0);
        for (int64_t pair = begin; pair < end; ++pair) ++next[ids[pair] + 1];
        pairs.first.push_back(pairs.groups.size());
        next[0] = begin;
        for (int64_t expert = 0; expert < experts; ++expert) {
            const int64_t count = next[expert + 1];
            next[expert + 1] += next[expert];
            if (count > 0) pairs.groups.push_back({expert, next[expert], next[expert + 1]});
        }
        for (int64_t pair = begin; pair < end; ++pair) {
            const int64_t at = next[ids[pair]]++;
            pairs.order[at] = static_cast<int32_t>(pair);
            pairs.index[pair] = static_cast<int32_t>(at);
        }
    }
    pairs.first.push_back(pairs.groups.size());
    return pairs;
}

}  // namespace rootstock
