// Scores and values of a block of keys for few queries, as in decoding. Memory limits the speed, so keys and values are not packed.
//
// Each element is the same chain of dot products as in a packed tile of an ordered job. In ordered jobs, a token's bits therefore
// do not depend on the size of its tile.

#include "attention_tile.h"
#include "vector16.h"

#if ROOTSTOCK_DOT_BF16

namespace rootstock {
namespace {

inline void prefetch(const bf16* source) { _mm_prefetch(reinterpret_cast<const char*>(source), _MM_HINT_T1); }

// Transposes 128-bit parts. Before, v[i] has parts 0 to 3 of key i; afterwards, it has part i of keys 0 to 3.
inline void transpose_parts(__m512 (&v)[4]) {
    const __m512 a = even_lanes(v[0], v[1]), b = odd_lanes(v[0], v[1]), c = even_lanes(v[2], v[3]), d = odd_lanes(v[2], v[3]);
    v[0] = even_lanes(a, c);
    v[1] = even_lanes(b, d);
    v[2] = odd_lanes(a, c);
    v[3] = odd_lanes(b, d);
}

// Adds the four parts of each score. sums[i] has the parts of keys 4 i to 4 i + 3. Returns the scores of 16 keys in order.
inline __m512 add_parts(__m512 (&sums)[4]) {
    const __m512 a = _mm512_unpacklo_ps(sums[0], sums[1]), b = _mm512_unpackhi_ps(sums[0], sums[1]);
    const __m512 c = _mm512_unpacklo_ps(sums[2], sums[3]), d = _mm512_unpackhi_ps(sums[2], sums[3]);
    const auto low = [](__m512 x, __m512 y) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    };
    const auto high = [](__m512 x, __m512 y) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    };
    const __m512 total = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(low(a, c), high(a, c)), low(b, d)), high(b, d));
    // lane 4 j + i is key 4 i + j
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, total);
}

template <int QUERIES> void score(const Tile& tile, const Places& places, int64_t count) {
    const int64_t dim = tile.job.head_dim;
    for (int64_t block = 0; block < count; block += 16) {
        __m512 sums[QUERIES][4];
        for (auto& query : sums) {
            for (auto& sum : query) sum = _mm512_setzero_ps();
        }
        for (int group = 0; group < 4; ++group) {
            const bf16* const* source = places.keys + block + 4 * group;
            const bf16* const* values = places.values + block + 4 * group;
            for (int64_t column = 0; column < dim; column += 32) {
                __m512 keys[4];
                for (int i = 0; i < 4; ++i) {
                    keys[i] = _mm512_loadu_ps(source[i] + column);
                    prefetch(values[i] + column);
                }
                transpose_parts(keys);
                for (int part = 0; part < 4; ++part) {
                    for (int q = 0; q < QUERIES; ++q) {
                        const float* query = reinterpret_cast<const float*>(tile.q + q * dim + column) + part * 4;
                        const auto factors = reinterpret_cast<__m512bh>(_mm512_broadcast_f32x4(_mm_loadu_ps(query)));
                        sums[q][group] = _mm512_dpbf16_ps(sums[q][group], reinterpret_cast<__m512bh>(keys[part]), factors);
                    }
                }
            }
        }
        for (int q = 0; q < QUERIES; ++q) _mm512_store_ps(tile.s + q * kKeys + block, add_parts(sums[q]));
    }
}

// 32 columns of the values of two neighbouring keys, as pairs in the order of the columns.
struct Pairs {
    __m512bh low, high;
};

inline Pairs pairs_at(const bf16* one, const bf16* two) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                           4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    const __m512i a = _mm512_loadu_si512(one), b = _mm512_loadu_si512(two);
    return {reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(a, first, b)),
            reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(a, second, b))};
}

// Adds up the weighted values of a block in 32 * VECTORS columns from `column` on.
template <int QUERIES, int VECTORS> void mix(const Tile& tile, const Places& places, int64_t count, int64_t column) {
    float* o = tile.o + column;
    __m512 sums[QUERIES][2 * VECTORS];
    for (int q = 0; q < QUERIES; ++q) {
        for (int v = 0; v < 2 * VECTORS; ++v) sums[q][v] = _mm512_load_ps(o + q * tile.wide + v * 16);
    }
    for (int64_t key = 0; key < count; key += 2) {
        const bf16* one = places.values[key] + column;
        const bf16* two = places.values[key + 1] + column;  // beyond count: the last value with weight 0
        const bf16* next = places.keys[kKeys + key] + column;
        const bf16* after_next = places.keys[kKeys + key + 1] + column;
        for (int v = 0; v < VECTORS; ++v) {
            prefetch(next + v * 32);
            prefetch(after_next + v * 32);
            const Pairs pairs = pairs_at(one + v * 32, two + v * 32);
            for (int q = 0; q < QUERIES; ++q) {
                const __m512bh weights = pair_at(tile.p + q * kKeys, key / 2);
                sums[q][2 * v] = _mm512_dpbf16_ps(sums[q][2 * v], pairs.low, weights);
                sums[q][2 * v + 1] = _mm512_dpbf16_ps(sums[q][2 * v + 1], pairs.high, weights);
            }
        }
    }
    for (int q = 0; q < QUERIES; ++q) {
        for (int v = 0; v < 2 * VECTORS; ++v) _mm512_store_ps(o + q * tile.wide + v * 16, sums[q][v]);
    }
}

template <int QUERIES> void mix_columns(const Tile& tile, const Places& places, int64_t count) {
    constexpr int kTogether = QUERIES <= 2 ? 4 : QUERIES <= 4 ? 2 : 1;  // vectors whose sums fit the registers
    const int64_t dim = tile.job.value_dim;
    int64_t column = 0;
    for (; column + kTogether * 32 <= dim; column += kTogether * 32) mix<QUERIES, kTogether>(tile, places, count, column);
    for (; column < dim; column += 32) mix<QUERIES, 1>(tile, places, count, column);
}

template <typename Work> void with_queries(int64_t queries, Work&& work) {
    switch (queries) {
        case 1: work.template operator()<1>(); break;
        case 2: work.template operator()<2>(); break;
        case 3: work.template operator()<3>(); break;
        case 4: work.template operator()<4>(); break;
        case 5: work.template operator()<5>(); break;
        case 6: work.template operator()<6>(); break;
        case 7: work.template operator()<7>(); break;
        default: work.template operator()<8>(); break;
    }
}

}  // namespace

void score_few(const Tile& tile, const Places& places, int64_t count) {
    with_queries(tile.queries, [&]<int QUERIES>() { score<QUERIES>(tile, places, count); });
}

void mix_few(const Tile& tile, const Places& places, int64_t count) {
    with_queries(tile.queries, [&]<int QUERIES>() { mix_columns<QUERIES>(tile, places, count); });
}

}  // namespace rootstock
#endif
