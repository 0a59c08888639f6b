// Rows of a tile on a CPU with AVX512-BF16: their state, packed keys and values, and weights from scores.
//
// Keys and values are packed so that each instruction multiplies pairs of 16 keys (scores) or of 16 dims (values) by
// pairs of rows. Exponentials are relative to a reference per row that follows the row's largest score with some slack,
// so that the fp32 sums are rarely rescaled.
//
// R: rows processed together. Strides and offsets are in elements.

#pragma once

#include <immintrin.h>

#include "block.h"
#include "vectors.h"

#ifdef __AMX_BF16__
#include "tiles.h"
#endif

namespace {

constexpr int kVectors = kBlock / kLanes;  // Vectors per row of scores.
#ifdef __AMX_BF16__
constexpr int kRows = kTileLanes;
constexpr int kFewRows = kTileLanes;   // Maximum number of rows of a tile that reads keys and values in place.
constexpr bool kFewAreColumns = true;  // Whether queries of few rows are stored as [pair of dims][row][2].
#else
constexpr int kRows = 6;  // Rows processed together: 24 sums, plus registers for their factors.
constexpr int kFewRows = 8;
constexpr bool kFewAreColumns = false;

struct Tiles {
  static void shape(int64_t) {}
};
#endif

inline __m512bh pairs(const void* p) { return (__m512bh)_mm512_load_si512(p); }
inline __m512bh repeated_pair(const bf16* p) { return (__m512bh)_mm512_set1_epi32(*(const int*)p); }
inline __mmask32 lanes32(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }
inline __mmask16 lanes16(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// 2^x with a relative error below 1e-4. That of bf16 is up to 4e-3.
inline __m512 exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x09);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07944154f), f, _mm512_set1_ps(0.22411230f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69646607f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99989510f));
  return _mm512_scalef_ps(p, x);
}

// Load 8 dims of keys 0, 4, 8 and 12. Loads that merge leave the units that shuffle free.
inline __m512i load_quarters(const bf16* const* keys, int64_t d) {
  const auto dims = [&](int key) { return _mm_loadu_si128((const __m128i*)(keys[key] + d)); };
  __m512i x = _mm512_zextsi128_si512(dims(0));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, dims(4));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, dims(8));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, dims(12));
}

// Load 32 dims, from d on, of 16 keys, as 16 vectors with one pair of dims of each key.
inline void load_all_pairs(const bf16* const* keys, int64_t d, __m512i x[kLanes]) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    __m512i y[4], z[4];
#pragma GCC unroll 4
    for (int key = 0; key < 4; ++key) y[key] = load_quarters(keys + key, d + 2 * i);
    z[0] = _mm512_unpacklo_epi32(y[0], y[1]), z[1] = _mm512_unpackhi_epi32(y[0], y[1]);
    z[2] = _mm512_unpacklo_epi32(y[2], y[3]), z[3] = _mm512_unpackhi_epi32(y[2], y[3]);
    x[i] = _mm512_unpacklo_epi64(z[0], z[2]), x[i + 1] = _mm512_unpackhi_epi64(z[0], z[2]);
    x[i + 2] = _mm512_unpacklo_epi64(z[1], z[3]), x[i + 3] = _mm512_unpackhi_epi64(z[1], z[3]);
  }
}

// Load 32 dims, from d on, of 16 keys with head_dim dims, as in load_all_pairs. Dims beyond these are zeros.
inline void load_pairs(const bf16* const* keys, int64_t d, int64_t head_dim, __m512i x[kLanes]) {
  if (__builtin_expect(d + 32 <= head_dim, 1)) return load_all_pairs(keys, d, x);
  alignas(64) bf16 copies[kLanes][32];
  const bf16* rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    _mm512_store_si512(copies[i], _mm512_maskz_loadu_epi16(lanes32(head_dim - d), keys[i] + d));
    rows[i] = copies[i];
  }
  load_all_pairs(rows, 0, x);
}

