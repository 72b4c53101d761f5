// What the matrix unit multiplies in a projection: packed weights, rows, and the format of both.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

#include "matrix_registers.h"

namespace headrace {

constexpr int64_t kColumns = 32;                   // outputs of a task: two right operands
constexpr int64_t kBlockRows = 2 * kMatrixRows;    // two left operands
constexpr int64_t kOperandBytes = 16 * 64;         // of a right operand
constexpr int64_t kStepBytes = 2 * kOperandBytes;  // of a weight, for one step of a task

// Lays a weight [out, in] out as the unit reads it, zero-padded: [out / 32, in / I, 2, 16, 16, W] with
// W elements in a word of 32 bits and I in 64 bytes; each [16, 16, W] is one right operand.
template <class Element>
at::Tensor pack_weight(const at::Tensor& weight) {
  constexpr int64_t W = 4 / sizeof(Element), I = 64 / sizeof(Element);
  const int64_t out = weight.size(0), in = weight.size(1);
  const int64_t tasks = (out + kColumns - 1) / kColumns, steps = (in + I - 1) / I;
  const at::Tensor source = weight.contiguous();
  at::Tensor packed = weight.new_zeros({tasks, steps, 2, 16, 16, W});
  const auto* from = static_cast<const Element*>(source.const_data_ptr());
  auto* to = static_cast<Element*>(packed.mutable_data_ptr());
  at::parallel_for(0, out, 64, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o)
      for (int64_t i = 0; i < in; ++i) {
        const int64_t operand = (o / kColumns * steps + i / I) * 2 + o % kColumns / 16;
        to[operand * 16 * I + i % I / W * 16 * W + o % 16 * W + i % W] = from[o * in + i];
      }
  });
  return packed;
}

#ifdef HEADRACE_AMX

// Products of bfloat16, summed in float32.
struct Bfloat16Format {
  using Element = uint16_t;
  using Sum = float;
  static constexpr int64_t kInputs = 32;  // that one instruction takes

  static void multiply_first() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }

  static void multiply_second() {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

// Products of whole numbers of eight bits, both signed.
struct Int8Format {
  using Element = int8_t;
  using Sum = int32_t;
  static constexpr int64_t kInputs = 64;

  static void multiply_first() {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
  }

  static void multiply_second() {
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
};

// Rows of the left operand, in place where that is possible, else padded with zeros.
template <class Format>
class PaddedRows {
 public:
  using Element = typename Format::Element;

  PaddedRows(const at::Tensor& x, int64_t num_inputs) : whole_(x.contiguous()), in_(num_inputs) {
    TORCH_CHECK(x.dim() == 2 && x.element_size() == sizeof(Element) && x.size(1) <= in_ &&
                    x.size(1) > in_ - Format::kInputs,
                "rows ", x.sizes(), " of ", x.dtype(), " do not go with the weight");
    const int64_t num_rows = x.size(0), given = x.size(1);
    num_in_place_ = given == in_ ? num_rows / kMatrixRows * kMatrixRows : 0;
    if (num_in_place_ == num_rows) return;
    const int64_t missing = num_rows - num_in_place_;
    rest_ = x.new_zeros({(missing + kMatrixRows - 1) / kMatrixRows * kMatrixRows, in_});
    auto* to = static_cast<Element*>(rest_.mutable_data_ptr());
    const auto* from = static_cast<const Element*>(whole_.const_data_ptr());
    for (int64_t r = 0; r < missing; ++r)
      std::memcpy(to + r * in_, from + (num_in_place_ + r) * given, given * sizeof(Element));
  }

  // The first of 16 rows from `row` on, a multiple of 16.
  const Element* at(int64_t row) const {
    const at::Tensor& source = row < num_in_place_ ? whole_ : rest_;
    const int64_t place = row < num_in_place_ ? row : row - num_in_place_;
    return static_cast<const Element*>(source.const_data_ptr()) + place * in_;
  }

  const char* bytes_at(int64_t row) const { return reinterpret_cast<const char*>(at(row)); }

  int64_t count() const { return whole_.size(0); }
  int64_t stride_bytes() const { return in_ * sizeof(Element); }
  int64_t steps() const { return in_ / Format::kInputs; }

 private:
  at::Tensor whole_, rest_;
  int64_t in_, num_in_place_;
};

#endif

}  // namespace headrace
