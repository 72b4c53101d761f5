// The registers of AMX, Intel's matrix unit: eight matrices of 16 rows, 64 bytes each.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define HEADRACE_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {

constexpr int64_t kMatrixRows = 16;     // of one matrix register, each of 64 bytes
constexpr int64_t kMatrixColumns = 16;  // floats in such a row

#ifdef HEADRACE_AMX

// Whether Linux lets this process use the registers; it must be asked once.
inline bool may_use_matrices() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_allowed;
}

// Shapes the matrix registers of this thread, and gives them back.
class MatrixRegisters {
 public:
  MatrixRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }
  ~MatrixRegisters() { _tile_release(); }
  MatrixRegisters(const MatrixRegisters&) = delete;
};

// Registers 0 to 3 hold sums of Rows x 2 matrices: sums [Rows * 16, 32], `stride` floats a row.
template <int Rows>
inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Rows == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int Rows>
inline void store_sums(float* sums, int64_t stride) {
  _tile_stored(0, sums, stride * sizeof(float));
  _tile_stored(1, sums + kMatrixColumns, stride * sizeof(float));
  if constexpr (Rows == 2) {
    _tile_stored(2, sums + kMatrixRows * stride, stride * sizeof(float));
    _tile_stored(3, sums + kMatrixRows * stride + kMatrixColumns, stride * sizeof(float));
  }
}

#else

inline bool may_use_matrices() { return false; }

#endif

}  // namespace headrace
