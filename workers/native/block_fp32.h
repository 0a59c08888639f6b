// Operations on one block of keys and values with fp32 products, for any CPU.
//
// A large tile is divided into panels with one row per lane: queries are [dim][row], scores [key][row], sums
// [dim][row]. Both products combine broadcast numbers with contiguous vectors, nothing is summed across lanes, and a
// block is only converted to fp32. In a small tile, the lanes are dims, and keys and values are read in place.
// Exponentials are relative to a reference per row that follows the row's largest score with some slack, so that sums
// are rarely rescaled. A block's terms are added up before they are added to the sums, which keeps rounding errors of
// long contexts small.
//
// Dims are in the order of Pairs. Scores are in powers of two, since queries are scaled when they are read. Strides and
// offsets are in elements.

#pragma once

#include "block.h"
#include "vectors.h"

namespace {

constexpr int kColumns = 3;                          // Vectors per panel.
constexpr int kPanel = kColumns * kLanes;            // Rows per panel.
constexpr int kRepeated = kRegisters == 32 ? 8 : 4;  // Keys or dims per product; they fill the registers.
constexpr int kAtOnce = kRegisters == 32 ? 8 : 4;    // Rows of a small tile that share one read of a block.
constexpr int kFewRows = 24;                         // More rows form a panel, even if it is not full.
static_assert(kTileRows % kPanel == 0 && kTileRows / 4 >= kPanel && kFewRows % kAtOnce == 0 && kPairs % kRepeated == 0 && kBlock % kPairs == 0);

// State of a tile.
struct Scratch {
  int64_t key_dim, value_dim, key_width, value_width;  // Widths: dims rounded up to full Pairs.
  int64_t key_stride, value_stride;                    // They spread a column over cache sets.
  int64_t rows;                                        // Maximum number of rows.
  float scale;
  Memory memory;
  float *query, *keys, *values, *weights, *out, *sums, *reference, *row;

  Scratch(int64_t keys_dim, int64_t values_dim, float factor)
      : key_dim(keys_dim), value_dim(values_dim), key_width(round_up(keys_dim, kPairs)),
        value_width(round_up(values_dim, kPairs)), key_stride(key_width + 16), value_stride(value_width + 16),
        rows(tile_rows(4 * (key_width + value_width), kPanel)), scale(float(M_LOG2E) * factor),
        memory(4 * (rows * (key_width + value_width) + kBlock * (key_stride + value_stride) +
                    kBlock * (kPanel + kFewRows) + value_width + 2 * rows + kFewRows * kLanes) + 8 * 64) {
    if (!memory) return;
    query = memory.take<float>(rows * key_width), out = memory.take<float>(rows * value_width);
    keys = memory.take<float>(kBlock * key_stride), values = memory.take<float>(kBlock * value_stride);
    weights = memory.take<float>(kBlock * (kPanel + kFewRows)), row = memory.take<float>(value_width);
    sums = memory.take<float>(rows + kFewRows * kLanes), reference = memory.take<float>(rows);
  }

