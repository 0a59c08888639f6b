// Sums of products of rows and the weights of some outputs, in the tile registers of AMX.

#pragma once

#include "block.h"
#include "tiles.h"

namespace {

constexpr int64_t kOutputs = 32;              // Outputs per call of sum_products: two tiles.
constexpr int64_t kGroup = 2 * kTileLanes;    // Rows whose sums fill the other tiles.
constexpr int64_t kMostGroups = 16;           // Groups that share a read of the weights,
constexpr int64_t kMostInputBytes = 1 << 20;  // which stay in the L2 cache.
constexpr int64_t kMostFetching = 7;          // Groups, apart from the first, that fetch the next outputs' weights.

// Some rows of inputs as tiles, one after another: [row / 16][input / 32][row][input], padded with zeros.
struct Inputs {
  const Tiles tiles;
  const int64_t num_inputs, stride;  // The stride is that of 16 rows.
  const int64_t rows_together;       // Maximum number of rows.
  Memory memory;
  bf16* const rows;

  // Inputs are read into memory of num_bytes at `at`, or have been read there. Null stands for memory of its own.
  Inputs(int64_t num_rows, int64_t width, void* at = nullptr)
      : num_inputs(width), stride(stride_of(width)), rows_together(most_rows(num_rows, width)),
        memory(at ? 0 : num_bytes(num_rows, width)), rows(at ? (bf16*)at : memory.take<bf16>(0)) {}

  static int64_t stride_of(int64_t width) { return kTileLanes * round_up(width, kTileDepth); }

  static int64_t most_rows(int64_t num_rows, int64_t width) {
    const int64_t num_groups = std::clamp<int64_t>(kMostInputBytes / (4 * stride_of(width)), 1, kMostGroups);
    return std::min(round_up(num_rows, kTileLanes), kGroup * num_groups);
  }

  static int64_t num_bytes(int64_t num_rows, int64_t width) {
    return most_rows(num_rows, width) / kTileLanes * stride_of(width) * sizeof(bf16);
  }

  // Read rows whose addresses `row_at` returns.
  template <class RowAt>
  void read_from(RowAt row_at, int64_t num_rows) {
    for (int64_t row = 0; row < round_up(num_rows, kTileLanes); ++row) {
      const bf16* from = row < num_rows ? row_at(row) : nullptr;
      bf16* to = rows + row / kTileLanes * stride + row % kTileLanes * kTileDepth;
      for (int64_t i = 0; i < num_inputs; i += kTileDepth, to += kTileLanes * kTileDepth) {
        const __mmask32 mask = from ? lanes32(num_inputs - i) : 0;
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, from + i));
      }
    }
    finish_writing(rows);
  }

  void read(const bf16* x, int64_t x_stride, int64_t num_rows) {
    read_from([&](int64_t row) { return x + row * x_stride; }, num_rows);
  }

  // Write kOutputs inputs of a row, from a multiple of kOutputs on.
  void put(int64_t row, int64_t input, const bf16* from) {
    static_assert(kOutputs == kTileDepth);
    bf16* to = rows + row / kTileLanes * stride + input * kTileLanes + row % kTileLanes * kTileDepth;
    _mm512_store_si512(to, _mm512_load_si512(from));
    finish_writing(to);
  }
};

// Weights of kOutputs outputs: pairs of inputs that are `pair_stride` elements apart.
struct Outputs {
  const bf16* first;
  int64_t pair_stride;
};

// Return the weights of outputs from `first` on.
Outputs outputs_from(int64_t first, const bf16* weight, int64_t, int64_t width, int64_t block_stride) {
  return {weight + first / width * block_stride + first % width * 2, 2 * width};
}

// Fetch the weights of 32 inputs into all caches.
inline void fetch(const bf16* weight, int64_t pair_stride) {
  for (int64_t i = 0; i < kTileDepth; i += 2, weight += pair_stride)
    for (int64_t part = 0; part < 2 * kOutputs; part += kLine) __builtin_prefetch(weight + part);
}

