// Elementwise operations between a layer's matrix products: norms, rotations, gates. In bf16, results are
// rounded wherever torch rounds. The source file defines Element, the type of all numbers, and EXPORT.

#pragma once

#include "vectors.h"

namespace {

// Round to the nearest bf16, ties to even, and put numbers in order. NaN stays NaN. With AVX512-BF16, numbers below
// 1.2e-38 become zero.
inline words packed(Pairs x) {
#if defined(__AVX512BF16__)
  const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const ints even_and_odd = lanes * 0x10001 + 0x100000;
  const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)x.odd, (__m512)x.even);
  return (words)_mm512_permutexvar_epi16((__m512i)even_and_odd, (__m512i)rounded);
#else
  const auto rounded = [](vec x) {
    const words bits = (words)x;
    return x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
  };
  return rounded(x.even) >> 16 | (rounded(x.odd) & 0xffff0000);
#endif
}

// Store the first n numbers, at most kPairs, rounded to the type of all numbers.
inline void store(bf16* p, Pairs x, int64_t n) {
  typedef words anywhere __attribute__((aligned(2)));
  const words both = packed(x);
  if (__builtin_expect(n >= kPairs, 1)) {
    *(anywhere*)p = both;
  } else {
    std::memcpy(p, &both, n * sizeof(bf16));
  }
}

inline void store(float* p, Pairs x, int64_t n) { std::memcpy(p, &x, std::min<int64_t>(n, kPairs) * sizeof(float)); }

// Apply ``make`` to the numbers at each index.
template <class Make, class... Given>
inline Pairs each(Make make, Given... given) {
  return {make(given.even...), make(given.odd...)};
}

// Round to the type of all numbers.
inline Pairs rounded(Pairs x) { return sizeof(Element) == 4 ? x : unpacked(packed(x)); }

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

inline vec squares_of(const Element* x, int64_t size) {
  vec squares = {};
  for (int64_t d = 0; d < size; d += kPairs) {
    const Pairs given = load(x + d, size - d);
    squares += given.even * given.even + given.odd * given.odd;
  }
  return squares;
}

inline Pairs normal(Pairs x, vec factor, Pairs weight) {
  return each(times, weight, rounded(each(times, x, Pairs{factor, factor})));
}

void normalize(const Element* x, const Element* weight, Element* out, int64_t size, float eps) {
  const vec factor = all(1.0f / std::sqrt(sum_of(squares_of(x, size)) / size + eps));
  for (int64_t d = 0; d < size; d += kPairs)
    store(out + d, normal(load(x + d, size - d), factor, load(weight + d, size - d)), size - d);
}

// Heads of one token, which are turned by its angles. Dimensions i and i + rope_dim / 2 are a pair.
struct Turn {
  const Element *cos, *sin;
  int64_t head_dim, rope_dim;
  float eps;

  // Rotate the first rope_dim elements of some heads, and call `out` with the number of each for where to store it.
  // With a weight, normalize them first.
  template <class Out>
  void heads(const Element* x, int64_t num_heads, int64_t stride, const Element* weight, Out out) const {
    for (int64_t first = 0; first < num_heads; first += kLanes) {
      const int64_t count = std::min<int64_t>(num_heads - first, kLanes);
      const Element* head = x + first * stride;
      const vec factors = weight ? factors_of(head, count, stride) : vec{};
      for (int64_t i = 0; i < count; ++i, head += stride) {
        if (weight) {
          const vec factor = all(factors[i]);
          turn(out(first + i), [&](int64_t d, int64_t n) {
            return rounded(normal(load(head + d, n), factor, load(weight + d, n)));
          });
        } else {
          turn(out(first + i), [&](int64_t d, int64_t n) { return load(head + d, n); });
        }
      }
    }
  }

 private:
  // What to multiply each of `count` heads by, at most kLanes, to normalize it. The roots and divisions of all heads
  // take as long as those of one.
  vec factors_of(const Element* x, int64_t count, int64_t stride) const {
    vec squares[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) squares[i] = squares_of(x + i * stride, head_dim);
    return 1.0f / root(sums_of(squares) / float(head_dim) + eps);
  }

