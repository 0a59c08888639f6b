// Products of rows with a weight in bf16. A few rows take as long as reading the weight. The source file defines
// Element, the type of all numbers, and EXPORT, and includes the products for this CPU.

#pragma once

#include "elementwise.h"
#include "helpers.h"

namespace {

constexpr int64_t kGateBytes = 64 << 10;  // Size of gates that wait in a cache for what they are multiplied by.

#if defined(__AVX512F__)
// Return whether outputs are stored past an L2 cache, since they do not fit into it beside what is read. Rows that are
// 2 KiB or more apart share few of its sets.
inline bool exceed_cache(int64_t num_rows, int64_t num_outputs) {
  const int64_t row_bytes = num_outputs * sizeof(Element), least = row_bytes < 2048 ? 5 << 19 : 3 << 19;
  return num_rows * row_bytes >= least;
}

// Store kOutputs numbers past the caches, which would first read the memory. Where each row is far from the last one,
// that can take as long as the products.
inline void stream(const Element* from, Element* to) {
  for (int64_t i = 0; i < kOutputs; i += kPairs)
    _mm512_stream_si512((__m512i*)(to + i), _mm512_load_si512(from + i));
}

// Let other threads see what was stored past the caches.
inline void finish_streaming() { _mm_sfence(); }
#else
inline bool exceed_cache(int64_t, int64_t) { return false; }

inline void stream(const Element* from, Element* to) { std::copy_n(from, kOutputs, to); }
inline void finish_streaming() {}
#endif

inline int64_t num_blocks(int64_t num_outputs) { return (num_outputs + kOutputs - 1) / kOutputs; }

// Store the first n outputs, at most kOutputs, of a matrix that is large or not.
inline void store_outputs(const Element* outputs, int64_t n, bool is_large, Element* to) {
  if (n < kOutputs) {
    std::copy_n(outputs, n, to);
  } else if (is_large && (uintptr_t)to % 64 == 0) {
    stream(outputs, to);
  } else {
    std::copy_n(outputs, kOutputs, to);
  }
}

// A packed weight, and a bias unless it is null. If is_gated, it multiplies to [gate, up], with num_outputs each, which
// is a multiple of kOutputs, and outputs are silu(gate) * up.
struct Linear {
  const Element *weight, *bias;
  int64_t width, block_stride, num_inputs, num_outputs;
  bool is_gated;

  // Compute outputs kOutputs * begin to kOutputs * end of rows that were read into `inputs`. Call `put` with the number
  // of a row, that of an output, and kOutputs outputs from there on. Those beyond num_outputs have no meaning.
  template <class Put>
  void compute(const Inputs& inputs, int64_t num_rows, int64_t begin, int64_t end, Put put) const {
    if (is_gated) {
      compute_gated(inputs, num_rows, begin, end, put);
    } else {
      multiply(inputs, num_rows, begin, end, put);
    }
    finish_streaming();
  }

 private:
  template <class Put>
  void compute_gated(const Inputs& inputs, int64_t num_rows, int64_t begin, int64_t end, Put put) const {
    const int64_t row_size = kOutputs * std::max<int64_t>(kGateBytes / (num_rows * kOutputs * sizeof(Element)), 1);
    Memory memory(std::min(row_size, (end - begin) * kOutputs) * num_rows * sizeof(Element));
    const auto gates = memory.take<Element>(0);
    for (int64_t at = begin; at < end; at += row_size / kOutputs) {
      const int64_t next = std::min(at + row_size / kOutputs, end), size = (next - at) * kOutputs;
      multiply(inputs, num_rows, at, next, [&](int64_t row, int64_t first, const Element* outputs) {
        std::copy_n(outputs, kOutputs, gates + row * size + first - at * kOutputs);
      });
      const int64_t up = num_outputs / kOutputs;
      multiply(inputs, num_rows, up + at, up + next, [&](int64_t row, int64_t first, Element* outputs) {
        first -= num_outputs;
        apply_gates(gates + row * size + first - at * kOutputs, outputs, outputs, kOutputs);
        put(row, first, outputs);
      });
    }
  }

  template <class Put>
  void multiply(const Inputs& inputs, int64_t num_rows, int64_t begin, int64_t end, Put put) const {
    const int64_t num_products = is_gated ? 2 * num_outputs : num_outputs;
    for (int64_t first = begin * kOutputs; first < end * kOutputs; first += kOutputs) {
      const auto store = [&](int64_t row, const float* sums) {
        alignas(64) Element outputs[kOutputs];
        store_sums(sums, bias ? bias + first : nullptr, num_products - first, outputs);
        put(row, first, outputs);
      };
      const Outputs weights = outputs_from(first, weight, num_products, width, block_stride);
      sum_products(inputs, weights, num_rows, num_inputs, store);
    }
  }
};

// Read rows into `inputs`, as many at a time as fit, and call `multiply` with the first one's number and their count.
template <class Multiply>
void read_in_turn(Inputs& inputs, const Element* x, int64_t stride, int64_t num_rows, Multiply multiply) {
  for (int64_t at = 0; at < num_rows; at += inputs.rows_together) {
    const int64_t count = std::min(num_rows - at, inputs.rows_together);
    inputs.read(x + at * stride, stride, count);
    multiply(at, count);
  }
}

// Outputs for some rows, of which helpers can take parts. What helpers are given is this.
struct SharedLinear {
  static constexpr int64_t kLeastBytes = 1 << 17;  // Bytes of weights per part.

