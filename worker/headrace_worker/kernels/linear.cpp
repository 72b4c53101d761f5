// Projections in bfloat16 on AMX: 32 columns of the weight a task, 32 or 16 rows a pass.
//
// A task streams its columns from memory once and keeps them in the cache for further rows. Sums
// run over the inputs in their order, in float32, so that a row's bits are its own.

#include "linear.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "matrix_registers.h"

namespace headrace {

constexpr int64_t kColumns = 32;                     // outputs of a task: two right operands
constexpr int64_t kInputs = 32;                      // inputs that one instruction takes
constexpr int64_t kOperand = 16 * 16 * 2;            // elements of a right operand
constexpr int64_t kStepElements = 2 * kOperand;      // of a weight, for one step of a task

bool has_matrix_unit() { return may_use_matrices(); }

at::Tensor pack_linear(const at::Tensor& weight) {
  const int64_t out = weight.size(0), in = weight.size(1);
  const int64_t tasks = (out + kColumns - 1) / kColumns, steps = (in + kInputs - 1) / kInputs;
  const at::Tensor source = weight.contiguous();
  at::Tensor packed = weight.new_zeros({tasks, steps, 2, 16, 16, 2});
  const auto* from = static_cast<const uint16_t*>(source.const_data_ptr());
  auto* to = static_cast<uint16_t*>(packed.mutable_data_ptr());
  at::parallel_for(0, out, 64, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o)
      for (int64_t i = 0; i < in; ++i) {
        const int64_t step = (o / kColumns * steps + i / kInputs) * kStepElements;
        const int64_t operand = o % kColumns / 16 * kOperand;
        to[step + operand + i % kInputs / 2 * 32 + o % 16 * 2 + i % 2] = from[o * in + i];
      }
  });
  return packed;
}

#ifdef HEADRACE_AMX

namespace {

// Rows of the left operand, in place where that is possible, else padded with zeros.
class PaddedRows {
 public:
  PaddedRows(const at::Tensor& x, int64_t in) : whole_(x.contiguous()), in_(in) {
    const int64_t num_rows = x.size(0), given = x.size(1);
    num_in_place_ = given == in ? num_rows / kMatrixRows * kMatrixRows : 0;
    if (num_in_place_ == num_rows) return;
    const int64_t missing = num_rows - num_in_place_;
    rest_ = x.new_zeros({(missing + kMatrixRows - 1) / kMatrixRows * kMatrixRows, in});
    auto* to = static_cast<uint16_t*>(rest_.mutable_data_ptr());
    const auto* from = static_cast<const uint16_t*>(whole_.const_data_ptr());
    for (int64_t r = 0; r < missing; ++r)
      std::memcpy(to + r * in, from + (num_in_place_ + r) * given, given * sizeof(uint16_t));
  }

  // The first of 16 rows from `row` on, a multiple of 16.
  const uint16_t* at(int64_t row) const {
    const at::Tensor& source = row < num_in_place_ ? whole_ : rest_;
    const int64_t place = row < num_in_place_ ? row : row - num_in_place_;
    return static_cast<const uint16_t*>(source.const_data_ptr()) + place * in_;
  }

 private:
  at::Tensor whole_, rest_;
  int64_t in_, num_in_place_;
};

// Registers 0 to 3 hold sums of Rows x 2 matrices: sums [Rows * 16, 32], `stride` floats a row.
template <int Rows>
inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Rows == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int Rows>
inline void store_sums(float* sums, int64_t stride) {
  _tile_stored(0, sums, stride * sizeof(float));
  _tile_stored(1, sums + kMatrixColumns, stride * sizeof(float));
  if constexpr (Rows == 2) {
    _tile_stored(2, sums + kMatrixRows * stride, stride * sizeof(float));
    _tile_stored(3, sums + kMatrixRows * stride + kMatrixColumns, stride * sizeof(float));
  }
}

// sums [32 or 16 rows, 32] (Rows: 2 or 1) of rows that begin at first and, if there are 32, second.
template <int Rows>
void multiply(const uint16_t* first, const uint16_t* second, const uint16_t* weight, int64_t steps,
              float* sums) {
  const int64_t stride = steps * kInputs * sizeof(uint16_t);
  clear_sums<Rows>();
  for (int64_t s = 0; s < steps; ++s, weight += kStepElements) {
    _tile_loadd(4, first + s * kInputs, stride);
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + kOperand, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Rows == 2) {
      _tile_loadd(5, second + s * kInputs, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  store_sums<Rows>(sums, kColumns);
}

// Adds the bias of 32 columns, zeros where there is none, and rounds; stores the columns that exist.
void store(const float* sums, const float* bias, uint16_t* to, __mmask32 columns) {
  const __m512 low = _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_loadu_ps(bias));
  const __m512 high = _mm512_add_ps(_mm512_loadu_ps(sums + 16), _mm512_loadu_ps(bias + 16));
  const __m512bh rounded = _mm512_cvtne2ps_pbh(high, low);
  _mm512_mask_storeu_epi16(to, columns, reinterpret_cast<const __m512i&>(rounded));
}

void load_bias(const std::optional<at::Tensor>& bias, int64_t first, int64_t count, float* to) {
  std::fill_n(to, kColumns, 0.0f);
  if (!bias) return;
  const auto* from = bias->const_data_ptr<at::BFloat16>() + first;
  for (int64_t c = 0; c < count; ++c) to[c] = from[c];
}

}  // namespace

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const std::optional<at::Tensor>& bias, int64_t out_features) {
  const int64_t num_rows = x.size(0), steps = packed.size(1);
  const PaddedRows rows(x, steps * kInputs);
  at::Tensor output = x.new_empty({num_rows, out_features});
  const auto* weight = static_cast<const uint16_t*>(packed.const_data_ptr());
  auto* to = static_cast<uint16_t*>(output.mutable_data_ptr());
  at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    const MatrixRegisters registers;
    alignas(64) float sums[2 * kMatrixRows * kColumns], added[kColumns];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t column = task * kColumns;
      const int64_t num_columns = std::min(kColumns, out_features - column);
      const auto mask = static_cast<__mmask32>(~0u >> (kColumns - num_columns));
      const uint16_t* columns = weight + task * steps * kStepElements;
      load_bias(bias, column, num_columns, added);
      for (int64_t row = 0; row < num_rows; row += 2 * kMatrixRows) {
        const int64_t count = std::min(2 * kMatrixRows, num_rows - row);
        if (count > kMatrixRows)
          multiply<2>(rows.at(row), rows.at(row + kMatrixRows), columns, steps, sums);
        else
          multiply<1>(rows.at(row), nullptr, columns, steps, sums);
        for (int64_t r = 0; r < count; ++r)
          store(sums + r * kColumns, added, to + (row + r) * out_features + column, mask);
      }
    }
  });
  return output;
}

#else

at::Tensor packed_linear(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         int64_t) {
  TORCH_CHECK(false, "this CPU has no matrix unit");
}

#endif

}  // namespace headrace
