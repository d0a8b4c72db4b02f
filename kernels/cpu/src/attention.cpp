// Paged attention in plain loops, any type and head size: one task per token and key/value head, scores kept whole.

#include "attention.h"

#include <vector>

#include "schedule.h"

namespace rootstock {
namespace {

template <typename T> float dot(const T* a, const T* b, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += widen(a[i]) * widen(b[i]);
    return sum;
}

// Scores to weights in place; returns the inverse of their sum.
float soften(float* scores, int64_t count) {
    float peak = scores[0], sum = 0.0f;
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < count; ++i) peak = scores[i] > peak ? scores[i] : peak;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
        scores[i] = exponential(scores[i] - peak);
        sum += scores[i];
    }
    return 1.0f / sum;
}

template <typename T>
void attend_head(const Attention<T>& job, int64_t row, int64_t token, int64_t position, int64_t head, float* scores, float* sums) {
    const int64_t first = job.first_seen(position), count = position + 1 - first, dim = job.head_dim;
    const int64_t kv_head = head / job.group();
    const T* query = job.query(token, head);
    for (int64_t i = 0; i < count; ++i) scores[i] = job.scale * dot(query, job.keys + job.place(row, first + i, kv_head), dim);
    const float inverse = soften(scores, count);
    std::fill(sums, sums + dim, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
        const T* value = job.values + job.place(row, first + i, kv_head);
        const float weight = scores[i];
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) sums[d] += weight * widen(value[d]);
    }
    T* out = job.result(token, head);
    for (int64_t d = 0; d < dim; ++d) out[d] = narrow<T>(sums[d] * inverse);
}

template <typename T> void attend(const Attention<T>& job, int threads) {
    std::vector<int32_t> row_of;
    int64_t longest = 1;
    for (int64_t row = 0; row < job.rows; ++row) {
        row_of.insert(row_of.end(), job.num_tokens[row], static_cast<int32_t>(row));
        longest = std::max<int64_t>(longest, job.starts[row] + job.num_tokens[row]);
    }
    const int64_t tokens = static_cast<int64_t>(row_of.size());
    for_each_piece(tokens * job.kv_heads, threads, [&](int64_t piece, int64_t) {
        thread_local std::vector<float> scores, sums;
        scores.resize(std::max<size_t>(scores.size(), longest));
        sums.resize(std::max<size_t>(sums.size(), job.head_dim));
        const int64_t token = piece / job.kv_heads, row = row_of[token];
        const int64_t position = job.starts[row] + token - job.offsets[row];
        for (int64_t h = 0; h < job.group(); ++h) {
            attend_head(job, row, token, position, piece % job.kv_heads * job.group() + h, scores.data(), sums.data());
        }
    });
}

}  // namespace
}  // namespace rootstock

extern "C" void rootstock_paged_attention(void* out, const void* qkv, const void* keys, const void* values,
                                          const int32_t* page_table, const int32_t* slots, const int32_t* starts,
                                          const int32_t* num_tokens, const int32_t* offsets, int64_t rows,
                                          int64_t table_width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                          int64_t page_size, int64_t window, float scale, int ordered, int bfloat16,
                                          int threads) {
    using rootstock::bf16;
    if (bfloat16) {
        const rootstock::Attention<bf16> job{static_cast<bf16*>(out), static_cast<const bf16*>(qkv),
                                             static_cast<const bf16*>(keys), static_cast<const bf16*>(values),
                                             page_table, slots, starts, num_tokens, offsets, rows, table_width, heads,
                                             kv_heads, head_dim, page_size, window, scale, ordered != 0};
        if (!rootstock::attend_bf16(job, threads)) rootstock::attend(job, threads);
    } else {
        const rootstock::Attention<float> job{static_cast<float*>(out), static_cast<const float*>(qkv),
                                              static_cast<const float*>(keys), static_cast<const float*>(values),
                                              page_table, slots, starts, num_tokens, offsets, rows, table_width, heads,
                                              kv_heads, head_dim, page_size, window, scale, ordered != 0};
        rootstock::attend(job, threads);
    }
}
