#include "helpers.h"

#if defined(__linux__)

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostGivenBytes = 1 << 18, kMostSharedBytes = 1 << 24, kMostResults = 1 << 22;
constexpr std::chrono::microseconds kMostDelay{300};  // Time to wait for a helper beyond that of a short part.
constexpr std::chrono::milliseconds kAwake{5};  // Time without work after which a helper sleeps.
// Time in which nothing is shared: after no helper had taken a part, and after one was late, since cores are busy.
constexpr std::chrono::microseconds kShortRest{100}, kLeastRest{500}, kMostRest{160'000};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield" ::: "memory");
#endif
}

// State of a part in a version of the work: one number, so that a late helper cannot take a part of another version.
enum State : uint64_t { kFree, kTaken, kClaimed, kDone };

uint64_t state_of(uint32_t version, State state, uint64_t helper = 0) {
  return uint64_t(version) << 32 | helper << 8 | state;
}

// Work without what is given.
struct Task {
  void (*compute)(const char* given, int64_t part, float* result);
  int64_t given_bytes, num_parts, result_size;
};

struct Helper {
  std::thread thread;
  std::vector<char> given;
  std::unique_ptr<float[]> results{new float[kMostResults]};  // Of parts that it has claimed in this version, by part.
};

class Helpers {
 public:
  Helpers(int count, const char* lasting, int64_t num_lasting)
      : helpers_(count), lasting_(lasting), num_lasting_(num_lasting) {
    for (int i = 0; i < count; ++i) helpers_[i].thread = std::thread([this, i] { run(i); });
  }

  ~Helpers() {
    is_stopping_ = true;
    version_ += 2;
    wake();
    set_policy(SCHED_OTHER);  // Where the system allows it. Otherwise, this waits until they get some time.
    for (Helper& helper : helpers_) helper.thread.join();
  }

  bool set_policy(int policy) {
    const sched_param any{};
    return std::all_of(helpers_.begin(), helpers_.end(), [&](Helper& helper) {
      return pthread_setschedparam(helper.thread.native_handle(), policy, &any) == 0;
    });
  }

  bool share(const Work& work, const Compute& compute, const Accept& accept) {
    if (is_resting() || work.num_parts < 2 || work.num_parts > kMostParts || work.given.size() > kMostGivenBytes ||
        work.num_parts * work.result_size > kMostResults)
      return false;
    publish(work);
    const auto begin = Clock::now();
    int64_t part = 0;
    for (; part < work.num_parts && take(part, state_of(version_, kFree)); ++part) compute(part);
    // Helpers have claimed the rest, since they begin with the last part. One that runs needs about as long for a part.
    const auto time = (Clock::now() - begin) / std::max<int64_t>(part, 1);
    const Clock::duration patience = std::min<Clock::duration>(4 * time, std::max<Clock::duration>(time, kMostDelay));
    const int64_t num_claimed = work.num_parts - part, helped_before = num_helped;
    for (; part < work.num_parts; ++part) {
      if (const float* result = result_of(part, work.result_size, patience)) {
        accept(part, result);
        ++num_helped;
      } else {
        compute(part);
      }
    }
    rest(num_claimed, num_claimed - (num_helped - helped_before));
    return true;
  }

  bool outlived_by(const char* address) const { return address >= lasting_ && address < lasting_ + num_lasting_; }

  int64_t num_helped = 0;  // Number of parts whose results came from helpers.

  void* memory(int64_t num_bytes, int64_t num_given) {
    return is_resting() || num_bytes > kMostSharedBytes || num_given > kMostGivenBytes ? nullptr : shared_;
  }

 private:
  // Return whether helpers were late, and it is not yet time to try again: where cores are busy, sharing costs time.
  bool is_resting() const { return Clock::now() < next_; }

  // Let helpers see work. Versions are even, and odd while the work changes.
  void publish(const Work& work) {
    version_ += 1;
    std::atomic_thread_fence(std::memory_order_release);
    task_ = {work.compute, work.given.size(), work.num_parts, work.result_size};
    std::memcpy(given_, work.given.data(), work.given.size());
    for (int64_t part = 0; part < work.num_parts; ++part) states_[part] = state_of(version_ + 1, kFree);
    version_ += 1;
    wake();
  }

  void wake() {
    if (num_asleep_) syscall(SYS_futex, &version_, FUTEX_WAKE_PRIVATE, helpers_.size(), nullptr, nullptr, 0);
  }

