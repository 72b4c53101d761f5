// The registers of AMX, Intel's matrix unit: eight matrices of 16 rows, 64 bytes each.
#pragma once

#include <cstdint>

// Vectors of torch's that are narrower than the unit's rows do not go with it.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && \
    defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512) && defined(__linux__)
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

// Before matrices are loaded that were written just now: compilers do not know that a load reads them.
inline void settle_memory() { asm volatile("" : : : "memory"); }

// Shapes the matrix registers of this thread, and gives them back.
class MatrixRegisters {
 public:
  MatrixRegisters() { load(); }
  ~MatrixRegisters() { _tile_release(); }
  MatrixRegisters(const MatrixRegisters&) = delete;

  // Gives sums and left operands as many rows as are in use, up to 16: fewer are less work.
  void set_rows(int64_t num_rows) {
    if (shape_.rows[0] == num_rows) return;
    for (const int i : {0, 1, 2, 3, 4, 5}) shape_.rows[i] = static_cast<uint8_t>(num_rows);
    load();
  }

 private:
  // GCC 12 takes the instruction to read eight bytes, and may leave the others unwritten.
  void load() {
    asm volatile("" : : "m"(shape_));
    _tile_loadconfig(&shape_);
  }

  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape_;
};

#else

inline bool may_use_matrices() { return false; }

class MatrixRegisters {};

#endif

}  // namespace headrace
