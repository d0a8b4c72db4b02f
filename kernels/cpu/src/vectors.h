// Vectors of float32 of the CPU's width: loads from float32 and bfloat16, sums over lanes in a fixed order, and the number of vectors
// that fit the registers.
#pragma once

#include <utility>

#include "numeric.h"

namespace rootstock {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kWidth = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kWidth = 4, kRegisters = 32;
#else
constexpr int kWidth = 4, kRegisters = 16;
#endif
typedef float Vector __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

inline Vector load(const float* source) { return *reinterpret_cast<const Vector*>(source); }

inline Vector load(const bf16* source) {
    typedef uint16_t Narrow __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));
    typedef uint32_t Wide __attribute__((vector_size(4 * kWidth)));
    return (Vector)(__builtin_convertvector(*reinterpret_cast<const Narrow*>(source), Wide) << 16);
}

inline void store(float* target, Vector values) { *reinterpret_cast<Vector*>(target) = values; }

// Returns e^x of each lane, as numeric.h does.
inline Vector exponential(Vector x) {
    typedef int32_t Whole __attribute__((vector_size(4 * kWidth)));
    const Vector low = Vector{} - 87.0f, high = Vector{} + 88.0f;
    const Vector clamped = x < low ? low : (x > high ? high : x);
    const Vector scaled = clamped * 1.44269504089f + 0.5f;
    Whole whole = __builtin_convertvector(scaled, Whole);
    whole += __builtin_convertvector(whole, Vector) > scaled;  // a comparison is -1 where it holds
    const Vector exponent = __builtin_convertvector(whole, Vector);
    const Vector rest = (clamped - exponent * 0.693359375f) + exponent * 2.12194440e-4f;
    Vector poly = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    poly = poly * rest + 8.3334519073e-3f;
    poly = poly * rest + 4.1665795894e-2f;
    poly = poly * rest + 1.6666665459e-1f;
    poly = poly * rest + 5.0000001201e-1f;
    poly = poly * rest * rest + rest + 1.0f;
    return x < low ? Vector{} : poly * (Vector)((whole + 127) << 23);
}

inline Vector silu(Vector x) { return x / (exponential(-x) + 1.0f); }

// Returns the number of vectors per row of a tile for which all sums, a vector of columns and a broadcast element fit the registers.
// The result is a power of two and at most `most`.
constexpr int vectors_of(int rows, int most) {
    while (rows * most + 2 > kRegisters) most /= 2;
    return most;
}

#if defined(__clang__)
template <size_t... I> Vector with_neighbour(Vector a, Vector b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}
#else
template <size_t... I> Vector with_neighbour(Vector a, Vector b, std::index_sequence<I...>) {
    typedef int32_t Indices __attribute__((vector_size(4 * kWidth)));
    return __builtin_shuffle(a, b, Indices{(2 * I)...}) + __builtin_shuffle(a, b, Indices{(2 * I + 1)...});
}
#endif

// Returns a vector whose lane i is the sum of the lanes of v[i], neighbours first. Overwrites v.
inline Vector sum_each(Vector (&v)[kWidth]) {
#pragma GCC unroll 8
    for (int count = kWidth / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) v[i] = with_neighbour(v[2 * i], v[2 * i + 1], std::make_index_sequence<kWidth>());
    }
    return v[0];
}

}  // namespace rootstock
