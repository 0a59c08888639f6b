// Sums of products of a few rows and the weights of some outputs, computed in fp32, for any CPU.

#pragma once

#include "block.h"
#include "vectors.h"

namespace {

constexpr int64_t kParts = kRegisters == 32 ? 4 : 2;
constexpr int64_t kOutputs = kParts * kLanes;                // Outputs per call of add_products.
constexpr int64_t kLines = 2 * kOutputs / kLine;             // Cache lines of a pair of inputs.
constexpr int64_t kMostTogether = kRegisters == 32 ? 6 : 5;  // Rows whose sums fit into registers.

// Some rows of inputs in fp32, as add_products takes them. They stay in the cache.
struct Inputs {
  static constexpr int64_t rows_together = 8 * kMostTogether;  // Rows that share a read of the weights.
  const int64_t stride;
  const std::unique_ptr<float[]> memory;
  float* const rows;

  // Inputs are read into memory of num_bytes at `at`, or have been read there. Null stands for memory of its own.
  Inputs(int64_t num_rows, int64_t width, void* at = nullptr)
      : stride(width), memory(at ? nullptr : new float[num_bytes(num_rows, width) / sizeof(float)]),
        rows(at ? (float*)at : memory.get()) {}

  static int64_t num_bytes(int64_t num_rows, int64_t width) {
    return std::min(num_rows, rows_together) * width * sizeof(float);
  }

  // Read rows whose addresses `row_at` returns.
  template <class RowAt>
  void read_from(RowAt row_at, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const bf16* from = row_at(row);
      for (int64_t i = 0; i < stride; ++i) rows[row * stride + i] = as_float(from[i]);
    }
  }

  void read(const bf16* x, int64_t x_stride, int64_t num_rows) {
    read_from([&](int64_t row) { return x + row * x_stride; }, num_rows);
  }

  // Write kOutputs inputs of a row, from a multiple of kOutputs on.
  void put(int64_t row, int64_t input, const bf16* from) {
    for (int64_t i = 0; i < kOutputs; ++i) rows[row * stride + input + i] = as_float(from[i]);
  }
};

// Weights of kOutputs outputs: pairs of inputs that are `pair_stride` elements apart.
struct Outputs {
  const bf16* first;
  int64_t pair_stride;
};

// Return the weights of outputs from `first` on. Blocks have kOutputs outputs.
Outputs outputs_from(int64_t first, const bf16* weight, int64_t, int64_t width, int64_t block_stride) {
  return {weight + first / width * block_stride, 2 * width};
}

// Add products with one input. `take` returns its weights from those of a pair.
template <int64_t Rows, class Take>
inline void add(const float* x, int64_t stride, const bf16* pair, Take take, vec (&sum)[Rows][kParts]) {
  vec weights[kParts];
#pragma GCC unroll 4
  for (int64_t v = 0; v < kParts; ++v) weights[v] = take(load(pair + v * kPairs, kPairs));
#pragma GCC unroll 8
  for (int64_t row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int64_t v = 0; v < kParts; ++v) sum[row][v] += weights[v] * x[row * stride];
}

// Add products with some inputs, from `begin`, to the sums of Rows rows. Meanwhile, fetch weights that are `ahead`.
template <int64_t Rows>
void add_products(const float* x, int64_t stride, const Outputs& weight, int64_t begin, int64_t num_inputs,
                  int64_t ahead, float* sums) {
  vec sum[Rows][kParts];
#pragma GCC unroll 8
  for (int64_t row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int64_t v = 0; v < kParts; ++v) sum[row][v] = at(sums + row * kOutputs + v * kLanes);
  const bf16* pair = weight.first + begin / 2 * weight.pair_stride;
  for (int64_t i = 0; i < num_inputs; i += 2, pair += weight.pair_stride) {
    __builtin_prefetch(pair + ahead, 0, 2);
    add<Rows>(x + begin + i, stride, pair, [](const Pairs& two) { return two.even; }, sum);
    add<Rows>(x + begin + i + 1, stride, pair, [](const Pairs& two) { return two.odd; }, sum);
  }
#pragma GCC unroll 8
  for (int64_t row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int64_t v = 0; v < kParts; ++v) at(sums + row * kOutputs + v * kLanes) = sum[row][v];
}

// Round the sums of the first n outputs, at most kOutputs, after adding a bias unless it is null.
void store_sums(const float* sums, const bf16* bias, int64_t n, bf16* out) {
  for (int64_t i = 0; i < std::min(n, kOutputs); ++i) set(out[i], bias ? sums[i] + as_float(bias[i]) : sums[i]);
}

}  // namespace

#include "products.h"

// Outputs per block of the weights that linear reads. It computes as many outputs at a time as the last of these says.
extern "C" const int64_t EXPORT(block_widths)[] = {kOutputs, kOutputs};
