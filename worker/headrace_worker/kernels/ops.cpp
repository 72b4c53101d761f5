// The schema of every kernel under torch.ops.headrace.
//
// They are gathered here, because torch/library.h alone costs most of a build's time.

#include <torch/library.h>

#include "kernels.h"

TORCH_LIBRARY(headrace, ops) {
  ops.def("count_threads() -> int", &headrace::count_threads);
}
