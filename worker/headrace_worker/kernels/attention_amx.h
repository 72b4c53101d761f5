// The products of a tile on AMX, Intel's matrix unit: 16 rows by 16 columns an instruction.
//
// It adds in another order than a vector does, so a row's bits here are not those of
// attention_tile.h; they, too, depend on no other row.
#pragma once

#include "attention_tile.h"
#include "matrix_registers.h"

namespace headrace {

#ifdef HEADRACE_AMX

// Registers 0 to 3 hold sums of Rows x 2 matrices, 4 and 5 left operands, 6 and 7 right ones.
template <int Rows>
inline void multiply_matrices(const char* left, int64_t left_stride, const char* right,
                              int64_t right_stride) {
  _tile_loadd(6, right, right_stride);
  _tile_loadd(7, right + 64, right_stride);
  _tile_loadd(4, left, left_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Rows == 2) {
    _tile_loadd(5, left + kMatrixRows * left_stride, left_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int Rows>
inline void load_sums(const float* sums, int64_t stride) {
  _tile_loadd(0, sums, stride * sizeof(float));
  _tile_loadd(1, sums + kLanes, stride * sizeof(float));
  if constexpr (Rows == 2) {
    _tile_loadd(2, sums + kMatrixRows * stride, stride * sizeof(float));
    _tile_loadd(3, sums + kMatrixRows * stride + kLanes, stride * sizeof(float));
  }
}

// Scores of 16 or 32 rows (Rows: 1 or 2), whose head size and units are multiples of 32.
template <int Rows>
void score_matrices(const uint32_t* query, int64_t num_words, const KeyTile& tile, float* scores) {
  for (int64_t u = 0; u < tile.num_units(); ++u) {
    clear_sums<Rows>();
    for (int64_t w = 0; w < num_words; w += kLanes)
      multiply_matrices<Rows>(reinterpret_cast<const char*>(query + w), num_words * 4,
                              reinterpret_cast<const char*>(tile.keys[u] + w * tile.key_stride),
                              tile.key_stride * 4);
    store_sums<Rows>(scores + u * tile.unit, kTileKeys);
  }
}

// sums [16 or 32 rows, head_dim] += weights * values; weights beyond the last key are 0, and the
// values there finite.
template <int Rows>
void weigh_matrices(const uint32_t* weights, const KeyTile& tile, int64_t head_dim, float* sums) {
  for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
    load_sums<Rows>(sums + d, head_dim);
    for (int64_t u = 0; u < tile.num_units(); ++u)
      multiply_matrices<Rows>(reinterpret_cast<const char*>(weights + u * kLanes), kTileKeys * 2,
                              reinterpret_cast<const char*>(tile.values[u] + d), head_dim * 4);
    store_sums<Rows>(sums + d, head_dim);
  }
}

#endif

}  // namespace headrace
