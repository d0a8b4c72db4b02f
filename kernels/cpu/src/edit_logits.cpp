// Implements edit_logits (kernels/contracts/sample_ops.py). A piece of work is one row of logits that needs edits.

#include <algorithm>
#include <limits>
#include <vector>

#include "numeric.h"
#include "schedule.h"
#include "slots.h"

namespace rootstock {
namespace {

constexpr int64_t kBlock = 64, kWordBits = 32;
constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

struct Edits {
    const int16_t* counts;                               // [slots, size]
    const int32_t *words, *masks;                        // [slots, ceil(size / 32)], [any, ceil(size / 32)]
    const int32_t* bias_ids;                             // [slots, max_biases]
    const float* biases;
    const int32_t* stop_ids;                             // [slots, max_stops]
    const int32_t* loss_ids;
    const float* losses;
    int64_t size, max_biases, max_stops;

    int64_t num_words() const { return (size + kWordBits - 1) / kWordBits; }
};

struct Penalties {
    float repetition, frequency, presence;
};

// Returns a logit after its penalties. The float32 quotient and product equal the rounded float64 results. A finite logit stays finite.
float penalized(float x, int32_t count, const Penalties& by) {
    if (count == 0) return x;
    if (x > -std::numeric_limits<float>::infinity() && x < std::numeric_limits<float>::infinity()) {
        const float scaled = x > 0.0f ? x / by.repetition : x * by.repetition;
        x = std::min(std::max(scaled, -kLargest), kLargest);
    }
    const int32_t outputs = count & kMaxCount;
    const double lost = static_cast<double>(outputs) * by.frequency + static_cast<double>(by.presence);
    return outputs > 0 ? x - static_cast<float>(lost) : x;
}

// Most tokens have a count of 0, so whole blocks of them are skipped.
void penalize(float* x, const int16_t* counts, int64_t size, const Penalties& by) {
    for (int64_t first = 0; first < size; first += kBlock) {
        const int64_t end = std::min(size, first + kBlock);
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = first; i < end; ++i) any |= counts[i];
        if (any == 0) continue;
        for (int64_t i = first; i < end; ++i) x[i] = penalized(x[i], counts[i], by);
    }
}

// Forbids the tokens whose bits are not set.
void keep_only(float* x, const int32_t* words, int64_t size) {
    for (int64_t first = 0; first < size; first += kWordBits) {
        const uint32_t bits = static_cast<uint32_t>(words[first / kWordBits]);
        const int64_t end = std::min(size, first + kWordBits);
        if (bits == 0) {
            std::fill(x + first, x + end, kForbidden);
        } else if (bits != ~0u) {
            for (int64_t i = first; i < end; ++i) x[i] = bits >> (i - first) & 1u ? x[i] : kForbidden;
        }
    }
}

void edit_row(float* x, int64_t row, int64_t index, const Slot& slot, const Rows& rows, const Edits& edits) {
    const int64_t size = edits.size;
    if (slot.number(kCounts) != 0) {
        const Penalties by{slot.real(kRepetition), slot.real(kFrequency), slot.real(kPresence)};
        penalize(x, edits.counts + index * size, size, by);
    }
    for (int32_t i = rows.loss_offsets[row]; i < rows.loss_offsets[row + 1]; ++i) x[edits.loss_ids[i]] -= edits.losses[i];
    const int64_t biases = index * edits.max_biases, stops = index * edits.max_stops;
    for (int32_t i = 0; i < slot.number(kNumBiases); ++i) x[edits.bias_ids[biases + i]] += edits.biases[biases + i];
    if (rows.positions[row] < slot.number(kStoppedUntil)) {
        for (int32_t i = 0; i < slot.number(kNumStops); ++i) x[edits.stop_ids[stops + i]] = kForbidden;
    }
    if (slot.number(kWords) != 0) keep_only(x, edits.words + index * edits.num_words(), size);
    if (rows.mask_rows[row] >= 0) keep_only(x, edits.masks + rows.mask_rows[row] * edits.num_words(), size);
}

}  // namespace
}  // namespace rootstock

// edited, logits: [count, size].
extern "C" void rootstock_edit_logits(float* edited, const float* logits, const int32_t* slots, const int32_t* positions,
                                      const int32_t* mask_rows, const int32_t* loss_offsets, const int32_t* loss_ids,
                                      const float* losses, const int32_t* masks, const int32_t* params,
                                      const int16_t* counts, const int32_t* words, const int32_t* bias_ids,
                                      const float* biases, const int32_t* stop_ids, int64_t count, int64_t size,
                                      int64_t max_biases, int64_t max_stops, int threads) {
    using namespace rootstock;
    const Rows rows{slots, positions, mask_rows, loss_offsets};
    const Edits edits{counts, words, masks, bias_ids, biases, stop_ids, loss_ids, losses, size, max_biases, max_stops};
    thread_local std::vector<int64_t> edited_rows;
    edited_rows.clear();
    for (int64_t row = 0; row < count; ++row) {
        if (slots[row] >= 0 && is_edited(rows, row, Slot{params + slots[row] * kWidth})) edited_rows.push_back(row);
    }
    const std::vector<int64_t>& chosen = edited_rows;  // `edited_rows` is another object in each thread of the team
    for_each_piece(static_cast<int64_t>(chosen.size()), threads, [&](int64_t piece, int64_t) {
        const int64_t row = chosen[piece], index = slots[row];
        float* x = edited + row * size;
        std::memcpy(x, logits + row * size, size * sizeof(float));
        edit_row(x, row, index, Slot{params + index * kWidth}, rows, edits);
    });
}