  // Index of dim d in a row's query or sum of this width, in a tile with num_rows rows.
  int64_t index(int64_t row, int64_t d, int64_t num_rows, int64_t width) const {
    const int64_t at_once = num_rows > kFewRows ? kPanel : std::min<int64_t>(num_rows, kAtOnce);
    const int64_t p = pairs_index<Element>(d);
    const int64_t group = row / at_once * at_once * width, mine = row % at_once;
    return group + (num_rows > kFewRows ? p * kPanel + mine : (p / kLanes * at_once + mine) * kLanes + p % kLanes);
  }
};

// Row count rounded up to what these functions process. Surplus rows are zero.
inline int64_t padded(int64_t num_rows) {
  if (num_rows > kFewRows) return round_up(num_rows, kPanel);
  return num_rows > 4 ? round_up(num_rows, kAtOnce) : num_rows == 3 ? 4 : num_rows;
}

// Begin a tile of `num_rows` rows, padded.
void clear(const Scratch& s, int64_t num_rows) {
  std::fill_n(s.out, num_rows * s.value_width, 0.0f);
  std::fill_n(s.sums, num_rows > kFewRows ? num_rows : num_rows * kLanes, 0.0f);
  std::fill_n(s.reference, num_rows, kUnset);
}

void read_query(const Scratch& s, int64_t row, int64_t num_rows, const Element* from) {
  for (int64_t d = 0; d < s.key_width; ++d)
    s.query[s.index(row, d, num_rows, s.key_width)] = d < s.key_dim ? as_float(from[d]) * s.scale : 0.0f;
}

Found found(const Scratch& s, int64_t row, int64_t num_rows) {
  for (int64_t d = 0; d < s.value_dim; ++d) s.row[d] = s.out[s.index(row, d, num_rows, s.value_width)];
  return {s.row, num_rows > kFewRows ? s.sums[row] : sum_of(at(s.sums + row * kLanes)), s.reference[row]};
}

// Set out[r] to (with kAdd: add to out[r]) the sum over i < n of a[r * row_stride + i * step] times row i of b. Rows of
// b and out are panels.
template <bool kAdd>
void product(const float* a, int64_t row_stride, int64_t step, const float* b, int64_t n, float* out) {
  vec x[kRepeated][kColumns] = {};
  for (int64_t i = 0; i < n; ++i, a += step, b += kPanel) {
    vec y[kColumns];
#pragma GCC unroll 3
    for (int c = 0; c < kColumns; ++c) y[c] = at(b + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRepeated; ++r)
#pragma GCC unroll 3
      for (int c = 0; c < kColumns; ++c) x[r][c] += a[r * row_stride] * y[c];
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRepeated; ++r)
#pragma GCC unroll 3
    for (int c = 0; c < kColumns; ++c) {
      vec& sum = at(out + r * kPanel + c * kLanes);
      sum = kAdd ? sum + x[r][c] : x[r][c];
    }
}

// Set the references of kLanes rows of a panel to their largest scores in this block where these are far above them.
void rebase_lanes(float* reference, float* sums, float* out, int64_t width, vec top) {
  const vec before = at(reference), after = top > before + kSlack ? top : before;
  if (!any(top > before + kSlack)) return;
  const vec factor = exp2<Element>(before - after);
  at(reference) = after;
  at(sums) *= factor;
  for (int64_t d = 0; d < width; ++d) at(out + d * kPanel) *= factor;
}

// Weights of a panel's rows from their scores with num_keys keys. Row r sees the first seen[r] keys.
void weigh_panel(const Scratch& s, int64_t row, const int* seen, int num_keys) {
  float* out = s.out + row * s.value_width;
  const bool all_seen = *std::min_element(seen, seen + kPanel) >= num_keys;
  for (int c = 0; c < kPanel; c += kLanes) {
    ints mine;
    std::memcpy(&mine, seen + c, sizeof mine);
    vec top = all(kUnset);
    for (int i = 0; i < num_keys; ++i) {
      vec& x = at(s.weights + i * kPanel + c);
      if (!all_seen) x = mine > i ? x : all(kHidden);
      top = largest(x, top);
    }
    rebase_lanes(s.reference + row + c, s.sums + row + c, out + c, s.value_width, top);
    const vec reference = at(s.reference + row + c);
    vec sum = {};
    for (int i = 0; i < num_keys; ++i) {
      vec& x = at(s.weights + i * kPanel + c);
      sum += x = exp2<Element>(x - reference);
    }
    at(s.sums + row + c) += sum;
  }
}

void attend_panel(const Scratch& s, int64_t row, const int* seen) {
  const int num_keys = *std::max_element(seen, seen + kPanel);
  if (num_keys == 0) return;
  const float* query = s.query + row * s.key_width;
  for (int i = 0; i < num_keys; i += kRepeated)
    product<false>(s.keys + i * s.key_stride, s.key_stride, 1, query, s.key_width, s.weights + i * kPanel);
  weigh_panel(s, row, seen, num_keys);
  for (int64_t d = 0; d < s.value_width; d += kRepeated)
    product<true>(s.values + d, 1, s.value_stride, s.weights, num_keys, s.out + row * s.value_width + d * kPanel);
}

// Scores of R rows of a small tile, as [row][key].
template <int R>
void score(const Scratch& s, const float* query, const Block& block, const Block& next, int num_keys) {
  for (int first = 0; first < num_keys; first += kLanes) {
    vec products[R][kLanes];
    for (int i = first; i < first + kLanes; i += 2) {
      vec x[2][R] = {};
      for (int64_t d = 0; d < s.key_dim; d += kPairs) {
        prefetch<kPairs>(next.key[i], d), prefetch<kPairs>(next.key[i + 1], d);
        const Pairs k[] = {load(block.key[i] + d, s.key_dim - d), load(block.key[i + 1] + d, s.key_dim - d)};
        const float* q = query + d * R;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) x[0][r] += k[0].even * at(q + r * kLanes), x[1][r] += k[1].even * at(q + r * kLanes);
#pragma GCC unroll 8
        for (int r = R; r < 2 * R; ++r)
          x[0][r - R] += k[0].odd * at(q + r * kLanes), x[1][r - R] += k[1].odd * at(q + r * kLanes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) products[r][i - first] = x[0][r], products[r][i + 1 - first] = x[1][r];
    }
    for (int r = 0; r < R; ++r) at(s.weights + r * kBlock + first) = sums_of(products[r]);
  }
}

// Weights of the r-th of R rows of a small tile from its scores. The row sees the first `seen` keys.
template <int R>
void weigh(const Scratch& s, int64_t row, int r, int seen, int num_keys) {
  float *weights = s.weights + r * kBlock, *out = s.out + row * s.value_width + r * kLanes;
  float &reference = s.reference[row + r];
  vec& sum = at(s.sums + (row + r) * kLanes);
  const int end = int(round_up(num_keys, kLanes));
  std::fill(weights + seen, weights + end, kHidden);
  vec top = at(weights);
  for (int i = kLanes; i < end; i += kLanes) top = largest(at(weights + i), top);
  if (any(top > reference + kSlack)) {
    const vec factor = exp2<Element>(all(reference - largest_of(top)));
    reference = largest_of(top);
    sum *= factor;
    for (int64_t d = 0; d < s.value_width; d += kLanes) at(out + d * R) *= factor;
  }
  for (int i = 0; i < end; i += kLanes) sum += at(weights + i) = exp2<Element>(at(weights + i) - reference);
}

// Add Count Pairs, from dim d on, of the weighted values of num_keys keys to the sums of R rows of a small tile.
template <int R, int Count>
void add_pairs(const Scratch& s, float* out, const Block& block, const Block& next, int num_keys, int64_t d) {
  vec x[Count][2 * R] = {};
  for (int i = 0; i < num_keys; ++i) {
#pragma GCC unroll 2
    for (int c = 0; c < Count; ++c) {
      const int64_t at = d + c * kPairs;
      prefetch<kPairs>(next.value[i], at);
      const Pairs v = load(block.value[i] + at, s.value_dim - at);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float weight = s.weights[r * kBlock + i];
        x[c][r] += weight * v.even, x[c][R + r] += weight * v.odd;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < 2 * R * Count; ++r) at(out + d * R + r * kLanes) += x[r / (2 * R)][r % (2 * R)];
}

// Add the weighted values of num_keys keys to the sums of R rows of a small tile.
template <int R>
void add_values(const Scratch& s, float* out, const Block& block, const Block& next, int num_keys) {
  constexpr int kCount = 4 * R < kRegisters - 4 ? 2 : 1;  // More sums than these do not fit into the registers.
  for (int64_t d = 0; d < s.value_dim; d += kCount * kPairs)
    if (kCount == 2 && s.value_dim - d <= kPairs)
      add_pairs<R, 1>(s, out, block, next, num_keys, d);
    else
      add_pairs<R, kCount>(s, out, block, next, num_keys, d);
}

template <int R>
void attend_few(const Scratch& s, int64_t row, const Block& block, const Block& next, const int* seen) {
  const int num_keys = *std::max_element(seen, seen + R);
  if (num_keys == 0) return;
  score<R>(s, s.query + row * s.key_width, block, next, num_keys);
  for (int r = 0; r < R; ++r) weigh<R>(s, row, r, seen[r], num_keys);
  add_values<R>(s, s.out + row * s.value_width, block, next, num_keys);
}

void widen(const Element* from, int64_t dims, float* to) {
  for (int64_t d = 0; d < dims; d += kPairs) {
    const Pairs x = load(from + d, dims - d);
    at(to + d) = x.even, at(to + d + kLanes) = x.odd;
  }
}

// Pack a block's keys for score_packed.
void pack_scored(const Scratch& s, const Block& block) {
  for (int i = 0; i < kBlock; ++i) widen(block.key[i], s.key_dim, s.keys + i * s.key_stride);
}

constexpr int kScoredRows = kPanel;

// Scores of kScoredRows rows with a block's packed keys, as [row][key].
void score_packed(const Scratch& s, int64_t row, float* to) {
  for (int i = 0; i < kBlock; i += kRepeated)
    product<false>(s.keys + i * s.key_stride, s.key_stride, 1, s.query + row * s.key_width, s.key_width,
                   s.weights + i * kPanel);
  for (int r = 0; r < kPanel; ++r)
    for (int i = 0; i < kBlock; ++i) to[r * kBlock + i] = s.weights[i * kPanel + r];
}

// Process a block for all rows of a tile. Row r sees the first seen[r] keys.
void attend_block(const Scratch& s, int64_t num_rows, const Block& block, const Block& next, const int* seen) {
  if (num_rows == 1) return attend_few<1>(s, 0, block, next, seen);
  if (num_rows == 2) return attend_few<2>(s, 0, block, next, seen);
  if (num_rows == 4) return attend_few<4>(s, 0, block, next, seen);
  if (num_rows <= kFewRows) {
    for (int64_t row = 0; row < num_rows; row += kAtOnce) attend_few<kAtOnce>(s, row, block, next, seen + row);
    return;
  }
  pack_scored(s, block);
  for (int i = 0; i < kBlock; ++i) widen(block.value[i], s.value_dim, s.values + i * s.value_stride);
  for (int64_t row = 0; row < num_rows; row += kPanel) {
    prefetch_keys(next, row * kBlock / num_rows, (row + kPanel) * kBlock / num_rows, s.key_dim, s.value_dim);
    attend_panel(s, row, seen + row);
  }
}

}  // namespace
