// Products of rows with a weight in bf16. A few rows take as long as reading the weight. The source file defines
// Element, the type of all numbers, and EXPORT, and includes the products for this CPU.

#pragma once

#include "block.h"
#include "helpers.h"

namespace {

// A packed weight, as in linear.
struct Weight {
  const Element* first;
  int64_t width, block_stride;
};

inline int64_t num_blocks(int64_t num_outputs) { return (num_outputs + kOutputs - 1) / kOutputs; }

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

// Products of a few rows, of which helpers can take parts. What they are given is this, then the rows.
struct SharedLinear {
  static constexpr int64_t kLeastBytes = 1 << 17;  // Bytes of weights per part.

  Weight weight;
  const Element* bias;
  int64_t num_rows, num_inputs, num_outputs;
  int64_t blocks_together = 0;  // Blocks of kOutputs outputs per part.

  // Let helpers take parts. Return false if they cannot, or it would save little time.
  bool share(const Rows<const Element>& x, Element* out) {
    if (!may_share() || num_rows > kMostSharedRows) return false;
    const int64_t least = kLeastBytes / (sizeof(Element) * kOutputs * num_inputs) + 1;
    blocks_together = std::max(least, (num_blocks(num_outputs) + kMostParts - 1) / kMostParts);
    const int64_t width = blocks_together * kOutputs, num_parts = (num_outputs + width - 1) / width;
    if (num_parts < 2) return false;
    Given given;
    given.put(this, 1);
    for (int64_t row = 0; row < num_rows; ++row) given.put(x.first + row * x.stride, num_inputs);
    const int64_t result_size = num_rows * width * sizeof(Element) / sizeof(float);
    return share_with_helpers({compute, given, num_parts, result_size}, [&](int64_t part, const float* result) {
      const int64_t first = part * width, count = std::min(width, num_outputs - first);
      for (int64_t row = 0; row < num_rows; ++row)
        std::copy_n((const Element*)result + row * width, count, out + row * num_outputs + first);
    });
  }

  static void compute(const char* given, int64_t part, float* result) {
    const SharedLinear& a = *(const SharedLinear*)given;
    Inputs inputs(a.num_rows, a.num_inputs);
    inputs.read((const Element*)(given + sizeof a), a.num_inputs, a.num_rows);
    const int64_t begin = part * a.blocks_together, end = std::min(begin + a.blocks_together, num_blocks(a.num_outputs));
    const auto out = [&](int64_t row) { return (Element*)result + (row * a.blocks_together - begin) * kOutputs; };
    multiply_inputs(inputs, a.num_rows, a.weight, a.bias, a.num_inputs, a.num_outputs, begin, end, out);
  }
};

}  // namespace

// Compute x [num_rows, num_inputs] @ weight.T + bias, or without a bias if it is null, for outputs
// kOutputs * begin to kOutputs * end. Blocks of the weight are [inputs / 2, width, 2]: pairs of inputs side by side, as
// the instructions for bf16 take them. `block_widths` lists the widths. Blocks are `block_stride` elements apart, and
// outputs beyond num_outputs are zeros. num_inputs is even.
extern "C" void EXPORT(linear)(const Element* x, const Element* weight, const Element* bias, Element* out,
                               int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t x_stride,
                               int64_t width, int64_t block_stride, int64_t begin, int64_t end) {
  const Weight packed = {weight, width, block_stride};
  const bool is_whole = begin == 0 && end == num_blocks(num_outputs);
  if (is_whole && SharedLinear{packed, bias, num_rows, num_inputs, num_outputs}.share({x, x_stride}, out)) return;
  multiply_rows({x, x_stride}, num_rows, packed, bias, num_inputs, num_outputs, begin, end, {out, num_outputs});
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
