// Products of packed keys and values with a few rows at a time, whose sums stay in registers, with AVX512-BF16.

#pragma once

#include "rows_bf16.h"

namespace {

// Scores of R rows with a block's packed keys.
template <int R>
inline void score(const Scratch& s, int64_t row, Scores<R>& x) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) x[r][c] = _mm512_setzero_ps();
  const bf16* query = s.query + row * s.key_width;
  const bf16* keys = s.keys;
  for (int64_t d = 0; d < s.key_dim; d += 2, query += 2, keys += 2 * kBlock) {
    __m512bh k[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) k[c] = pairs(keys + c * 2 * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh q = repeated_pair(query + r * s.key_width);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) x[r][c] = _mm512_dpbf16_ps(x[r][c], q, k[c]);
    }
  }
}

// Scores of kRows rows with a block's packed keys, as [row][key].
void score_packed(const Scratch& s, int64_t row, float* to) {
  Scores<kRows> x;
  score<kRows>(s, row, x);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) _mm512_store_ps(to + r * kBlock + c * kLanes, x[r][c]);
}

// Add the weighted values of num_keys keys, dims first to first + 16 C, to the sums of R rows.
template <int R, int C>
void add_values(const Scratch& s, int64_t row, int64_t first, int num_keys, const bf16* weights) {
  __m512 x[R][C];
  float* out = s.out + row * s.value_width + first;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) x[r][c] = _mm512_load_ps(out + r * s.value_width + c * kLanes);
  const bf16* values = s.values + first * 2;
  for (int i = 0; i < num_keys; i += 2, values += 2 * s.value_width) {
    __m512bh v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) v[c] = pairs(values + c * 2 * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh w = repeated_pair(weights + r * kBlock + i);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) x[r][c] = _mm512_dpbf16_ps(x[r][c], w, v[c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm512_store_ps(out + r * s.value_width + c * kLanes, x[r][c]);
}

// Process a block's packed keys and values for rows `row` to row + kRows.
void attend_panel(const Scratch& s, int64_t row, const int* seen) {
  const int most = *std::max_element(seen, seen + kRows);
  if (most == 0) return;
  Scores<kRows> x;
  score<kRows>(s, row, x);
  alignas(64) bf16 weights[kRows * kBlock];
  weigh<kRows>(s, row, seen, x, weights);
  int64_t first = 0;
  for (; first + 4 * kLanes <= s.value_width; first += 4 * kLanes)
    add_values<kRows, 4>(s, row, first, most, weights);
  if (first < s.value_width) add_values<kRows, 2>(s, row, first, most, weights);
}

}  // namespace
