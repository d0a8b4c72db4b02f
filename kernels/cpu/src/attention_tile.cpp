// Attention of many tokens of a row, as in a prefill: FlashAttention (arXiv 2205.14135, section 3.1) with bfloat16 products.
//
// A tile of queries walks over its keys in blocks of 64. It packs keys and values once, unless it has few queries
// (attention_few.cpp). Scores, weights and sums stay in the second-level cache. Blocks begin at multiples of 64, and a masked key
// adds 0. In ordered jobs, a query's result therefore does not depend on the other queries of its tile.

#include <vector>

#include "attention_tile.h"
#include "vector16.h"

#if ROOTSTOCK_DOT_BF16

namespace rootstock {
namespace {

constexpr int64_t kRowsOfParts = 3;  // rows whose sums and totals, 4 vectors each, together fit the registers

template <typename T> struct Buffer {
    std::vector<T> storage;

    T* of(int64_t size) {
        if (static_cast<int64_t>(storage.size()) < size + 64) storage.resize(size + 64);
        const auto address = reinterpret_cast<uintptr_t>(storage.data());
        return reinterpret_cast<T*>((address + 63) / 64 * 64);
    }
};

struct Scratch {
    Buffer<bf16> queries, keys, values, weights;
    Buffer<float> scores, sums, peaks, totals;
};

void gather_queries(const Tile& tile) {
    const int64_t group = tile.job.group(), dim = tile.job.head_dim;
    for (int64_t i = 0; i < tile.queries; ++i) {
        const bf16* query = tile.job.query(tile.first_token + i / group, tile.head(i));
        std::memcpy(tile.q + i * dim, query, dim * sizeof(bf16));
        tile.peak[i] = tile.job.sink(tile.head(i));  // a sink is the first score of its softmax, and it has no value
        tile.total[i] = tile.peak[i] == kNone ? 0.0f : 1.0f;
    }
    std::fill(tile.o, tile.o + tile.queries * tile.wide, 0.0f);
}

// Returns a position's index in the pools. Positions before the window of the tile's first token have the index of the window's
// first position: their weights are 0, but their pages may belong to another request by now, and 0 times a NaN would be NaN.
int64_t index_in_window(const Tile& tile, int64_t position) {
    return tile.job.pool_index(tile.row, std::max(position, tile.job.first_seen(tile.start)), tile.kv_head);
}

// Finds the keys and values of positions begin .. end - 1. Reads the page table once in order, because a division per key would take
// longer than the key's dot product.
void locate(const Tile& tile, int64_t begin, int64_t end, Places& places) {
    const Attention<bf16>& job = tile.job;
    const int64_t count = std::min(kPlaces, end - begin), before = std::min(count, job.first_seen(tile.start) - begin);
    const auto fill = [&](int64_t from, int64_t to, int64_t index, int64_t step) {
        const bf16 *key = tile.key(index), *value = tile.value(index);
        for (int64_t i = from; i < to; ++i) places.keys[i] = key + (i - from) * step * job.head_dim;
        for (int64_t i = from; i < to; ++i) places.values[i] = value + (i - from) * step * job.value_dim;
    };
    if (before > 0) fill(0, before, index_in_window(tile, begin), 0);
    for (int64_t i = std::max<int64_t>(before, 0); i < count;) {
        const int64_t run = std::min(count - i, job.page_size - (begin + i) % job.page_size);
        fill(i, i + run, job.pool_index(tile.row, begin + i, tile.kv_head), 1);
        i += run;
    }
    fill(count, kPlaces, index_in_window(tile, begin + count - 1), 0);
}

// Packs keys begin .. begin + count - 1 as columns: k[pair][64][2]. The pairs of one part (kParts) follow each other. The columns from
// `count` on are 0.
void pack_keys(const Tile& tile, int64_t begin, int64_t count) {
    const int64_t pairs = tile.job.head_dim / 2, parts = tile.job.ordered ? kParts : 1;
    const auto packed_pair = [&](int64_t pair) { return pair % parts * (pairs / parts) + pair / parts; };
    for (int64_t block = 0; block < kKeys; block += 16) {
        const bf16* source[16];
        for (int64_t i = 0; i < 16; ++i) {
            const int64_t key = block + i;
            source[i] = key < count ? tile.key(index_in_window(tile, begin + key)) : nullptr;
        }
        for (int64_t pair = 0; pair < pairs; pair += 16) {
            __m512 lanes[16];
            for (int i = 0; i < 16; ++i) {
                lanes[i] = source[i] != nullptr ? _mm512_loadu_ps(source[i] + pair * 2) : _mm512_setzero_ps();
            }
            transpose(lanes);
            for (int i = 0; i < 16; ++i) _mm512_store_ps(tile.k + packed_pair(pair + i) * 128 + block * 2, lanes[i]);
        }
    }
}

// Packs values as rows of pairs: v[block of 64 columns][32 pairs of keys][64][2]. The rows from `count` on are 0.
void pack_values(const Tile& tile, int64_t begin, int64_t count) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t key = 0; key < kKeys; key += 2) {
        const bf16* one = key < count ? tile.value(index_in_window(tile, begin + key)) : nullptr;
        const bf16* two = key + 1 < count ? tile.value(index_in_window(tile, begin + key + 1)) : nullptr;
        for (int64_t column = 0; column < tile.wide; column += 32) {
            const bool inside = column < tile.job.value_dim;
            const __m512i a = one != nullptr && inside ? _mm512_loadu_si512(one + column) : _mm512_setzero_si512();
            const __m512i b = two != nullptr && inside ? _mm512_loadu_si512(two + column) : _mm512_setzero_si512();
            bf16* target = tile.v + (column / 64 * (kKeys / 2) + key / 2) * 128 + column % 64 * 2;
            _mm512_store_si512(target, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(target + 32, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

template <int ROWS> void store_scores(const Tile& tile, int64_t row, const __m512 (&sums)[ROWS][kVectors]) {
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < kVectors; ++v) _mm512_store_ps(tile.s + (row + r) * kKeys + v * 16, sums[r][v]);
    }
}

// Computes scores in the same order as attention_few.cpp: each part of a dot product is a separate sum.
void make_scores_by_parts(const Tile& tile) {
    const int64_t dim = tile.job.head_dim, pairs = dim / 2 / kParts;
    for (int64_t row = 0; row < tile.queries; row += kRowsOfParts) {
        with_rows(std::min<int64_t>(kRowsOfParts, tile.queries - row), [&]<int ROWS>() {
            __m512 totals[ROWS][kVectors];
            clear(totals);
            multiply_tile<ROWS, kParts>(totals, tile.q + row * dim, dim, tile.k, pairs);
            for (int64_t part = 1; part < kParts; ++part) {
                __m512 sums[ROWS][kVectors];
                clear(sums);
                multiply_tile<ROWS, kParts>(sums, tile.q + row * dim + 2 * part, dim, tile.k + part * pairs * 2 * kKeys, pairs);
                for (int r = 0; r < ROWS; ++r) {
                    for (int v = 0; v < kVectors; ++v) totals[r][v] = _mm512_add_ps(totals[r][v], sums[r][v]);
                }
            }
            store_scores(tile, row, totals);
        });
    }
}

void make_scores(const Tile& tile) {
    const int64_t dim = tile.job.head_dim;
    for (int64_t row = 0; row < tile.queries; row += kTileRows) {
        with_rows(std::min<int64_t>(kTileRows, tile.queries - row), [&]<int ROWS>() {
            __m512 sums[ROWS][kVectors];
            clear(sums);
            multiply_tile<ROWS>(sums, tile.q + row * dim, dim, tile.k, dim / 2);
            store_scores(tile, row, sums);
        });
    }
}

// Returns cap * tanh(x / cap).
inline __m512 capped16(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f), limit = _mm512_set1_ps(cap);
    const __m512 power = exponential16(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap)));
    return _mm512_mul_ps(limit, _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one))));
}

