// The activations of gated feed-forward layers, on vectors of floats.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>

namespace headrace {

struct Silu {
  template <class V>
  V operator()(const V& x) const {
    return x / (V(1.0f) + x.neg().exp());
  }
};

struct GeluTanh {
  template <class V>
  V operator()(const V& x) const {
    const V factor(static_cast<float>(M_SQRT2 * M_2_SQRTPI * 0.5));
    const V inner = factor * (x + V(0.044715f) * (x * x * x));
    return V(0.5f) * x * (V(1.0f) + inner.tanh());
  }
};

}  // namespace headrace
