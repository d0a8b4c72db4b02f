// A tile of queries of one row and key/value head on its walk over the keys, a block of 64 at a time. head_dim is 64, 96, 128 or
// 256; weights are rounded to bfloat16.
#pragma once

#include <limits>

#include "attention.h"
#include "tile_bf16.h"

#if ROOTSTOCK_DOT_BF16

namespace rootstock {

constexpr int64_t kKeys = kTileCols;  // of a block; blocks begin at multiples of it
constexpr int64_t kTileQueries = 96;  // queries (tokens x heads of a group) of one tile
constexpr int64_t kPlaces = 2 * kKeys + 1;
constexpr int64_t kParts = 4;         // of a dot product: every fourth pair, one after the other; then the parts, in turn
constexpr int64_t kFewQueries = 8;    // from which packing a block's keys and values pays
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Tile {
    const Attention<bf16>& job;
    int64_t row, kv_head, first_token, start, queries, wide;  // wide: head_dim rounded up to 64
    bf16 *q, *k, *v, *p;
    float *s, *o, *peak, *total;

    int64_t position(int64_t query) const { return start + query / job.group(); }
    bool few() const { return queries < kFewQueries; }
};

// As make_scores_by_parts and mix_values of attention_tile.cpp for less than kFewQueries queries, to the last bit: keys and values
// are read as they lie, and brought into order in registers. count: of the block's keys. places: kPlaces of them, in elements of
// the pools: also of the next block, which is fetched meanwhile, and the last one's again behind the end.
void score_few(const Tile& tile, const int64_t* places, int64_t count);
void mix_few(const Tile& tile, const int64_t* places, int64_t count);

// `count` tokens of a row from `first` on, at most kTileQueries / group or 1: the softmax is kept running.
void attend_tile(const Attention<bf16>& job, int64_t row, int64_t first, int64_t count, int64_t kv_head);

}  // namespace rootstock
#endif
