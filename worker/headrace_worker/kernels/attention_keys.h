// Where a tile's keys and values are: in place, or gathered where blocks are smaller than a vector.
#pragma once

#include <cstring>
#include <vector>

#include "attention_tile.h"
#include "kv_layout.h"

namespace headrace {

template <class T>
class KeyFinder {
 public:
  explicit KeyFinder(const KvLayer<T>& layer) : layer_(layer) {
    if (is_gathered()) {
      keys_.resize(layer.key_words() * kTileKeys);
      values_.resize((layer.head_dim + kLanes) * kTileKeys / kPerWord<T>);
    }
    tail_.resize(2 * kLanes / kPerWord<T> * layer.head_dim);
  }

  // Keys [first_key, first_key + num_keys) of the sequence that has these blocks.
  KeyTile find(const int32_t* blocks, int64_t head, int64_t first_key, int64_t num_keys) {
    return is_gathered() ? gather(blocks, head, first_key, num_keys)
                         : point_at(blocks, head, first_key, num_keys);
  }

  // The tile with zeros for the values after its last key, where anything may have been left.
  KeyTile with_clean_tail(KeyTile tile) {
    constexpr int64_t W = kPerWord<T>;
    const int64_t last = tile.num_units() - 1, num_keys = tile.num_keys - last * tile.unit;
    if (num_keys == tile.unit) return tile;
    const int64_t head_dim = layer_.head_dim, whole = num_keys / W * head_dim;
    std::fill(tail_.begin(), tail_.end(), 0);
    std::memcpy(tail_.data(), tile.values[last], whole * sizeof(uint32_t));
    for (int64_t d = 0; d < head_dim && num_keys % W != 0; ++d)
      tail_[whole + d] = tile.values[last][whole + d] & 0xffffu;
    tile.values[last] = tail_.data();
    return tile;
  }

 private:
  bool is_gathered() const { return layer_.block_size % kLanes != 0; }

  KeyTile point_at(const int32_t* blocks, int64_t head, int64_t first_key, int64_t num_keys) const {
    const int64_t size = layer_.block_size;
    KeyTile tile{{}, {}, size % (2 * kLanes) == 0 ? 2 * kLanes : kLanes, size, num_keys};
    for (int64_t u = 0; u < tile.num_units(); ++u) {
      const int64_t key = first_key + u * tile.unit, offset = key % size;
      const int64_t block = blocks[key / size];
      tile.keys[u] = layer_.key_block(block, head) + offset;
      tile.values[u] = layer_.value_block(block, head) + offset / kPerWord<T> * layer_.head_dim;
    }
    return tile;
  }

  KeyTile gather(const int32_t* blocks, int64_t head, int64_t first_key, int64_t num_keys) {
    constexpr int64_t W = kPerWord<T>;
    const int64_t size = layer_.block_size, head_dim = layer_.head_dim;
    for (int64_t i = 0; i < num_keys; ++i) {
      const int64_t key = first_key + i, offset = key % size;
      const int64_t block = blocks[key / size];
      const uint32_t* from = layer_.key_block(block, head) + offset;
      for (int64_t w = 0; w < layer_.key_words(); ++w) keys_[w * kTileKeys + i] = from[w * size];
      const T* value = reinterpret_cast<const T*>(layer_.value_block(block, head)) +
                       offset / W * head_dim * W + offset % W;
      T* to = reinterpret_cast<T*>(values_.data()) + i / W * head_dim * W + i % W;
      for (int64_t d = 0; d < head_dim; ++d) to[d * W] = value[d * W];
    }
    KeyTile tile{{}, {}, kLanes, kTileKeys, num_keys};
    for (int64_t u = 0; u < tile.num_units(); ++u) {
      tile.keys[u] = keys_.data() + u * kLanes;
      tile.values[u] = values_.data() + u * kLanes / W * head_dim;
    }
    return tile;
  }

  const KvLayer<T>& layer_;
  std::vector<uint32_t> keys_;    // [key_words, 128]
  std::vector<uint32_t> values_;  // [128 / W, head_dim], and a vector more
  std::vector<uint32_t> tail_;    // [32 / W, head_dim]
};

}  // namespace headrace
