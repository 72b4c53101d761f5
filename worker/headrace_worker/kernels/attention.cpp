// Paged attention over the native backend's cache: tasks of a plan, on all threads.

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "attention_rows.h"
#include "kernels.h"

namespace headrace {

namespace {

// Each thread makes a worker and lets it do whatever is next, until nothing is left.
template <class MakeWorker>
void share_out(int64_t count, const MakeWorker& make_worker) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    auto worker = make_worker();
    for (int64_t i = next++; i < count; i = next++) worker(i, next.load(std::memory_order_relaxed));
  });
}

// Does tasks of the plan, one after another. The sums of parts that are tasks of their own are left in
// `parts`, by slot and head.
template <class T>
class TaskRunner {
 public:
  TaskRunner(const Call<T>& call, std::vector<TileSums>& parts)
      : call_(call), parts_(parts), tile_(call) {}

  void expect(const Task& task, int64_t head) { tile_.expect(task, head); }

  // Does the joint tasks that begin here for one head; there are none where they began before.
  void run(const Task* tasks, int64_t head) {
    shared_.clear();
    if (tasks->num_joint > 1) {
      tile_.start(tasks, tasks->num_joint, head);
      tile_.attend(0, tasks->shared_keys, shared_);
    }
    int64_t first_row = 0;
    for (int32_t i = 0; i < tasks->num_joint; ++i) first_row += finish(tasks[i], head, first_row);
  }

 private:
  // Takes a task from the shared keys to its end; returns how many rows it has.
  int64_t finish(const Task& task, int64_t head, int64_t first_row) {
    tile_.start(&task, 1, head);
    sums_.copy_rows(shared_, first_row, tile_.shape());
    tile_.attend(task.first_own_key(), task.end_key(), sums_);
    TileSums& sums = sums_.finish(tile_.shape());
    if (task.num_slots > 1)
      std::swap(parts_[task.slot * call_.layer.kv_heads + head], sums);
    else
      tile_.write(sums);
    return tile_.num_rows();
  }

  const Call<T>& call_;
  std::vector<TileSums>& parts_;
  QueryTile<T> tile_;
  ContextSums shared_;  // of joint tasks, over the keys that they share
  ContextSums sums_;    // of one task
};

// Merges the parts that were tasks of their own.
template <class T>
void merge_parts(const Call<T>& call, const Task* tasks, int64_t count, std::vector<TileSums>& parts) {
  const int64_t kv_heads = call.layer.kv_heads;
  QueryTile<T> tile(call);
  for (int64_t i = 0; i < count; ++i) {
    const Task& task = tasks[i / kv_heads];
    if (task.num_slots == 1 || task.first_part > 0) continue;
    TileSums* sums = &parts[task.slot * kv_heads + i % kv_heads];
    for (int32_t s = 1; s < task.num_slots; ++s) sums->merge(sums[s * kv_heads]);
    tile.start(&task, 1, i % kv_heads);
    tile.write(*sums);
  }
}

template <class T>
void run(const Call<T>& call, const Task* tasks, int64_t num_tasks) {
  const int64_t kv_heads = call.layer.kv_heads, count = num_tasks * kv_heads;
  const bool is_split = std::any_of(tasks, tasks + num_tasks,
                                    [](const Task& task) { return task.num_slots > 1; });
  std::vector<TileSums> parts(is_split ? count : 0);  // by slot, then head
  share_out(count, [&] {
    return [&, runner = TaskRunner<T>(call, parts)](int64_t i, int64_t likely_next) mutable {
      if (likely_next < count) runner.expect(tasks[likely_next / kv_heads], likely_next % kv_heads);
      runner.run(tasks + i / kv_heads, i % kv_heads);
    };
  });
  if (is_split) merge_parts(call, tasks, count, parts);
}

}  // namespace

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache,
                           const at::Tensor& value_cache, const at::Tensor& block_table,
                           const at::Tensor& plan, double scale, std::optional<int64_t> window,
                           std::optional<double> soft_cap) {
  auto output = query.new_empty(query.sizes());
  const auto table = block_table.contiguous();
  const Scoring scoring{static_cast<float>(scale), static_cast<float>(soft_cap.value_or(0)),
                        window.value_or(std::numeric_limits<int32_t>::max())};
  with_element_type(query, [&](auto element) {
    using T = decltype(element);
    const Call<T> call{with_dense_rows(query), kv_layer<T>(key_cache, value_cache),
                       table.const_data_ptr<int32_t>(), table.size(1), scoring,
                       output.mutable_data_ptr<T>()};
    run(call, static_cast<const Task*>(plan.const_data_ptr()), plan.size(0));
  });
  return output;
}

}  // namespace headrace
