// Gated activations of the feed-forward layer: silu or gelu of one half of a row, times the other.

#include "gates.h"

#include <type_traits>

#include "row_ops.h"
#include "rows.h"

namespace headrace {
namespace {

template <typename T, typename Activate>
void gate_row(const T* gate, const T* up, T* out, int64_t size, const Activate& activate) {
  for_each_vector<T>(size, [&](int64_t start, int64_t count) {
    const auto wide = Wide<T>::load(gate + start, count);
    const auto factor = Wide<T>::load(up + start, count);
    const auto active = Wide<T>::round(map_parts<T>([&](int i) { return activate(wide[i]); }));
    Wide<T>::store(out + start, map_parts<T>([&](int i) { return active[i] * factor[i]; }), count);
  });
}

template <typename Activate>
at::Tensor gate_rows(const at::Tensor& gate_up, const Activate& activate) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous() && gate_up.size(1) % 2 == 0);
  const int64_t size = gate_up.size(1) / 2;
  at::Tensor out = gate_up.new_empty({gate_up.size(0), size});
  with_type_of(gate_up, [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    const T* from = gate_up.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_row(gate_up.size(0), size, [&](int64_t row) {
      const T* gate = from + row * 2 * size;
      gate_row(gate, gate + size, to + row * size, size, activate);
    });
  });
  return out;
}

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate_up) {
  return gate_rows(gate_up, Silu());
}

at::Tensor gelu_tanh_mul(const at::Tensor& gate_up) {
  return gate_rows(gate_up, GeluTanh());
}

}  // namespace headrace
