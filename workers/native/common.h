// Definitions shared by the bf16 and fp32 block operations.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

namespace {

using bf16 = uint16_t;

constexpr int kBlock = 64;         // Keys per block.
constexpr int kTileRows = 384;     // Rows per tile. Their queries and sums stay in the L2 cache.
constexpr int kMostDims = 1024;    // Maximum head size.
constexpr float kSlack = 40.0f;    // Scores may exceed their reference by this much, in powers of two.
constexpr float kHidden = -1e30f;  // Score of a key that is not seen.
constexpr float kUnset = -1e38f;   // Reference of a row before its first block.

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline float as_float(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Round to nearest, ties to even.
inline bf16 rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}

// Addresses of the keys and values of one block. Zeros follow the last key.
struct Block {
  const bf16 *key[kBlock], *value[kBlock];
};

alignas(64) const bf16 kZeros[kMostDims] = {};

// Prefetch 32 dims of the next block's row into the L2 cache. Pages are too short for the processor's own prefetcher.
inline void prefetch(const bf16* row, int64_t d) { __builtin_prefetch(row + d, 0, 2); }

inline void prefetch_keys(const Block& next, int64_t first, int64_t end, int64_t head_dim) {
  for (int64_t i = first; i < end; ++i)
    for (int64_t d = 0; d < head_dim; d += 32) prefetch(next.key[i], d), prefetch(next.value[i], d);
}

// Intermediate result of a row: the weighted sum of values and the sum of weights, which are 2^(score - reference).
struct Found {
  const float* out;
  float sum, reference;
};

// Memory for arrays, which are allocated one after another and freed together.
class Memory {
 public:
  explicit Memory(int64_t size)
      : memory_(std::aligned_alloc(64, round_up(size, 64)), &std::free), at_(static_cast<char*>(memory_.get())) {}

  explicit operator bool() const { return bool(memory_); }

  template <class T>
  T* take(int64_t count) {
    return (T*)std::exchange(at_, at_ + round_up(count * sizeof(T), 64));
  }

 private:
  std::unique_ptr<void, decltype(&std::free)> memory_;
  char* at_;
};

}  // namespace
