// A block of keys and values. Element, their type, is defined by the source file.

#pragma once

#include "common.h"

namespace {

constexpr int kBlock = 64;                   // Keys per block.
constexpr int kTileRows = 384;               // Maximum number of rows per tile.
constexpr int64_t kTileBytes = 320 << 10;    // Their queries and sums stay in the L2 cache.
constexpr int kLine = 64 / sizeof(Element);  // Elements per cache line.
constexpr float kSlack = 40.0f;              // Scores may exceed their reference by this much, in powers of two.
constexpr float kHidden = -1e30f;            // Score of a key that is not seen.
constexpr float kUnset = -1e38f;             // Reference of a row before its first block.

// Addresses of the keys and values of one block. Zeros follow the last key.
struct Block {
  const Element *key[kBlock], *value[kBlock];
};

alignas(64) const Element kZeros[kMostDims] = {};

constexpr int kL1 = 3, kL2 = 2;  // Caches, as prefetches number them.

// Prefetch the cache lines that begin in Count dims of a row that is read next, from d on. d is a multiple of Count.
// Pages are too short for the processor's own prefetcher.
template <int Count, int Cache = kL2>
inline void prefetch(const Element* row, int64_t d) {
  if (Count < kLine && d % kLine) return;
#pragma GCC unroll 2
  for (int line = 0; line < Count; line += kLine) __builtin_prefetch(row + d + line, 0, Cache);
}

template <int Cache = kL2>
inline void prefetch_keys(const Block& next, int64_t first, int64_t end, int64_t key_dim, int64_t value_dim) {
  for (int64_t i = first; i < end; ++i) {
    for (int64_t d = 0; d < key_dim; d += kLine) prefetch<kLine, Cache>(next.key[i], d);
    for (int64_t d = 0; d < value_dim; d += kLine) prefetch<kLine, Cache>(next.value[i], d);
  }
}

// Rows per tile, a multiple of `unit`.
inline int64_t tile_rows(int64_t row_bytes, int64_t unit) {
  return std::clamp<int64_t>(kTileBytes / row_bytes, kTileRows / 4, kTileRows) / unit * unit;
}

// Intermediate result of a row: the weighted sum of values and the sum of weights, which are 2^(score - reference).
struct Found {
  const float* out;
  float sum, reference;
};

}  // namespace
