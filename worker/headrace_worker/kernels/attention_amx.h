// The products of a tile on AMX, Intel's matrix unit: 16 rows by 16 columns an instruction.
//
// It adds in another order than a vector does, so a row's bits here are not those of
// attention_tile.h; they, too, depend on no other row.
#pragma once

#include "attention_tile.h"
#include "matrix_registers.h"

namespace headrace {

#ifdef HEADRACE_AMX

// Registers 0 to 3 hold four matrices of sums: of 16 or fewer rows (Rows: 1) and 64 columns, or of
// twice 16 rows (Rows: 2) and 32. Sums that wait for no other keep the unit busy. Register 4 holds a
// left operand, and 5 that of the second 16 rows; 6 and 7 hold right ones.
template <int Rows>
constexpr int64_t kSumColumns = 4 / Rows * kMatrixColumns;

constexpr int64_t kAnnouncedLines = 8;  // of a unit's keys; as many of its values for heads of 64

// sums += left * right, whose columns lie in two places, 32 side by side; both are used if Rows is 1.
template <int Rows>
inline void multiply_matrices(const void* left, int64_t left_stride, const uint32_t* right,
                              const uint32_t* more_right, int64_t right_stride) {
  _tile_loadd(4, left, left_stride);
  _tile_loadd(6, right, right_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, right + kMatrixColumns, right_stride);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Rows == 1) {
    _tile_loadd(6, more_right, right_stride);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, more_right + kMatrixColumns, right_stride);
    _tile_dpbf16ps(3, 4, 7);
  } else {
    _tile_loadd(5, static_cast<const char*>(left) + kMatrixRows * left_stride, left_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

inline void clear_matrices() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Where the second two registers belong, `stride` floats a row: below the first two, or beside them.
template <int Rows>
inline int64_t offset_of_more(int64_t stride) {
  return Rows == 1 ? 2 * kMatrixColumns : kMatrixRows * stride;
}

template <int Rows>
inline void load_matrices(const float* sums, int64_t stride) {
  const float* more = sums + offset_of_more<Rows>(stride);
  _tile_loadd(0, sums, stride * sizeof(float));
  _tile_loadd(1, sums + kMatrixColumns, stride * sizeof(float));
  _tile_loadd(2, more, stride * sizeof(float));
  _tile_loadd(3, more + kMatrixColumns, stride * sizeof(float));
}

template <int Rows>
inline void store_matrices(float* sums, int64_t stride) {
  float* more = sums + offset_of_more<Rows>(stride);
  _tile_stored(0, sums, stride * sizeof(float));
  _tile_stored(1, sums + kMatrixColumns, stride * sizeof(float));
  _tile_stored(2, more, stride * sizeof(float));
  _tile_stored(3, more + kMatrixColumns, stride * sizeof(float));
}

// Asks for the first lines of a stretch of memory; once it is touched, the processor reads ahead in it.
inline void announce(const uint32_t* words, int64_t num_lines) {
  constexpr int64_t kLineWords = 16;
  for (int64_t i = 0; i < num_lines; ++i) __builtin_prefetch(words + i * kLineWords, 0, 2);
}

// Scores of the rows in use, whose head size and units are multiples of 32. One row of matrices takes
// two units at once; where the last has no neighbour it is its own, and its second scores are unused.
// Few rows wait for memory most of the time, so the values, which are next, are announced meanwhile.
template <int Rows>
void score_matrices(const uint32_t* query, int64_t num_words, const KeyTile& tile, float* scores) {
  constexpr int64_t kUnits = 2 / Rows;
  for (int64_t u = 0; u < tile.num_units(); u += kUnits) {
    const uint32_t* keys = tile.keys[u];
    const uint32_t* more_keys = tile.keys[std::min(u + kUnits - 1, tile.num_units() - 1)];
    clear_matrices();
    for (int64_t w = 0; w < num_words; w += kLanes) {
      multiply_matrices<Rows>(query + w, num_words * 4, keys + w * tile.key_stride,
                              more_keys + w * tile.key_stride, tile.key_stride * 4);
      for (int64_t i = u; Rows == 1 && i < std::min(u + kUnits, tile.num_units()); ++i)
        announce(tile.values[i] + w * (kAnnouncedLines / 2), kAnnouncedLines / 2);
    }
    store_matrices<Rows>(scores + u * tile.unit, kTileKeys);
  }
}

// sums [rows, head_dim] += weights * values; weights beyond the last key are 0, and the values there
// finite. One row of matrices takes head sizes that are multiples of 64, and announces the keys of the
// tile that is next.
template <int Rows>
void weigh_matrices(const uint32_t* weights, const KeyTile& tile, const KeyTile& next,
                    int64_t head_dim, float* sums) {
  for (int64_t d = 0; d < head_dim; d += kSumColumns<Rows>) {
    load_matrices<Rows>(sums + d, head_dim);
    for (int64_t u = 0; u < tile.num_units(); ++u) {
      const uint32_t* values = tile.values[u] + d;
      multiply_matrices<Rows>(weights + u * kLanes, kTileKeys * 2, values,
                              values + 2 * kMatrixColumns, head_dim * 4);
      if (Rows == 1 && d == 0 && u < next.num_units()) announce(next.keys[u], kAnnouncedLines);
    }
    store_matrices<Rows>(sums + d, head_dim);
  }
}

#endif

}  // namespace headrace
