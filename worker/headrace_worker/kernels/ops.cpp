// The schema of every kernel under torch.ops.headrace.
//
// They are gathered here, because torch/library.h alone costs most of a build's time.

#include <torch/library.h>

#include "kernels.h"

TORCH_LIBRARY(headrace, ops) {
  ops.def("count_threads() -> int", &headrace::count_threads);
  ops.def(
      "write_kv(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value,"
      " Tensor slots) -> ()",
      &headrace::write_kv);
  ops.def(
      "plan_attention(Tensor cu_seqlens_q, Tensor seq_lens, int kv_heads, int heads_per_kv_head)"
      " -> Tensor",
      &headrace::plan_attention);
  ops.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,"
      " Tensor plan, float scale, int? window, float? soft_cap) -> Tensor",
      &headrace::paged_attention);
}
