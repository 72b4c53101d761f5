// Paged attention over the native backend's cache: tasks of a plan, on all threads.

#include <ATen/Parallel.h>

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
    for (int64_t i = next++; i < count; i = next++) worker(i);
  });
}

template <class T>
void run(const Call<T>& call, const Task* tasks, int64_t num_tasks) {
  const int64_t kv_heads = call.layer.kv_heads, count = num_tasks * kv_heads;
  const bool is_split = std::any_of(tasks, tasks + num_tasks,
                                    [](const Task& task) { return task.num_slots > 1; });
  std::vector<TileSums> parts(is_split ? count : 0);  // by slot, then head
  share_out(count, [&] {
    return [&, tile = QueryTile<T>(call), sums = TileSums()](int64_t i) mutable {
      const Task& task = tasks[i / kv_heads];
      const int64_t head = i % kv_heads;
      tile.start(task, head);
      if (task.num_slots > 1) return tile.attend(parts[task.slot * kv_heads + head]);
      tile.attend(sums);
      tile.write(sums);
    };
  });
  if (!is_split) return;
  QueryTile<T> tile(call);
  for (int64_t i = 0; i < count; ++i) {
    const Task& task = tasks[i / kv_heads];
    if (task.num_slots == 1 || task.first_part > 0) continue;
    TileSums* sums = &parts[task.slot * kv_heads + i % kv_heads];
    for (int32_t s = 1; s < task.num_slots; ++s) sums->merge(sums[s * kv_heads]);
    tile.start(task, i % kv_heads);
    tile.write(*sums);
  }
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
