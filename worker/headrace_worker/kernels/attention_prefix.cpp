// Puts together tasks whose contexts begin with the same blocks, so that those keys are read once.
//
// Hydragen (Juravsky et al., 2024) and ChunkAttention (Ye et al., 2024) gain by it what we do: a tile
// of queries does more work for each key that it reads.

#include "attention_prefix.h"

#include <cstring>
#include <limits>

namespace headrace {

namespace {

// The blocks of keys that lie before all of a task's tokens.
struct Prefix {
  Prefix(const Task& task, const Blocks& blocks)
      : first(blocks.table + task.sequence * blocks.width),
        size((task.first_position + blocks.size - 1) / blocks.size) {}

  const int32_t* first;
  int64_t size;
};

// An order in which prefixes that begin alike are neighbours, whichever it is.
bool comes_before(const Prefix& a, const Prefix& b) {
  const int order = std::memcmp(a.first, b.first, std::min(a.size, b.size) * sizeof(int32_t));
  return order != 0 ? order < 0 : a.size < b.size;
}

// Keys that two tasks see in the same blocks, as whole tiles.
int64_t count_shared_keys(const Task& a, const Task& b, const Blocks& blocks) {
  const Prefix one(a, blocks), other(b, blocks);
  const int32_t* end = one.first + std::min(one.size, other.size);
  const int64_t num_blocks = std::mismatch(one.first, end, other.first).first - one.first;
  const int64_t before = std::min(a.first_position, b.first_position);
  return std::min(num_blocks * blocks.size, before) / kTileKeys * kTileKeys;
}

// Whether a task takes more than half of a tile, so that another one like it does not fit in.
bool fills_tile(const Task& task, const JointLimits& limits) {
  return 2 * task.num_tokens * limits.rows_per_token > kTileRows;
}

// The last tasks of some, which are to be joint, and what all of their cuts save.
struct Cut {
  int64_t saved_keys = 0;  // that need not be read again
  int64_t num_joint = 1;
  int64_t shared_keys = 0;
};

// The best ways to cut a row of tasks: cuts[n] is that of the first n. Each task shares `shared[i]` keys
// with the one before it.
std::vector<Cut> cut_best(const std::vector<Task>& tasks, const std::vector<int64_t>& shared,
                          const JointLimits& limits) {
  std::vector<Cut> cuts(1);
  for (size_t end = 1; end <= tasks.size(); ++end) {
    Cut best{cuts.back().saved_keys};
    int64_t keys = std::numeric_limits<int64_t>::max();
    int64_t num_rows = tasks[end - 1].num_tokens * limits.rows_per_token;
    for (int64_t n = 2; n <= std::min<int64_t>(limits.tasks, end); ++n) {
      keys = std::min(keys, shared[end - n + 1]);
      num_rows += tasks[end - n].num_tokens * limits.rows_per_token;
      if (keys == 0 || num_rows > kTileRows) break;
      const int64_t saved = cuts[end - n].saved_keys + (n - 1) * keys;
      if (saved > best.saved_keys) best = {saved, n, keys};
    }
    cuts.push_back(best);
  }
  return cuts;
}

void mark(const std::vector<Cut>& cuts, std::vector<Task>& tasks) {
  for (size_t end = tasks.size(); end > 0;) {
    const Cut& cut = cuts[end];
    for (int64_t i = 1; i <= cut.num_joint; ++i) {
      tasks[end - i].num_joint = 0;
      tasks[end - i].shared_keys = static_cast<int32_t>(cut.shared_keys);
    }
    end -= cut.num_joint;
    tasks[end].num_joint = static_cast<int32_t>(cut.num_joint);
  }
}

}  // namespace

std::vector<Task> join_prefixes(std::vector<Task> tasks, const Blocks& blocks,
                                const JointLimits& limits) {
  const auto first = std::stable_partition(
      tasks.begin(), tasks.end(), [&](const Task& task) { return fills_tile(task, limits); });
  std::stable_sort(first, tasks.end(), [&](const Task& a, const Task& b) {
    return comes_before(Prefix(a, blocks), Prefix(b, blocks));
  });
  std::vector<int64_t> shared(tasks.size());
  for (size_t i = 1; i < tasks.size(); ++i)
    shared[i] = count_shared_keys(tasks[i - 1], tasks[i], blocks);
  mark(cut_best(tasks, shared, limits), tasks);
  return tasks;
}

}  // namespace headrace
