// The loop of a projection on the matrix unit: blocks of 32 rows by 32 outputs.
//
// A thread takes outputs by 32, and streams their part of the weight once for as many rows as stay in
// its cache. While the unit multiplies a block, the vectors, which have nothing else to do, round and store the block before, and
// the next part of the weight comes into the cache.
#pragma once

#include <algorithm>

#include "matrix_operands.h"

namespace headrace {

#ifdef HEADRACE_AMX

// Asks for a stretch of memory little by little, so that it is in the second-level cache in time.
class Prefetch {
 public:
  Prefetch(const char* begin, int64_t bytes, int64_t num_steps)
      : next_(begin), end_(begin + bytes), lines_((bytes / kLine + num_steps - 1) / num_steps) {}

  void step() {
    for (int64_t i = 0; i < lines_ && next_ < end_; ++i, next_ += kLine) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  const char* next_;
  const char* end_;
  int64_t lines_;  // a step
};

// Sums of a block, which `store(sums, row, task)` is handed row by row while the next is computed.
template <class Sum, class Store>
class PendingBlock {
 public:
  explicit PendingBlock(const Store& store) : store_(store) {}

  void store_rows(int64_t count) {
    for (; count > 0 && next_ < num_rows_; --count, ++next_)
      store_(sums_ + next_ * kColumns, first_row_ + next_, task_);
  }

  // Takes over the sums that the registers 0 to 3 hold, of Rows times 16 rows.
  template <int Rows>
  void take(int64_t first_row, int64_t num_rows, int64_t task) {
    store_rows(kBlockRows);
    constexpr int64_t kStride = kColumns * sizeof(Sum);
    _tile_stored(0, sums_, kStride);
    _tile_stored(1, sums_ + kMatrixColumns, kStride);
    if constexpr (Rows == 2) {
      _tile_stored(2, sums_ + kMatrixRows * kColumns, kStride);
      _tile_stored(3, sums_ + kMatrixRows * kColumns + kMatrixColumns, kStride);
    }
    first_row_ = first_row;
    num_rows_ = num_rows;
    task_ = task;
    next_ = 0;
  }

 private:
  alignas(64) Sum sums_[kBlockRows * kColumns];
  const Store& store_;
  int64_t first_row_ = 0, num_rows_ = 0, task_ = 0;
  int64_t next_ = 0;  // row of the block that waits
};

// Leaves in registers 0 to 3 the sums of 32 (Rows: 2) or 16 rows and 32 outputs.
template <class Format, int Rows, class EachStep>
void multiply_block(const PaddedRows<Format>& rows, int64_t row, const char* weight,
                    const EachStep& each_step) {
  const int64_t stride = rows.stride_bytes();
  const auto* first = rows.at(row);
  const auto* second = Rows == 2 ? rows.at(row + kMatrixRows) : nullptr;
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < rows.steps(); ++s, weight += kStepBytes) {
    _tile_loadd(4, first + s * Format::kInputs, stride);
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + kOperandBytes, 64);
    Format::multiply_first();
    if constexpr (Rows == 2) {
      _tile_loadd(5, second + s * Format::kInputs, stride);
      Format::multiply_second();
    }
    each_step();
  }
}

// A thread's tasks [begin, end), for rows [first, last).
template <class Format, class Store>
void multiply_share(const PaddedRows<Format>& rows, int64_t first, int64_t last, const char* weight,
                    int64_t begin, int64_t end, const Store& store) {
  const int64_t steps = rows.steps(), task_bytes = steps * kStepBytes;
  const int64_t num_blocks = (last - first + kBlockRows - 1) / kBlockRows;
  const int64_t rows_a_step = std::max<int64_t>(2, (kBlockRows + steps - 1) / steps);
  const MatrixRegisters registers;
  PendingBlock<typename Format::Sum, Store> pending(store);
  for (int64_t task = begin; task < end; ++task) {
    const char* columns = weight + task * task_bytes;
    Prefetch weight_ahead(columns + task_bytes, task + 1 < end ? task_bytes : 0, num_blocks * steps);
    for (int64_t row = first; row < last; row += kBlockRows) {
      const int64_t num_rows = std::min(kBlockRows, last - row);
      const bool is_new = task == begin && row + 2 * kBlockRows <= last;
      Prefetch rows_ahead(rows.bytes_at(row + kBlockRows * is_new),
                          is_new ? kBlockRows * rows.stride_bytes() : 0, steps);
      int64_t expected = row;
      const auto meanwhile = [&] {
        weight_ahead.step();
        rows_ahead.step();
        pending.store_rows(rows_a_step);
        for (int64_t i = 0; i < rows_a_step && expected < row + num_rows; ++i)
          store.expect(expected++, task);
      };
      if (num_rows > kMatrixRows) {
        multiply_block<Format, 2>(rows, row, columns, meanwhile);
        pending.template take<2>(row, num_rows, task);
      } else {
        multiply_block<Format, 1>(rows, row, columns, meanwhile);
        pending.template take<1>(row, num_rows, task);
      }
    }
  }
  pending.store_rows(kBlockRows);
}

// Calls store(sums, row, task) for each row and each of num_tasks times 32 outputs, and
// store.expect(row, task) a little earlier.
//
// Many long rows are taken in parts that stay in a thread's cache while its part of the weight passes
// by; in parts of less than a hundred rows, it would pass by faster than memory can send it.
template <class Format, class Store>
void multiply_rows(const PaddedRows<Format>& rows, const char* weight, int64_t num_tasks,
                   const Store& store) {
  constexpr int64_t kCacheBytes = 768 * 1024, kFewestBlocks = 4;
  const int64_t part =
      std::max(kFewestBlocks, kCacheBytes / (kBlockRows * rows.stride_bytes())) * kBlockRows;
  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < rows.count(); row += part)
      multiply_share(rows, row, std::min(row + part, rows.count()), weight, begin, end, store);
  });
}

#endif

}  // namespace headrace
