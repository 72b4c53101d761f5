// Cuts a step's attention into tasks that any thread may take, the longest first.

#include "attention_plan.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace headrace {

namespace {

constexpr int64_t kFewTasks = 16;  // fewer than these leave threads idle

int64_t cost(const Task& task) {
  const int64_t last_position = task.first_position + task.num_tokens;
  const int64_t end = std::min(last_position, task.end_part * kPartKeys);
  return task.num_tokens * (end - task.first_part * kPartKeys);
}

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
      tiles.push_back({seq, token, count, position, 0, parts, 0, 1});
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

}  // namespace

at::Tensor plan_attention(const at::Tensor& cu_seqlens_q, const at::Tensor& seq_lens,
                          int64_t kv_heads, int64_t heads_per_kv_head) {
  const int64_t tokens_per_tile = std::max<int64_t>(1, kTileRows / heads_per_kv_head);
  auto tasks = cut_into_tiles(cu_seqlens_q, seq_lens, tokens_per_tile);
  if (static_cast<int64_t>(tasks.size()) * kv_heads < kFewTasks) tasks = split(tasks);
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& a, const Task& b) { return cost(a) > cost(b); });
  const int64_t num_tasks = tasks.size();
  auto plan = cu_seqlens_q.new_empty({num_tasks, 8});
  std::memcpy(plan.mutable_data_ptr(), tasks.data(), num_tasks * sizeof(Task));
  return plan;
}

}  // namespace headrace
