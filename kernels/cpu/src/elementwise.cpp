// Norms, gates, and the rotary embedding with the write to the paged pool. Memory limits their speed; the loops are
// plain.

#include <algorithm>
#include <vector>

#include "numeric.h"

namespace rootstock {
namespace {

constexpr int64_t kParallelElements = 1 << 14;  // up to this number of elements, a parallel region costs more than it saves

template <typename T> float inverse_rms(const T* x, int64_t size, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) {
        const float value = widen(x[i]);
        sum += value * value;
    }
    return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

template <typename T> void scale_row(T* out, const T* x, const float* weight, int64_t size, float scale) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = narrow<T>(widen(x[i]) * scale * weight[i]);
}

template <typename T>
void rms_norm(T* out, const T* x, T* residual, const float* weight, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1 && rows * size > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const T* source = x + row * size;
        if (residual != nullptr) {
            T* sum = residual + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) sum[i] = narrow<T>(widen(sum[i]) + widen(source[i]));
            source = sum;
        }
        scale_row(out + row * size, source, weight, size, inverse_rms(source, size, eps));
    }
}

// gelu(x) with the approximation of its integral by tanh. 0.5 (1 + tanh(u)) is 1 / (1 + exp(-2 u)).
inline float gelu_tanh(float x) { return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x))); }

template <float (*ACTIVATION)(float), typename T>
void activate_and_mul(T* out, const T* x, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1 && rows * size > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = x + row * 2 * size;
        const T* up = gate + size;
        T* target = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) target[i] = narrow<T>(ACTIVATION(widen(gate[i])) * widen(up[i]));
    }
}

// `gate` is [rows, size], or [rows] if it has one factor for each whole row.
template <typename T> void sigmoid_mul(T* x, const T* gate, int64_t rows, int64_t size, bool whole_rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1 && rows * size > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        T* target = x + row * size;
        if (whole_rows) {
            const float divisor = 1.0f + exponential(-widen(gate[row]));
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) target[i] = narrow<T>(widen(target[i]) / divisor);
            continue;
        }
        const T* gates = gate + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) target[i] = narrow<T>(widen(target[i]) / (1.0f + exponential(-widen(gates[i]))));
    }
}

struct RopeShape {
    int64_t heads, kv_heads, head_dim, page_size;
    float eps;
};

// Rotates the two halves of one head, after its norm if NORMED. `to` may equal `from`.
template <bool NORMED, typename T>
void rotate(T* to, const T* from, const float* norm, const float* cos_sin, int64_t dim, float eps) {
    const int64_t half = dim / 2;
    const float scale = NORMED ? inverse_rms(from, dim, eps) : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float low = NORMED ? widen(from[i]) * scale * norm[i] : widen(from[i]);
        const float high = NORMED ? widen(from[half + i]) * scale * norm[half + i] : widen(from[half + i]);
        to[i] = narrow<T>(low * cos_sin[i] - high * cos_sin[half + i]);
        to[half + i] = narrow<T>(high * cos_sin[i] + low * cos_sin[half + i]);
    }
}

template <typename T> void rotate(T* to, const T* from, const float* norm, const float* cos_sin, int64_t dim, float eps) {
    if (norm != nullptr) {
        rotate<true>(to, from, norm, cos_sin, dim, eps);
    } else {
        rotate<false>(to, from, norm, cos_sin, dim, eps);
    }
}

template <typename T>
void rope_token(T* token, const float* q_norm, const float* k_norm, const float* cos_sin, int64_t location, T* keys, T* values,
                const RopeShape& shape) {
    const int64_t dim = shape.head_dim;
    for (int64_t head = 0; head < shape.heads; ++head) {
        rotate(token + head * dim, token + head * dim, q_norm, cos_sin, dim, shape.eps);
    }
    if (location < 0) return;
    const int64_t page = location / shape.page_size, offset = location % shape.page_size;
    const T* k = token + shape.heads * dim;
    const T* v = k + shape.kv_heads * dim;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
        const int64_t target = ((page * shape.kv_heads + head) * shape.page_size + offset) * dim;
        rotate(keys + target, k + head * dim, k_norm, cos_sin, dim, shape.eps);
        std::memcpy(values + target, v + head * dim, dim * sizeof(T));
    }
}

