// Implements gated_delta_rule and gated_rms_norm (kernels/contracts/ops.py): Gated DeltaNet, one token after the other.
//
// A call has two phases. The first one replaces qkv by the causal convolution; a piece of work is a block of channels of a row. The
// second one advances the recurrent state; a piece of work is a block of columns of a row's head. The columns of a state do not
// depend on each other, so a block of them stays in the cache for all tokens of its row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "numeric.h"
#include "schedule.h"
#include "vectors.h"

namespace rootstock {
namespace {

constexpr int64_t kChannels = 64;   // channels per piece of the convolution
constexpr int64_t kTile = 16;       // tokens whose keys and queries are prepared together
constexpr int kVectors = 4;         // vectors of a block of columns
constexpr float kNormEps = 1e-6f;   // epsilon of the norm of keys and queries
constexpr int64_t kMostTaps = 8;    // largest width of the convolution

struct Shape {
    int64_t tokens, rows, key_heads, value_heads, key_dim, value_dim, taps;

    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// One row of a step, and the units of the pools that it reads and writes. A unit below 0 is not read or written.
struct Row {
    int64_t first, count;     // index of the row's first token in the batch, and number of tokens
    int64_t before, after;    // units of the state before the first token and after the last token
    int64_t cut, at_cut;      // number of tokens after which the state is also stored, and the unit that gets it
};

struct Columns {
    const int32_t *offsets, *num_tokens, *before, *after, *cuts, *at_cut;

    Row row(int64_t index) const {
        return {offsets[index], num_tokens[index], before[index], after[index], cuts[index], at_cut[index]};
    }
};

template <typename T> void read_channels(float (&to)[kChannels], const T* from, int64_t width) {
    if (width == kChannels) {
#pragma omp simd
        for (int64_t c = 0; c < kChannels; ++c) to[c] = widen(from[c]);
    } else {
        for (int64_t c = 0; c < kChannels; ++c) to[c] = c < width ? widen(from[c]) : 0.0f;
    }
}

template <typename T> void write_channels(T* to, const float (&from)[kChannels], int64_t width) {
    if (width == kChannels) {
#pragma omp simd
        for (int64_t c = 0; c < kChannels; ++c) to[c] = narrow<T>(from[c]);
    } else {
        for (int64_t c = 0; c < width; ++c) to[c] = narrow<T>(from[c]);
    }
}

// The convolution of one block of channels over the tokens of a row. The ring `past` has the inputs of the last `taps`
// tokens: past[t % taps] is the input of token t, counted from the oldest input before the row.
template <typename T>
void convolve(T* qkv, const T* weight, T* pool, const Row& row, const Shape& shape, int64_t channel, int64_t width) {
    const int64_t channels = shape.channels(), taps = shape.taps, kept = taps - 1;
    float past[kMostTaps][kChannels] = {}, factors[kMostTaps][kChannels] = {}, sum[kChannels];
    for (int64_t tap = 0; tap < taps; ++tap) {
        for (int64_t c = 0; c < width; ++c) factors[tap][c] = widen(weight[(channel + c) * taps + tap]);
    }
    for (int64_t i = 0; i < kept && row.before >= 0; ++i) {
        read_channels(past[i], pool + (row.before * kept + i) * channels + channel, width);
    }
    const auto store_past = [&](int64_t unit, int64_t count) {
        for (int64_t i = 0; i < kept; ++i) {
            write_channels(pool + (unit * kept + i) * channels + channel, past[(count + i) % taps], width);
        }
    };
    for (int64_t t = 0; t < row.count; ++t) {
        T* x = qkv + (row.first + t) * channels + channel;
        read_channels(past[(t + kept) % taps], x, width);
        for (int64_t c = 0; c < kChannels; c += kWidth) {
            Vector total{};
            for (int64_t tap = 0; tap < taps; ++tap) total += load(past[(t + tap) % taps] + c) * load(factors[tap] + c);
            store(sum + c, silu(total));
        }
        write_channels(x, sum, width);
        if (t + 1 == row.cut && row.at_cut >= 0) store_past(row.at_cut, t + 1);
    }
    if (row.after >= 0) store_past(row.after, row.count);
}

// Keys, queries and gates of a head for a few tokens, and the key and query of the token after them.
struct Tile {
    std::unique_ptr<float[]> keys, queries;  // [tokens, key_dim] each, normed
    float products[kTile];                   // key times query
    float decays[kTile], betas[kTile];

