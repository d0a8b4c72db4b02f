// Choosing a token of one row of logits.
#pragma once

#include <cstdint>

namespace rootstock {

// How a row is drawn from. Order: temperature, top-n-sigma, top-k, top-p of what is left, min-p.
struct Rule {
    float temperature;  // above 0
    float top_n_sigma;  // 0: all
    int64_t top_k;      // below 1: all
    float top_p, min_p;
    double uniform;  // in [0, 1): the draw is the first id whose cumulated mass exceeds uniform times the whole
};

// Lowest index of the largest value; the first NaN wins over all.
int64_t argmax_row(const float* x, int64_t size);

// A token of float32[size] with a finite maximum.
int64_t draw_row(const float* x, int64_t size, const Rule& rule);

}  // namespace rootstock
