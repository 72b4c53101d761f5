// Who computes what in a step's attention: query tiles, shared prefixes, and parts of long contexts.
#pragma once

#include <algorithm>
#include <cstdint>

namespace headrace {

constexpr int64_t kTileRows = 32;    // query rows of a tile: new tokens times heads of one KV head
constexpr int64_t kTileKeys = 128;   // scores of a row between two looks at its maximum
constexpr int64_t kPartKeys = 512;   // a context is summed in parts of this size, then merged

inline int64_t num_parts(int64_t num_keys) { return (num_keys + kPartKeys - 1) / kPartKeys; }

// New tokens [first_token, first_token + num_tokens) of one sequence, against parts
// [first_part, end_part) of its context. A row of the plan's int32 tensor.
//
// Tasks whose contexts begin with the same blocks may be joint. They follow each other in the plan;
// whoever takes the first of them sums over the shared keys for all, then over each one's own.
struct Task {
  int32_t sequence;
  int32_t first_token;     // within the batch
  int32_t num_tokens;      // at least 1
  int32_t first_position;  // of first_token within its sequence
  int32_t first_part;
  int32_t end_part;
  int32_t slot;            // place of its sums among those that wait to be merged
  int32_t num_slots;       // of its tile: the parts that are tasks of their own; 1: it is whole
  int32_t num_joint;       // joint tasks from here on; 1: it is by itself; 0: it follows their first
  int32_t shared_keys;     // that are the same for all joint tasks: whole tiles of keys

  int64_t first_own_key() const { return std::max<int64_t>(first_part * kPartKeys, shared_keys); }
  int64_t end_key() const {
    return std::min<int64_t>(end_part * kPartKeys, first_position + num_tokens);
  }
};
constexpr int64_t kTaskColumns = 10;
static_assert(sizeof(Task) == kTaskColumns * sizeof(int32_t));

}  // namespace headrace