// Loads the scores of one query, minus infinity for masked keys. `begin` is the position of the first key.
inline void load_scores(const Tile& tile, int64_t query, int64_t begin, __m512 (&scores)[kVectors]) {
    const int64_t position = tile.position(query), seen = tile.job.first_seen(position);
    const int64_t from = std::clamp<int64_t>(seen - begin, 0, kKeys), to = std::clamp<int64_t>(position + 1 - begin, 0, kKeys);
    const uint64_t below = to == 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1;
    const uint64_t mask = from == 64 ? 0 : below & (~uint64_t{0} << from);
    const __m512 scale = _mm512_set1_ps(tile.job.scale);
    for (int v = 0; v < kVectors; ++v) {
        __m512 value = _mm512_mul_ps(_mm512_load_ps(tile.s + query * kKeys + v * 16), scale);
        if (tile.job.softcap != 0.0f) value = capped16(value, tile.job.softcap);
        scores[v] = _mm512_mask_mov_ps(_mm512_set1_ps(kNone), static_cast<__mmask16>(mask >> (16 * v)), value);
    }
}

// Adds a block of keys to the online softmax of one query: stores the weights in p, and scales earlier sums down if the largest score
// rises.
void soften(const Tile& tile, int64_t query, int64_t begin) {
    __m512 scores[kVectors], weights[kVectors];
    load_scores(tile, query, begin, scores);
    const __m512 highest = _mm512_max_ps(_mm512_max_ps(scores[0], scores[1]), _mm512_max_ps(scores[2], scores[3]));
    const float before = tile.peak[query], peak = std::max(before, _mm512_reduce_max_ps(highest));
    const __m512 shift = _mm512_set1_ps(peak == kNone ? 0.0f : peak);
    for (int v = 0; v < kVectors; ++v) weights[v] = exponential16(_mm512_sub_ps(scores[v], shift));
    bf16* p = tile.p + query * kKeys;
    _mm512_store_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weights[1], weights[0])));
    _mm512_store_si512(p + 32, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weights[3], weights[2])));
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(weights[0], weights[1]), _mm512_add_ps(weights[2], weights[3]));
    const float fade = before == peak ? 1.0f : exponential(before - peak);
    tile.total[query] = tile.total[query] * fade + _mm512_reduce_add_ps(sum);
    tile.peak[query] = peak;
    if (fade == 1.0f || before == kNone) return;
    float* o = tile.o + query * tile.wide;
    for (int64_t i = 0; i < tile.wide; i += 16) _mm512_store_ps(o + i, _mm512_mul_ps(_mm512_load_ps(o + i), _mm512_set1_ps(fade)));
}