    Tile(int64_t tokens, int64_t key_dim)
        : keys(std::make_unique_for_overwrite<float[]>(tokens * key_dim)),
          queries(std::make_unique_for_overwrite<float[]>(tokens * key_dim)) {}
};

template <typename T> float inverse_length(const T* x, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
    return 1.0f / std::sqrt(sum + kNormEps);
}

// Fills the tile with the tokens [first, first + count) of the batch. If `next`, also adds the key and query of the token after
// these.
template <typename T>
void prepare(Tile& tile, const T* qkv, const T* gates, const float* rates, const float* biases, int64_t first, int64_t count,
             bool next, int64_t head, const Shape& shape) {
    const int64_t dim = shape.key_dim, channels = shape.channels();
    const int64_t key_head = head / (shape.value_heads / shape.key_heads);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int64_t t = 0; t < count + next; ++t) {
        const T* query = qkv + (first + t) * channels + key_head * dim;
        const T* key = query + shape.key_heads * dim;
        const float by_query = inverse_length(query, dim) * scale, by_key = inverse_length(key, dim);
        float *queries = tile.queries.get() + t * dim, *keys = tile.keys.get() + t * dim;
        float product = 0.0f;
#pragma omp simd reduction(+ : product)
        for (int64_t i = 0; i < dim; ++i) {
            queries[i] = widen(query[i]) * by_query;
            keys[i] = widen(key[i]) * by_key;
            product += queries[i] * keys[i];
        }
        if (t == count) break;
        const T* gate = gates + (first + t) * 2 * shape.value_heads + head;
        const float x = widen(gate[shape.value_heads]) + biases[head];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        tile.products[t] = product;
        tile.betas[t] = 1.0f / (1.0f + std::exp(-widen(gate[0])));
        tile.decays[t] = std::exp(-rates[head] * softplus);
    }
}

// Applies one token's update to a block of columns, and multiplies the result by the next token's key and query. Every sum over the
// key dimension is made here, so that its bits do not depend on the way in which a row is cut.
template <int V>
__attribute__((noinline)) void advance(float* state, int64_t dim, float decay, const float* key, const Vector (&delta)[V],
                                       const float* next_key, const float* next_query, float* by_key,
                                       float* by_query) {
    Vector keyed[V] = {}, queried[V] = {};
    for (int64_t i = 0; i < dim; ++i) {
        float* columns = state + i * V * kWidth;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const Vector value = load(columns + v * kWidth) * decay + delta[v] * key[i];
            store(columns + v * kWidth, value);
            keyed[v] += value * next_key[i];
            queried[v] += value * next_query[i];
        }
    }
    for (int v = 0; v < V; ++v) {
        store(by_key + v * kWidth, keyed[v]);
        store(by_query + v * kWidth, queried[v]);
    }
}

// The state of some columns of a head while the tokens of a row pass. A block has V vectors of columns.
template <int V> struct Blocks {
    static constexpr int64_t kWide = V * kWidth;
    int64_t dim, first, width, count;          // key size; first column, number of columns, number of blocks
    std::unique_ptr<float[]> state;            // [count, dim, kWide]
    std::unique_ptr<float[]> by_key, by_query;  // [count, kWide], the state times the next token's key and query

    Blocks(int64_t dim, int64_t first, int64_t width)
        : dim(dim), first(first), width(width), count((width + kWide - 1) / kWide),
          state(std::make_unique_for_overwrite<float[]>(count * dim * kWide)),
          by_key(std::make_unique_for_overwrite<float[]>(count * kWide)),
          by_query(std::make_unique_for_overwrite<float[]>(count * kWide)) {}

    int64_t width_of(int64_t block) const { return std::min(kWide, width - block * kWide); }

    // Copies between the blocks and a state [dim, stride]. A null source is a state of zeros.
    void read(const float* source, int64_t stride) {
        for (int64_t block = 0; block < count; ++block) {
            for (int64_t i = 0; i < dim; ++i) {
                float* target = state.get() + (block * dim + i) * kWide;
                const int64_t size = source == nullptr ? 0 : width_of(block);
                if (size) std::memcpy(target, source + i * stride + first + block * kWide, size * sizeof(float));
                if (size < kWide) std::memset(target + size, 0, (kWide - size) * sizeof(float));
            }
        }
    }

    void write(float* target, int64_t stride) const {
        for (int64_t block = 0; block < count; ++block) {
            for (int64_t i = 0; i < dim; ++i) {
                const float* source = state.get() + (block * dim + i) * kWide;
                std::memcpy(target + i * stride + first + block * kWide, source, width_of(block) * sizeof(float));
            }
        }
    }

    // Advances one block, see advance().
    void advance_block(int64_t block, float decay, const float* key, const Vector (&delta)[V], const float* next_key,
                       const float* next_query) {
        advance<V>(state.get() + block * dim * kWide, dim, decay, key, delta, next_key, next_query, by_key.get() + block * kWide,
                   by_query.get() + block * kWide);
    }
};

// Runs the columns of a head over the tokens of a row.
template <int V, typename T>
void run(T* out, const T* qkv, const T* gates, const float* rates, const float* biases, float* pool, const Row& row, int64_t head,
         int64_t first_column, int64_t width, const Shape& shape) {
    using B = Blocks<V>;
    const int64_t dim = shape.key_dim, channels = shape.channels();
    const auto place = [&](int64_t unit) { return pool + (unit * shape.value_heads + head) * dim * shape.value_dim; };
    B blocks(dim, first_column, width);
    blocks.read(row.before >= 0 ? place(row.before) : nullptr, shape.value_dim);
    const std::vector<float> none(dim);
    Tile tile(std::min(kTile, row.count) + 1, dim);
    const Vector unchanged[V] = {};
    for (int64_t begin = 0, count; begin < row.count; begin += count) {
        const int64_t rest = row.count - begin;
        // a tile ends where the state is stored
        const int64_t to_cut = row.at_cut >= 0 && row.cut > begin ? row.cut - begin : rest;
        count = std::min({kTile, rest, to_cut});
        const bool next = count < rest;
        prepare(tile, qkv, gates, rates, biases, row.first + begin, count, next, head, shape);
        for (int64_t block = 0; block < blocks.count; ++block) {
            const int64_t column = first_column + block * B::kWide, size = blocks.width_of(block);
            if (begin == 0) blocks.advance_block(block, 1.0f, none.data(), unchanged, tile.keys.get(), tile.queries.get());
            for (int64_t t = 0; t < count; ++t) {
                const int64_t token = row.first + begin + t;
                const T* values = qkv + token * channels + 2 * shape.key_heads * dim + head * shape.value_dim + column;
                T* target = out + (token * shape.value_heads + head) * shape.value_dim + column;
                float lanes[B::kWide] = {}, results[B::kWide];
                for (int64_t c = 0; c < size; ++c) lanes[c] = widen(values[c]);
                Vector delta[V];
                for (int v = 0; v < V; ++v) {
                    const int64_t at = block * B::kWide + v * kWidth;
                    const Vector keyed = load(blocks.by_key.get() + at) * tile.decays[t];
                    const Vector queried = load(blocks.by_query.get() + at) * tile.decays[t];
                    delta[v] = (load(lanes + v * kWidth) - keyed) * tile.betas[t];
                    store(results + v * kWidth, queried + delta[v] * tile.products[t]);
                }
                for (int64_t c = 0; c < size; ++c) target[c] = narrow<T>(results[c]);
                const bool last = t + 1 == count && !next;
                const float* key = last ? none.data() : tile.keys.get() + (t + 1) * dim;
                const float* query = last ? none.data() : tile.queries.get() + (t + 1) * dim;
                blocks.advance_block(block, tile.decays[t], tile.keys.get() + t * dim, delta, key, query);
            }
        }
        if (begin + count == row.cut && row.at_cut >= 0) blocks.write(place(row.at_cut), shape.value_dim);
    }
    if (row.after >= 0) blocks.write(place(row.after), shape.value_dim);
}

template <typename T>
void gated_delta_rule(T* out, T* qkv, const T* gates, const T* weight, const float* rates, const float* biases, T* conv_pool,
                      float* state_pool, const Columns& columns, const Shape& shape, int threads) {
    const int64_t blocks = (shape.channels() + kChannels - 1) / kChannels;
    for_each_piece(shape.rows * blocks, threads, [&](int64_t piece, int64_t) {
        const int64_t channel = piece % blocks * kChannels;
        const int64_t width = std::min(kChannels, shape.channels() - channel);
        convolve(qkv, weight, conv_pool, columns.row(piece / blocks), shape, channel, width);
    });
    // A head is one piece, unless the heads are too few for the threads.
    const int64_t wide = kVectors * kWidth, most = (shape.value_dim + wide - 1) / wide, heads = shape.rows * shape.value_heads;
    const int64_t pieces = std::clamp<int64_t>((2 * threads + heads - 1) / std::max<int64_t>(heads, 1), 1, most);
    const int64_t columns_each = (most + pieces - 1) / pieces * wide;
    for_each_piece(heads * pieces, threads, [&](int64_t piece, int64_t) {
        const int64_t head = piece / pieces % shape.value_heads, column = piece % pieces * columns_each;
        const int64_t width = std::min(columns_each, shape.value_dim - column);
        if (width <= 0) return;
        run<kVectors>(out, qkv, gates, rates, biases, state_pool, columns.row(piece / pieces / shape.value_heads), head, column,
                      width, shape);
    });
}

template <typename T>
void gated_rms_norm(T* out, const T* x, const T* gate, const float* weight, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > (1 << 14))
    for (int64_t row = 0; row < rows; ++row) {
        const T *from = x + row * size, *gates = gate + row * size;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; ++i) sum += widen(from[i]) * widen(from[i]);
        const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) to[i] = narrow<T>(widen(from[i]) * scale * weight[i] * silu(widen(gates[i])));
    }
}

}  // namespace
}  // namespace rootstock

