// The schema of every kernel under torch.ops.headrace.
//
// They are gathered here, because torch/library.h alone costs most of a build's time.

#include <torch/library.h>

#include "kernels.h"
#include "linear.h"
#include "row_ops.h"

TORCH_LIBRARY(headrace, ops) {
  ops.def("count_threads() -> int", &headrace::count_threads);
  ops.def(
      "write_kv(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value,"
      " Tensor slots) -> ()",
      &headrace::write_kv);
  ops.def(
      "plan_attention(Tensor cu_seqlens_q, Tensor seq_lens, Tensor block_table, int block_size,"
      " int kv_heads, int heads_per_kv_head) -> Tensor",
      &headrace::plan_attention);
  ops.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,"
      " Tensor plan, float scale, int? window, float? soft_cap) -> Tensor",
      &headrace::paged_attention);
  ops.def("has_matrix_unit() -> bool", &headrace::has_matrix_unit);
  ops.def("pack_linear(Tensor weight) -> Tensor", &headrace::pack_linear);
  ops.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor",
          &headrace::packed_linear);
  ops.def("packed_gated_linear(Tensor x, Tensor packed, Tensor? bias, bool is_gelu) -> Tensor",
          &headrace::packed_gated_linear);
  ops.def(
      "packed_linear_int8(Tensor x, Tensor row_scales, Tensor packed, Tensor scales, Tensor? bias)"
      " -> Tensor",
      &headrace::packed_linear_int8);
  ops.def(
      "packed_gated_linear_int8(Tensor x, Tensor row_scales, Tensor packed, Tensor scales,"
      " Tensor? bias, bool is_gelu) -> Tensor",
      &headrace::packed_gated_linear_int8);
  ops.def("rms_norm(Tensor x, Tensor weight, float eps, bool is_centred) -> Tensor",
          &headrace::rms_norm);
  ops.def(
      "add_rms_norm(Tensor(a!) hidden, Tensor delta, Tensor weight, float eps, bool is_centred)"
      " -> Tensor",
      &headrace::add_rms_norm);
  ops.def("silu_mul(Tensor gate_up) -> Tensor", &headrace::silu_mul);
  ops.def("gelu_tanh_mul(Tensor gate_up) -> Tensor", &headrace::gelu_tanh_mul);
  ops.def("rotate(Tensor(a!) heads, Tensor cos, Tensor signed_sin) -> ()", &headrace::rotate);
  ops.def(
      "rotate_and_write(Tensor(a!) query_key, Tensor value, Tensor cos, Tensor signed_sin,"
      " Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor slots) -> ()",
      &headrace::rotate_and_write);
  ops.def("max_of_rows(Tensor rows) -> (Tensor, Tensor)", &headrace::max_of_rows);
  ops.def("quantize_rows(Tensor x) -> (Tensor, Tensor)", &headrace::quantize_rows);
  ops.def("scale_rows(Tensor(a!) rows, Tensor scales, Tensor? bias) -> ()", &headrace::scale_rows);
}
