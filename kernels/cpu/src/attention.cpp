// Paged attention of any type and head size. A tile has the queries of some tokens of one row, for one key/value head. It
// computes and stores the scores of all of its keys, block by block, and then adds up the weighted values, block by block.
//
// A query's result does not depend on its tile: the lanes of each score are added in a fixed order, and each element of the result is
// one chain of additions over the keys to which the query attends.

#include "attention.h"

#include <limits>
#include <type_traits>
#include <vector>

#include "attention_tasks.h"
#include "vectors.h"

namespace rootstock {
namespace {

constexpr int64_t kTileRows = 6;               // number of queries for which values are added up together
constexpr int64_t kMostQueries = 48;           // largest number of queries of a tile
constexpr int64_t kScores = int64_t{1} << 17;  // largest number of scores of a tile, unless kTileRows queries have more
constexpr int64_t kWidenFrom = 3;              // smallest number of queries for which bfloat16 keys and values are first converted
constexpr int64_t kValues = 128;               // keys per block of values

struct Scratch {
    std::vector<int64_t> pool_indices;
    std::vector<float> queries, keys, values, scores, sums, inverses;
};

// A tile and its buffers. `depth` and `width` are head_dim and value_dim rounded up to whole vectors; the rest is padded with zeros.
// `begin` is the position of the tile's first key. All indices of keys are relative to `begin`: a query attends to keys
// first(query) .. last(query) - 1.
template <typename T> struct Tile {
    const Attention<T>& job;
    int64_t row, kv_head, token, start, queries, begin, end, depth, width, stride;
    Scratch& scratch;

    int64_t first(int64_t query) const { return job.first_seen(start + query / job.group()) - begin; }
    int64_t last(int64_t query) const { return start + query / job.group() + 1 - begin; }
    float* scores(int64_t query) const { return scratch.scores.data() + query * stride; }
    float* sums(int64_t query) const { return scratch.sums.data() + query * width; }
    const T* key(int64_t index) const { return job.keys + scratch.pool_indices[index] * job.head_dim; }
    const T* value(int64_t index) const { return job.values + scratch.pool_indices[index] * job.value_dim; }
};

template <typename T> void widen_to(float* target, const T* source, int64_t count, int64_t padded) {
    for (int64_t i = 0; i < count; ++i) target[i] = widen(source[i]);
    std::fill(target + count, target + padded, 0.0f);
}

// Finds the pool indices of all keys and values to which the tile attends, in one pass over the page table.
template <typename T> void locate(const Tile<T>& tile) {
    const int64_t page_size = tile.job.page_size;
    auto& pool_indices = tile.scratch.pool_indices;
    pool_indices.resize(tile.end - tile.begin);
    for (int64_t at = tile.begin; at < tile.end;) {
        const int64_t run = std::min(tile.end - at, page_size - at % page_size);
        const int64_t first = tile.job.pool_index(tile.row, at, tile.kv_head);
        for (int64_t i = 0; i < run; ++i) pool_indices[at - tile.begin + i] = first + i;
        at += run;
    }
}

template <typename S>
void score_block(float* scores, const float* query, const S* const (&keys)[kWidth], int64_t depth, float scale) {
    Vector sums[kWidth] = {};
    for (int64_t d = 0; d < depth; d += kWidth) {
        const Vector numbers = load(query + d);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) sums[i] += numbers * load(keys[i] + d);
    }
    store(scores, sum_each(sums) * scale);
}

// Computes the scores of a block of keys for the queries that attend to any of these keys. An incomplete block is filled up with its
// last key.
template <typename T> void score(const Tile<T>& tile, int64_t block, bool wide) {
    const T* keys[kWidth];
    const float* widened[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) {
        keys[i] = tile.key(std::min(block + i, tile.end - tile.begin - 1));
        if (wide) {
            float* target = tile.scratch.keys.data() + i * tile.depth;
            widen_to(target, keys[i], tile.job.head_dim, tile.depth);
            widened[i] = target;
        }
    }
    for (int64_t q = 0; q < tile.queries; ++q) {
        if (block >= tile.last(q) || block + kWidth <= tile.first(q)) continue;
        const float* query = tile.scratch.queries.data() + q * tile.depth;
        if (wide) {
            score_block(tile.scores(q) + block, query, widened, tile.depth, tile.job.scale);
        } else {
            score_block(tile.scores(q) + block, query, keys, tile.depth, tile.job.scale);
        }
    }
}

// Replaces each score by cap * tanh(score / cap), up to the next whole vector after the last score.
void cap_scores(float* scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += kWidth) {
        const Vector power = exponential(load(scores + i) * (2.0f / cap));
        store(scores + i, (1.0f - 2.0f / (power + 1.0f)) * cap);
    }
}

