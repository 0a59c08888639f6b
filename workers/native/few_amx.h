// Processing one block for up to 16 rows in the tile registers of AMX, which read keys and values in place: each is a
// row of a tile, so only queries are rearranged.

#pragma once

#include "panel_amx.h"

namespace {

// Keys or values of a block: in place, or copied if their distances vary or their dims do not fill tiles.
struct BlockRows {
  const bf16* first;
  int64_t distance;  // To the next row.

  BlockRows(const bf16* const* rows, int64_t num_dims, int64_t width, bf16* copies)
      : first(rows[0]), distance(rows[1] - rows[0]) {
    if (num_dims == width && is_even(rows)) return;
    for (int i = 0; i < kBlock; ++i)
      for (int64_t d = 0; d < width; d += kTileDepth)
        _mm512_store_si512(copies + i * width + d, _mm512_maskz_loadu_epi16(lanes32(num_dims - d), rows[i] + d));
    first = copies, distance = width;
  }

 private:
  bool is_even(const bf16* const* rows) const {
    bool found = true;
    for (int i = 2; i < kBlock; ++i) found &= rows[i] - rows[i - 1] == distance;
    return found;
  }
};

// Scores of kLanes keys as [key][row].
inline void score_keys(const Scratch& s, int64_t num_rows, const bf16* keys, int64_t distance, float* scores) {
  _tile_zero(2);
  for (int64_t d = 0; d < s.key_width; d += kTileDepth) {
    _tile_loadd(0, keys + d, 2 * distance);
    _tile_loadd(3, s.query + d * num_rows, 4 * num_rows);
    _tile_dpbf16ps(2, 0, 3);
  }
  _tile_stored(2, scores, 4 * num_rows);
}

// Turn [key][row], R rows of kLanes keys, into [row][key]. Rows have kBlock keys.
template <int R>
inline void transpose(const float* from, float* to) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  __m512 x[R], y[R];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) x[i] = _mm512_load_ps(from + i * kLanes);
#pragma GCC unroll 4
  for (int n = 1; n < R; n *= 2) {  // The lowest bit of each number's index becomes the highest.
#pragma GCC unroll 8
    for (int i = 0; i < R / 2; ++i) {
      y[i] = _mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]);
      y[i + R / 2] = _mm512_permutex2var_ps(x[2 * i], odd, x[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) x[i] = y[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) _mm512_store_ps(to + i * kBlock, x[i]);
}

// Add the weighted values of num_keys keys to the sums of all rows, and fetch the next block's keys. Products take
// pairs of adjacent dims, so each weight is paired with a zero, for even dims behind it and for odd dims before it.
void add_few_values(const Scratch& s, const BlockRows& values, const Block& next, int num_keys, const uint32_t* even,
                    const uint32_t* odd) {
  const int64_t num_steps = s.value_width / kTileDepth * (kBlock / kLanes);
  int64_t step = 0;
  for (int64_t d = 0; d < s.value_width; d += kTileDepth) {
    _tile_loadd(6, s.out + d, 4 * s.value_width);
    _tile_loadd(7, s.out + d + kLanes, 4 * s.value_width);
    for (int i = 0; i < num_keys; i += kLanes, ++step) {
      // Only few lines at a time can be on their way to L1.
      prefetch_keys<kL1>(next, step * kBlock / num_steps, (step + 1) * kBlock / num_steps, s.key_dim, 0);
      _tile_loadd(0, values.first + i * values.distance + d, 2 * values.distance);
      _tile_loadd(4, even + i, 4 * kBlock);
      _tile_loadd(5, odd + i, 4 * kBlock);
      _tile_dpbf16ps(6, 4, 0);
      _tile_dpbf16ps(7, 5, 0);
    }
    _tile_stored(6, s.out + d, 4 * s.value_width);
    _tile_stored(7, s.out + d + kLanes, 4 * s.value_width);
  }
}

// Process a block for a tile of R rows.
template <int R>
void attend_rows(const Scratch& s, const Block& block, const Block& next, const int* seen) {
  const BlockRows keys(block.key, s.key_dim, s.key_width, s.keys);
  const BlockRows values(block.value, s.value_dim, s.value_width, s.values);
  const int num_keys = round_up(*std::max_element(seen, seen + R), kLanes);
  alignas(64) float by_key[kLanes * R], scores[R * kBlock] = {};
  alignas(64) bf16 weights[R * kBlock];
  alignas(64) uint32_t even[R * kBlock], odd[R * kBlock];
  finish_writing(s.keys);
  for (int i = 0; i < num_keys; i += kLanes) {
    prefetch_keys<kL1>(block, i, i + kLanes, 0, s.value_dim);
    score_keys(s, R, keys.first + i * keys.distance, keys.distance, by_key);
    transpose<R>(by_key, scores + i);
  }
  weigh_rows<R>(s, 0, seen, scores, weights);
  for (int i = 0; i < R * kBlock; i += kLanes) {
    const __m512i w = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i*)(weights + i)));
    _mm512_store_si512(even + i, w);
    _mm512_store_si512(odd + i, _mm512_slli_epi32(w, 16));
  }
  finish_writing(even);
  add_few_values(s, values, next, num_keys, even, odd);
}

}  // namespace