  Linear layer;
  int64_t num_rows;
  bool is_large;
  void* memory;                 // Where the rows have been read to.
  int64_t blocks_together = 0;  // Blocks of kOutputs outputs per part.

  // Let helpers take parts. Return false if they cannot, or it would save little time.
  bool share(const Inputs& inputs, Element* out) {
    const int64_t num_outputs = layer.num_outputs;
    const int64_t least = kLeastBytes / (sizeof(Element) * kOutputs * layer.num_inputs * (layer.is_gated ? 2 : 1)) + 1;
    blocks_together = std::max(least, (num_blocks(num_outputs) + kMostParts - 1) / kMostParts);
    const int64_t width = blocks_together * kOutputs, num_parts = (num_outputs + width - 1) / width;
    if (num_parts < 2) return false;
    Given given;
    given.put(this, 1);
    const int64_t result_size = num_rows * width * sizeof(Element) / sizeof(float);
    const auto compute = [&](int64_t part) {
      compute_blocks(inputs, part, [&](int64_t row, int64_t first, const Element* outputs) {
        store_outputs(outputs, num_outputs - first, is_large, out + row * num_outputs + first);
      });
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
    const Inputs inputs(a.num_rows, a.layer.num_inputs, a.memory);
    const int64_t width = a.blocks_together * kOutputs;
    a.compute_blocks(inputs, part, [&](int64_t row, int64_t first, const Element* outputs) {
      std::copy_n(outputs, kOutputs, (Element*)result + row * width + first - part * width);
    });
  }

  template <class Put>
  void compute_blocks(const Inputs& inputs, int64_t part, Put put) const {
    const int64_t begin = part * blocks_together;
    const int64_t end = std::min(begin + blocks_together, num_blocks(layer.num_outputs));
    layer.compute(inputs, num_rows, begin, end, put);
  }
};

}  // namespace

// Compute x [num_rows, num_inputs] @ weight.T + bias, or without a bias if it is null, for outputs
// kOutputs * begin to kOutputs * end. Blocks of the weight are [inputs / 2, width, 2]: pairs of inputs side by side, as
// the instructions for bf16 take them. `block_widths` lists the widths. Blocks are `block_stride` elements apart, and
// outputs beyond num_outputs are zeros. num_inputs is even. For is_gated, see Linear.
extern "C" void EXPORT(linear)(const Element* x, const Element* weight, const Element* bias, Element* out,
                               int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t x_stride,
                               int64_t width, int64_t block_stride, int64_t is_gated, int64_t begin, int64_t end) {
  const Linear layer = {weight, bias, width, block_stride, num_inputs, num_outputs, bool(is_gated)};
  const bool is_whole = begin == 0 && end == num_blocks(num_outputs);
  const bool is_large = exceed_cache(num_rows, num_outputs);
  const int64_t num_bytes = Inputs::num_bytes(num_rows, num_inputs);
  void* memory = is_whole ? memory_to_share(num_bytes, sizeof(SharedLinear)) : nullptr;
  Inputs inputs(num_rows, num_inputs, memory);
  read_in_turn(inputs, x, x_stride, num_rows, [&](int64_t at, int64_t count) {
    Element* to = out + at * num_outputs;
    if (memory && SharedLinear{layer, count, is_large, memory}.share(inputs, to)) return;
    layer.compute(inputs, count, begin, end, [&](int64_t row, int64_t first, const Element* outputs) {
      store_outputs(outputs, num_outputs - first, is_large, to + row * num_outputs + first);
    });
  });
}

// Compute linear without a bias for each head of x [num_rows, num_heads, num_inputs], with weights of its own.
extern "C" void EXPORT(linear_of_heads)(const Element* x, const Element* const* weights, Element* out,
                                        int64_t num_heads, int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                                        int64_t x_stride, int64_t x_head_stride, int64_t out_stride,
                                        int64_t out_head_stride, int64_t width, int64_t block_stride, int64_t begin,
                                        int64_t end) {
  Inputs inputs(num_rows, num_inputs);
  for (int64_t head = 0; head < num_heads; ++head) {
    const Linear layer = {weights[head], nullptr, width, block_stride, num_inputs, num_outputs, false};
    read_in_turn(inputs, x + head * x_head_stride, x_stride, num_rows, [&](int64_t at, int64_t count) {
      Element* to = out + head * out_head_stride + at * out_stride;
      layer.compute(inputs, count, begin, end, [&](int64_t row, int64_t first, const Element* outputs) {
        store_outputs(outputs, num_outputs - first, false, to + row * out_stride + first);
      });
    });
  }
}