// Turns the scores of a query into softmax weights in place, and returns the inverse of their sum. The sum includes the sink, minus
// infinity for none. The buffer must have space for one more vector after the scores.
float soften(float* scores, int64_t count, float sink) {
    const int64_t padded = (count + kWidth - 1) / kWidth * kWidth;
    std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
    float peak = std::max(scores[0], sink), sum = 0.0f;
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < count; ++i) peak = scores[i] > peak ? scores[i] : peak;
#pragma omp simd
    for (int64_t i = 0; i < padded; ++i) scores[i] = exponential(scores[i] - peak);
    Vector sums = {};
    for (int64_t i = 0; i < padded; i += kWidth) sums += load(scores + i);
    for (int i = 0; i < kWidth; ++i) sum += sums[i];
    return 1.0f / (sum + exponential(sink - peak));
}

// Adds the weighted values of keys begin .. end - 1 to the sums of ROWS queries. If step is not 0, `values` has the values of the
// keys from `block` on, step elements apart. If step is 0, `values` is the pool.
template <int ROWS, int VECTORS, typename T, typename S>
void mix_columns(const Tile<T>& tile, int64_t query, int64_t begin, int64_t end, int64_t block, const S* values, int64_t step,
                 int64_t column) {
    Vector sums[ROWS][VECTORS];
    const float* weights[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        weights[r] = tile.scores(query + r);
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = load(tile.sums(query + r) + column + v * kWidth);
    }
    for (int64_t k = begin; k < end; ++k) {
        const S* value = values + (step ? (k - block) * step : tile.scratch.pool_indices[k] * tile.job.value_dim) + column;
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) {
            const Vector columns = load(value + v * kWidth);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) sums[r][v] += columns * weights[r][k];
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) store(tile.sums(query + r) + column + v * kWidth, sums[r][v]);
    }
}

template <int ROWS, typename T, typename S>
void mix_rows(const Tile<T>& tile, int64_t query, int64_t begin, int64_t end, int64_t block, const S* values, int64_t step) {
    constexpr int kMost = vectors_of(ROWS, 8);
    if (begin >= end) return;
    int64_t column = 0;
    const auto walk = [&]<int VECTORS>() {
        for (; column + VECTORS * kWidth <= tile.width; column += VECTORS * kWidth) {
            mix_columns<ROWS, VECTORS>(tile, query, begin, end, block, values, step, column);
        }
    };
    if constexpr (kMost >= 8) walk.template operator()<8>();
    if constexpr (kMost >= 4) walk.template operator()<4>();
    if constexpr (kMost >= 2) walk.template operator()<2>();
    walk.template operator()<1>();
}

// Adds up the weighted values of a block for ROWS queries. The values of keys to which all of these queries attend are added for all
// queries together. The values of the keys before and after are added one query at a time.
template <int ROWS, typename T, typename S>
void mix(const Tile<T>& tile, int64_t query, int64_t block, int64_t end, const S* values, int64_t step) {
    const int64_t last_query = query + ROWS - 1;  // the last query has the latest first key and the latest last key
    const int64_t low = std::clamp(tile.first(last_query), block, end), high = std::clamp(tile.last(query), low, end);
    for (int r = 0; r < ROWS; ++r) {
        const int64_t begin = std::max(block, tile.first(query + r));
        mix_rows<1>(tile, query + r, begin, std::min(low, tile.last(query + r)), block, values, step);
    }
    mix_rows<ROWS>(tile, query, low, high, block, values, step);
    for (int r = 0; r < ROWS; ++r) {
        mix_rows<1>(tile, query + r, high, std::min(end, tile.last(query + r)), block, values, step);
    }
}

template <typename T, typename S> void mix_block(const Tile<T>& tile, int64_t block, int64_t end, const S* values, int64_t step) {
    for (int64_t query = 0; query < tile.queries; query += kTileRows) {
        switch (std::min(kTileRows, tile.queries - query)) {
            case 1: mix<1>(tile, query, block, end, values, step); break;
            case 2: mix<2>(tile, query, block, end, values, step); break;
            case 3: mix<3>(tile, query, block, end, values, step); break;
            case 4: mix<4>(tile, query, block, end, values, step); break;
            case 5: mix<5>(tile, query, block, end, values, step); break;
            default: mix<6>(tile, query, block, end, values, step); break;
        }
    }
}

template <typename T> void add_values(const Tile<T>& tile, bool wide) {
    const int64_t count = tile.end - tile.begin;
    for (int64_t block = 0; block < count; block += kValues) {
        const int64_t end = std::min(count, block + kValues);
        if (!wide) {
            mix_block(tile, block, end, tile.job.values, 0);
            continue;
        }
        float* values = tile.scratch.values.data();
        for (int64_t k = block; k < end; ++k) {
            widen_to(values + (k - block) * tile.width, tile.value(k), tile.job.value_dim, tile.width);
        }
        mix_block(tile, block, end, static_cast<const float*>(values), tile.width);
    }
}

