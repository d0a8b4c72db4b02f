// What slots ask for and which rows are sampled: kernels.contracts.sample_ops.SlotTable and SampleRows as addresses.
#pragma once

#include <cstdint>
#include <cstring>

namespace rootstock {

// Columns of the parameters, as kernels.contracts.sample_ops.SlotColumn has them.
enum Column : int {
    kSeedLow, kSeedHigh, kTemperature, kTopK, kTopP, kMinP, kRepetition, kFrequency, kPresence,
    kEditedUntil, kStoppedUntil, kNumBiases, kNumStops, kCounts, kWords, kTopNSigma, kWidth = 16
};

constexpr int32_t kMaxCount = (1 << 15) - 1;  // the lower 15 bits of a count: how often the token stands in the output

struct Slot {
    const int32_t* params;

    int32_t number(Column column) const { return params[column]; }
    float real(Column column) const {
        float value;
        std::memcpy(&value, params + column, sizeof(value));
        return value;
    }
};

struct Rows {
    const int32_t *slots, *positions, *mask_rows, *loss_offsets;
};

// Whether edit_logits fills the row, and select_tokens reads it there.
inline bool is_edited(const Rows& rows, int64_t row, const Slot& slot) {
    return rows.positions[row] < slot.number(kEditedUntil) || rows.mask_rows[row] >= 0 ||
           rows.loss_offsets[row + 1] > rows.loss_offsets[row];
}

}  // namespace rootstock
