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

// Read rows into `inputs`, as many at a time as fit, and call `multiply` with the first one's number and their count.
template <class Multiply>
void read_in_turn(Inputs& inputs, const Element* x, int64_t stride, int64_t num_rows, Multiply multiply) {
  for (int64_t at = 0; at < num_rows; at += inputs.rows_together) {
    const int64_t count = std::min(num_rows - at, inputs.rows_together);
    inputs.read(x + at * stride, stride, count);
    multiply(at, count);
  }
}

// Products of some rows, of which helpers can take parts. What helpers are given is this.
struct SharedLinear {
  static constexpr int64_t kLeastBytes = 1 << 17;  // Bytes of weights per part.

  Weight weight;
  const Element* bias;
  int64_t num_rows, num_inputs, num_outputs;
  void* memory;                 // Where the rows have been read to.
  int64_t blocks_together = 0;  // Blocks of kOutputs outputs per part.

  // Let helpers take parts. Return false if they cannot, or it would save little time.
  bool share(const Inputs& inputs, Element* out) {
    const int64_t least = kLeastBytes / (sizeof(Element) * kOutputs * num_inputs) + 1;
    blocks_together = std::max(least, (num_blocks(num_outputs) + kMostParts - 1) / kMostParts);
    const int64_t width = blocks_together * kOutputs, num_parts = (num_outputs + width - 1) / width;
    if (num_parts < 2) return false;
    Given given;
    given.put(this, 1);
    const int64_t result_size = num_rows * width * sizeof(Element) / sizeof(float);
    const auto compute = [&](int64_t part) {
      multiply(inputs, part, [&](int64_t row) { return out + row * num_outputs; });
    };
    const auto accept = [&](int64_t part, const float* result) {
      const int64_t first = part * width, count = std::min(width, num_outputs - first);
      for (int64_t row = 0; row < num_rows; ++row)
        std::copy_n((const Element*)result + row * width, count, out + row * num_outputs + first);
    };
    return share_with_helpers({compute_part, given, num_parts, result_size}, compute, accept);
  }

  static void compute_part(const char* given, int64_t part, float* result) {
    const SharedLinear& a = *(const SharedLinear*)given;
    const Inputs inputs(a.num_rows, a.num_inputs, a.memory);
    Element* out = (Element*)result - part * a.blocks_together * kOutputs;
    a.multiply(inputs, part, [&](int64_t row) { return out + row * a.blocks_together * kOutputs; });
  }

  template <class Out>
  void multiply(const Inputs& inputs, int64_t part, Out out) const {
    const int64_t begin = part * blocks_together, end = std::min(begin + blocks_together, num_blocks(num_outputs));
    multiply_inputs(inputs, num_rows, weight, bias, num_inputs, num_outputs, begin, end, out);
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
  const int64_t num_bytes = Inputs::num_bytes(num_rows, num_inputs);
  void* memory = is_whole ? memory_to_share(num_bytes, sizeof(SharedLinear)) : nullptr;
  Inputs inputs(num_rows, num_inputs, memory);
  read_in_turn(inputs, x, x_stride, num_rows, [&](int64_t at, int64_t count) {
    Element* first = out + at * num_outputs;
    if (memory && SharedLinear{packed, bias, count, num_inputs, num_outputs, memory}.share(inputs, first)) return;
    multiply_inputs(inputs, count, packed, bias, num_inputs, num_outputs, begin, end,
                    [&](int64_t row) { return first + row * num_outputs; });
  });
}

// Compute linear without a bias for each head of x [num_rows, num_heads, num_inputs], with weights of its own.
extern "C" void EXPORT(linear_of_heads)(const Element* x, const Element* const* weights, Element* out,
                                        int64_t num_heads, int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                                        int64_t x_stride, int64_t x_head_stride, int64_t out_stride,
                                        int64_t out_head_stride, int64_t width, int64_t block_stride, int64_t begin,
                                        int64_t end) {
  Inputs inputs(num_rows, num_inputs);
  for (int64_t head = 0; head < num_heads; ++head)
    read_in_turn(inputs, x + head * x_head_stride, x_stride, num_rows, [&](int64_t at, int64_t count) {
      multiply_inputs(inputs, count, {weights[head], width, block_stride}, nullptr, num_inputs, num_outputs, begin, end,
                      [&](int64_t row) { return out + head * out_head_stride + (at + row) * out_stride; });
    });
}
