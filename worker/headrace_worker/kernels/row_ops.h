// Every kernel over rows that Python can call; ops.cpp gives each its schema.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace headrace {

// RMSNorm of [num_rows, size] or [num_rows, heads, size]; is_centred: the factor is 1 + weight.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool is_centred);

// hidden += delta, in place; returns the norm of the sum. Both are [num_rows, size].
at::Tensor add_rms_norm(at::Tensor hidden, const at::Tensor& delta, const at::Tensor& weight,
                        double eps, bool is_centred);

// silu(gate) * up of rows [gate | up], [num_rows, 2 * size] -> [num_rows, size].
at::Tensor silu_mul(const at::Tensor& gate_up);

// The same with gelu in its tanh form.
at::Tensor gelu_tanh_mul(const at::Tensor& gate_up);

// Rotates heads [num_rows, heads, head_dim] in place; cos, signed_sin: [num_rows, 1, rotary_dim].
void rotate(at::Tensor heads, const at::Tensor& cos, const at::Tensor& signed_sin);

// The same for queries and, behind them, keys; while a token is at hand, its keys and its values
// [num_rows, kv_heads, head_dim] go to its slot of a layer's cache, see write_kv.
void rotate_and_write(at::Tensor query_key, const at::Tensor& value, const at::Tensor& cos,
                      const at::Tensor& signed_sin, const at::Tensor& key_cache,
                      const at::Tensor& value_cache, const at::Tensor& slots);

// The largest element of each row as float32, NaN if there is one, and its first index as int64.
std::tuple<at::Tensor, at::Tensor> max_of_rows(const at::Tensor& rows);

// Whole numbers in [-127, 127] and each row's float32 scale: row = numbers * scale, about.
std::tuple<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& x);

// rows[i] = rows[i] * scales[i] + bias, in place, rounded once.
void scale_rows(at::Tensor rows, const at::Tensor& scales, const std::optional<at::Tensor>& bias);

}  // namespace headrace
