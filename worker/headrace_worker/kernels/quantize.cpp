// Rows to whole numbers of eight bits and back: one scale a row, so no row depends on another.

#include <cmath>
#include <type_traits>
#include <vector>

#include "row_ops.h"
#include "rows.h"

namespace headrace {
namespace {

constexpr float kLargest = 127.0f;

// Writes the row's numbers and returns its scale; a row that is not finite gets such a scale.
template <typename T>
float quantize_row(const T* x, int8_t* numbers, int64_t size, float* wide) {
  Floats magnitudes(0.0f);
  for_each_vector<T>(size, [&](int64_t start, int64_t count) {
    const auto parts = Wide<T>::load(x + start, count);
    for (int i = 0; i < Wide<T>::kNumParts; ++i) {
      magnitudes = at::vec::maximum(magnitudes, parts[i].abs());
      parts[i].store(wide + start + i * Floats::size());
    }
  });
  const auto larger = [](const Floats& a, const Floats& b) { return at::vec::maximum(a, b); };
  const float largest = at::vec::vec_reduce_all<float>(larger, magnitudes);
  if (largest == 0.0f || !std::isfinite(largest)) {
    std::fill(numbers, numbers + size, int8_t{0});
    return largest == 0.0f ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = kLargest / largest;
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = std::min(std::max(std::nearbyint(wide[i] * inverse), -kLargest), kLargest);
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
      static thread_local std::vector<float> wide;
      wide.resize(size + Wide<T>::kSize);
      scale[row] = quantize_row(from + row * size, to + row * size, size, wide.data());
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
