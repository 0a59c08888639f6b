// Elementwise operations between a layer's matrix products: norms, rotations, gates. In bf16, results are
// rounded wherever torch rounds. The source file defines Element, the type of all numbers, and EXPORT.

#pragma once

#include "vectors.h"

namespace {

// Round to the nearest bf16, ties to even, if that is the type of all numbers. NaN stays NaN. With AVX512-BF16, numbers
// below 1.2e-38 become zero.
inline vec rounded(vec x) {
  if (sizeof(Element) == 4) return x;
#if defined(__AVX512BF16__)
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
#endif
  const words bits = (words)x;
  const words nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  return x == x ? (vec)nearest : (vec)(bits | 0x400000);
}

// Apply ``make`` to the numbers at each index, and round.
template <class Make, class... Given>
inline Pairs each(Make make, Given... given) {
  return {rounded(make(given.even...)), rounded(make(given.odd...))};
}

// Store the first n numbers, at most kPairs.
inline void store(bf16* p, Pairs x, int64_t n) {
  typedef words anywhere __attribute__((aligned(2)));
  const words both = (words)x.even >> 16 | ((words)x.odd & 0xffff0000);
  if (__builtin_expect(n >= kPairs, 1)) {
    *(anywhere*)p = both;
  } else {
    std::memcpy(p, &both, n * sizeof(bf16));
  }
}

inline void store(float* p, Pairs x, int64_t n) { std::memcpy(p, &x, std::min<int64_t>(n, kPairs) * sizeof(float)); }

inline vec times(vec a, vec b) { return a * b; }
inline vec plus(vec a, vec b) { return a + b; }
inline vec minus(vec a, vec b) { return a - b; }

// e^x for x of at least -87, with a relative error below 3e-7. Infinity if that is too large for a float.
inline vec exp(vec x) {
  const vec shift = all(12582912.0f), whole = x * float(M_LOG2E) + shift - shift;
  const vec f = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // The two constants add up to ln 2.
  vec p = f * 1.3888889e-3f + 8.3333333e-3f;
  p = p * f + 4.1666667e-2f;
  p = p * f + 1.6666667e-1f;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#endif
  return x > 88.722f ? all(INFINITY) : (vec)((ints)p + ((ints)(whole + shift) << 23));
}

inline vec silu(vec x) { return x / (1.0f + exp(smallest(largest(-x, all(-87.0f)), all(89.0f)))); }

void normalize(const Element* x, const Element* weight, Element* out, int64_t size, float eps) {
  vec squares = {};
  for (int64_t d = 0; d < size; d += kPairs) {
    const Pairs given = load(x + d, size - d);
    squares += given.even * given.even + given.odd * given.odd;
  }
  const vec scale = all(1.0f / std::sqrt(sum_of(squares) / size + eps));
  const Pairs scales = {scale, scale};
  for (int64_t d = 0; d < size; d += kPairs) {
    const Pairs normal = each(times, load(x + d, size - d), scales);
    store(out + d, each(times, load(weight + d, size - d), normal), size - d);
  }
}

// Dimensions i and i + rope_dim / 2 are a pair.
inline void rotate(const Element* x, const Element* cos, const Element* sin, Element* out, int64_t rope_dim) {
  const int64_t half = rope_dim / 2;
  for (int64_t d = 0; d < half; d += kPairs) {
    const auto [first, second] = std::pair(load(x + d, half - d), load(x + half + d, half - d));
    const Pairs from_second = each(times, second, load(sin + d, half - d));
    const Pairs from_first = each(times, first, load(sin + half + d, half - d));
    store(out + d, each(minus, each(times, first, load(cos + d, half - d)), from_second), half - d);
    store(out + half + d, each(plus, each(times, second, load(cos + half + d, half - d)), from_first), half - d);
  }
}

// Rotate the first rope_dim elements of a head. With a weight, normalize it first.
inline void turn(const Element* x, const Element* weight, float eps, const Element* cos, const Element* sin,
                 Element* out, int64_t head_dim, int64_t rope_dim) {
  alignas(64) Element normal[kMostDims];
  if (weight) normalize(x, weight, normal, head_dim, eps);
  const Element* head = weight ? normal : x;
  rotate(head, cos, sin, out, rope_dim);
  std::memcpy(out + rope_dim, head + rope_dim, (head_dim - rope_dim) * sizeof(Element));
}

// Compute silu(gate) * up.
inline void apply_gates(const Element* gate, const Element* up, Element* out, int64_t size) {
  for (int64_t d = 0; d < size; d += kPairs) {
    const Pairs opened = each(silu, load(gate + d, size - d));
    store(out + d, each(times, opened, load(up + d, size - d)), size - d);
  }
}

// Pages of one layer's keys and values. Strides are in elements.
struct Pages {
  Element* pages;
  const int64_t* slots;  // Slots of rows.
  int64_t page_size, page_stride, head_stride, which_stride, slot_stride;

