// Choice of the keys that an indexer scores highest for each query. A key k has the score sum_h(weight_h * relu(q_h *
// k)). The source file defines Element and EXPORT, and includes operations on a block of keys.
//
// A tile has the heads of some queries as rows. It scores all visible keys block by block, and then chooses for one
// query after another.

#pragma once

#include "attention.h"

namespace {

constexpr int64_t kMostScores = 1 << 20;  // Scores of a tile, unless a single query has more. They stay in the caches.
constexpr int kDigits = 2048;
constexpr int kSamples = 256;  // Scores by which a choice is estimated.
constexpr int kCounters = 4;  // Counters per digit, since equal digits often follow each other.

struct Selection {
  Attention attention;     // The heads of a query are one group. Values are not read.
  const float* weights;    // [query][head]
  const int64_t* visible;  // Number of keys that each query sees, in ascending order.
  float* scores;           // [query][top_k], -inf for keys that do not count.
  int64_t* keys;           // [query][top_k]
  int64_t top_k;
};

// Numbers in the order of finite scores.
inline uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float finite(float x) {
  constexpr float most = std::numeric_limits<float>::max();
  return x != x ? -most : std::clamp(x, -most, most) + 0.0f;  // Adding zero makes -0 the same as 0.
}

// Find the k-th highest of n numbers. Set k to its rank among equal numbers. The numbers are overwritten.
uint32_t find(uint32_t* numbers, int64_t n, int64_t& k) {
  for (const int shift : {21, 10}) {
    uint32_t counts[kCounters][kDigits] = {};
    int64_t i = 0;
    for (; i + kCounters <= n; i += kCounters)
#pragma GCC unroll 4
      for (int j = 0; j < kCounters; ++j) ++counts[j][numbers[i + j] >> shift & (kDigits - 1)];
    for (; i < n; ++i) ++counts[0][numbers[i] >> shift & (kDigits - 1)];
    uint32_t digit = kDigits;
    int64_t count = 0;
    while (k > count) {
      k -= count, --digit, count = 0;
      for (int j = 0; j < kCounters; ++j) count += counts[j][digit];
    }
    int64_t left = 0;
    for (i = 0; i < n; ++i) {
      const uint32_t number = numbers[i];
      numbers[left] = number;
      left += (number >> shift & (kDigits - 1)) == digit;
    }
    n = left;
  }
  std::nth_element(numbers, numbers + k - 1, numbers + n, std::greater<uint32_t>());
  const uint32_t found = numbers[k - 1];
  k -= std::count_if(numbers, numbers + k - 1, [found](uint32_t number) { return number > found; });
  return found;
}

// Number that at least top_k of n scores probably reach, and not many more of them, judged by some scores.
float estimate(const float* scores, int64_t n, int64_t top_k) {
  const double rank = double(kSamples) * top_k / n;
  const int64_t nth = rank + 3 * std::sqrt(rank) + 2;
  if (n < 4 * kSamples || nth >= kSamples) return -std::numeric_limits<float>::max();
  float samples[kSamples];
  for (int64_t i = 0; i < kSamples; ++i) samples[i] = scores[i * n / kSamples];
  std::nth_element(samples, samples + nth, samples + kSamples, std::greater<float>());
  return samples[nth];
}

// Scores that may be chosen, in order, with the numbers of their keys.
struct Candidates {
  float* scores;
  int32_t* keys;
  uint32_t* numbers;

