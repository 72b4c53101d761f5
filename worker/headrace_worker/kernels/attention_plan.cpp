// Cuts a step's attention into tasks that any thread may take, the longest first.

#include <ATen/Parallel.h>

#include <cstring>

#include "attention_prefix.h"
#include "kernels.h"

namespace headrace {

namespace {

constexpr int64_t kTasksPerThread = 8;  // fewer than these leave threads idle

std::vector<Task> cut_into_tiles(const at::Tensor& bounds, const at::Tensor& lengths,
                                 int64_t tokens_per_tile) {
  const int32_t* bound = bounds.const_data_ptr<int32_t>();
  const int32_t* length = lengths.const_data_ptr<int32_t>();
  std::vector<Task> tiles;
  for (int32_t seq = 0; seq < lengths.size(0); ++seq) {
    const int32_t before = length[seq] - (bound[seq + 1] - bound[seq]);
    for (int32_t token = bound[seq]; token < bound[seq + 1]; token += tokens_per_tile) {
      const auto count = std::min<int32_t>(tokens_per_tile, bound[seq + 1] - token);
      const int32_t position = before + token - bound[seq];
      const auto parts = static_cast<int32_t>(num_parts(position + count));
      tiles.push_back({seq, token, count, position, 0, parts, 0, 1, 1, 0});
    }
  }
  return tiles;
}

// One task a part. It changes no bit: parts are summed apart in any case.
std::vector<Task> split(const std::vector<Task>& tiles) {
  std::vector<Task> tasks;
  for (const Task& tile : tiles)
    for (int32_t part = 0; part < tile.end_part; ++part) {
      Task task = tile;
      task.first_part = part;
      task.end_part = part + 1;
      task.slot = static_cast<int32_t>(tasks.size());
      task.num_slots = tile.end_part;
      tasks.push_back(task);
    }
  return tasks;
}

// Tasks that one thread takes together: one, or joint ones.
struct Run {
  const Task* first;
  int64_t cost;  // keys that are read, times new tokens; what is shared counts once
};

std::vector<Run> find_runs(const std::vector<Task>& tasks) {
  std::vector<Run> runs;
  for (const Task& task : tasks) {
    if (task.num_joint > 0) runs.push_back({&task, task.num_tokens * task.shared_keys});
    runs.back().cost += task.num_tokens * (task.end_key() - task.first_own_key());
  }
  return runs;
}

std::vector<Task> put_longest_first(const std::vector<Task>& tasks) {
  auto runs = find_runs(tasks);
  std::stable_sort(runs.begin(), runs.end(),
                   [](const Run& a, const Run& b) { return a.cost > b.cost; });
  std::vector<Task> sorted;
  for (const Run& run : runs) sorted.insert(sorted.end(), run.first, run.first + run.first->num_joint);
  return sorted;
}

}  // namespace

at::Tensor plan_attention(const at::Tensor& cu_seqlens_q, const at::Tensor& seq_lens,
                          const at::Tensor& block_table, int64_t block_size, int64_t kv_heads,
                          int64_t heads_per_kv_head) {
  const auto table = block_table.contiguous();
  const int64_t tokens_per_tile = std::max<int64_t>(1, kTileRows / heads_per_kv_head);
  auto tasks = cut_into_tiles(cu_seqlens_q, seq_lens, tokens_per_tile);
  const int64_t num_items = static_cast<int64_t>(tasks.size()) * kv_heads;
  const int64_t num_wanted = kTasksPerThread * at::get_num_threads();
  if (num_items < num_wanted) {
    tasks = split(tasks);
  } else {
    const Blocks blocks{table.const_data_ptr<int32_t>(), table.size(1), block_size};
    tasks = join_prefixes(std::move(tasks), blocks, {num_items / num_wanted, heads_per_kv_head});
  }
  tasks = put_longest_first(tasks);
  const int64_t num_tasks = tasks.size();
  auto plan = cu_seqlens_q.new_empty({num_tasks, kTaskColumns});
  std::memcpy(plan.mutable_data_ptr(), tasks.data(), num_tasks * sizeof(Task));
  return plan;
}

}  // namespace headrace
