// What the kernels over rows share: vectors of floats over any number format.
//
// Every row is computed by one thread and in one order, which depends on its width alone. So its
// bits depend neither on its neighbours nor on the number of threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace headrace {

using Floats = at::vec::Vectorized<float>;

// As many elements as one vector of T holds, computed on as float vectors.
template <typename T>
struct Wide {
  using Elements = at::vec::Vectorized<T>;
  static constexpr int64_t kSize = Elements::size();
  static constexpr int kNumParts = kSize / Floats::size();
  using Parts = std::array<Floats, kNumParts>;

  static Parts load(const T* from, int64_t count) {
    return widen(count == kSize ? Elements::loadu(from) : Elements::loadu(from, count));
  }

  static void store(T* to, const Parts& parts, int64_t count) {
    narrow(parts).store(to, static_cast<int>(count));
  }

  // What is left of floats once they have been stored.
  static Parts round(const Parts& parts) { return widen(narrow(parts)); }

 private:
  static Parts widen(const Elements& elements) {
    if constexpr (kNumParts == 1) {
      return {elements};
    } else {
      auto [low, high] = at::vec::convert_to_float<T>(elements);
      return {low, high};
    }
  }

  static Elements narrow(const Parts& parts) {
    if constexpr (kNumParts == 1) {
      return parts[0];
    } else {
      return at::vec::convert_from_float<T>(parts[0], parts[1]);
    }
  }
};

// Calls visit(start, count) for vectors of T that cover [0, size); only the last may be short.
template <typename T, typename Visit>
void for_each_vector(int64_t size, const Visit& visit) {
  for (int64_t start = 0; start < size; start += Wide<T>::kSize) {
    visit(start, std::min(Wide<T>::kSize, size - start));
  }
}

template <typename T, typename Compute>
typename Wide<T>::Parts map_parts(const Compute& compute) {
  typename Wide<T>::Parts result;
  for (int part = 0; part < Wide<T>::kNumParts; ++part) {
    result[part] = compute(part);
  }
  return result;
}

// Calls visit(row), on as many threads as the elements are worth.
template <typename Visit>
void for_each_row(int64_t num_rows, int64_t elements_per_row, const Visit& visit) {
  constexpr int64_t kWorthAThread = 8192;  // elements
  const int64_t grain = std::max<int64_t>(1, kWorthAThread / std::max<int64_t>(1, elements_per_row));
  at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      visit(row);
    }
  });
}

// Calls compute with a null pointer of the tensor's element type.
template <typename Compute>
void with_type_of(const at::Tensor& tensor, const Compute& compute) {
  if (tensor.scalar_type() == at::kBFloat16) {
    compute(static_cast<at::BFloat16*>(nullptr));
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "no kernel for ", tensor.scalar_type());
    compute(static_cast<float*>(nullptr));
  }
}

}  // namespace headrace
