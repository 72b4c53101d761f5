// Online softmax (Milakov and Gimelshein, 2018): sums over keys that arrive tile by tile.
#pragma once

#include <limits>

#include "attention_tile.h"

namespace headrace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// How scores become weights, in one layer.
struct Scoring {
  float scale;     // multiplies the products; above 0
  float soft_cap;  // bound of the scores; 0: none
  int64_t window;  // keys that a token sees, itself counted

  int64_t first_visible(int64_t position) const { return std::max<int64_t>(0, position + 1 - window); }
};

// What one query row has summed up so far; weights are relative to 2^top.
struct RowSums {
  float top = kNever;  // largest score, times log2(e)
  float total = 0;     // of the weights
};

// Where scores may be counted: keys [first, end) of a tile.
struct Visible {
  int64_t first;
  int64_t end;
};

inline Floats16 masked(Floats16 scores, int64_t first_lane, const Visible& visible) {
  if (visible.first <= first_lane && first_lane + kLanes <= visible.end) return scores;
  constexpr Ints16 kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Ints16 key = kLane + static_cast<int32_t>(first_lane);
  const Ints16 is_visible = (key >= static_cast<int32_t>(visible.first)) &
                            (key < static_cast<int32_t>(visible.end));
  return is_visible ? scores : spread(kNever);
}

// What takes products to scores in units of log2(e), so that weights are powers of two.
inline float factor_of(const Scoring& scoring) {
  constexpr float kLog2E = 1.44269504f;
  return kLog2E * (scoring.soft_cap == 0 ? scoring.scale : scoring.soft_cap);
}

inline void bend(float* products, int64_t num_keys, const Scoring& scoring) {
  for (int64_t k = 0; k < num_keys; k += kLanes)
    store16(products + k, tanh(load16<Floats16>(products + k) * (scoring.scale / scoring.soft_cap)));
}

inline void hide(float* products, int64_t num_keys, const Visible& visible) {
  if (visible.first <= 0 && num_keys <= visible.end) return;
  for (int64_t k = 0; k < num_keys; k += kLanes)
    store16(products + k, masked(load16<Floats16>(products + k), k, visible));
}

inline float largest(const float* products, int64_t num_keys) {
  Floats16 top = spread(kNever);
  for (int64_t k = 0; k < num_keys; k += kLanes) top = larger(top, load16<Floats16>(products + k));
  return largest_of(top);
}

// Turns a row's products with `num_keys` keys into weights, and returns what earlier sums shrink by.
//
// Keys out of sight get the weight 0, and a tile of only such keys leaves every bit as it was.
template <class T>
float weigh_keys(float* products, int64_t num_keys, const Visible& visible, const Scoring& scoring,
                 RowSums& row, T* weights) {
  if (scoring.soft_cap != 0) bend(products, num_keys, scoring);
  hide(products, num_keys, visible);
  const float factor = factor_of(scoring);
  const float top = std::max(row.top, largest(products, num_keys) * factor);
  const float base = top == kNever ? 0 : top;  // infinity less infinity is NaN
  Floats16 total = {};
  for (int64_t k = 0; k < num_keys; k += kLanes) {
    const Floats16 product = load16<Floats16>(products + k);
    const Floats16 weight = exp2(multiply_add(product, spread(factor), spread(-base)));
    total += weight;
    store_as(weights + k, weight);
  }
  const float decay = exp2(spread(row.top - base))[0];
  row = {top, row.total * decay + sum_of(total)};
  return decay;
}

inline void shrink(float* values, int64_t size, float factor) {
  if (factor == 1) return;
  for (int64_t i = 0; i < size; i += kLanes) store16(values + i, load16<Floats16>(values + i) * factor);
}

// Adds the sums of another part of the context: `values` and `other_values` have `size` floats.
inline void merge_rows(RowSums& row, float* values, const RowSums& other, const float* other_values,
                       int64_t size) {
  const float top = std::max(row.top, other.top);
  const float base = top == kNever ? 0 : top;
  const float keep = exp2(spread(row.top - base))[0], add = exp2(spread(other.top - base))[0];
  for (int64_t i = 0; i < size; i += kLanes)
    store16(values + i, load16<Floats16>(values + i) * keep + load16<Floats16>(other_values + i) * add);
  row = {top, row.total * keep + other.total * add};
}

}  // namespace headrace
