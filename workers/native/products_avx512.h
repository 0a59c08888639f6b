// Sums of products of a few rows and the weights of some outputs, on a CPU with AVX512-BF16.

#pragma once

#include <vector>

#include "block.h"
#include "vectors.h"

namespace {

constexpr int64_t kOutputs = 64;  // Outputs per call of add_products.
constexpr int64_t kParts = kOutputs / kLanes;
constexpr int64_t kLines = 2;           // Cache lines of a pair of inputs, in each half of the outputs.
constexpr int64_t kMostTogether = 6;    // Rows whose sums fit into registers.

// Rows of inputs, as add_products takes them.
struct Inputs {
  static constexpr int64_t rows_together = 120;  // Rows that share a read of the weights. Their sums stay in the cache.
  const int64_t num_inputs;
  Element* const shared;
  const Element* rows;
  int64_t stride;
  std::vector<Element> copies;

  // Inputs are copied to memory of num_bytes at `at`, or have been copied there. Null stands for memory of its own.
  Inputs(int64_t, int64_t width, void* at = nullptr)
      : num_inputs(width), shared((Element*)at), rows(shared), stride(width) {}

  static int64_t num_bytes(int64_t num_rows, int64_t width) {
    return std::min(num_rows, rows_together) * width * sizeof(Element);
  }

  // Read rows whose addresses `row_at` returns.
  template <class RowAt>
  void read_from(RowAt row_at, int64_t num_rows) {
    if (!shared) copies.resize(num_rows * num_inputs);
    Element* to = shared ? shared : copies.data();
    for (int64_t row = 0; row < num_rows; ++row) std::copy_n(row_at(row), num_inputs, to + row * num_inputs);
    rows = to, stride = num_inputs;
  }

  void read(const Element* x, int64_t x_stride, int64_t num_rows) {
    rows = x, stride = x_stride;
    if (shared) read_from([&](int64_t row) { return x + row * x_stride; }, num_rows);
  }

  // Write kOutputs inputs of a row, from a multiple of kOutputs on.
  void put(int64_t row, int64_t input, const Element* from) {
    copies.resize(rows_together * num_inputs);
    rows = copies.data(), stride = num_inputs;
    std::copy_n(from, kOutputs, copies.data() + row * num_inputs + input);
  }
};

// Weights of kOutputs outputs: of each half of the outputs, pairs of inputs that are `pair_stride` elements apart.
struct Outputs {
  const Element *first, *second;
  int64_t pair_stride;
};

// Add products with some inputs, from `begin`, to the sums of Rows rows. Meanwhile, fetch weights that are `ahead`.
template <int64_t Rows>
void add_products(const Element* x, int64_t stride, const Outputs& weight, int64_t begin, int64_t num_inputs,
                  int64_t ahead, float* sums) {
  __m512 sum[Rows][kParts];
  for (int64_t row = 0; row < Rows; ++row)
    for (int64_t v = 0; v < kParts; ++v) sum[row][v] = _mm512_loadu_ps(sums + row * kOutputs + v * kLanes);
  const Element* first = weight.first + begin / 2 * weight.pair_stride;
  const Element* second = weight.second + begin / 2 * weight.pair_stride;
  for (int64_t i = 0; i < num_inputs; i += 2, first += weight.pair_stride, second += weight.pair_stride) {
    __builtin_prefetch(first + ahead, 0, 2);
    __builtin_prefetch(second + ahead, 0, 2);
    __m512bh weights[kParts];
    for (int64_t v = 0; v < kParts / 2; ++v) {
      weights[v] = (__m512bh)_mm512_loadu_si512(first + v * kPairs);
      weights[kParts / 2 + v] = (__m512bh)_mm512_loadu_si512(second + v * kPairs);
    }
    for (int64_t row = 0; row < Rows; ++row) {
      int32_t pair;
      std::memcpy(&pair, x + row * stride + begin + i, sizeof pair);
      for (int64_t v = 0; v < kParts; ++v)
        sum[row][v] = _mm512_dpbf16_ps(sum[row][v], weights[v], (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  for (int64_t row = 0; row < Rows; ++row)
    for (int64_t v = 0; v < kParts; ++v) _mm512_storeu_ps(sums + row * kOutputs + v * kLanes, sum[row][v]);
}

// Return the weights of outputs from `first` on, of which there are `num_outputs` in total. Where there is no second
// half, its products are not used.
Outputs outputs_from(int64_t first, const Element* weight, int64_t num_outputs, int64_t width, int64_t block_stride) {
  const Element* block = weight + first / width * block_stride;
  if (width == kOutputs) return {block, block + kOutputs, 2 * width};
  return {block, first + width < num_outputs ? block + block_stride : block, 2 * width};
}

// Round the sums of the first n outputs, at most kOutputs, after adding a bias unless it is null.
void store_sums(const float* sums, const Element* bias, int64_t n, Element* out) {
  for (int64_t v = 0; v < kOutputs && v < n; v += kLanes) {
    const __mmask16 lanes = n - v >= kLanes ? 0xffff : (1u << (n - v)) - 1;
    __m512 sum = _mm512_loadu_ps(sums + v);
    if (bias) sum += (vec)((words)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, bias + v)) << 16);
    _mm256_mask_storeu_epi16(out + v, lanes, (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

}  // namespace

#include "products.h"

// Outputs per block of the weights that linear reads. It computes as many outputs at a time as the last of these says.
extern "C" const int64_t EXPORT(block_widths)[] = {32, 64};
