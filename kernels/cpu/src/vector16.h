// Vectors of 16 float32: loads from bfloat16, the exponential, silu, sums over lanes, and a transpose.
#pragma once

#include "numeric.h"

#if ROOTSTOCK_DOT_BF16
#include <immintrin.h>

namespace rootstock {

inline __m512 widen16(const bf16* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Returns e^x, 0 below -87 and for minus infinity. The polynomial has one degree less than that of exponential() in numeric.h.
inline __m512 exponential16(__m512 x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    const __m512 clamped = _mm512_min_ps(_mm512_set1_ps(88.0f), x);
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504089f)), 0);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), clamped);
    rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), rest);
    __m512 poly = _mm512_set1_ps(1.3981999507e-3f);
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(8.3334519073e-3f));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(4.1665795894e-2f));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(1.6666665459e-1f));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(5.0000001201e-1f));
    poly = _mm512_fmadd_ps(poly, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(static_cast<__mmask16>(~tiny), poly, whole);
}

inline __m512 silu16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline __m512 even_lanes(__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
inline __m512 odd_lanes(__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0xdd); }

// Transposes 32-bit lanes: lane i of v[j] becomes lane j of v[i].
inline void transpose(__m512 (&v)[16]) {
    __m512 t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
            const __m512d low = _mm512_castps_pd(t[4 * i + half]), high = _mm512_castps_pd(t[4 * i + 2 + half]);
            v[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            v[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    for (int i = 0; i < 4; ++i) {  // lane group l of v[4 g + i] has column 4 l + i of rows 4 g .. 4 g + 3
        const __m512 a = even_lanes(v[i], v[4 + i]), b = odd_lanes(v[i], v[4 + i]);
        const __m512 c = even_lanes(v[8 + i], v[12 + i]), d = odd_lanes(v[8 + i], v[12 + i]);
        t[i] = even_lanes(a, c);
        t[8 + i] = odd_lanes(a, c);
        t[4 + i] = even_lanes(b, d);
        t[12 + i] = odd_lanes(b, d);
    }
    for (int i = 0; i < 16; ++i) v[i] = t[i];
}

}  // namespace rootstock
#endif
