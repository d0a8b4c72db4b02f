// Implements select_tokens (kernels/contracts/sample_ops.py). A piece of work is one row of logits.

#include <cmath>

#include "draw.h"
#include "schedule.h"
#include "slots.h"

namespace rootstock {
namespace {

constexpr int32_t kNanLogits = 1, kNoTokenAllowed = 3;  // values of rootstock_llm.kernels.contracts.row_fault.RowFault

struct Choice {
    int64_t token;
    int32_t fault;
};

// Returns the finalizer of splitmix64 (Steele et al., OOPSLA 2014; constants: Stafford's Mix13).
uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

// Returns a number in [0, 1) with 53 random bits, a function of only the seed and the position.
double uniform_of(uint64_t seed, int32_t position) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
    const uint64_t stream = mixed(seed + kGolden);
    return static_cast<double>(mixed(stream + (static_cast<uint64_t>(position) + 1) * kGolden) >> 11) * 0x1p-53;
}

uint64_t seed_of(const Slot& slot) {
    const uint32_t low = static_cast<uint32_t>(slot.number(kSeedLow)), high = static_cast<uint32_t>(slot.number(kSeedHigh));
    return static_cast<uint64_t>(high) << 32 | low;
}

// `edited` is null if the row needs no edits.
Choice choose(const float* logits, const float* edited, int64_t size, const Slot& slot, int32_t position) {
    int64_t best = argmax_row(logits, size);
    if (!std::isfinite(logits[best])) return {0, kNanLogits};
    const float* source = logits;
    if (edited != nullptr) {
        source = edited;
        best = argmax_row(edited, size);
        if (!std::isfinite(edited[best])) return {0, kNoTokenAllowed};
    }
    const float temperature = slot.real(kTemperature);
    if (!(temperature > 0.0f)) return {best, 0};
    const double uniform = uniform_of(seed_of(slot), position);
    const Rule rule{temperature, slot.real(kTopNSigma), slot.number(kTopK), slot.real(kTopP), slot.real(kMinP), uniform};
    return {draw_row(source, size, rule), 0};
}

}  // namespace
}  // namespace rootstock

extern "C" void rootstock_uniforms(double* out, const int64_t* seeds, const int32_t* positions, int64_t count, int) {
    for (int64_t i = 0; i < count; ++i) out[i] = rootstock::uniform_of(static_cast<uint64_t>(seeds[i]), positions[i]);
}

// logits, edited: [count, size]; params: [slots, kWidth]; counts: [slots, size]; relay: [slots].
extern "C" void rootstock_select_tokens(int32_t* tokens, int32_t* faults, const float* logits, const float* edited,
                                        const int32_t* slots, const int32_t* positions, const int32_t* mask_rows,
                                        const int32_t* loss_offsets, const int32_t* params, int16_t* counts,
                                        int64_t* relay, int64_t count, int64_t size, int threads) {
    using namespace rootstock;
    const Rows rows{slots, positions, mask_rows, loss_offsets};
    for_each_piece(count, threads, [&](int64_t row, int64_t) {
        tokens[row] = faults[row] = 0;
        const int64_t index = slots[row];
        if (index < 0) return;
        const Slot slot{params + index * kWidth};
        const float* changed = is_edited(rows, row, slot) ? edited + row * size : nullptr;
        const Choice chosen = choose(logits + row * size, changed, size, slot, positions[row]);
        tokens[row] = static_cast<int32_t>(chosen.token);
        faults[row] = chosen.fault;
        if (chosen.fault != 0) return;
        relay[index] = chosen.token;
        int16_t& seen = counts[index * size + chosen.token];
        if (slot.number(kCounts) != 0 && (seen & kMaxCount) < kMaxCount) ++seen;
    });
}
