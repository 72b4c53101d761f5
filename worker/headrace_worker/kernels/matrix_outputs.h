// What becomes of a projection's sums: scaled, biased, perhaps gated, rounded to bfloat16, stored.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "matrix_operands.h"

namespace headrace {

#ifdef HEADRACE_AMX

// A float for each of num_tasks times 32 outputs, zeros where there is none.
inline std::vector<float> padded(const std::optional<at::Tensor>& bias, int64_t num_tasks) {
  std::vector<float> wide(num_tasks * kColumns, 0.0f);
  if (!bias) return wide;
  TORCH_CHECK(bias->numel() <= num_tasks * kColumns, "a bias of ", bias->numel(), " outputs");
  const auto* from = bias->const_data_ptr<at::BFloat16>();
  std::copy(from, from + bias->size(0), wide.begin());
  return wide;
}

// Values of 16 outputs from `column` on: sums of bfloat16 products, and a bias.
struct BiasedSums {
  std::vector<float> bias;  // [num_tasks * 32]

  __m512 operator()(const float* sums, int64_t, int64_t column) const {
    return _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_loadu_ps(&bias[column]));
  }
};

// The same of whole numbers, whose weights have a scale an output, and rows one each.
struct ScaledSums {
  const float* row_scales;    // [num_rows]
  std::vector<float> scales;  // [num_tasks * 32], as bias
  std::vector<float> bias;

  __m512 operator()(const int32_t* sums, int64_t row, int64_t column) const {
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums)),
                                        _mm512_loadu_ps(&scales[column]));
    return _mm512_add_ps(_mm512_mul_ps(scaled, _mm512_set1_ps(row_scales[row])),
                         _mm512_loadu_ps(&bias[column]));
  }
};

// Rounds the values and stores the outputs that exist.
template <class Values>
class RoundedOutput {
 public:
  RoundedOutput(const at::Tensor& output, Values values)
      : to_(static_cast<uint16_t*>(output.mutable_data_ptr())), width_(output.size(1)),
        values_(std::move(values)) {}

  template <class Sum>
  void operator()(const Sum* sums, int64_t row, int64_t task) const {
    const int64_t column = task * kColumns;
    const __m512bh rounded = _mm512_cvtne2ps_pbh(values_(sums + 16, row, column + 16),
                                                 values_(sums, row, column));
    const auto mask = static_cast<__mmask32>(~0u >> (kColumns - std::min(kColumns, width_ - column)));
    _mm512_mask_storeu_epi16(to_ + row * width_ + column, mask,
                             reinterpret_cast<const __m512i&>(rounded));
  }

  void expect(int64_t row, int64_t task) const {
    __builtin_prefetch(to_ + row * width_ + task * kColumns, 1, 2);
  }

 private:
  uint16_t* to_;  // [num_rows, width]
  int64_t width_;
  Values values_;
};

// Of 16 gates and the 16 factors behind them: activation(gate) * factor, rounded at each step.
template <class Values, class Activation>
class GatedOutput {
 public:
  GatedOutput(const at::Tensor& output, Values values)
      : to_(static_cast<uint16_t*>(output.mutable_data_ptr())), width_(output.size(1)),
        values_(std::move(values)) {}

  template <class Sum>
  void operator()(const Sum* sums, int64_t row, int64_t task) const {
    const int64_t column = task * kColumns;
    const Floats gate = rounded(values_(sums, row, column));
    const Floats factor = rounded(values_(sums + 16, row, column + 16));
    const __m256bh gated = _mm512_cvtneps_pbh(rounded(Activation()(gate)) * factor);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to_ + row * width_ + task * kMatrixColumns),
                        reinterpret_cast<const __m256i&>(gated));
  }

  void expect(int64_t row, int64_t task) const {
    __builtin_prefetch(to_ + row * width_ + task * kMatrixColumns, 1, 2);
  }

 private:
  using Floats = at::vec::Vectorized<float>;
  static_assert(Floats::size() == 16);

  static Floats rounded(__m512 x) { return _mm512_cvtpbh_ps(_mm512_cvtneps_pbh(x)); }

  uint16_t* to_;  // [num_rows, width]
  int64_t width_;
  Values values_;
};

#endif

}  // namespace headrace
