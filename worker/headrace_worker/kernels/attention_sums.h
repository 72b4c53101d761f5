// What query rows have summed up over their contexts so far, part by part.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "attention_softmax.h"

namespace headrace {

// Sizes of a tile's sums.
struct TileShape {
  int64_t num_rows;
  int64_t padded_rows;  // to whole matrices
  int64_t padded_dim;   // of a row's values, to whole vectors
};

// Sums of a tile's rows over some keys; values are [padded_rows, padded_dim].
struct TileSums {
  std::vector<RowSums> rows;
  std::vector<float> values;
  int64_t padded_dim = 0;

  void clear(const TileShape& shape) {
    rows.assign(shape.num_rows, RowSums{});
    values.assign(shape.padded_rows * shape.padded_dim, 0.0f);
    padded_dim = shape.padded_dim;
  }

  void merge(const TileSums& other) {
    for (size_t r = 0; r < rows.size(); ++r)
      merge_rows(rows[r], &values[r * padded_dim], other.rows[r], &other.values[r * padded_dim],
                 padded_dim);
  }

  // Takes over the rows of another tile from first_row on, as many as the shape has.
  void copy_rows(const TileSums& other, int64_t first_row, const TileShape& shape) {
    clear(shape);
    std::copy_n(other.rows.begin() + first_row, shape.num_rows, rows.begin());
    std::copy_n(other.values.begin() + first_row * padded_dim, shape.num_rows * padded_dim,
                values.begin());
  }
};

// Sums over a context from its first keys on. Each part of the context is summed by itself and then
// merged with those before it, wherever prefixes and tasks end: so a row's bits stay its own.
class ContextSums {
 public:
  void clear() { index_.reset(), has_before_ = false; }

  // The sums of the part that `key` lies in; keys come in order.
  TileSums& part_of(int64_t key, const TileShape& shape) {
    if (index_ != key / kPartKeys) {
      finish_part();
      part_.clear(shape);
      index_ = key / kPartKeys;
    }
    return part_;
  }

  // Goes on where some rows of another tile are.
  void copy_rows(const ContextSums& other, int64_t first_row, const TileShape& shape) {
    index_ = other.index_;
    has_before_ = other.has_before_;
    if (index_) part_.copy_rows(other.part_, first_row, shape);
    if (has_before_) before_.copy_rows(other.before_, first_row, shape);
  }

  // All there is, when the last key has come; nothing where no key was in sight.
  TileSums& finish(const TileShape& shape) {
    finish_part();
    if (!has_before_) before_.clear(shape);
    return before_;
  }

 private:
  void finish_part() {
    if (!index_) return;
    if (has_before_)
      before_.merge(part_);
    else
      std::swap(before_, part_);
    has_before_ = true;
    index_.reset();
  }

  std::optional<int64_t> index_;  // of the part under way
  TileSums part_;                 // what it has; meaningless while there is none
  bool has_before_ = false;
  TileSums before_;               // what the parts before it have, merged
};

}  // namespace headrace