// Add products with 32 inputs to tiles 0 to 3, the sums of 32 rows, or of 16 if not Two. Inputs and weights of all rows
// fill the L1 cache, so loads go past it.
template <bool Two>
inline void add_products(const bf16* x, int64_t stride, const bf16* weight, int64_t pair_stride) {
  _tile_stream_loadd(4, x, 2 * kTileDepth);
  _tile_stream_loadd(6, weight, 2 * pair_stride);
  _tile_stream_loadd(7, weight + 2 * kTileLanes, 2 * pair_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Two) {
    _tile_stream_loadd(5, x + stride, 2 * kTileDepth);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Add products with the last inputs, of which there are fewer than 32.
template <bool Two>
void add_rest(const bf16* x, int64_t stride, const bf16* weight, int64_t pair_stride, int64_t num_inputs) {
  alignas(64) bf16 copies[kTileDepth * kOutputs] = {};
  for (int64_t i = 0; i < num_inputs; i += 2, weight += pair_stride)
    std::copy_n(weight, 2 * kOutputs, copies + i * kOutputs);
  finish_writing(copies);
  add_products<Two>(x, stride, copies, 2 * kOutputs);
}

// Cache lines to fetch into L2 while other products are computed: `count` of them with every 32 inputs.
struct Ahead {
  const bf16* first;
  int64_t count;
};

// Compute the sums of 32 rows, or of 16 if not Two. The first rows read weights from memory.
template <bool Two>
void sum_rows(const Inputs& x, int64_t row, const Outputs& weight, Ahead ahead, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const bf16 *rows = x.rows + row / kTileLanes * x.stride, *pairs = weight.first;
  const int64_t rest = x.num_inputs % kTileDepth;
  for (int64_t i = rest; i < x.num_inputs; i += kTileDepth, rows += kTileLanes * kTileDepth) {
    const bf16* next = pairs + kTileDepth / 2 * weight.pair_stride;
    add_products<Two>(rows, x.stride, pairs, weight.pair_stride);
    if (row == 0) fetch(next, weight.pair_stride);
    for (int64_t line = 0; line < ahead.count; ++line, ahead.first += kLine) __builtin_prefetch(ahead.first, 0, 2);
    pairs = next;
  }
  if (rest) add_rest<Two>(rows, x.stride, pairs, weight.pair_stride, rest);
  _tile_stored(0, sums, 4 * kOutputs);
  _tile_stored(1, sums + kTileLanes, 4 * kOutputs);
  if constexpr (Two) {
    _tile_stored(2, sums + kTileLanes * kOutputs, 4 * kOutputs);
    _tile_stored(3, sums + kTileLanes * kOutputs + kTileLanes, 4 * kOutputs);
  }
}

// Return what rows from `row` on fetch. The first ones wait for memory anyway.
Ahead ahead_of(const Inputs& x, int64_t row, const Outputs& weight, int64_t num_rows) {
  const int64_t num_fetching = std::min((num_rows - 1) / kGroup, kMostFetching), index = row / kGroup - 1;
  if (index < 0 || index >= num_fetching) return {nullptr, 0};
  const int64_t count = round_up(kTileDepth * kOutputs / kLine, num_fetching) / num_fetching;
  return {weight.first + x.num_inputs * (kOutputs + index * count * kLine / kTileDepth), count};
}

// Compute the sums of some rows, and give those of each row to `store`.
template <class Store>
void sum_products(const Inputs& x, const Outputs& weight, int64_t num_rows, int64_t, Store store) {
  alignas(64) float sums[kGroup * kOutputs];
  for (int64_t row = 0; row < num_rows; row += kGroup) {
    const int64_t count = std::min(kGroup, num_rows - row);
    const Ahead ahead = ahead_of(x, row, weight, num_rows);
    if (count > kTileLanes) {
      sum_rows<true>(x, row, weight, ahead, sums);
    } else {
      sum_rows<false>(x, row, weight, ahead, sums);
    }
    for (int64_t i = 0; i < count; ++i) store(row + i, sums + i * kOutputs);
  }
}

// Round the sums of the first n outputs, at most kOutputs, after adding a bias unless it is null.
void store_sums(const float* sums, const bf16* bias, int64_t n, bf16* out) {
  const __mmask32 lanes = lanes32(n);
  __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + kTileLanes);
  if (bias) {
    const auto wide = [](__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); };
    const __m512i x = _mm512_maskz_loadu_epi16(lanes, bias);
    low = _mm512_add_ps(low, wide(_mm512_castsi512_si256(x)));
    high = _mm512_add_ps(high, wide(_mm512_extracti64x4_epi64(x, 1)));
  }
  _mm512_mask_storeu_epi16(out, lanes, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

}  // namespace

// Outputs per block of the weights that linear reads. It computes as many outputs at a time as the last of these says.
extern "C" const int64_t EXPORT(block_widths)[] = {64, kOutputs};
