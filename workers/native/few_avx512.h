// Processing one block for few rows, which read its keys and values in place, with AVX512-BF16.

#pragma once

#include "rows_bf16.h"

namespace {

// Scores with keys read in place, for few rows, where packing would cost more than it saves.
template <int R>
inline void score_unpacked(const Scratch& s, const Block& block, const Block& next, int num_keys, Scores<R>& x) {
  constexpr int kSums = R == 1 ? 4 : R == 2 ? 2 : 1;  // Several sums per row hide the latency of additions.
  for (int c = 0; c * kLanes < num_keys; ++c) {
    __m512 sums[R][kSums] = {};
    for (int64_t d = 0; d < s.key_dim; d += 32) {
      __m512i k[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) prefetch<2 * kLanes>(next.key[c * kLanes + i], d);
      load_pairs(block.key + c * kLanes, d, s.key_dim, k);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512bh q = repeated_pair(s.query + r * s.key_width + d + 2 * i);
          sums[r][i % kSums] = _mm512_dpbf16_ps(sums[r][i % kSums], q, (__m512bh)k[i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      x[r][c] = sums[r][0];
#pragma GCC unroll 3
      for (int i = 1; i < kSums; ++i) x[r][c] = _mm512_add_ps(x[r][c], sums[r][i]);
    }
  }
}

// Weighted sums with values read in place, for all rows of a small tile and all dims.
template <int R>
void add_values_unpacked(const Scratch& s, const Block& block, const Block& next, int num_keys, const bf16* weights) {
  for (int64_t first = 0; first < s.value_dim; first += 2 * kLanes) {
    __m512 x[R][2];
    float* out = s.out + first;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) x[r][c] = _mm512_load_ps(out + r * s.value_width + c * kLanes);
    for (int i = 0; i < num_keys; i += 2) {
      __m512i v[2];
      prefetch<2 * kLanes>(next.value[i], first);
      prefetch<2 * kLanes>(next.value[i + 1], first);
      interleave(block.value + i, first, s.value_dim, v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh w = repeated_pair(weights + r * kBlock + i);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) x[r][c] = _mm512_dpbf16_ps(x[r][c], w, (__m512bh)v[c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) _mm512_store_ps(out + r * s.value_width + c * kLanes, x[r][c]);
  }
}

// Process a block's keys and values for a tile of R rows.
template <int R>
void attend_rows(const Scratch& s, const Block& block, const Block& next, const int* seen) {
  const int most = *std::max_element(seen, seen + R);
  Scores<R> x = {};
  score_unpacked<R>(s, block, next, most, x);
  alignas(64) bf16 weights[R * kBlock];
  weigh<R>(s, 0, seen, x, weights);
  add_values_unpacked<R>(s, block, next, most, weights);
}

}  // namespace
