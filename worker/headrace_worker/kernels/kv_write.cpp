// Stores the new tokens' keys and values in the native backend's cache.

#include <ATen/Parallel.h>

#include "kernels.h"
#include "kv_tensors.h"

namespace headrace {

namespace {

constexpr int64_t kTokensPerTask = 32;  // below that, waking a second thread costs more

}  // namespace

void write_kv(const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& key,
              const at::Tensor& value, const at::Tensor& slots) {
  const auto keys = with_dense_rows(key), values = with_dense_rows(value);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  with_element_type(key, [&](auto element) {
    using T = decltype(element);
    const auto layer = kv_layer<T>(key_cache, value_cache);
    at::parallel_for(0, keys.size(0), kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token)
        store_token(layer, slot[token], keys, values, token);
    });
  });
}

}  // namespace headrace
