// Projections on the matrix unit: every row is summed in one order, whatever rows share the call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace headrace {

// Whether this CPU has the unit, and Linux lets this process use it.
bool has_matrix_unit();

// Lays a bfloat16 weight [out, in] out in the order in which packed_linear reads it, zero-padded:
// [out / 32, in / 32, 2, 16, 16, 2], each [16, 16, 2] one right operand of the unit.
at::Tensor pack_linear(const at::Tensor& weight);

// x @ weight.T + bias for bfloat16 x [num_rows, in]; bias [out_features] is added before rounding.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const std::optional<at::Tensor>& bias, int64_t out_features);

}  // namespace headrace
