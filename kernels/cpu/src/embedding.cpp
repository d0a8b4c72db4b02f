// Copies rows of a packed weight: the embedding of a model whose vocabulary projection has the same weight.

#include <cstdint>

namespace rootstock {
namespace {

constexpr int64_t kBlock = 64;  // rows of a packed block

// Copies unit u of row id from data[id / 64][u][id % 64] to out[row][u].
template <typename Unit>
void copy_rows(Unit* out, const Unit* data, const int64_t* ids, int64_t rows, int64_t units, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; ++row) {
        const Unit* first = data + ids[row] / kBlock * units * kBlock + ids[row] % kBlock;
        for (int64_t u = 0; u < units; ++u) out[row * units + u] = first[u * kBlock];
    }
}

}  // namespace
}  // namespace rootstock

extern "C" {

// Copies rows of a weight that is packed as [ceil(n / 64)][units][64], in units of 2 or 4 bytes, to out [rows][units].
void rootstock_embedding(void* out, const void* data, const int64_t* ids, int64_t rows, int64_t units, int64_t bytes, int threads) {
    if (bytes == 2) {
        rootstock::copy_rows(static_cast<uint16_t*>(out), static_cast<const uint16_t*>(data), ids, rows, units, threads);
    } else {
        rootstock::copy_rows(static_cast<uint32_t*>(out), static_cast<const uint32_t*>(data), ids, rows, units, threads);
    }
}

}  // extern "C"
