// Storage types, conversions and the exponential that all kernels share, in plain C++ that compilers vectorize on any target.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ROOTSTOCK_DOT_BF16 1
#else
#define ROOTSTOCK_DOT_BF16 0
#endif

namespace rootstock {

// A bfloat16 number: the upper half of a float32.
struct bf16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

template <typename T> inline T narrow(float value);

template <> inline float narrow<float>(float value) { return value; }

// Rounds to nearest even. A NaN stays a NaN.
template <> inline bf16 narrow<bf16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return bf16{static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

// Returns e^x to about 2 ulp, 0 below -87 (polynomial of Cephes, expf.c).
inline float exponential(float x) {
    const float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    const float whole = std::floor(clamped * 1.44269504089f + 0.5f);
    const float rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float poly = 1.9875691500e-4f;
    poly = poly * rest + 1.3981999507e-3f;
    poly = poly * rest + 8.3334519073e-3f;
    poly = poly * rest + 4.1665795894e-2f;
    poly = poly * rest + 1.6666665459e-1f;
    poly = poly * rest + 5.0000001201e-1f;
    poly = poly * rest * rest + rest + 1.0f;
    const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return x < -87.0f ? 0.0f : poly * power;
}

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

}  // namespace rootstock
