// Definitions shared by all functions of this library.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

namespace {

using bf16 = uint16_t;

constexpr int kMostDims = 1024;  // Maximum head size.

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline float as_float(float x) { return x; }

inline float as_float(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void set(float& to, float x) { to = x; }

// Round to nearest, ties to even.
inline void set(bf16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}

// Memory for arrays, which are allocated one after another and freed together.
class Memory {
 public:
  explicit Memory(int64_t size)
      : memory_(std::aligned_alloc(64, round_up(size, 64)), &std::free), at_(static_cast<char*>(memory_.get())) {}

  explicit operator bool() const { return bool(memory_); }

  template <class T>
  T* take(int64_t count) {
    return (T*)std::exchange(at_, at_ + round_up(count * sizeof(T), 64));
  }

 private:
  std::unique_ptr<void, decltype(&std::free)> memory_;
  char* at_;
};

}  // namespace
