// Attention of queries over keys and values in pages, on a CPU. The source file defines Element, the type of all
// numbers, and EXPORT.

#pragma once

#include "helpers.h"
#include "attention_tile.h"

namespace {

// Attention with one small tile per item and head. What helpers are given is a Header, then items, page numbers, and
// queries.
class SharedAttention {
  struct Header {
    Attention attention;
    int64_t num_pages;
  };

 public:
  // Return whether the tiles are small, and there is enough to read.
  static bool suits(const Attention& a) {
    int64_t most_rows = 0, num_keys = 0;
    for (const Item* item = a.items; item < a.items + a.num_items; ++item)
      most_rows = std::max(most_rows, item->num_queries * a.groups), num_keys += item->num_keys;
    return most_rows <= kFewRows && num_keys * a.kv_heads * (a.key_dim + a.value_dim) >= kLeastShared;
  }

  explicit SharedAttention(const Attention& a) : a_(a), size_(kFewRows * (a.value_dim + 2)) {
    Header header = {a, 0};
    header.attention.query_head_stride = a.key_dim;
    header.attention.query_stride = a.kv_heads * a.groups * a.key_dim;
    for (const Item* item = a.items; item < a.items + a.num_items; ++item) header.num_pages += pages_of(*item);
    given_.put(&header, 1);
    int64_t num_tokens = 0, num_pages = 0;
    for (const Item* item = a.items; item < a.items + a.num_items; ++item) {
      const Item copy = {num_tokens,     item->num_queries, num_pages, item->first_key % a.page_size,
                         item->num_keys, item->ahead,       item->step};
      given_.put(&copy, 1);
      num_pages += pages_of(*item), num_tokens += item->num_queries;
    }
    for (const Item* item = a.items; item < a.items + a.num_items; ++item)
      given_.put(a.tables + item->table + item->first_key / a.page_size, pages_of(*item));
    for (const Item* item = a.items; item < a.items + a.num_items; ++item)
      for (int64_t token = item->first_query; token < item->first_query + item->num_queries; ++token)
        for (int64_t head = 0; head < a.kv_heads * a.groups; ++head)
          given_.put(a.query + token * a.query_stride + head * a.query_head_stride, a.key_dim);
  }

  Work work() const { return {compute, given_, a_.num_items * a_.kv_heads, size_}; }

  void write(int64_t part, const float* result) const {
    const Item& item = a_.items[part / a_.kv_heads];
    for (int64_t row = 0; row < item.num_queries * a_.groups; ++row, result += a_.value_dim + 2) {
      const int64_t head = part % a_.kv_heads * a_.groups + row % a_.groups;
      const int64_t to = (item.first_query + row / a_.groups) * a_.kv_heads * a_.groups + head;
      const Found found = {result, result[a_.value_dim], result[a_.value_dim + 1]};
      write_row(found, a_.value_dim, a_.overwrites, a_.out + to * a_.value_dim, a_.lse + to);
    }
  }

 private:
  static constexpr int64_t kLeastShared = 1 << 17;  // Elements of keys and values.

  int64_t pages_of(const Item& item) const {
    return (item.first_key % a_.page_size + item.num_keys + a_.page_size - 1) / a_.page_size;
  }

  static void compute(const char* given, int64_t part, float* result) {
    const Header& header = *(const Header*)given;
    Attention a = header.attention;
    a.items = (const Item*)(given + sizeof header);
    a.tables = (const int64_t*)(a.items + a.num_items);
    a.query = (const Element*)(a.tables + header.num_pages);
    const Item& item = a.items[part / a.kv_heads];
    const int64_t num_rows = item.num_queries * a.groups;
    const Scratch scratch(a.key_dim, a.value_dim, a.scale);
    Tile tile(a, item, part % a.kv_heads, 0, num_rows, scratch);
    tile.compute();
    for (int64_t row = 0; row < num_rows; ++row, result += a.value_dim + 2) {
      const Found found = tile.result(row);
      std::copy_n(found.out, a.value_dim, result);
      result[a.value_dim] = found.sum, result[a.value_dim + 1] = found.reference;
    }
  }

  const Attention& a_;
  const int64_t size_;
  Given given_;
};

}  // namespace

// Process tiles until none is left. Several threads may share one Attention if no two items share a query. Returns 0,
// or 1 if memory runs out.
extern "C" int EXPORT(attend)(const Attention* a) {
  if (a->is_shared && may_share() && SharedAttention::suits(*a)) {
    const SharedAttention shared(*a);
    if (share_with_helpers(shared.work(), [&](int64_t part, const float* result) { shared.write(part, result); }))
      return 0;
  }
  Scratch scratch(a->key_dim, a->value_dim, a->scale);
  if (!scratch.memory) return 1;
  int64_t first = 0;
  int64_t mine = __atomic_fetch_add(a->next_tile, 1, __ATOMIC_RELAXED);
  for (const Item* item = a->items; item < a->items + a->num_items; ++item) {
    const int64_t rows = item->num_queries * a->groups, tiles = (rows + scratch.rows - 1) / scratch.rows;
    for (; mine < first + tiles * a->kv_heads; mine = __atomic_fetch_add(a->next_tile, 1, __ATOMIC_RELAXED)) {
      const int64_t head = (mine - first) / tiles, row = (mine - first) % tiles * scratch.rows;
      Tile(*a, *item, head, row, std::min(scratch.rows, rows - row), scratch).attend();
    }
    first += tiles * a->kv_heads;
  }
  return 0;
}
