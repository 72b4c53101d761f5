// A tile of query rows of one KV head, which go over keys together.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "attention_amx.h"
#include "attention_keys.h"
#include "attention_sums.h"
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

// One query row: a head of a new token.
struct QueryRow {
  int64_t token;     // within the batch
  int64_t head;      // of all query heads
  int64_t position;  // of the token within its sequence
};

// The rows of a task, or of joint ones; a thread uses one object for all its tasks, so that memory is
// taken once and the matrix unit is set up once.
template <class T>
class QueryTile {
 public:
  explicit QueryTile(const Call<T>& call) : call_(call), finder_(call.layer) {
    if (can_use_matrices()) registers_.emplace();
  }

  // Takes the rows of `count` tasks, whose keys are found in the blocks of the first.
  void start(const Task* tasks, int64_t count, int64_t kv_head) {
    kv_head_ = kv_head;
    blocks_ = call_.block_table + tasks->sequence * call_.table_width;
    rows_.clear();
    for (int64_t i = 0; i < count; ++i) add_rows(tasks[i]);
    num_matrices_ = matrices_of_rows();
    padded_rows_ = num_matrices_ == 2 ? 2 * kMatrixRows : num_rows();
    query_.resize(padded_rows_ * call_.layer.head_dim);
    scores_.resize(padded_rows_ * kTileKeys);
    weights_.resize(padded_rows_ * kTileKeys);
    decay_.resize(num_rows());
  }

  // Says whose keys are likely to be asked for after those of the task that is at hand.
  void expect(const Task& task, int64_t kv_head) {
    const int32_t* blocks = call_.block_table + task.sequence * call_.table_width;
    after_ = place_of(blocks, kv_head, task.first_part * kPartKeys, task.end_key());
  }

  int64_t num_rows() const { return rows_.size(); }
  TileShape shape() const { return {num_rows(), padded_rows_, call_.padded_dim()}; }

  // Adds keys [first, end) to the sums, but for tiles of keys that no row sees. Such tiles start at
  // multiples of their size, so that a row meets the same ones in any chunk.
  void attend(int64_t first, int64_t end, ContextSums& sums) {
    gather_query();
    first = std::max(first, first_visible() / kTileKeys * kTileKeys);
    for (int64_t key = first; key < end; key += kTileKeys) {
      next_ = key + kTileKeys < end ? place_of(blocks_, kv_head_, key + kTileKeys, end) : after_;
      attend_keys(key, std::min(kTileKeys, end - key), sums.part_of(key, shape()));
    }
  }

  void write(const TileSums& sums) {
    const int64_t head_dim = call_.layer.head_dim, padded = call_.padded_dim();
    row_.resize(padded);
    for (int64_t r = 0; r < num_rows(); ++r) {
      for (int64_t i = 0; i < padded; i += kLanes)
        store_as(&row_[i], load16<Floats16>(&sums.values[r * padded + i]) / sums.rows[r].total);
      const int64_t row = rows_[r].token * call_.query.size(1) + rows_[r].head;
      std::memcpy(call_.output + row * head_dim, row_.data(), head_dim * sizeof(T));
    }
  }

 private:
  void add_rows(const Task& task) {
    for (int64_t i = 0; i < task.num_tokens; ++i)
      for (int64_t h = 0; h < call_.group(); ++h)
        rows_.push_back(
            {task.first_token + i, kv_head_ * call_.group() + h, task.first_position + i});
  }

  bool can_use_matrices() const {
    const KvLayer<T>& layer = call_.layer;
    return std::is_same_v<T, c10::BFloat16> && layer.head_dim % (2 * kMatrixColumns) == 0 &&
           layer.block_size % (2 * kLanes) == 0 && may_use_matrices();
  }

  // 0 where vectors have to do; a single one takes four columns of matrices at once.
  int64_t matrices_of_rows() const {
    if (!registers_ || num_rows() > 2 * kMatrixRows) return 0;
    return num_rows() <= kMatrixRows && call_.layer.head_dim % (4 * kMatrixColumns) == 0 ? 1 : 2;
  }

  int64_t first_visible() const {
    int64_t position = rows_[0].position;
    for (const QueryRow& row : rows_) position = std::min(position, row.position);
    return call_.scoring.first_visible(position);
  }

  // Where the keys [first, end) begin, as far as one tile; nothing where it would take a copy.
  KeyTile place_of(const int32_t* blocks, int64_t kv_head, int64_t first, int64_t end) {
    if (!registers_) return KeyTile{};
    return finder_.find(blocks, kv_head, first, std::min(kTileKeys, end - first));
  }

  void gather_query() {
    const int64_t head_dim = call_.layer.head_dim;
    for (int64_t r = 0; r < num_rows(); ++r)
      std::memcpy(&query_[r * head_dim], row_of<T>(call_.query, rows_[r].token, rows_[r].head),
                  head_dim * sizeof(T));
  }

  void attend_keys(int64_t first_key, int64_t num_keys, TileSums& sums) {
    const KeyTile keys = finder_.find(blocks_, kv_head_, first_key, num_keys);
    if (num_matrices_ > 0) return attend_by_matrices(finder_.with_clean_tail(keys), first_key, sums);
    score_tile<T>(words_of(query_), num_rows(), call_.layer.key_words(), keys, scores_.data());
    weigh_scores(first_key, keys, sums);
    weigh_tile<T>(words_of(weights_), num_rows(), call_.layer.head_dim, keys, decay_.data(),
                  sums.values.data(), call_.padded_dim());
  }

  void attend_by_matrices([[maybe_unused]] const KeyTile& keys, [[maybe_unused]] int64_t first_key,
                          [[maybe_unused]] TileSums& sums) {
#ifdef HEADRACE_AMX
    const int64_t head_dim = call_.layer.head_dim;
    registers_->set_rows(std::min(padded_rows_, kMatrixRows));
    with_constant<2>(num_matrices_, [&](auto matrices) {
      settle_memory();
      score_matrices<matrices>(words_of(query_), call_.layer.key_words(), keys, scores_.data());
      weigh_scores(first_key, keys, sums);
      for (int64_t r = 0; r < num_rows(); ++r)
        shrink(&sums.values[r * head_dim], head_dim, decay_[r]);
      settle_memory();
      weigh_matrices<matrices>(words_of(weights_), keys, next_, head_dim, sums.values.data());
    });
#endif
  }

  void weigh_scores(int64_t first_key, const KeyTile& keys, TileSums& sums) {
    for (int64_t r = 0; r < num_rows(); ++r) {
      const int64_t position = rows_[r].position;
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
  KeyTile next_{};   // after the one at hand
  KeyTile after_{};  // the first of the task that is likely to be next
  const int32_t* blocks_ = nullptr;  // of the sequence whose keys these are
  int64_t kv_head_ = 0;
  std::vector<QueryRow> rows_;
  int64_t padded_rows_ = 0;    // to whole matrices; what the rows beyond hold is never written
  int64_t num_matrices_ = 0;   // of 16 rows; 0: vectors do the work
  std::vector<T> query_;       // [padded_rows, head_dim]
  std::vector<float> scores_;  // [padded_rows, 128]
  std::vector<T> weights_;     // [padded_rows, 128]
  std::vector<float> decay_;   // [num_rows]
  std::vector<T> row_;         // [padded_dim]
};

}  // namespace headrace
