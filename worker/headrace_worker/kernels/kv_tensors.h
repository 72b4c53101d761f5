// From tensors to what the attention kernels work on.
#pragma once

#include <ATen/core/Tensor.h>

#include "kv_layout.h"

namespace headrace {

// Calls f with a value of the tensor's element type, float32 or bfloat16.
template <class F>
void with_element_type(const at::Tensor& tensor, const F& f) {
  if (tensor.scalar_type() == at::kFloat) return f(float{});
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "no attention kernel for ", tensor.dtype());
  f(c10::BFloat16{});
}

// The layer whose caches have the shapes in kv_layout.h, words written as a last dimension of W.
template <class T>
KvLayer<T> kv_layer(const at::Tensor& key_cache, const at::Tensor& value_cache) {
  TORCH_CHECK(key_cache.size(4) == kPerWord<T>, "the cache was allocated for another type");
  return {key_cache.mutable_data_ptr<T>(), value_cache.mutable_data_ptr<T>(), key_cache.size(1),
          value_cache.size(3), key_cache.size(3)};
}

// [num_tokens, heads, head_dim] with the elements of a row side by side; usually as it was.
inline at::Tensor with_dense_rows(const at::Tensor& rows) {
  return rows.stride(2) == 1 ? rows : rows.contiguous();
}

template <class T>
const T* row_of(const at::Tensor& rows, int64_t token, int64_t head) {
  return rows.const_data_ptr<T>() + token * rows.stride(0) + head * rows.stride(1);
}

// Stores one token's keys and values [num_tokens, kv_heads, head_dim], which have dense rows.
template <class T>
void store_token(const KvLayer<T>& layer, int64_t slot, const at::Tensor& keys,
                 const at::Tensor& values, int64_t token) {
  for (int64_t head = 0; head < layer.kv_heads; ++head) {
    layer.store_key(slot, head, row_of<T>(keys, token, head));
    layer.store_value(slot, head, row_of<T>(values, token, head));
  }
}

}  // namespace headrace