  // Return a helper's result, or null if it is late. A late result does not count any more.
  const float* result_of(int64_t part, int64_t size, Clock::duration patience) {
    const auto deadline = Clock::now() + patience;
    uint64_t state = states_[part];
    for (; State(state & 0xff) == kClaimed && Clock::now() < deadline; state = states_[part]) pause();
    if (State(state & 0xff) == kClaimed && take(part, state)) return nullptr;
    return helpers_[state >> 8 & 0xff].results.get() + part * size;
  }

  // Share nothing for some time after a helper was late: longer if that is more than every fifth call.
  void rest(int64_t num_claimed, int64_t num_late) {
    rest_ = num_late ? std::clamp<Clock::duration>(4 * rest_, kLeastRest, kMostRest) : rest_ - rest_ / 4;
    next_ = Clock::now() + (num_late ? rest_ : num_claimed ? Clock::duration{0} : kShortRest);
  }

  bool take(int64_t part, uint64_t state) {
    return states_[part].compare_exchange_strong(state, state_of(version_, kTaken));
  }

  void run(int number) {
    Helper& helper = helpers_[number];
    for (uint32_t seen = 0; !is_stopping_;) {
      const uint32_t version = next_version(seen);
      const Task task = task_;
      if (!is_still(version)) continue;
      helper.given.assign(given_, given_ + task.given_bytes);
      if (!is_still(version)) continue;
      seen = version;
      help(task, version, number);
    }
  }

  // Return whether what has been read is that of a version.
  bool is_still(uint32_t version) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return version % 2 == 0 && version_ == version;
  }

  void help(const Task& task, uint32_t version, int number) {
    Helper& helper = helpers_[number];
    for (int64_t part = task.num_parts - 1; part >= 0 && version_ == version; --part) {
      uint64_t state = state_of(version, kFree), claimed = state_of(version, kClaimed, number);
      if (!states_[part].compare_exchange_strong(state, claimed)) continue;
      task.compute(helper.given.data(), part, helper.results.get() + part * task.result_size);
      states_[part].compare_exchange_strong(claimed, state_of(version, kDone, number));
    }
  }

  // Wait for another version than `seen`.
  uint32_t next_version(uint32_t seen) {
    const auto deadline = Clock::now() + kAwake;
    while (version_ == seen) {
      if (Clock::now() < deadline) {
        pause();
        continue;
      }
      num_asleep_ += 1;
      syscall(SYS_futex, &version_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      num_asleep_ -= 1;
    }
    return version_;
  }

  std::atomic<bool> is_stopping_{false};
  std::atomic<uint32_t> version_{0};
  std::atomic<int> num_asleep_{0};
  Task task_{};
  char given_[kMostGivenBytes];
  std::atomic<uint64_t> states_[kMostParts];
  Memory memory_{kMostSharedBytes};
  char* const shared_ = memory_.take<char>(0);
  Clock::duration rest_{0};  // Increased whenever a helper is late.
  Clock::time_point next_;
  std::vector<Helper> helpers_;
  const char* const lasting_;  // Keys and values that live until helpers stop.
  const int64_t num_lasting_;
};

std::unique_ptr<Helpers> helpers;

}  // namespace

bool outlives_helpers(const void* address) { return helpers && helpers->outlived_by((const char*)address); }

void* memory_to_share(int64_t num_bytes, int64_t num_given) {
  return helpers ? helpers->memory(num_bytes, num_given) : nullptr;
}

bool share_with_helpers(const Work& work, const Compute& compute, const Accept& accept) {
  return helpers && helpers->share(work, compute, accept);
}

// Start some helpers, or with 0, stop all. Keys and values in num_bytes at `lasting` must live until they stop. Return
// whether any run: the system may refuse to lower their priority.
extern "C" int baton_start_helpers(int64_t count, const char* lasting, int64_t num_bytes) {
  helpers.reset();
  if (count > 0) helpers = std::make_unique<Helpers>(int(count), lasting, num_bytes);
  if (helpers && !helpers->set_policy(SCHED_IDLE)) helpers.reset();
  return bool(helpers);
}

// Return the number of parts whose results came from helpers since they started.
extern "C" int64_t baton_num_helped() { return helpers ? helpers->num_helped : 0; }

#else

bool outlives_helpers(const void*) { return false; }
void* memory_to_share(int64_t, int64_t) { return nullptr; }
bool share_with_helpers(const Work&, const Compute&, const Accept&) { return false; }
extern "C" int baton_start_helpers(int64_t, const char*, int64_t) { return 0; }
extern "C" int64_t baton_num_helped() { return 0; }

#endif