// Load 32 dims, from d on, of two values, as two vectors with one pair per dim: the first half of every 8 dims, and the
// second.
inline void interleave(const bf16* const* values, int64_t d, int64_t head_dim, __m512i x[2]) {
  const __mmask32 mask = lanes32(head_dim - d);
  const __m512i even = _mm512_maskz_loadu_epi16(mask, values[0] + d);
  const __m512i odd = _mm512_maskz_loadu_epi16(mask, values[1] + d);
  x[0] = _mm512_unpacklo_epi16(even, odd), x[1] = _mm512_unpackhi_epi16(even, odd);
}

// Put sums of 32 dims in order: in that of interleaved values, or even dims followed by odd dims.
inline void put_in_order(float* sums, bool are_interleaved) {
  const __m512i interleaved = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i parted = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i low = are_interleaved ? interleaved : parted, high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 x = _mm512_load_ps(sums), y = _mm512_load_ps(sums + kLanes);
  _mm512_store_ps(sums, _mm512_permutex2var_ps(x, low, y));
  _mm512_store_ps(sums + kLanes, _mm512_permutex2var_ps(x, high, y));
}

// Pack keys as [pair of dims][key][2].
void pack_keys(const Block& block, int64_t head_dim, bf16* packed) {
  for (int64_t d = 0; d < head_dim; d += 32) {
    for (int first = 0; first < kBlock; first += kLanes) {
      __m512i x[kLanes];
      load_pairs(block.key + first, d, head_dim, x);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) _mm512_store_si512(packed + ((d / 2 + i) * kBlock + first) * 2, x[i]);
    }
  }
}

// Pack values as [pair of keys][dim][2], with `width` dims per pair.
void pack_values(const Block& block, int num_keys, int64_t head_dim, int64_t width, bf16* packed) {
  for (int i = 0; i < num_keys; i += 2) {
    for (int64_t d = 0; d < head_dim; d += 32) {
      __m512i x[2];
      interleave(block.value + i, d, head_dim, x);
      _mm512_store_si512(packed + (i / 2 * width + d) * 2, x[0]);
      _mm512_store_si512(packed + (i / 2 * width + d) * 2 + 32, x[1]);
    }
  }
}

// State of a tile.
struct Scratch {
  int64_t key_dim, value_dim, key_width, value_width;  // Widths: dims rounded up to full vectors of 32.
  int64_t rows;                                        // Maximum number of rows.
  float scale;
  Tiles tiles;
  Memory memory;
  bf16 *query, *keys, *values;
  float *out, *sums, *reference, *limit;

  Scratch(int64_t keys_dim, int64_t values_dim, float factor)
      : key_dim(keys_dim), value_dim(values_dim), key_width(round_up(keys_dim, 32)),
        value_width(round_up(values_dim, 32)), rows(tile_rows(2 * key_width + 4 * value_width, kRows)),
        scale(float(M_LOG2E) * factor),
        memory(2 * (rows * key_width + kBlock * (key_width + value_width)) +
               4 * rows * (value_width + kLanes + 2) + 7 * 64) {
    if (!memory) return;
    query = memory.take<bf16>(rows * key_width);
    keys = memory.take<bf16>(kBlock * key_width), values = memory.take<bf16>(kBlock * value_width);
    out = memory.take<float>(rows * value_width), sums = memory.take<float>(rows * kLanes);
    reference = memory.take<float>(rows), limit = memory.take<float>(rows);
  }
};

constexpr int kScoredRows = kRows;

// Pack a block's keys for score_packed.
void pack_scored(const Scratch& s, const Block& block) { pack_keys(block, s.key_dim, s.keys); }

// Row count rounded up to what these functions process. Surplus rows are zero.
inline int64_t padded(int64_t num_rows) {
  if (num_rows > kFewRows) return round_up(num_rows, kRows);
  int64_t power = 1;
  while (power < num_rows) power *= 2;
  return power;
}

