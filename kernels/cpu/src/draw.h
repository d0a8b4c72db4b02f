// Chooses a token of one row of logits.
#pragma once

#include <cstdint>

namespace rootstock {

// Parameters of a draw, applied in this order; top_p is a share of the mass that top_k leaves.
struct Rule {
    float temperature;  // above 0
    float top_n_sigma;  // 0: no cut
    int64_t top_k;      // below 1: no cut
    float top_p, min_p;
    double uniform;  // in [0, 1): the draw is the first id whose cumulated mass exceeds uniform times the total
};

// Returns the lowest index of the largest value, or the index of the first NaN.
int64_t argmax_row(const float* x, int64_t size);

// Draws a token of the logits float32[size], whose maximum is finite.
int64_t draw_row(const float* x, int64_t size, const Rule& rule);

}  // namespace rootstock
