// Root-mean-square norms, alone and after adding to the residual, rounded where transformers rounds.

#include <cmath>
#include <type_traits>

#include "row_ops.h"
#include "rows.h"

namespace headrace {
namespace {

// Writes the norm of one row.
template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps, bool is_centred) {
  Floats squares(0.0f);
  for_each_vector<T>(size, [&](int64_t start, int64_t count) {
    for (const Floats& part : Wide<T>::load(x + start, count)) {
      squares = at::vec::fmadd(part, part, squares);
    }
  });
  const auto add = [](const Floats& a, const Floats& b) { return a + b; };
  const float sum = at::vec::vec_reduce_all<float>(add, squares);
  const Floats inverse(1.0f / std::sqrt(sum / static_cast<float>(size) + eps));
  const Floats one(1.0f);
  for_each_vector<T>(size, [&](int64_t start, int64_t count) {
    const auto wide = Wide<T>::load(x + start, count);
    const auto factor = Wide<T>::load(weight + start, count);
    const auto normed = map_parts<T>([&](int i) { return wide[i] * inverse; });
    // Centred, the product comes before the rounding: 1 + weight would lose its digits.
    const auto base = is_centred ? normed : Wide<T>::round(normed);
    const auto product = map_parts<T>(
        [&](int i) { return base[i] * (is_centred ? one + factor[i] : factor[i]); });
    Wide<T>::store(out + start, product, count);
  });
}

template <typename T>
void add_row(T* hidden, const T* delta, int64_t size) {
  for_each_vector<T>(size, [&](int64_t start, int64_t count) {
    const auto left = Wide<T>::load(hidden + start, count);
    const auto right = Wide<T>::load(delta + start, count);
    Wide<T>::store(hidden + start, map_parts<T>([&](int i) { return left[i] + right[i]; }), count);
  });
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool is_centred) {
  const int64_t size = x.size(-1);
  const bool has_heads = x.dim() == 3;
  TORCH_CHECK(x.dim() == 2 || has_heads, "rms_norm takes 2 or 3 dimensions, not ", x.dim());
  TORCH_CHECK(x.stride(-1) == 1 && weight.is_contiguous() && weight.numel() == size);
  TORCH_CHECK(x.scalar_type() == weight.scalar_type());
  const int64_t num_heads = has_heads ? x.size(1) : 1;
  const int64_t head_stride = has_heads ? x.stride(1) : 0;
  at::Tensor out = x.new_empty(x.sizes());
  with_type_of(x, [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    const T* from = x.const_data_ptr<T>();
    const T* factor = weight.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_row(x.size(0), num_heads * size, [&](int64_t row) {
      for (int64_t head = 0; head < num_heads; ++head) {
        norm_row(from + row * x.stride(0) + head * head_stride, factor,
                 to + (row * num_heads + head) * size, size, static_cast<float>(eps), is_centred);
      }
    });
  });
  return out;
}

at::Tensor add_rms_norm(at::Tensor hidden, const at::Tensor& delta, const at::Tensor& weight,
                        double eps, bool is_centred) {
  const int64_t size = hidden.size(-1);
  TORCH_CHECK(hidden.dim() == 2 && hidden.is_contiguous() && delta.is_contiguous());
  TORCH_CHECK(delta.sizes() == hidden.sizes() && weight.is_contiguous() && weight.numel() == size);
  TORCH_CHECK(delta.scalar_type() == hidden.scalar_type());
  TORCH_CHECK(weight.scalar_type() == hidden.scalar_type());
  at::Tensor out = hidden.new_empty(hidden.sizes());
  with_type_of(hidden, [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    T* sums = hidden.mutable_data_ptr<T>();
    const T* added = delta.const_data_ptr<T>();
    const T* factor = weight.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_row(hidden.size(0), size, [&](int64_t row) {
      add_row(sums + row * size, added + row * size, size);
      norm_row(sums + row * size, factor, to + row * size, size, static_cast<float>(eps),
               is_centred);
    });
  });
  return out;
}

}  // namespace headrace
