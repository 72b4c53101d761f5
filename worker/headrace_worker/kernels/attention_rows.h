// A tile of query rows of one KV head, and what it sums up over its keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "attention_amx.h"
#include "attention_keys.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "kv_tensors.h"

namespace headrace {

// What all tasks of one call share.
template <class T>
struct Call {
  at::Tensor query;  // [num_tokens, heads, head_dim], rows dense
  KvLayer<T> layer;
  const int32_t* block_table;
  int64_t table_width;
  Scoring scoring;
  T* output;  // [num_tokens, heads, head_dim]

  int64_t group() const { return query.size(1) / layer.kv_heads; }
  int64_t padded_dim() const { return (layer.head_dim + kLanes - 1) / kLanes * kLanes; }
};

// Sums of a tile's rows over some keys; values are [padded_rows, padded_dim].
struct TileSums {
  std::vector<RowSums> rows;
  std::vector<float> values;
  int64_t padded_dim = 0;

  void clear(int64_t num_rows, int64_t padded_rows, int64_t dim) {
    rows.assign(num_rows, RowSums{});
    values.assign(padded_rows * dim, 0.0f);
    padded_dim = dim;
  }

  void merge(const TileSums& other) {
    for (size_t r = 0; r < rows.size(); ++r)
      merge_rows(rows[r], &values[r * padded_dim], other.rows[r], &other.values[r * padded_dim],
                 padded_dim);
  }
};

// The rows of one task; a thread uses one object for all its tasks, so that memory is taken once and
// the matrix unit is set up once.
template <class T>
class QueryTile {
 public:
  explicit QueryTile(const Call<T>& call) : call_(call), finder_(call.layer) {
    if (can_use_matrices()) registers_.emplace();
  }

  void start(const Task& task, int64_t kv_head) {
    task_ = task;
    kv_head_ = kv_head;
    num_rows_ = task.num_tokens * call_.group();
    num_matrices_ = matrices_of_rows();
    padded_rows_ = num_matrices_ == 2 ? 2 * kMatrixRows : num_rows_;
    query_.resize(padded_rows_ * call_.layer.head_dim);
    scores_.resize(padded_rows_ * kTileKeys);
    weights_.resize(padded_rows_ * kTileKeys);
    decay_.resize(num_rows_);
  }

  // Sums over the task's parts, each by itself and then merged in order.
  void attend(TileSums& sums) {
    gather_query();
    clear(sums);
    attend_part(task_.first_part, sums);
    for (int64_t part = task_.first_part + 1; part < task_.end_part; ++part) {
      clear(more_);
      attend_part(part, more_);
      sums.merge(more_);
    }
  }

  void write(const TileSums& sums) {
    const int64_t head_dim = call_.layer.head_dim, padded = call_.padded_dim();
    row_.resize(padded);
    for (int64_t r = 0; r < num_rows_; ++r) {
      for (int64_t i = 0; i < padded; i += kLanes)
        store_as(&row_[i], load16<Floats16>(&sums.values[r * padded + i]) / sums.rows[r].total);
      const int64_t row = token_of(r) * call_.query.size(1) + head_of(r);
      std::memcpy(call_.output + row * head_dim, row_.data(), head_dim * sizeof(T));
    }
  }

 private:
  // Rows of one token's heads follow each other: they share every key.
  int64_t token_of(int64_t row) const { return task_.first_token + row / call_.group(); }
  int64_t head_of(int64_t row) const { return kv_head_ * call_.group() + row % call_.group(); }
  int64_t position_of(int64_t row) const { return task_.first_position + row / call_.group(); }

  bool can_use_matrices() const {
    const KvLayer<T>& layer = call_.layer;
    return std::is_same_v<T, c10::BFloat16> && layer.head_dim % (2 * kMatrixColumns) == 0 &&
           layer.block_size % (2 * kLanes) == 0 && may_use_matrices();
  }

  // 0 where vectors have to do; a single one takes four columns of matrices at once.
  int64_t matrices_of_rows() const {
    if (!registers_ || num_rows_ > 2 * kMatrixRows) return 0;
    return num_rows_ <= kMatrixRows && call_.layer.head_dim % (4 * kMatrixColumns) == 0 ? 1 : 2;
  }

