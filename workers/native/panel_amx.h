// Products of packed keys and values with 16 rows at a time, in the tile registers of AMX.

#pragma once

#include "rows_bf16.h"

namespace {

// Add products of 16 rows with the first 64 columns of a packed matrix, or 32 if not Wide, to tiles 0 to 3. Strides are
// in bytes, and each row of the packed matrix has pairs of elements. `depth` is rounded up to 32.
template <bool Wide>
void multiply(const bf16* rows, int64_t row_stride, const bf16* packed, int64_t packed_stride, int64_t depth) {
  for (int64_t i = 0; i < depth; i += 32, rows += 32, packed += 8 * packed_stride) {
    _tile_loadd(4, rows, row_stride);
    _tile_loadd(5, packed, packed_stride);
    _tile_loadd(6, packed + 32, packed_stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (Wide) {
      _tile_loadd(5, packed + 64, packed_stride);
      _tile_loadd(6, packed + 96, packed_stride);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
}

// Scores of kRows rows with a block's packed keys, as [row][key].
void score_packed(const Scratch& s, int64_t row, float* to) {
  finish_writing(s.keys);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  multiply<true>(s.query + row * s.key_width, 2 * s.key_width, s.keys, 4 * kBlock, s.key_width);
  _tile_stored(0, to, 4 * kBlock);
  _tile_stored(1, to + 16, 4 * kBlock);
  _tile_stored(2, to + 32, 4 * kBlock);
  _tile_stored(3, to + 48, 4 * kBlock);
}

// Add the weighted values of num_keys keys, rounded up to 32, to 64 or 32 dims of kRows rows' sums.
template <bool Wide>
void add_values(const Scratch& s, int64_t num_keys, const bf16* weights, const bf16* values, float* out) {
  const int64_t stride = 4 * s.value_width;
  _tile_loadd(0, out, stride);
  _tile_loadd(1, out + 16, stride);
  if constexpr (Wide) {
    _tile_loadd(2, out + 32, stride);
    _tile_loadd(3, out + 48, stride);
  }
  multiply<Wide>(weights, 2 * kBlock, values, stride, num_keys);
  _tile_stored(0, out, stride);
  _tile_stored(1, out + 16, stride);
  if constexpr (Wide) {
    _tile_stored(2, out + 32, stride);
    _tile_stored(3, out + 48, stride);
  }
}

// Weights of R rows from their scores, as [row][key].
template <int R>
void weigh_rows(const Scratch& s, int64_t row, const int* seen, const float* scores, bf16* weights) {
  constexpr int kWeighed = std::min(R, 4);  // Rows whose scores fit into registers.
  for (int r = 0; r < R; r += kWeighed) {
    Scores<kWeighed> x;
#pragma GCC unroll 4
    for (int i = 0; i < kWeighed; ++i)
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) x[i][c] = _mm512_load_ps(scores + (r + i) * kBlock + c * kLanes);
    weigh<kWeighed>(s, row + r, seen + r, x, weights + r * kBlock);
  }
  finish_writing(weights);
}

// Process a block's packed keys and values for rows `row` to row + kRows.
void attend_panel(const Scratch& s, int64_t row, const int* seen) {
  const int most = *std::max_element(seen, seen + kRows);
  if (most == 0) return;
  alignas(64) float scores[kRows * kBlock];
  alignas(64) bf16 weights[kRows * kBlock];
  score_packed(s, row, scores);
  weigh_rows<kRows>(s, row, seen, scores, weights);
  float* out = s.out + row * s.value_width;
  int64_t d = 0;
  for (; d + 64 <= s.value_width; d += 64) add_values<true>(s, most, weights, s.values + 2 * d, out + d);
  if (d < s.value_width) add_values<false>(s, most, weights, s.values + 2 * d, out + d);
}

}  // namespace
