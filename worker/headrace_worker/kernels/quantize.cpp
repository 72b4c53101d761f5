// Rows to whole numbers of eight bits and back: one scale a row, so no row depends on another.

#include <c10/util/bit_cast.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "row_ops.h"
#include "rows.h"

namespace headrace {
namespace {

constexpr float kLargest = 127.0f;
constexpr float kNoFraction = 12582912.0f;  // 1.5 * 2^23: to add and subtract it rounds to whole numbers

// A magnitude as a whole number: of two, the larger has the larger one, and NaN has the largest.
uint16_t bits_of_magnitude(at::BFloat16 x) { return x.x & 0x7fff; }

uint32_t bits_of_magnitude(float x) { return c10::bit_cast<uint32_t>(x) & 0x7fffffff; }

float magnitude_of(uint16_t bits) { return at::BFloat16(bits, at::BFloat16::from_bits()); }

float magnitude_of(uint32_t bits) { return c10::bit_cast<float>(bits); }

// The largest magnitude of a row; not finite if an element is not.
template <typename T>
float largest_of_row(const T* x, int64_t size) {
  auto largest = bits_of_magnitude(T(0.0f));
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, bits_of_magnitude(x[i]));
  return magnitude_of(largest);
}

// Writes the row's numbers and returns its scale; a row that is not finite gets such a scale.
template <typename T>
float quantize_row(const T* __restrict x, int8_t* __restrict numbers, int64_t size) {
  const float largest = largest_of_row(x, size);
  const float inverse = kLargest / largest;  // infinite for zeros, and for rows that are nearly so
  if (!std::isfinite(largest) || !std::isfinite(inverse)) {
    std::fill(numbers, numbers + size, int8_t{0});
    return std::isfinite(largest) ? largest / kLargest : std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t i = 0; i < size; ++i) {
    const float whole = (static_cast<float>(x[i]) * inverse + kNoFraction) - kNoFraction;
    const float scaled = std::min(std::max(whole, -kLargest), kLargest);
    numbers[i] = static_cast<int8_t>(static_cast<int32_t>(scaled));
  }
  return largest / kLargest;
}

template <typename T>
void scale_row(T* row, float scale, const T* bias, int64_t size) {
  const Floats factor(scale);
  for_each_vector<T>(size, [&](int64_t start, int64_t count) {
    auto parts = Wide<T>::load(row + start, count);
    parts = map_parts<T>([&](int i) { return parts[i] * factor; });
    if (bias != nullptr) {
      const auto added = Wide<T>::load(bias + start, count);
      parts = map_parts<T>([&](int i) { return parts[i] + added[i]; });
    }
    Wide<T>::store(row + start, parts, count);
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous());
  const int64_t size = x.size(1);
  at::Tensor numbers = x.new_empty(x.sizes(), at::kChar);
  at::Tensor scales = x.new_empty({x.size(0)}, at::kFloat);
  with_type_of(x, [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    const T* from = x.const_data_ptr<T>();
    int8_t* to = numbers.mutable_data_ptr<int8_t>();
    float* scale = scales.mutable_data_ptr<float>();
    for_each_row(x.size(0), size, [&](int64_t row) {
      scale[row] = quantize_row(from + row * size, to + row * size, size);
    });
  });
  return {numbers, scales};
}

void scale_rows(at::Tensor rows, const at::Tensor& scales, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && scales.is_contiguous());
  TORCH_CHECK(scales.numel() == rows.size(0) && scales.scalar_type() == at::kFloat);
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == rows.size(1) &&
                        bias->scalar_type() == rows.scalar_type()));
  with_type_of(rows, [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    T* first = rows.mutable_data_ptr<T>();
    const float* scale = scales.const_data_ptr<float>();
    const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
    for_each_row(rows.size(0), rows.size(1), [&](int64_t row) {
      scale_row(first + row * rows.size(1), scale[row], added, rows.size(1));
    });
  });
}

}  // namespace headrace
