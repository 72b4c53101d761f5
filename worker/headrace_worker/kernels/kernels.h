// Every kernel that Python can call, with what it does; ops.cpp gives each its schema.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace headrace {

// Number of threads that a parallel loop of a kernel is spread over.
int64_t count_threads();

}  // namespace headrace
