// Rotary positions, in place: dimension i of a head turns with dimension i + rotary_dim / 2.

#include <type_traits>

#include "kv_tensors.h"
#include "row_ops.h"
#include "rows.h"

namespace headrace {
namespace {

// Each product is rounded before the sum, as where they are tensors of their own.
template <typename T>
typename Wide<T>::Parts turn(const typename Wide<T>::Parts& own,
                             const typename Wide<T>::Parts& partner, const T* cos,
                             const T* signed_sin, int64_t count) {
  const auto cosine = Wide<T>::load(cos, count);
  const auto sine = Wide<T>::load(signed_sin, count);
  const auto left = Wide<T>::round(map_parts<T>([&](int i) { return own[i] * cosine[i]; }));
  const auto right = Wide<T>::round(map_parts<T>([&](int i) { return partner[i] * sine[i]; }));
  return map_parts<T>([&](int i) { return left[i] + right[i]; });
}

template <typename T>
void rotate_head(T* head, const T* cos, const T* signed_sin, int64_t half) {
  for_each_vector<T>(half, [&](int64_t start, int64_t count) {
    T* low = head + start;
    T* high = low + half;
    const auto first = Wide<T>::load(low, count);
    const auto second = Wide<T>::load(high, count);
    Wide<T>::store(low, turn<T>(first, second, cos + start, signed_sin + start, count), count);
    const T* cos_high = cos + half + start;
    Wide<T>::store(high, turn<T>(second, first, cos_high, signed_sin + half + start, count), count);
  });
}

// Rotates every head, then shows each finished row to `then`.
template <typename T, typename Then>
void rotate_rows(at::Tensor& heads, const at::Tensor& cos, const at::Tensor& signed_sin,
                 const Then& then) {
  const int64_t rotary_dim = cos.size(-1);
  T* first = heads.mutable_data_ptr<T>();
  const T* cosines = cos.const_data_ptr<T>();
  const T* sines = signed_sin.const_data_ptr<T>();
  for_each_row(heads.size(0), heads.size(1) * rotary_dim, [&](int64_t row) {
    for (int64_t head = 0; head < heads.size(1); ++head)
      rotate_head(first + row * heads.stride(0) + head * heads.stride(1),
                  cosines + row * rotary_dim, sines + row * rotary_dim, rotary_dim / 2);
    then(row);
  });
}

void check(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& signed_sin) {
  const int64_t rotary_dim = cos.size(-1);
  TORCH_CHECK(heads.dim() == 3 && heads.stride(2) == 1 && rotary_dim <= heads.size(2));
  TORCH_CHECK(cos.is_contiguous() && cos.numel() == heads.size(0) * rotary_dim);
  TORCH_CHECK(signed_sin.is_contiguous() && signed_sin.sizes() == cos.sizes());
  TORCH_CHECK(cos.scalar_type() == heads.scalar_type());
  TORCH_CHECK(signed_sin.scalar_type() == heads.scalar_type());
}

}  // namespace

void rotate(at::Tensor heads, const at::Tensor& cos, const at::Tensor& signed_sin) {
  check(heads, cos, signed_sin);
  with_type_of(heads, [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    rotate_rows<T>(heads, cos, signed_sin, [](int64_t) {});
  });
}

void rotate_and_write(at::Tensor query_key, const at::Tensor& value, const at::Tensor& cos,
                      const at::Tensor& signed_sin, const at::Tensor& key_cache,
                      const at::Tensor& value_cache, const at::Tensor& slots) {
  check(query_key, cos, signed_sin);
  const int64_t kv_heads = value.size(1);
  const at::Tensor key = query_key.narrow(1, query_key.size(1) - kv_heads, kv_heads);
  const at::Tensor values = with_dense_rows(value);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  with_element_type(query_key, [&](auto element) {
    using T = decltype(element);
    const auto layer = kv_layer<T>(key_cache, value_cache);
    rotate_rows<T>(query_key, cos, signed_sin,
                   [&](int64_t row) { store_token(layer, slot[row], key, values, row); });
  });
}

}  // namespace headrace