// Begin a tile of `num_rows` rows, padded.
void clear(const Scratch& s, int64_t num_rows) {
  std::fill_n(s.out, num_rows * s.value_width, 0.0f);
  std::fill_n(s.sums, num_rows * kLanes, 0.0f);
  std::fill_n(s.reference, num_rows, kUnset);
  std::fill_n(s.limit, num_rows, kUnset);
  Tiles::shape(std::min<int64_t>(num_rows, kRows));
}

void read_query(const Scratch& s, int64_t row, int64_t num_rows, const bf16* from) {
  if (kFewAreColumns && num_rows <= kFewRows) {
    for (int64_t d = 0; d < s.key_width; ++d)
      s.query[d / 2 * 2 * num_rows + row * 2 + d % 2] = d < s.key_dim ? from[d] : 0;
    return;
  }
  for (int64_t d = 0; d < s.key_dim; d += 32)
    _mm512_store_si512(s.query + row * s.key_width + d, _mm512_maskz_loadu_epi16(lanes32(s.key_dim - d), from + d));
}

Found found(const Scratch& s, int64_t row, int64_t num_rows) {
  const float sum = _mm512_reduce_add_ps(_mm512_load_ps(s.sums + row * kLanes));
  float* out = s.out + row * s.value_width;
  const bool are_interleaved = !kFewAreColumns || num_rows > kFewRows;
  for (int64_t d = 0; d < s.value_width; d += 32) put_in_order(out + d, are_interleaved);
  return {out, sum, s.reference[row]};
}

// Set a row's reference to its largest score in this block if that is far above it.
void rebase(const Scratch& s, int64_t row, __m512 scores) {
  const float top = _mm512_reduce_max_ps(scores) * s.scale;
  if (top <= s.reference[row] + kSlack) return;
  const __m512 factor = exp2(_mm512_set1_ps(s.reference[row] - top));
  float* sums = s.sums + row * kLanes;
  _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), factor));
  for (float *out = s.out + row * s.value_width, *end = out + s.value_width; out < end; out += kLanes)
    _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), factor));
  s.reference[row] = top;
  s.limit[row] = (top + kSlack) / s.scale;
}

template <int R>
using Scores = __m512[R][kVectors];

// Weights [row][key] of R rows from their scores. Row r sees the first seen[r] keys.
template <int R>
inline void weigh(const Scratch& s, int64_t row, const int* seen, Scores<R>& x, bf16* weights) {
  if (*std::min_element(seen, seen + R) < kBlock) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c)
        x[r][c] = _mm512_mask_mov_ps(_mm512_set1_ps(kHidden), lanes16(seen[r] - c * kLanes), x[r][c]);
  }
  unsigned far = 0;
  __m512 largest[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    largest[r] = _mm512_max_ps(_mm512_max_ps(x[r][0], x[r][1]), _mm512_max_ps(x[r][2], x[r][3]));
    far |= _mm512_cmp_ps_mask(largest[r], _mm512_set1_ps(s.limit[row + r]), _CMP_GT_OQ);
  }
  if (__builtin_expect(far, 0)) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rebase(s, row + r, largest[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512 reference = _mm512_set1_ps(s.reference[row + r]);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) x[r][c] = exp2(_mm512_fmsub_ps(x[r][c], _mm512_set1_ps(s.scale), reference));
    float* sums = s.sums + (row + r) * kLanes;
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(x[r][0], x[r][1]), _mm512_add_ps(x[r][2], x[r][3]));
    _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), sum));
#pragma GCC unroll 2
    for (int c = 0; c < kVectors; c += 2)
      _mm512_store_si512(weights + r * kBlock + c * kLanes, (__m512i)_mm512_cvtne2ps_pbh(x[r][c + 1], x[r][c]));
  }
}

}  // namespace