  template <class Given>
  void turn(Element* out, Given given) const {
    const int64_t half = rope_dim / 2;
    for (int64_t d = 0; d < half; d += kPairs) {
      const Pairs first = given(d, half - d), second = given(half + d, half - d);
      const auto product = [&](Pairs x, const Element* y) { return rounded(each(times, x, load(y + d, half - d))); };
      store(out + d, each(minus, product(first, cos), product(second, sin)), half - d);
      store(out + half + d, each(plus, product(second, cos + half), product(first, sin + half)), half - d);
    }
    for (int64_t d = rope_dim; d < head_dim; d += kPairs) store(out + d, given(d, head_dim - d), head_dim - d);
  }
};

// Compute silu(gate) * up.
inline void apply_gates(const Element* gate, const Element* up, Element* out, int64_t size) {
  for (int64_t d = 0; d < size; d += kPairs) {
    const Pairs opened = rounded(each(silu, load(gate + d, size - d)));
    store(out + d, each(times, opened, load(up + d, size - d)), size - d);
  }
}

inline void copy(const Element* from, Element* to, int64_t size) {
  typedef words anywhere __attribute__((aligned(2)));
  constexpr int64_t kTogether = sizeof(words) / sizeof(Element);
  int64_t d = 0;
  for (; d + kTogether <= size; d += kTogether) *(anywhere*)(to + d) = *(const anywhere*)(from + d);
  if (d < size) std::memcpy(to + d, from + d, (size - d) * sizeof(Element));
}

// Pages of one layer's keys and values. Strides are in elements.
struct Pages {
  Element* pages;
  const int64_t* slots;  // Slots of rows.
  int64_t page_size, page_stride, head_stride, which_stride, slot_stride;

  // The key of a row's first head. Its values are which_stride after its keys.
  Element* at(int64_t row) const {
    return pages + slots[row] / page_size * page_stride + slots[row] % page_size * slot_stride;
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
  for (int64_t token = begin; token < end; ++token) {
    const Turn turn = {cos + token * rope_dim, sin + token * rope_dim, head_dim, rope_dim, eps};
    turn.heads(x + token * token_stride, num_heads, head_stride, weight,
               [&](int64_t head) { return out + (token * num_heads + head) * head_dim; });
  }
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
    const Turn turn = {cos + token * rope_dim, sin + token * rope_dim, head_dim, rope_dim, eps};
    const Element *query = heads + token * stride, *key = query + num_query_heads * head_dim;
    const Element* value = key + num_kv_heads * head_dim;
    Element* slot = pages->at(token);
    turn.heads(query, num_query_heads, head_dim, query_weight,
               [&](int64_t head) { return out + (token * num_query_heads + head) * head_dim; });
    turn.heads(key, num_kv_heads, head_dim, key_weight, [&](int64_t head) { return slot + head * pages->head_stride; });
    for (int64_t head = 0; head < num_kv_heads; ++head)
      copy(value + head * head_dim, slot + head * pages->head_stride + pages->which_stride, head_dim);
  }
}

// Write rows begin to end of kv to their slots. Strides are in elements.
extern "C" void EXPORT(store_kv)(const Pages* pages, const Element* kv, int64_t num_heads, int64_t head_dim,
                                 int64_t row_stride, int64_t which_stride, int64_t head_stride, int64_t begin,
                                 int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const Element* given = kv + row * row_stride;
    Element* slot = pages->at(row);
    for (int64_t head = 0; head < num_heads; ++head)
      for (int64_t which = 0; which < 2; ++which)
        copy(given + which * which_stride + head * head_stride,
             slot + head * pages->head_stride + which * pages->which_stride, head_dim);
  }
}

// Compute silu(gate) * up for rows begin to end, where each row is [gate, up] with size numbers each.
extern "C" void EXPORT(swiglu)(const Element* gate_up, Element* out, int64_t size, int64_t stride, int64_t begin,
                               int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    apply_gates(gate_up + row * stride, gate_up + row * stride + size, out + row * size, size);
}
