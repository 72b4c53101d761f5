// The schemas of the kernels over rows, beside those of ops.cpp.

#include <torch/library.h>

#include "rows.h"

TORCH_LIBRARY_FRAGMENT(headrace, ops) {
  ops.def("rms_norm(Tensor x, Tensor weight, float eps, bool is_centred) -> Tensor",
          &headrace::rms_norm);
  ops.def(
      "add_rms_norm(Tensor(a!) hidden, Tensor delta, Tensor weight, float eps, bool is_centred)"
      " -> Tensor",
      &headrace::add_rms_norm);
  ops.def("silu_mul(Tensor gate_up) -> Tensor", &headrace::silu_mul);
  ops.def("gelu_tanh_mul(Tensor gate_up) -> Tensor", &headrace::gelu_tanh_mul);
  ops.def("rotate(Tensor(a!) heads, Tensor cos, Tensor signed_sin) -> ()", &headrace::rotate);
  ops.def("max_of_rows(Tensor rows) -> (Tensor, Tensor)", &headrace::max_of_rows);
  ops.def("quantize_rows(Tensor x) -> (Tensor, Tensor)", &headrace::quantize_rows);
  ops.def("scale_rows(Tensor(a!) rows, Tensor scales, Tensor? bias) -> ()", &headrace::scale_rows);
}
