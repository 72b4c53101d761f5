// Where a key and a value lie in the native backend's KV cache.
//
// The cache is made of 32-bit words: one float32, or two bfloat16 that a dot product takes at once.
// With W = elements per word (1 or 2), block size S and head size D, one layer holds
//
//   key    [num_blocks, kv_heads, D / W, S]   words of W neighbouring elements of one key
//   value  [num_blocks, kv_heads, S / W, D]   words of one element of W neighbouring tokens
//
// so that 16 neighbouring words are 16 keys, or 16 elements of values, and no sum crosses lanes. The
// same order is what AMX wants of its right operand. A block of one token has half-empty words.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace headrace {

template <class T>
constexpr int64_t kPerWord = sizeof(uint32_t) / sizeof(T);

// One layer's keys and values of element type T.
template <class T>
struct KvLayer {
  T* key;
  T* value;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t block_size;

  int64_t key_words() const { return head_dim / kPerWord<T>; }
  int64_t value_rows() const { return (block_size + kPerWord<T> - 1) / kPerWord<T>; }

  uint32_t* key_block(int64_t block, int64_t head) const {
    return reinterpret_cast<uint32_t*>(key) + (block * kv_heads + head) * key_words() * block_size;
  }
  uint32_t* value_block(int64_t block, int64_t head) const {
    return reinterpret_cast<uint32_t*>(value) + (block * kv_heads + head) * value_rows() * head_dim;
  }

  // Stores one token's key of one head: head_dim elements side by side at row.
  void store_key(int64_t slot, int64_t head, const T* row) const {
    constexpr int64_t W = kPerWord<T>;
    const int64_t offset = slot % block_size;
    T* to = reinterpret_cast<T*>(key_block(slot / block_size, head)) + offset * W;
    for (int64_t i = 0; i < head_dim; i += W)
      for (int64_t j = 0; j < W; ++j) to[i * block_size + j] = row[i + j];
  }

  // Stores one token's value of one head. Its word-mate belongs to a neighbouring token.
  void store_value(int64_t slot, int64_t head, const T* row) const {
    constexpr int64_t W = kPerWord<T>;
    const int64_t offset = slot % block_size;
    T* to = reinterpret_cast<T*>(value_block(slot / block_size, head)) +
            (offset / W) * head_dim * W + offset % W;
    for (int64_t i = 0; i < head_dim; ++i) to[i * W] = row[i];
  }
};

}  // namespace headrace
