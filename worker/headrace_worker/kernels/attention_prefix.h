// Which sequences of a step have contexts that begin with the same blocks.
#pragma once

#include <vector>

#include "attention_plan.h"

namespace headrace {

// Where the keys of a step's sequences lie.
struct Blocks {
  const int32_t* table;  // [num_seqs, width]
  int64_t width;
  int64_t size;          // tokens in a block
};

// Limits of what may be joint.
struct JointLimits {
  int64_t tasks;           // that are joint, at most
  int64_t rows_per_token;  // heads of one KV head; joint tasks have up to kTileRows rows
};

// Returns the tasks in another order, where those that share a prefix are joint.
std::vector<Task> join_prefixes(std::vector<Task> tasks, const Blocks& blocks,
                                const JointLimits& limits);

}  // namespace headrace