using rootstock::bf16;

extern "C" {

// `bfloat16` is 1 if the tensors in the model dtype are bfloat16, 0 if they are float32.
void rootstock_gated_delta_rule(void* out, void* qkv, const void* gates, const void* weight, const float* rates,
                                const float* biases, void* conv_pool, float* state_pool, const int32_t* offsets,
                                const int32_t* num_tokens, const int32_t* before, const int32_t* after, const int32_t* cuts,
                                const int32_t* at_cut, int64_t tokens, int64_t rows, int64_t key_heads, int64_t value_heads,
                                int64_t key_dim, int64_t value_dim, int64_t taps, int bfloat16, int threads) {
    const rootstock::Columns columns{offsets, num_tokens, before, after, cuts, at_cut};
    const rootstock::Shape shape{tokens, rows, key_heads, value_heads, key_dim, value_dim, taps};
    if (bfloat16) {
        rootstock::gated_delta_rule(static_cast<bf16*>(out), static_cast<bf16*>(qkv), static_cast<const bf16*>(gates),
                                    static_cast<const bf16*>(weight), rates, biases, static_cast<bf16*>(conv_pool), state_pool,
                                    columns, shape, threads);
    } else {
        rootstock::gated_delta_rule(static_cast<float*>(out), static_cast<float*>(qkv), static_cast<const float*>(gates),
                                    static_cast<const float*>(weight), rates, biases, static_cast<float*>(conv_pool), state_pool,
                                    columns, shape, threads);
    }
}

void rootstock_gated_rms_norm(void* out, const void* x, const void* gate, const float* weight, int64_t rows, int64_t size,
                              float eps, int bfloat16, int threads) {
    if (bfloat16) {
        rootstock::gated_rms_norm(static_cast<bf16*>(out), static_cast<const bf16*>(x), static_cast<const bf16*>(gate),
                                  weight, rows, size, eps, threads);
    } else {
        rootstock::gated_rms_norm(static_cast<float*>(out), static_cast<const float*>(x), static_cast<const float*>(gate),
                                  weight, rows, size, eps, threads);
    }
}

}  // extern "C"