  void clear(TileSums& sums) const { sums.clear(num_rows_, padded_rows_, call_.padded_dim()); }

  void gather_query() {
    const int64_t head_dim = call_.layer.head_dim;
    for (int64_t r = 0; r < num_rows_; ++r)
      std::memcpy(&query_[r * head_dim], row_of<T>(call_.query, token_of(r), head_of(r)),
                  head_dim * sizeof(T));
  }

  // Tiles of keys start at multiples of their size, so that a row meets the same ones in any chunk.
  void attend_part(int64_t part, TileSums& sums) {
    const int64_t visible = call_.scoring.first_visible(task_.first_position);
    const int64_t first = std::max(part * kPartKeys, visible / kTileKeys * kTileKeys);
    const int64_t end =
        std::min<int64_t>((part + 1) * kPartKeys, task_.first_position + task_.num_tokens);
    for (int64_t key = first; key < end; key += kTileKeys)
      attend_keys(key, std::min(kTileKeys, end - key), sums);
  }

  void attend_keys(int64_t first_key, int64_t num_keys, TileSums& sums) {
    const int32_t* blocks = call_.block_table + task_.sequence * call_.table_width;
    const KeyTile keys = finder_.find(blocks, kv_head_, first_key, num_keys);
    if (num_matrices_ > 0) return attend_by_matrices(finder_.with_clean_tail(keys), first_key, sums);
    score_tile<T>(words_of(query_), num_rows_, call_.layer.key_words(), keys, scores_.data());
    weigh_scores(first_key, keys, sums);
    weigh_tile<T>(words_of(weights_), num_rows_, call_.layer.head_dim, keys, decay_.data(),
                  sums.values.data(), sums.padded_dim);
  }

  void attend_by_matrices([[maybe_unused]] const KeyTile& keys, [[maybe_unused]] int64_t first_key,
                          [[maybe_unused]] TileSums& sums) {
#ifdef HEADRACE_AMX
    const int64_t head_dim = call_.layer.head_dim;
    registers_->set_rows(std::min(padded_rows_, kMatrixRows));
    with_constant<2>(num_matrices_, [&](auto matrices) {
      score_matrices<matrices>(words_of(query_), call_.layer.key_words(), keys, scores_.data());
      weigh_scores(first_key, keys, sums);
      for (int64_t r = 0; r < num_rows_; ++r)
        shrink(&sums.values[r * head_dim], head_dim, decay_[r]);
      weigh_matrices<matrices>(words_of(weights_), keys, head_dim, sums.values.data());
    });
#endif
  }

  void weigh_scores(int64_t first_key, const KeyTile& keys, TileSums& sums) {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const int64_t position = position_of(r);
      const Visible visible{call_.scoring.first_visible(position) - first_key,
                            std::min(position + 1 - first_key, keys.num_keys)};
      decay_[r] = weigh_keys(&scores_[r * kTileKeys], keys.num_units() * keys.unit, visible,
                             call_.scoring, sums.rows[r], &weights_[r * kTileKeys]);
    }
  }

  static const uint32_t* words_of(const std::vector<T>& elements) {
    return reinterpret_cast<const uint32_t*>(elements.data());
  }

  const Call<T>& call_;
  KeyFinder<T> finder_;
  std::optional<MatrixRegisters> registers_;
  Task task_{};
  int64_t kv_head_ = 0;
  int64_t num_rows_ = 0;
  int64_t padded_rows_ = 0;    // to whole matrices; what the rows beyond hold is never written
  int64_t num_matrices_ = 0;   // of 16 rows; 0: vectors do the work
  std::vector<T> query_;       // [padded_rows, head_dim]
  std::vector<float> scores_;  // [padded_rows, 128]
  std::vector<T> weights_;     // [padded_rows, 128]
  std::vector<float> decay_;   // [num_rows]
  std::vector<T> row_;         // [padded_dim]
  TileSums more_;
};

}  // namespace headrace