template <typename T>
void rope_write_kv(T* qkv, const float* q_norm, const float* k_norm, const float* cos_sin, const int32_t* positions,
                   const int64_t* locations, T* keys, T* values, int64_t tokens, const RopeShape& shape, int threads) {
    const int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1 && tokens * width > kParallelElements)
    for (int64_t t = 0; t < tokens; ++t) {
        const float* angles = cos_sin + positions[t] * shape.head_dim;
        rope_token(qkv + t * width, q_norm, k_norm, angles, locations[t], keys, values, shape);
    }
}

}  // namespace
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

// `bfloat16` is 1 if the tensors in the model dtype are bfloat16, 0 if they are float32. `residual` may be null.
void rootstock_rms_norm(void* out, const void* x, void* residual, const float* weight, int64_t rows, int64_t size, float eps,
                        int bfloat16, int threads) {
    if (bfloat16) {
        rootstock::rms_norm(static_cast<bf16*>(out), static_cast<const bf16*>(x), static_cast<bf16*>(residual), weight,
                            rows, size, eps, threads);
    } else {
        rootstock::rms_norm(static_cast<float*>(out), static_cast<const float*>(x), static_cast<float*>(residual), weight,
                            rows, size, eps, threads);
    }
}

void rootstock_silu_and_mul(void* out, const void* x, int64_t rows, int64_t size, int bfloat16, int threads) {
    using namespace rootstock;
    if (bfloat16) {
        activate_and_mul<silu>(static_cast<bf16*>(out), static_cast<const bf16*>(x), rows, size, threads);
    } else {
        activate_and_mul<silu>(static_cast<float*>(out), static_cast<const float*>(x), rows, size, threads);
    }
}

void rootstock_gelu_and_mul(void* out, const void* x, int64_t rows, int64_t size, int bfloat16, int threads) {
    using namespace rootstock;
    if (bfloat16) {
        activate_and_mul<gelu_tanh>(static_cast<bf16*>(out), static_cast<const bf16*>(x), rows, size, threads);
    } else {
        activate_and_mul<gelu_tanh>(static_cast<float*>(out), static_cast<const float*>(x), rows, size, threads);
    }
}

void rootstock_sigmoid_mul(void* x, const void* gate, int64_t rows, int64_t size, int whole_rows, int bfloat16, int threads) {
    if (bfloat16) {
        rootstock::sigmoid_mul(static_cast<bf16*>(x), static_cast<const bf16*>(gate), rows, size, whole_rows != 0, threads);
    } else {
        rootstock::sigmoid_mul(static_cast<float*>(x), static_cast<const float*>(gate), rows, size, whole_rows != 0, threads);
    }
}

void rootstock_rope_write_kv(void* qkv, const float* q_norm, const float* k_norm, const float* cos_sin, const int32_t* positions,
                             const int64_t* locations, void* keys, void* values, int64_t tokens, int64_t heads,
                             int64_t kv_heads, int64_t head_dim, int64_t page_size, float eps, int bfloat16, int threads) {
    const rootstock::RopeShape shape{heads, kv_heads, head_dim, page_size, eps};
    if (bfloat16) {
        rootstock::rope_write_kv(static_cast<bf16*>(qkv), q_norm, k_norm, cos_sin, positions, locations, static_cast<bf16*>(keys),
                                 static_cast<bf16*>(values), tokens, shape, threads);
    } else {
        rootstock::rope_write_kv(static_cast<float*>(qkv), q_norm, k_norm, cos_sin, positions, locations,
                                 static_cast<float*>(keys), static_cast<float*>(values), tokens, shape, threads);
    }
}

}  // extern "C"
