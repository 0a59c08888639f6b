// Products of rows with a weight in bf16. A few rows take as long as reading the weight. The source file defines
// Element, the type of all numbers, and EXPORT, and includes the products for this CPU.

#pragma once

#include "block.h"

namespace {

// A packed weight, as in linear.
struct Weight {
  const Element* first;
  int64_t width, block_stride;
};

// Compute products of rows that were read into `inputs`, for outputs kOutputs * begin to kOutputs * end. `out` returns
// the address of a row's products. A null bias counts as zero.
template <class Out>
void multiply_inputs(const Inputs& inputs, int64_t num_rows, const Weight& weight, const Element* bias,
                     int64_t num_inputs, int64_t num_outputs, int64_t begin, int64_t end, Out out) {
  for (int64_t first = begin * kOutputs; first < end * kOutputs; first += kOutputs) {
    const auto store = [&](int64_t row, const float* sums) {
      store_sums(sums, bias ? bias + first : nullptr, num_outputs - first, out(row) + first);
    };
    const Outputs weights = outputs_from(first, weight.first, num_outputs, weight.width, weight.block_stride);
    sum_products(inputs, weights, num_rows, num_inputs, store);
  }
}

// Rows of inputs or outputs.
template <class T>
struct Rows {
  T* first;
  int64_t stride;
};

void multiply_rows(const Rows<const Element>& x, int64_t num_rows, const Weight& weight, const Element* bias,
                   int64_t num_inputs, int64_t num_outputs, int64_t begin, int64_t end, const Rows<Element>& out) {
  Inputs inputs(num_rows, num_inputs);
  for (int64_t at = 0; at < num_rows; at += inputs.rows_together) {
    const int64_t num_together = std::min(num_rows - at, inputs.rows_together);
    inputs.read(x.first + at * x.stride, x.stride, num_together);
    multiply_inputs(inputs, num_together, weight, bias, num_inputs, num_outputs, begin, end,
                    [&](int64_t row) { return out.first + (at + row) * out.stride; });
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
  multiply_rows({x, x_stride}, num_rows, {weight, width, block_stride}, bias, num_inputs, num_outputs, begin, end,
                {out, num_outputs});
}

// Compute linear without a bias for each head of x [num_rows, num_heads, num_inputs], with weights of its own.
extern "C" void EXPORT(linear_of_heads)(const Element* x, const Element* const* weights, Element* out,
                                        int64_t num_heads, int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                                        int64_t x_stride, int64_t x_head_stride, int64_t out_stride,
                                        int64_t out_head_stride, int64_t width, int64_t block_stride, int64_t begin,
                                        int64_t end) {
  for (int64_t head = 0; head < num_heads; ++head)
    multiply_rows({x + head * x_head_stride, x_stride}, num_rows, {weights[head], width, block_stride}, nullptr,
                  num_inputs, num_outputs, begin, end, {out + head * out_head_stride, out_stride});
}
