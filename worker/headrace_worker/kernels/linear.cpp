// Projections on AMX, in bfloat16 and in eight bits; the loop, and why it is fast, is in matrix_blocks.h.
//
// Sums in float32 run over the inputs in their order, so that a row's bits are its own.

#include "linear.h"

#include "gates.h"
#include "matrix_blocks.h"
#include "matrix_outputs.h"

namespace headrace {

bool has_matrix_unit() { return may_use_matrices(); }

at::Tensor pack_linear(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && (weight.scalar_type() == at::kChar ||
                                    weight.scalar_type() == at::kBFloat16),
              "no packed layout for ", weight.sizes(), " of ", weight.dtype());
  return weight.scalar_type() == at::kChar ? pack_weight<int8_t>(weight) : pack_weight<uint16_t>(weight);
}

#ifdef HEADRACE_AMX

namespace {

// [num_rows, width] of what `Store` makes of the sums.
template <class Format, class Store, class Values>
at::Tensor multiply(const at::Tensor& x, const at::Tensor& packed, int64_t width, Values values) {
  const int64_t most = packed.size(0) * kColumns;
  TORCH_CHECK(0 < width && width <= most, "the weight has ", most, " outputs, not ", width);
  const PaddedRows<Format> rows(x, packed.size(1) * Format::kInputs);
  at::Tensor output = x.new_empty({x.size(0), width}, at::kBFloat16);
  multiply_rows(rows, static_cast<const char*>(packed.const_data_ptr()), packed.size(0),
                Store(output, std::move(values)));
  return output;
}

template <class Format, class Values>
at::Tensor multiply_gated(const at::Tensor& x, const at::Tensor& packed, bool is_gelu, Values values) {
  const int64_t width = packed.size(0) * kMatrixColumns;
  return is_gelu
             ? multiply<Format, GatedOutput<Values, GeluTanh>>(x, packed, width, std::move(values))
             : multiply<Format, GatedOutput<Values, Silu>>(x, packed, width, std::move(values));
}

ScaledSums scaled_sums(const at::Tensor& row_scales, const at::Tensor& packed, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias) {
  std::vector<float> padded_scales(packed.size(0) * kColumns, 0.0f);
  std::copy_n(scales.const_data_ptr<float>(), scales.size(0), padded_scales.begin());
  return {row_scales.const_data_ptr<float>(), std::move(padded_scales), padded(bias, packed.size(0))};
}

}  // namespace

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const std::optional<at::Tensor>& bias, int64_t out_features) {
  return multiply<Bfloat16Format, RoundedOutput<BiasedSums>>(
      x, packed, out_features, BiasedSums{padded(bias, packed.size(0))});
}

at::Tensor packed_gated_linear(const at::Tensor& x, const at::Tensor& packed,
                               const std::optional<at::Tensor>& bias, bool is_gelu) {
  return multiply_gated<Bfloat16Format>(x, packed, is_gelu, BiasedSums{padded(bias, packed.size(0))});
}

at::Tensor packed_linear_int8(const at::Tensor& x, const at::Tensor& row_scales, const at::Tensor& packed,
                              const at::Tensor& scales, const std::optional<at::Tensor>& bias) {
  return multiply<Int8Format, RoundedOutput<ScaledSums>>(x, packed, scales.size(0),
                                                         scaled_sums(row_scales, packed, scales, bias));
}

at::Tensor packed_gated_linear_int8(const at::Tensor& x, const at::Tensor& row_scales,
                                    const at::Tensor& packed, const at::Tensor& scales,
                                    const std::optional<at::Tensor>& bias, bool is_gelu) {
  return multiply_gated<Int8Format>(x, packed, is_gelu, scaled_sums(row_scales, packed, scales, bias));
}

#else

at::Tensor packed_linear(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         int64_t) {
  TORCH_CHECK(false, "this CPU has no matrix unit");
}

at::Tensor packed_gated_linear(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                               bool) {
  TORCH_CHECK(false, "this CPU has no matrix unit");
}

at::Tensor packed_linear_int8(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>&) {
  TORCH_CHECK(false, "this CPU has no matrix unit");
}

at::Tensor packed_gated_linear_int8(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                    const at::Tensor&, const std::optional<at::Tensor>&, bool) {
  TORCH_CHECK(false, "this CPU has no matrix unit");
}

#endif

}  // namespace headrace
