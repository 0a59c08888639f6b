// Products of rows with a weight in bf16. A few rows take as long as reading the weight. The source file defines
// Element, the type of all numbers, and EXPORT, and includes the products for this CPU.

#pragma once

#include "block.h"

namespace {

// Rows, their weight as in linear, and their products.
struct Rows {
  const Element *x, *weight;
  Element* out;
  int64_t width, block_stride, num_rows;
};

// Compute products of `rows`, for outputs kOutputs * begin to kOutputs * end. A null bias counts as zero.
void multiply_rows(const Rows& rows, const Element* bias, int64_t num_inputs, int64_t num_outputs, int64_t x_stride,
                   int64_t out_stride, int64_t begin, int64_t end) {
  Inputs inputs(rows.num_rows, num_inputs);
  for (int64_t at = 0; at < rows.num_rows; at += inputs.rows_together) {
    const int64_t num_together = std::min(rows.num_rows - at, inputs.rows_together);
    inputs.read(rows.x + at * x_stride, x_stride, num_together);
    for (int64_t first = begin * kOutputs; first < end * kOutputs; first += kOutputs) {
      const auto store = [&](int64_t row, const float* sums) {
        store_sums(sums, bias ? bias + first : nullptr, num_outputs - first,
                   rows.out + (at + row) * out_stride + first);
      };
      const Outputs weights = outputs_from(first, rows.weight, num_outputs, rows.width, rows.block_stride);
      sum_products(inputs, weights, num_together, num_inputs, store);
    }
  }
}

}  // namespace

// Compute x [num_rows, num_inputs] @ weight.T + bias, or without a bias if it is null, for outputs
// kOutputs * begin to kOutputs * end. Blocks of the weight are [inputs / 2, width, 2]: pairs of inputs side by side, as
// the instructions for bf16 take them. `block_widths` lists the widths. Blocks are `block_stride` elements apart, and
// outputs beyond num_outputs are zeros. num_inputs is even.
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