void mix_values(const Tile& tile) {
    for (int64_t block = 0; block < tile.wide / 64; ++block) {
        for (int64_t row = 0; row < tile.queries; row += kTileRows) {
            with_rows(std::min<int64_t>(kTileRows, tile.queries - row), [&]<int ROWS>() {
                float* o = tile.o + row * tile.wide + block * 64;
                __m512 sums[ROWS][kVectors];
                for (int r = 0; r < ROWS; ++r) {
                    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_load_ps(o + r * tile.wide + v * 16);
                }
                multiply_tile<ROWS>(sums, tile.p + row * kKeys, kKeys, tile.v + block * kKeys * 64, kKeys / 2);
                for (int r = 0; r < ROWS; ++r) {
                    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(o + r * tile.wide + v * 16, sums[r][v]);
                }
            });
        }
    }
}

void write_results(const Tile& tile) {
    const int64_t group = tile.job.group();
    const __m512 zero = _mm512_setzero_ps();  // turns -0 into 0, as the addition of a masked key does
    for (int64_t query = 0; query < tile.queries; ++query) {
        bf16* out = tile.job.result(tile.first_token + query / group, tile.head(query));
        const float* o = tile.o + query * tile.wide;
        const __m512 scale = _mm512_set1_ps(1.0f / tile.total[query]);
        for (int64_t i = 0; i < tile.job.value_dim; i += 32) {
            const __m512 low = _mm512_mul_ps(_mm512_add_ps(_mm512_load_ps(o + i), zero), scale);
            const __m512 high = _mm512_mul_ps(_mm512_add_ps(_mm512_load_ps(o + i + 16), zero), scale);
            _mm512_storeu_si512(out + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
        }
    }
}

}  // namespace

void attend_tile(const Attention<bf16>& job, int64_t row, int64_t first, int64_t count, int64_t kv_head) {
    thread_local Scratch scratch;
    const int64_t queries = count * job.group(), dim = job.head_dim, wide = (job.value_dim + 63) / 64 * 64;
    const Tile tile{job, row, kv_head, job.offsets[row] + first, job.starts[row] + first, queries, wide,
                    scratch.queries.of(queries * dim), scratch.keys.of(kKeys * dim), scratch.values.of(kKeys * wide),
                    scratch.weights.of(queries * kKeys), scratch.scores.of(queries * kKeys), scratch.sums.of(queries * wide),
                    scratch.peaks.of(queries), scratch.totals.of(queries)};
    gather_queries(tile);
    const int64_t end = tile.start + count;
    Places places;
    for (int64_t begin = job.first_seen(tile.start) / kKeys * kKeys; begin < end; begin += kKeys) {
        const int64_t keys = std::min(kKeys, end - begin);
        if (tile.few()) {
            locate(tile, begin, end, places);
            score_few(tile, places, keys);
        } else {
            pack_keys(tile, begin, keys);
            pack_values(tile, begin, keys);
            if (job.ordered) {
                make_scores_by_parts(tile);
            } else {
                make_scores(tile);
            }
        }
        for (int64_t query = 0; query < queries; ++query) soften(tile, query, begin);
        if (tile.few()) {
            mix_few(tile, places, keys);
        } else {
            mix_values(tile);
        }
    }
    write_results(tile);
}

}  // namespace rootstock
#endif
