// Products of one tile: a few query rows against the keys and values of up to 128 tokens.
//
// Every row is computed by itself, in the same order whatever other rows share the tile. So a row's
// bits depend on its own keys alone, and decodes and chunks of any size agree.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "simd.h"

namespace headrace {

constexpr int64_t kMaxUnits = kTileKeys / kLanes;

// The keys and values of a tile, as units of 16 or 32 tokens that lie together.
struct KeyTile {
  const uint32_t* keys[kMaxUnits];    // each [head_dim / W, key_stride] words, see kv_layout.h
  const uint32_t* values[kMaxUnits];  // each [unit / W, head_dim] words
  int64_t unit = kLanes;              // tokens in a unit, 16 or 32
  int64_t key_stride = 0;             // words from one row of keys to the next
  int64_t num_keys = 0;               // in the whole tile, up to 128; the last unit may be cut

  int64_t num_units() const { return (num_keys + unit - 1) / unit; }
};

// scores[r][16 n + lane] = query row r . key; R rows and N vectors of keys stay in registers.
template <class T, int R, int N>
inline void score_rows(const uint32_t* query, int64_t num_words, const uint32_t* keys,
                       int64_t key_stride, float* scores) {
  Floats16 sums[R][N] = {};
  for (int64_t w = 0; w < num_words; ++w) {
    Words16 column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = load16<Words16>(keys + w * key_stride + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        sums[r][n] = accumulate<T>(sums[r][n], query[r * num_words + w], column[n]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store16(scores + r * kTileKeys + n * kLanes, sums[r][n]);
}

// sums[r][16 n + lane] = sums * decay[r] + weights of row r . values, over all keys of the tile.
template <class T, int R, int N>
inline void weigh_rows(const uint32_t* weights, const KeyTile& tile, int64_t column,
                       int64_t head_dim, const float* decay, float* sums, int64_t sum_stride) {
  constexpr int64_t W = kPerWord<T>;
  Floats16 totals[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      totals[r][n] = load16<Floats16>(sums + r * sum_stride + column + n * kLanes) * decay[r];
  for (int64_t u = 0; u < tile.num_units(); ++u) {
    const int64_t num_keys = std::min(tile.unit, tile.num_keys - u * tile.unit);
    const uint32_t* values = tile.values[u] + column;
    const uint32_t* words = weights + u * tile.unit / W;
    for (int64_t w = 0; w < (num_keys + W - 1) / W; ++w) {
      // The token after the last one may have left anything here, and 0 * NaN is NaN.
      const uint32_t mask = (w + 1) * W > num_keys ? 0xffffu : 0xffffffffu;
      Words16 row[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        row[n] = load16<Words16>(values + w * head_dim + n * kLanes) & mask;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
          totals[r][n] = accumulate<T>(totals[r][n], words[r * (kTileKeys / W) + w], row[n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      store16(sums + r * sum_stride + column + n * kLanes, totals[r][n]);
}

// Calls f with the number of rows as a constant, for up to Most rows.
template <int Most, class F>
inline void with_constant(int64_t count, const F& f) {
  if constexpr (Most > 1) {
    if (count < Most) return with_constant<Most - 1>(count, f);
  }
  f(std::integral_constant<int, Most>{});
}

// All scores of a tile: [num_rows, 128] float32, of queries [num_rows, num_words].
template <class T>
void score_tile(const uint32_t* query, int64_t num_rows, int64_t num_words, const KeyTile& tile,
                float* scores) {
  for (int64_t u = 0; u < tile.num_units(); ++u)
    for (int64_t r = 0; r < num_rows; r += 8)
      with_constant<8>(std::min<int64_t>(8, num_rows - r), [&](auto rows) {
        const uint32_t* from = query + r * num_words;
        float* to = scores + r * kTileKeys + u * tile.unit;
        if (tile.unit == 2 * kLanes)
          score_rows<T, rows, 2>(from, num_words, tile.keys[u], tile.key_stride, to);
        else
          score_rows<T, rows, 1>(from, num_words, tile.keys[u], tile.key_stride, to);
      });
}

// Adds a tile's weighted values to sums [num_rows, sum_stride], which first shrink by decay.
template <class T>
void weigh_tile(const uint32_t* weights, int64_t num_rows, int64_t head_dim, const KeyTile& tile,
                const float* decay, float* sums, int64_t sum_stride) {
  const int64_t num_vectors = sum_stride / kLanes;
  for (int64_t v = 0; v < num_vectors; v += 4)
    for (int64_t r = 0; r < num_rows; r += 4)
      with_constant<4>(std::min<int64_t>(4, num_rows - r), [&](auto rows) {
        with_constant<4>(std::min<int64_t>(4, num_vectors - v), [&](auto vectors) {
          weigh_rows<T, rows, vectors>(weights + r * (kTileKeys / kPerWord<T>), tile, v * kLanes,
                                       head_dim, decay + r, sums + r * sum_stride, sum_stride);
        });
      });
}

}  // namespace headrace
