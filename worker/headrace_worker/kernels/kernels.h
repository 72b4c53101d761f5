// Every kernel that Python can call, with what it does; ops.cpp gives each its schema.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace headrace {

// Number of threads that a parallel loop of a kernel is spread over.
int64_t count_threads();

// Stores keys and values [num_tokens, kv_heads, head_dim] at slots [num_tokens] of a layer's cache:
// key [num_blocks, kv_heads, head_dim / W, block_size, W], value [.., block_size / W, head_dim, W].
void write_kv(const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& key,
              const at::Tensor& value, const at::Tensor& slots);

// The tasks of a step, [num_tasks, 10] int32, from prefix sums of new tokens, lengths and the block
// table, all int32.
at::Tensor plan_attention(const at::Tensor& cu_seqlens_q, const at::Tensor& seq_lens,
                          const at::Tensor& block_table, int64_t block_size, int64_t kv_heads,
                          int64_t heads_per_kv_head);

// Attention of queries [num_tokens, heads, head_dim] over a layer's cache, in their type.
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache,
                           const at::Tensor& value_cache, const at::Tensor& block_table,
                           const at::Tensor& plan, double scale, std::optional<int64_t> window,
                           std::optional<double> soft_cap);

}  // namespace headrace
