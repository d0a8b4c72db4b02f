// The addresses of the slots' sampling parameters and of the rows to sample, as in SlotTable and SampleRows
// (kernels/contracts/sample_ops.py).
#pragma once

#include <cstdint>
#include <cstring>

namespace rootstock {

// Columns of the parameters, in the order of rootstock_llm.kernels.contracts.sample_ops.SlotColumn.
enum Column : int {
    kSeedLow, kSeedHigh, kTemperature, kTopK, kTopP, kMinP, kRepetition, kFrequency, kPresence,
    kEditedUntil, kStoppedUntil, kNumBiases, kNumStops, kCounts, kWords, kTopNSigma, kWidth = 16
};

constexpr int32_t kMaxCount = (1 << 15) - 1;  // mask of the lower 15 bits of a count: occurrences of the token in the output

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

// Returns whether edit_logits fills the row. If so, select_tokens reads the edited logits.
inline bool is_edited(const Rows& rows, int64_t row, const Slot& slot) {
    return rows.positions[row] < slot.number(kEditedUntil) || rows.mask_rows[row] >= 0 ||
           rows.loss_offsets[row + 1] > rows.loss_offsets[row];
}

}  // namespace rootstock
