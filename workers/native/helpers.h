// Threads that share work while cores are idle. They have Linux's lowest priority: any other thread takes their core at
// once, and may keep it. So a thread never waits long for a helper, but computes the helper's part again. Since helpers
// may be late, what they are given is copied, and rows are in memory of their own. The keys, values and weights that
// they read must live until they stop.

#pragma once

#include <functional>
#include <vector>

#include "common.h"

constexpr int64_t kMostParts = 256;

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

using Compute = std::function<void(int64_t part)>;
using Accept = std::function<void(int64_t part, const float* result)>;

// Return whether an address is in the memory that lives until helpers stop.
bool outlives_helpers(const void* address);

// Return memory of num_bytes for rows that helpers read in place, so that they may change while a late helper still
// reads them. Null if no helpers run, if sharing is not worth a try now, or if that, or num_given bytes that they are
// given, is too much.
void* memory_to_share(int64_t num_bytes, int64_t num_given);

// Compute all parts: some with `compute`, and for others, call `accept` with a helper's result. Return false, having
// done nothing, if there are no helpers, or they lack memory for this. Only one thread may call this at a time.
bool share_with_helpers(const Work& work, const Compute& compute, const Accept& accept);
