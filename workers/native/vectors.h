// Vectors of floats as wide as this CPU's registers, built on the portable vector extensions of GCC and Clang.

#pragma once

#include "common.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 32;  // As in NEON.
#endif

typedef float vec __attribute__((vector_size(kLanes * 4), may_alias));
typedef int32_t ints __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t words __attribute__((vector_size(kLanes * 4), may_alias));

inline vec& at(float* p) { return *(vec*)p; }
inline const vec& at(const float* p) { return *(const vec*)p; }
inline vec all(float x) { return x - vec{}; }
inline vec smallest(vec a, vec b) { return a < b ? a : b; }  // b if a is NaN.
inline vec largest(vec a, vec b) { return a > b ? a : b; }  // b if a is NaN.

// Adjacent numbers: bf16 split into even and odd indices, which takes the fewest instructions, fp32 into halves.
constexpr int kPairs = 2 * kLanes;

struct Pairs {
  vec even, odd;
};

// Index of the i-th number in the order of Pairs.
template <class T>
inline int64_t pairs_index(int64_t i) {
  return sizeof(T) == 4 ? i : i / kPairs * kPairs + i % 2 * kLanes + i % kPairs / 2;
}

inline words tail_words(const bf16* p, int64_t n) {
  words x = {};
  std::memcpy(&x, p, n * sizeof(bf16));
  return x;
}

inline Pairs unpacked(words x) { return {(vec)(x << 16), (vec)(x & 0xffff0000)}; }

// Load kPairs numbers, or the first n followed by zeros.
inline Pairs load(const bf16* p, int64_t n) {
  typedef words anywhere __attribute__((aligned(2)));
  return unpacked(__builtin_expect(n >= kPairs, 1) ? *(const anywhere*)p : tail_words(p, n));
}

inline Pairs load(const float* p, int64_t n) {
  typedef vec anywhere __attribute__((aligned(4)));
  if (__builtin_expect(n >= kPairs, 1)) return {*(const anywhere*)p, *(const anywhere*)(p + kLanes)};
  Pairs x = {};
  std::memcpy(&x, p, n * sizeof(float));
  return x;
}

// 2^x for x below 127, with a relative error below that of T: 1e-4 for bf16, 2e-7 for fp32.
template <class T>
inline vec exp2(vec x) {
  const vec shift = all(12582912.0f);  // Adding this to a small number leaves the nearest integer in the lowest bits.
  const vec whole = x + shift, f = x - (whole - shift);
  vec p;
  if (sizeof(T) == 2) {
    p = f * 0.05517167f + 0.24261114f;
    p = p * f + 0.69326099f;
    p = p * f + 0.99992807f;
  } else {
    p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
  }
  return x < -126.0f ? vec{} : (vec)((ints)p + ((ints)whole << 23));
}

// Return which lane every_second takes as its i-th. The lanes of the second vector follow those of the first.
template <int Unit, int First>
constexpr int every_second_lane(int i) {
  return Unit == 4 ? i / 4 * 8 + First * 4 + i % 4 : i % 4 / 2 * kLanes + i / 4 * 4 + i % 2 * 2 + First;
}

// Return every second lane of each four lanes of two vectors (Unit 1), or every second four lanes (Unit 4), from the
// first or the second on. On AVX2 and AVX512, either is one instruction.
template <int Unit, int First, int... Lanes>
inline vec every_second(vec a, vec b, std::integer_sequence<int, Lanes...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, every_second_lane<Unit, First>(Lanes)...);
#else
  return __builtin_shuffle(a, b, ints{every_second_lane<Unit, First>(Lanes)...});
#endif
}

// Return the sums of adjacent lanes in each four lanes (Unit 1), or of adjacent four lanes (Unit 4).
template <int Unit>
inline vec pair_sums(vec a, vec b) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  return every_second<Unit, 0>(a, b, lanes) + every_second<Unit, 1>(a, b, lanes);
}

// The sums of kLanes vectors, one per lane. The vectors are overwritten.
inline vec sums_of(vec x[kLanes]) {
#pragma GCC unroll 4
  for (int n = kLanes / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i)
      x[i] = n >= kLanes / 4 ? pair_sums<1>(x[2 * i], x[2 * i + 1]) : pair_sums<4>(x[2 * i], x[2 * i + 1]);
  return x[0];
}

inline vec root(vec x) {
#if defined(__AVX512F__)
  return (vec)_mm512_sqrt_ps((__m512)x);
#endif
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

inline float sum_of(vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

inline float largest_of(vec x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = std::max(most, x[i]);
  return most;
}

// Append the numbers in x that are at least `least`, and their indices, the first of which is `index`. Return how many.
// Up to kLanes elements of both arrays are overwritten.
inline int64_t append(vec x, float least, int32_t index, float* values, int32_t* indices) {
#if defined(__AVX512F__)
  const __m512 all = (__m512)x;
  const __mmask16 kept = _mm512_cmp_ps_mask(all, _mm512_set1_ps(least), _CMP_GE_OQ);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(kept, all));
  _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(kept, _mm512_add_epi32(lanes, _mm512_set1_epi32(index))));
  return __builtin_popcount(kept);
#else
  int64_t count = 0;
  for (int i = 0; i < kLanes; ++i) {
    values[count] = x[i], indices[count] = index + i;
    count += x[i] >= least;
  }
  return count;
#endif
}

inline bool any(ints x) {
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= x[i];
  return found;
}

}  // namespace
