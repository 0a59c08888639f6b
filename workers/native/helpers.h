// Threads that share work while cores are idle. They have Linux's lowest priority: any other thread takes their core at
// once, and may keep it. So a thread never waits long for a helper, but computes the helper's part again. What helpers
// are given is copied, since they may be late; the keys, values and weights that they read must live until they stop.

#pragma once

#include <functional>
#include <vector>

#include "common.h"

constexpr int64_t kMostParts = 256;
constexpr int64_t kMostSharedRows = 16;  // Products of more rows would not wait for weights.

// Copies of what helpers are given, one after another.
class Given {
 public:
  template <class T>
  void put(const T* from, int64_t count) {
    bytes_.insert(bytes_.end(), (const char*)from, (const char*)(from + count));
  }

  const char* data() const { return bytes_.data(); }
  int64_t size() const { return bytes_.size(); }

 private:
  std::vector<char> bytes_;
};

// Work whose parts do not depend on each other.
struct Work {
  // Compute a part into result_size floats from a copy of what is given.
  void (*compute)(const char* given, int64_t part, float* result);
  const Given& given;
  int64_t num_parts, result_size;
};

using Accept = std::function<void(int64_t part, const float* result)>;

// Return whether helpers run, and it is worth trying whether they have time.
bool may_share();

// Compute all parts, and call `accept` with each one's result. Return false, having done nothing, if there are no
// helpers, or they lack memory for this. Only one thread may call this at a time.
bool share_with_helpers(const Work& work, const Accept& accept);
