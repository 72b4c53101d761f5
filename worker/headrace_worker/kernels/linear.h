// Projections on the matrix unit: every row is summed in one order, whatever rows share the call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace headrace {

// Whether this CPU has the unit, and Linux lets this process use it.
bool has_matrix_unit();

// Lays a bfloat16 or int8 weight [out, in] out in the order in which the products read it; it stays as
// large but for padding, see matrix_operands.h.
at::Tensor pack_linear(const at::Tensor& weight);

// x @ weight.T + bias for bfloat16 x [num_rows, in]; bias [out_features] is added before rounding.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const std::optional<at::Tensor>& bias, int64_t out_features);

// The same of rows that are gates and factors: act(gate) * factor, [num_rows, out / 2]. By the weight,
// 16 gates and their 16 factors take turns; act is silu, or gelu in its tanh form.
at::Tensor packed_gated_linear(const at::Tensor& x, const at::Tensor& packed,
                               const std::optional<at::Tensor>& bias, bool is_gelu);

// Both for whole numbers: x [num_rows, in] times row_scales [num_rows], the weight times scales [out].
at::Tensor packed_linear_int8(const at::Tensor& x, const at::Tensor& row_scales, const at::Tensor& packed,
                              const at::Tensor& scales, const std::optional<at::Tensor>& bias);

at::Tensor packed_gated_linear_int8(const at::Tensor& x, const at::Tensor& row_scales,
                                    const at::Tensor& packed, const at::Tensor& scales,
                                    const std::optional<at::Tensor>& bias, bool is_gelu);

}  // namespace headrace
