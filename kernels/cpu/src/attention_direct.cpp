// Attention of one token, as in decoding: bound by reading keys and values, so each is read once per key/value head.

#include <vector>

#include "attention_bf16.h"
#include "vector16.h"

#if ROOTSTOCK_DOT_BF16

namespace rootstock {
namespace {

constexpr int64_t kBlock = 16;  // keys whose scores are made together
constexpr int64_t kAhead = 32;  // keys between the one at hand and the one that is being fetched

inline __m512bh load32(const bf16* source) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(source)); }

inline void prefetch_vector(const bf16* source, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) _mm_prefetch(reinterpret_cast<const char*>(source + i), _MM_HINT_T1);
}

// Where the keys and values of positions first .. end - 1 lie in the pools, for one head; then kAhead + kBlock times the last.
// Walks the page table once: a division per key would cost more than the key's dot product.
void locate(const Attention<bf16>& job, int64_t row, int64_t kv_head, int64_t first, int64_t end, int64_t* places) {
    const int64_t count = end - first;
    for (int64_t i = 0; i < count;) {
        const int64_t run = std::min(count - i, job.page_size - (first + i) % job.page_size);
        const int64_t begin = job.place(row, first + i, kv_head);
        for (int64_t k = 0; k < run; ++k) places[i + k] = begin + k * job.head_dim;
        i += run;
    }
    std::fill(places + count, places + count + kAhead + kBlock, places[count - 1]);
}

// scores[h][i], rows of `stride`, for `count` keys; tails of the last block are written but mean nothing.
template <int VECTORS>
void score(const Attention<bf16>& job, const int64_t* places, int64_t count, const bf16* query, float* scores, int64_t stride) {
    const __m512 scale = _mm512_set1_ps(job.scale);
    for (int64_t begin = 0; begin < count; begin += kBlock) {
        const bf16* keys[kBlock];
        for (int64_t i = 0; i < kBlock; ++i) keys[i] = job.keys + places[begin + i];
        for (int64_t h = 0; h < job.group(); ++h) {
            __m512bh q[VECTORS];
            for (int v = 0; v < VECTORS; ++v) q[v] = load32(query + h * job.head_dim + v * 32);
            __m512 sums[kBlock];
            for (int i = 0; i < kBlock; ++i) {
                if (h == 0) prefetch_vector(job.keys + places[begin + kAhead + i], VECTORS * 32);
                sums[i] = _mm512_setzero_ps();
                for (int v = 0; v < VECTORS; ++v) sums[i] = _mm512_dpbf16_ps(sums[i], q[v], load32(keys[i] + v * 32));
            }
            _mm512_storeu_ps(scores + h * stride + begin, _mm512_mul_ps(sum_each(sums), scale));
        }
    }
}

// Scores to weights; what lies past count becomes 0. Returns the inverse of the weights' sum.
float soften(float* scores, int64_t count, int64_t padded) {
    for (int64_t i = count; i < padded; ++i) scores[i] = -std::numeric_limits<float>::infinity();
    __m512 peak = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < padded; i += 16) peak = _mm512_max_ps(peak, _mm512_loadu_ps(scores + i));
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(peak));
    for (int64_t i = 0; i < padded; i += 16) {
        const __m512 weights = exponential16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most));
        sum = _mm512_add_ps(sum, weights);
        _mm512_storeu_ps(scores + i, weights);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// Two neighbouring weights as a pair of bfloat16 in every lane.
inline __m512bh weight_pair(const float* weights) {
    const uint32_t low = narrow<bf16>(weights[0]).bits, high = narrow<bf16>(weights[1]).bits;
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(low | high << 16)));
}

// Undoes the order that interleaving leaves: low holds elements 0-3, 8-11, 16-19, 24-27 of 32, high the others.
inline void store_row(bf16* out, __m512 low, __m512 high, __m512 scale) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512 a = _mm512_mul_ps(_mm512_permutex2var_ps(low, first, high), scale);
    const __m512 b = _mm512_mul_ps(_mm512_permutex2var_ps(low, second, high), scale);
    _mm512_storeu_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}