// Computes the attention of `count` tokens of a row from `token` on, for the query heads of one key/value head.
template <typename T> void attend_tile(const Attention<T>& job, int64_t row, int64_t token, int64_t count, int64_t kv_head) {
    thread_local Scratch scratch;
    const int64_t start = job.starts[row] + token, begin = job.first_seen(start), end = start + count;
    const auto whole = [](int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; };
    const int64_t depth = whole(job.head_dim), width = whole(job.value_dim), queries = count * job.group();
    const int64_t stride = whole(end - begin + kWidth);
    const Tile<T> tile{job, row, kv_head, job.offsets[row] + token, start, queries, begin, end, depth, width, stride, scratch};
    const auto reserve = [](std::vector<float>& numbers, int64_t size) {
        if (static_cast<int64_t>(numbers.size()) < size) numbers.resize(size);
    };
    reserve(scratch.queries, queries * depth);
    reserve(scratch.sums, queries * width);
    reserve(scratch.scores, queries * stride);
    reserve(scratch.keys, kWidth * depth);
    reserve(scratch.values, kValues * width);
    reserve(scratch.inverses, queries);
    locate(tile);
    const auto head = [&](int64_t query) { return kv_head * job.group() + query % job.group(); };
    for (int64_t q = 0; q < queries; ++q) {
        widen_to(scratch.queries.data() + q * depth, job.query(tile.token + q / job.group(), head(q)), job.head_dim, depth);
    }
    std::fill(tile.sums(0), tile.sums(queries), 0.0f);
    // Keys and values are first converted to float in memory, without rounding, if they are not whole vectors, or if they are not
    // float and the tile has kWidenFrom or more queries.
    const bool widens = !std::is_same_v<T, float> && queries >= kWidenFrom;
    for (int64_t block = 0; block < end - begin; block += kWidth) score(tile, block, widens || job.head_dim != depth);
    for (int64_t q = 0; q < queries; ++q) {
        float* scores = tile.scores(q) + tile.first(q);
        const int64_t seen = tile.last(q) - tile.first(q);
        if (job.softcap != 0.0f) cap_scores(scores, seen, job.softcap);
        scratch.inverses[q] = soften(scores, seen, job.sink(head(q)));
    }
    add_values(tile, widens || job.value_dim != width);
    for (int64_t q = 0; q < queries; ++q) {
        T* out = job.result(tile.token + q / job.group(), head(q));
        for (int64_t d = 0; d < job.value_dim; ++d) out[d] = narrow<T>(tile.sums(q)[d] * scratch.inverses[q]);
    }
}

template <typename T> void attend(const Attention<T>& job, int threads) {
    const auto most = [&](int64_t row, int64_t first) {  // tokens of a tile whose scores stay in the second-level cache
        const int64_t start = job.starts[row] + first;
        const int64_t seen = start + std::min<int64_t>(kMostQueries, job.num_tokens[row] - first) - job.first_seen(start);
        return std::max<int64_t>(1, std::clamp(kScores / seen, kTileRows, kMostQueries) / job.group());
    };
    for_each_tile(job, threads, most, [&](int64_t row, int64_t first, int64_t count, int64_t kv_head) {
        attend_tile(job, row, first, count, kv_head);
    });
}

// Runs the bfloat16 kernels with dot products if they fit the job, otherwise the general kernels.
template <typename T> void run(const Attention<T>& job, int threads) {
    if constexpr (std::is_same_v<T, bf16>) {
        if (attend_bf16(job, threads)) return;
    }
    attend(job, threads);
}

}  // namespace
}  // namespace rootstock

extern "C" void rootstock_paged_attention(void* out, const void* q, const void* keys, const void* values, const int32_t* page_table,
                                          const int32_t* slots, const int32_t* starts, const int32_t* num_tokens,
                                          const int32_t* offsets, const float* sinks, int64_t rows, int64_t table_width,
                                          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim, int64_t q_stride,
                                          int64_t page_size, int64_t window, float scale, float softcap, int ordered,
                                          int bfloat16, int threads) {
    const auto start = [&]<typename T>() {
        rootstock::run<T>({static_cast<T*>(out), static_cast<const T*>(q), static_cast<const T*>(keys),
                           static_cast<const T*>(values), page_table, slots, starts, num_tokens, offsets, sinks, rows, table_width,
                           heads, kv_heads, head_dim, value_dim, q_stride, page_size, window, scale, softcap, ordered != 0},
                          threads);
    };
    if (bfloat16) {
        start.template operator()<rootstock::bf16>();
    } else {
        start.template operator()<float>();
    }
}