  // Keep those of n scores that are at least `least`. Return how many. Scores are followed by unused ones.
  int64_t keep(const float* from, int64_t n, float least) {
    int64_t count = 0, i = 0;
    for (; i + kLanes <= n; i += kLanes) count += append(at(from + i), least, i, scores + count, keys + count);
    for (; i < n; ++i) {
      scores[count] = from[i], keys[count] = i;
      count += from[i] >= least;
    }
    return count;
  }
};

// Choose the top_k highest of n scores, of equal ones the first, in ascending order.
void choose(const float* scores, int64_t n, int64_t top_k, Candidates some, float* chosen, int64_t* keys) {
  int64_t count = 0;
  if (n > top_k) {
    int64_t num_some = some.keep(scores, n, estimate(scores, n, top_k));
    if (num_some < top_k) num_some = some.keep(scores, n, -std::numeric_limits<float>::max());
    for (int64_t i = 0; i < num_some; ++i) some.numbers[i] = ordered(some.scores[i]);
    int64_t ties = top_k;
    const uint32_t worst = find(some.numbers, num_some, ties);
    for (int64_t i = 0; count < top_k; ++i) {
      const uint32_t number = ordered(some.scores[i]);
      const bool is_tied = number == worst;
      keys[count] = some.keys[i], chosen[count] = some.scores[i];
      count += number > worst || (is_tied && ties > 0);
      ties -= is_tied;
    }
  }
  for (; count < n && count < top_k; ++count) keys[count] = count, chosen[count] = scores[count];
  for (; count < top_k; ++count) keys[count] = 0, chosen[count] = -std::numeric_limits<float>::infinity();
}

// Add the weighted scores of a block's keys for rows that begin at `row`, kScoredRows of which `rows` are queries'.
void add_scores(const float* scores, const float* weights, int64_t rows, int64_t row, int64_t heads, int64_t stride,
                float* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    float* to = sums + (row + r) / heads * stride;
    for (int i = 0; i < kBlock; i += kLanes) at(to + i) += weights[r] * largest(vec{}, at(scores + r * kBlock + i));
  }
}

}  // namespace

// Process tiles until none is left. Several threads may share one Selection. Returns 0, or 1 if memory runs out.
extern "C" int EXPORT(select)(const Selection* s) {
  const Attention& a = s->attention;
  const int64_t num_queries = a.items->num_queries, heads = a.groups;
  const int64_t stride = std::max<int64_t>(round_up(s->visible[num_queries - 1], kBlock), kBlock);
  Scratch scratch(a.key_dim, 0, 1.0f);
  const int64_t at_once = std::clamp<int64_t>(kMostScores / stride, 1, std::max<int64_t>(scratch.rows / heads, 1));
  Memory memory(4 * (at_once * stride + kScoredRows * kBlock + 3 * (stride + kLanes)) + 5 * 64);
  if (!scratch.memory || !memory) return 1;
  scratch.scale = 1.0f;
  float *sums = memory.take<float>(at_once * stride), *scores = memory.take<float>(kScoredRows * kBlock);
  const Candidates some{memory.take<float>(stride + kLanes), memory.take<int32_t>(stride + kLanes),
                        memory.take<uint32_t>(stride + kLanes)};
  for (int64_t first; (first = __atomic_fetch_add(a.next_tile, 1, __ATOMIC_RELAXED) * at_once) < num_queries;) {
    const int64_t count = std::min(at_once, num_queries - first), rows = count * heads;
    const int64_t padded_rows = round_up(rows, kScoredRows), most = s->visible[first + count - 1];
    for (int64_t row = 0; row < padded_rows; ++row) {
      const int64_t query = first + row / heads, head = row % heads;
      const Element* from = a.query + query * a.query_stride + head * a.query_head_stride;
      read_query(scratch, row, scratch.rows, row < rows ? from : kZeros);
    }
    std::fill_n(sums, count * stride, 0.0f);
    Cursor cursor(a, *a.items, 0);
    Block blocks[2];
    cursor.next(blocks[0]);
    for (int64_t begin = 0, number = 0; begin < most; begin += kBlock, ++number) {
      const Block &block = blocks[number % 2], &next = blocks[(number + 1) % 2];
      cursor.next(blocks[(number + 1) % 2]);
      prefetch_keys(next, 0, kBlock, a.key_dim, 0);
      pack_scored(scratch, block);
      for (int64_t row = 0; row < padded_rows; row += kScoredRows) {
        score_packed(scratch, row, scores);
        const float* weights = s->weights + first * heads + row;
        add_scores(scores, weights, std::min<int64_t>(kScoredRows, rows - row), row, heads, stride, sums + begin);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      float* mine = sums + i * stride;
      const int64_t n = s->visible[first + i], to = (first + i) * s->top_k;
      for (int64_t key = 0; key < n; ++key) mine[key] = finite(mine[key]);
      choose(mine, n, s->top_k, some, s->scores + to, s->keys + to);
    }
  }
  return 0;
}
