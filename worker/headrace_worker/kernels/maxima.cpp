// The most likely token of each row of logits, and whether the row can be trusted, in one pass.

#include <cmath>
#include <limits>
#include <type_traits>

#include "row_ops.h"
#include "rows.h"

namespace headrace {
namespace {

constexpr int64_t kBlock = 2048;  // elements: what is searched again for the place of the maximum

template <typename T>
float max_of_block(const T* block, int64_t size) {
  Floats best(-std::numeric_limits<float>::infinity());
  int64_t start = 0;
  for (; start + Wide<T>::kSize <= size; start += Wide<T>::kSize) {
    for (const Floats& part : Wide<T>::load(block + start, Wide<T>::kSize)) {
      best = at::vec::maximum(best, part);  // NaN stays
    }
  }
  const auto larger = [](const Floats& a, const Floats& b) { return at::vec::maximum(a, b); };
  float result = at::vec::vec_reduce_all<float>(larger, best);
  for (; start < size; ++start) {
    const float element = static_cast<float>(block[start]);
    result = std::isnan(result) || element <= result ? result : element;
  }
  return result;
}

template <typename T>
std::pair<float, int64_t> max_of_row(const T* row, int64_t size) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t block = 0;
  for (int64_t start = 0; start < size && !std::isnan(best); start += kBlock) {
    const float found = max_of_block(row + start, std::min(kBlock, size - start));
    if (!(found <= best)) {
      best = found;
      block = start;
    }
  }
  int64_t place = block;
  while (place < size - 1 && static_cast<float>(row[place]) != best &&
         !(std::isnan(best) && std::isnan(static_cast<float>(row[place])))) {
    ++place;
  }
  return {best, place};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> max_of_rows(const at::Tensor& rows) {
  TORCH_CHECK(rows.dim() == 2 && rows.stride(1) == 1 && rows.size(1) > 0);
  at::Tensor maxima = rows.new_empty({rows.size(0)}, at::kFloat);
  at::Tensor places = rows.new_empty({rows.size(0)}, at::kLong);
  with_type_of(rows, [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    const T* first = rows.const_data_ptr<T>();
    float* largest = maxima.mutable_data_ptr<float>();
    int64_t* index = places.mutable_data_ptr<int64_t>();
    for_each_row(rows.size(0), rows.size(1), [&](int64_t row) {
      std::tie(largest[row], index[row]) = max_of_row(first + row * rows.stride(0), rows.size(1));
    });
  });
  return {maxima, places};
}

}  // namespace headrace