  // A row's key, or its value if `which` is 1, for a head.
  Element* at(int64_t row, int64_t which, int64_t head) const {
    return pages + slots[row] / page_size * page_stride + slots[row] % page_size * slot_stride + head * head_stride +
           which * which_stride;
  }
};

}  // namespace

// Normalize rows begin to end of x, or of x + y, which is stored in total.
extern "C" void EXPORT(rms_norm)(const Element* x, const Element* y, const Element* weight, Element* total,
                                 Element* out, int64_t size, int64_t x_stride, int64_t y_stride, float eps,
                                 int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const Element* given = x + row * x_stride;
    if (y) {
      Element* sum = total + row * size;
      for (int64_t d = 0; d < size; d += kPairs)
        store(sum + d, each(plus, load(given + d, size - d), load(y + row * y_stride + d, size - d)), size - d);
      given = sum;
    }
    normalize(given, weight, out + row * size, size, eps);
  }
}

// Rotate the heads of tokens begin to end. With a weight, normalize them first.
extern "C" void EXPORT(rotate)(const Element* x, const Element* cos, const Element* sin, const Element* weight,
                               Element* out, int64_t num_heads, int64_t head_dim, int64_t rope_dim,
                               int64_t token_stride, int64_t head_stride, float eps, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < num_heads; ++head)
      turn(x + token * token_stride + head * head_stride, weight, eps, cos + token * rope_dim, sin + token * rope_dim,
           out + (token * num_heads + head) * head_dim, head_dim, rope_dim);
}

// Rotate the heads of queries and keys of tokens begin to end, with weights normalize them first, and store keys and
// values. The heads of a token are those of queries, keys and values, in this order, `stride` elements after the token
// before.
extern "C" void EXPORT(rotate_storing)(const Element* heads, const Element* cos, const Element* sin,
                                       const Element* query_weight, const Element* key_weight, Element* out,
                                       const Pages* pages, int64_t num_query_heads, int64_t num_kv_heads,
                                       int64_t head_dim, int64_t rope_dim, int64_t stride, float eps, int64_t begin,
                                       int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const Element *head = heads + token * stride, *my_cos = cos + token * rope_dim, *my_sin = sin + token * rope_dim;
    for (int64_t i = 0; i < num_query_heads; ++i, head += head_dim)
      turn(head, query_weight, eps, my_cos, my_sin, out + (token * num_query_heads + i) * head_dim, head_dim, rope_dim);
    for (int64_t i = 0; i < num_kv_heads; ++i, head += head_dim)
      turn(head, key_weight, eps, my_cos, my_sin, pages->at(token, 0, i), head_dim, rope_dim);
    for (int64_t i = 0; i < num_kv_heads; ++i, head += head_dim)
      std::memcpy(pages->at(token, 1, i), head, head_dim * sizeof(Element));
  }
}

// Write rows begin to end of kv to their slots. Strides are in elements.
extern "C" void EXPORT(store_kv)(const Pages* pages, const Element* kv, int64_t num_heads, int64_t head_dim,
                                 int64_t row_stride, int64_t which_stride, int64_t head_stride, int64_t begin,
                                 int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t which = 0; which < 2; ++which)
      for (int64_t head = 0; head < num_heads; ++head)
        std::memcpy(pages->at(row, which, head), kv + row * row_stride + which * which_stride + head * head_stride,
                    head_dim * sizeof(Element));
}

// Compute silu(gate) * up for rows begin to end, where each row is [gate, up] with size numbers each.
extern "C" void EXPORT(swiglu)(const Element* gate_up, Element* out, int64_t size, int64_t stride, int64_t begin,
                               int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    apply_gates(gate_up + row * stride, gate_up + row * stride + size, out + row * size, size);
}