// out[h] = sum of weights[h][i] * value[i] for HEADS heads at once.
template <int VECTORS, int HEADS>
void mix(const Attention<bf16>& job, const int64_t* places, int64_t count, const float* weights, int64_t stride,
         const float* inverse, bf16* out) {
    __m512 sums[HEADS][2 * VECTORS];
    for (auto& head : sums) {
        for (auto& sum : head) sum = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < count; i += 2) {
        const bf16* one = job.values + places[i];
        const bf16* two = job.values + places[i + 1];
        prefetch_vector(job.values + places[i + kAhead], VECTORS * 32);
        prefetch_vector(job.values + places[i + kAhead + 1], VECTORS * 32);
        __m512bh pair[HEADS];
        for (int h = 0; h < HEADS; ++h) pair[h] = weight_pair(weights + h * stride + i);
        for (int v = 0; v < VECTORS; ++v) {
            const __m512i a = _mm512_loadu_si512(one + v * 32), b = _mm512_loadu_si512(two + v * 32);
            const __m512bh low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
            const __m512bh high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
            for (int h = 0; h < HEADS; ++h) {
                sums[h][2 * v] = _mm512_dpbf16_ps(sums[h][2 * v], low, pair[h]);
                sums[h][2 * v + 1] = _mm512_dpbf16_ps(sums[h][2 * v + 1], high, pair[h]);
            }
        }
    }
    for (int h = 0; h < HEADS; ++h) {
        for (int v = 0; v < VECTORS; ++v) {
            store_row(out + h * job.head_dim + v * 32, sums[h][2 * v], sums[h][2 * v + 1], _mm512_set1_ps(inverse[h]));
        }
    }
}

template <int VECTORS> void attend_token(const Attention<bf16>& job, int64_t row, int64_t index, int64_t kv_head) {
    const int64_t position = job.starts[row] + index, first = job.first_seen(position), count = position + 1 - first;
    const int64_t group = job.group(), padded = (count + kBlock - 1) / kBlock * kBlock, token = job.offsets[row] + index;
    thread_local std::vector<float> scores;
    thread_local std::vector<int64_t> places;
    scores.resize(std::max<size_t>(scores.size(), group * (padded + 1)));
    places.resize(std::max<size_t>(places.size(), count + kAhead + kBlock));
    locate(job, row, kv_head, first, position + 1, places.data());
    float* inverse = scores.data() + group * padded;
    score<VECTORS>(job, places.data(), count, job.query(token, kv_head * group), scores.data(), padded);
    for (int64_t h = 0; h < group; ++h) inverse[h] = soften(scores.data() + h * padded, count, padded);
    constexpr int kTogether = VECTORS > 4 ? 1 : 2;  // heads whose sums fit the registers
    for (int64_t h = 0; h < group;) {
        const float* weights = scores.data() + h * padded;
        bf16* out = job.result(token, kv_head * group + h);
        if (h + kTogether <= group) {
            mix<VECTORS, kTogether>(job, places.data(), count, weights, padded, inverse + h, out);
            h += kTogether;
        } else {
            mix<VECTORS, 1>(job, places.data(), count, weights, padded, inverse + h, out);
            h += 1;
        }
    }
}

}  // namespace

void attend_direct(const Attention<bf16>& job, int64_t row, int64_t index, int64_t kv_head) {
    switch (job.head_dim) {
        case 64: attend_token<2>(job, row, index, kv_head); break;
        case 96: attend_token<3>(job, row, index, kv_head); break;
        case 128: attend_token<4>(job, row, index, kv_head); break;
        default: attend_token<8>(job, row, index, kv_head); break;
    }
}

}  // namespace rootstock
#endif
