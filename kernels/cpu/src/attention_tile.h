// A tile of queries of one row and key/value head, which walks over the keys in blocks of 64. head_dim and value_dim are multiples
// of 32. Weights are rounded to bfloat16.
#pragma once

#include <limits>

#include "attention.h"
#include "tile_bf16.h"

#if ROOTSTOCK_DOT_BF16

namespace rootstock {

constexpr int64_t kKeys = kTileCols;  // keys per block; blocks begin at multiples of kKeys
constexpr int64_t kTileQueries = 96;  // largest number of queries (tokens x heads of a group) of a tile
constexpr int64_t kPlaces = 2 * kKeys + 1;
constexpr int64_t kParts = 4;         // parts of a dot product: part i sums pairs i, i + 4, ...; then the parts are added in order
constexpr int64_t kFewQueries = 9;    // smallest number of queries for which packing keys and values pays
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Tile {
    const Attention<bf16>& job;
    int64_t row, kv_head, first_token, start, queries, wide;  // `wide` is value_dim rounded up to a multiple of 64
    bf16 *q, *k, *v, *p;           // queries; packed keys, packed values and weights of a block
    float *s, *o, *peak, *total;   // scores of a block; per query: sums of weighted values, largest score, sum of weights

    int64_t position(int64_t query) const { return start + query / job.group(); }
    int64_t head(int64_t query) const { return kv_head * job.group() + query % job.group(); }
    const bf16* key(int64_t pool_index) const { return job.keys + pool_index * job.head_dim; }
    const bf16* value(int64_t pool_index) const { return job.values + pool_index * job.value_dim; }
    bool few() const { return queries < kFewQueries; }
};

// The keys and values of consecutive positions in the pools: first those of a block, then those of the next block, which are
// prefetched. The rest repeats the last position.
struct Places {
    const bf16* keys[kPlaces];
    const bf16* values[kPlaces];
};

// score_few and mix_few compute the same bits as make_scores_by_parts and mix_values of attention_tile.cpp, for fewer than kFewQueries
// queries. They read keys and values from the pools and reorder them in registers. `count` is the number of the block's keys.
void score_few(const Tile& tile, const Places& places, int64_t count);
void mix_few(const Tile& tile, const Places& places, int64_t count);

// Computes the attention of `count` tokens of a row from `first` on, with an online softmax. `count` is at most
// max(1, kTileQueries / group).
void attend_tile(const Attention<bf16>& job, int64_t row, int64_t first, int64_t count, int64_t kv_head);

}  // namespace rootstock
#endif
