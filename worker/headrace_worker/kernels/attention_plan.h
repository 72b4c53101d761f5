// Who computes what in a step's attention: query tiles, and parts of long contexts.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int64_t kTileRows = 32;   // query rows of a tile: new tokens times heads of one KV head
constexpr int64_t kPartKeys = 512;  // a context is summed in parts of this size, then merged

inline int64_t num_parts(int64_t num_keys) { return (num_keys + kPartKeys - 1) / kPartKeys; }

// New tokens [first_token, first_token + num_tokens) of one sequence, against parts
// [first_part, end_part) of its context. A row of the plan's int32 tensor.
struct Task {
  int32_t sequence;
  int32_t first_token;     // within the batch
  int32_t num_tokens;      // at least 1
  int32_t first_position;  // of first_token within its sequence
  int32_t first_part;
  int32_t end_part;
  int32_t slot;            // place of its sums among those that wait to be merged
  int32_t num_slots;       // of its tile: the parts that are tasks of their own; 1: it is whole
};
static_assert(sizeof(Task) == 8 * sizeof(int32_t));

}  // namespace headrace
