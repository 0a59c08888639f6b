// Products of rows with a weight in bf16. A few rows take as long as reading the weight. The source file defines
// Element, the type of all numbers, and EXPORT. Only for CPUs with AVX512-BF16.

#pragma once

#include "vectors.h"

namespace {

constexpr int64_t kOutputs = 64;        // Outputs per call of add_products.
constexpr int64_t kParts = kOutputs / kLanes;
constexpr int64_t kMostTogether = 6;    // Rows whose sums fit into registers.
constexpr int64_t kDepth = 512;         // Inputs whose weights stay in the cache until all rows have met them.
constexpr int64_t kRowsTogether = 120;  // Rows that share a read of the weights. Their sums stay in the cache.

// Rows, their weight as in linear, and their products.
struct Rows {
  const Element *x, *weight;
  Element* out;
  int64_t width, block_stride, num_rows;
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

constexpr decltype(&add_products<1>) kAddProducts[] = {add_products<1>, add_products<2>, add_products<3>,
                                                       add_products<4>, add_products<5>, add_products<6>};

// Return the weights of outputs from `first` on, of which there are `num_outputs` in total. Where there is no second
// half, its products are not used.
Outputs outputs_from(int64_t first, const Element* weight, int64_t num_outputs, int64_t width, int64_t block_stride) {
  const Element* block = weight + first / width * block_stride;
  if (width == kOutputs) return {block, block + kOutputs, 2 * width};
  return {block, first + width < num_outputs ? block + block_stride : block, 2 * width};
}

// Compute the sums of up to kRowsTogether rows. Of several groups of rows, only the first would wait for memory: two of
// them each fetch half of the weights that come next. A single group waits for memory all the time.
void sum_products(const Element* x, int64_t stride, const Outputs& weight, int64_t num_rows, int64_t num_inputs,
                  float* sums) {
  const int64_t num_groups = round_up(num_rows, kMostTogether) / kMostTogether;
  std::fill(sums, sums + num_rows * kOutputs, 0.0f);
  for (int64_t i = 0; i < num_inputs; i += kDepth)
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t row = num_rows * group / num_groups, next = num_rows * (group + 1) / num_groups;
      const int64_t depth = std::min(kDepth, num_inputs - i);
      const int64_t ahead = num_groups > 1 ? depth / 2 * weight.pair_stride + group % 2 * kPairs : 0;
      kAddProducts[next - row - 1](x + row * stride, stride, weight, i, depth, ahead, sums + row * kOutputs);
    }
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

// Compute products of `rows`, for outputs 64 * begin to 64 * end. A null bias counts as zero.
void multiply_rows(const Rows& rows, const Element* bias, int64_t num_inputs, int64_t num_outputs, int64_t x_stride,
                   int64_t out_stride, int64_t begin, int64_t end) {
  float sums[kRowsTogether * kOutputs];
  for (int64_t at = 0; at < rows.num_rows; at += kRowsTogether) {
    const int64_t num_together = std::min(rows.num_rows - at, kRowsTogether);
    for (int64_t first = begin * kOutputs; first < end * kOutputs; first += kOutputs) {
      const Outputs weights = outputs_from(first, rows.weight, num_outputs, rows.width, rows.block_stride);
      sum_products(rows.x + at * x_stride, x_stride, weights, num_together, num_inputs, sums);
      for (int64_t row = 0; row < num_together; ++row)
        store_sums(sums + row * kOutputs, bias ? bias + first : nullptr, num_outputs - first,
                   rows.out + (at + row) * out_stride + first);
    }
  }
}

}  // namespace

// Compute x [num_rows, num_inputs] @ weight.T + bias, or without a bias if it is null, for outputs 64 * begin to
// 64 * end. Blocks of the weight are [inputs / 2, width, 2], where width is 32 or 64: pairs of inputs side by side, as
// the instruction takes them. They are `block_stride` elements apart, and outputs beyond num_outputs are zeros.
// num_inputs is even.
extern "C" void EXPORT(linear)(const Element* x, const Element* weight, const Element* bias, Element* out,
                               int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t x_stride,
                               int64_t width, int64_t block_stride, int64_t begin, int64_t end) {
  multiply_rows({x, weight, out, width, block_stride, num_rows}, bias, num_inputs, num_outputs, x_stride, num_outputs,
                begin, end);
}

// Compute linear without a bias for groups of rows, each with a weight of its own.
extern "C" void EXPORT(grouped_linear)(const Rows* groups, int64_t num_groups, int64_t num_inputs, int64_t num_outputs,
                                       int64_t x_stride, int64_t out_stride, int64_t begin, int64_t end) {
  for (int64_t group = 0; group < num_groups; ++group)
    multiply_rows(groups[group], nullptr, num_inputs, num_outputs, x_stride, out_stride, begin, end);
}
