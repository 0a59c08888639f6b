// Attention of queries over keys and values in pages, on a CPU. The source file defines Element, the type of all
// numbers, and EXPORT.

#pragma once

#include <vector>

#include "helpers.h"
#include "attention_tile.h"

namespace {

// Some rows of an item for one kv head.
struct TilePart {
  int64_t item, head, first_row, num_rows;
};

std::vector<TilePart> parts_of(const Attention& a, int64_t most_rows) {
  std::vector<TilePart> parts;
  for (int64_t item = 0; item < a.num_items; ++item) {
    const int64_t num_rows = a.items[item].num_queries * a.groups;
    for (int64_t head = 0; head < a.kv_heads; ++head)
      for (int64_t row = 0; row < num_rows; row += most_rows)
        parts.push_back({item, head, row, std::min(most_rows, num_rows - row)});
  }
  return parts;
}

Tile tile_of(const Attention& a, const TilePart& part, const Scratch& scratch) {
  return Tile(a, a.items[part.item], part.head, part.first_row, part.num_rows, scratch);
}

constexpr int64_t kMostSharedTiles = 64;  // Tiles whose queries are copied at a time.

// Tiles that helpers can take. What they are given is a Header, then items, parts, and page numbers. The queries of
// each part are in the memory to share: the heads of each token from the first row's on.
class SharedAttention {
  struct Header {
    Attention attention;
    int64_t num_parts, queries_per_part;
  };

 public:
  // Return whether keys and values outlive helpers, and there is enough to read.
  static bool suits(const Attention& a) {
    int64_t num_keys = 0;
    for (const Item* item = a.items; item < a.items + a.num_items; ++item) num_keys += item->num_keys;
    return num_keys * a.kv_heads * (a.key_dim + a.value_dim) >= kLeastShared && outlives_helpers(a.key) &&
           outlives_helpers(a.value);
  }

  SharedAttention(const Attention& a, const TilePart* parts, int64_t num_parts, const Scratch& scratch)
      : a_(a), parts_(parts), num_parts_(num_parts), scratch_(scratch) {
    for (const Item* item = a.items; item < a.items + a.num_items; ++item) num_pages_ += pages_of(*item);
    for (const TilePart* part = parts; part < parts + num_parts; ++part)
      most_rows_ = std::max(most_rows_, part->num_rows);
  }

  // Let helpers take parts. Return false if they cannot.
  bool share() const {
    const int64_t queries_per_part = (most_rows_ / a_.groups + 2) * a_.groups * a_.key_dim;
    const int64_t num_given = sizeof(Header) + a_.num_items * sizeof(Item) + num_parts_ * sizeof(TilePart) +
                              num_pages_ * sizeof(int64_t);
    const auto queries = (Element*)memory_to_share(num_parts_ * queries_per_part * sizeof(Element), num_given);
    if (!queries) return false;
    for (int64_t part = 0; part < num_parts_; ++part) copy_queries(parts_[part], queries + part * queries_per_part);
    Given given;
    give(given, {a_, num_parts_, queries_per_part}, queries);
    const auto compute = [&](int64_t part) { tile_of(a_, parts_[part], scratch_).attend(); };
    return share_with_helpers({compute_part, given, num_parts_, most_rows_ * (a_.value_dim + 2)}, compute,
                              [&](int64_t part, const float* result) { write(parts_[part], result); });
  }

 private:
  static constexpr int64_t kLeastShared = 1 << 17;  // Elements of keys and values.

  void copy_queries(const TilePart& part, Element* to) const {
    const int64_t first = a_.items[part.item].first_query;
    const int64_t end = (part.first_row + part.num_rows - 1) / a_.groups + 1;
    for (int64_t query = part.first_row / a_.groups; query < end; ++query)
      for (int64_t head = part.head * a_.groups; head < (part.head + 1) * a_.groups; ++head, to += a_.key_dim)
        std::copy_n(a_.query + (first + query) * a_.query_stride + head * a_.query_head_stride, a_.key_dim, to);
  }

  void give(Given& given, Header header, const Element* queries) const {
    header.attention.query = queries;
    header.attention.query_head_stride = a_.key_dim;
    header.attention.query_stride = a_.groups * a_.key_dim;
    given.put(&header, 1);
    int64_t num_pages = 0;
    for (const Item* item = a_.items; item < a_.items + a_.num_items; ++item) {
      Item copy = *item;
      copy.table = num_pages, copy.first_key %= a_.page_size;
      given.put(&copy, 1);
      num_pages += pages_of(*item);
    }
    given.put(parts_, num_parts_);
    for (const Item* item = a_.items; item < a_.items + a_.num_items; ++item)
      given.put(a_.tables + item->table + item->first_key / a_.page_size, pages_of(*item));
  }

  int64_t pages_of(const Item& item) const {
    return (item.first_key % a_.page_size + item.num_keys + a_.page_size - 1) / a_.page_size;
  }

  static void compute_part(const char* given, int64_t index, float* result) {
    const Header& header = *(const Header*)given;
    Attention a = header.attention;
    const auto items = (const Item*)(given + sizeof header);
    const auto parts = (const TilePart*)(items + a.num_items);
    const TilePart& part = parts[index];
    Item item = items[part.item];
    item.first_query = -(part.first_row / a.groups);
    a.tables = (const int64_t*)(parts + header.num_parts);
    a.query += index * header.queries_per_part - part.head * a.groups * a.key_dim;
    const Scratch scratch(a.key_dim, a.value_dim, a.scale);
    Tile tile(a, item, part.head, part.first_row, part.num_rows, scratch);
    tile.compute();
    for (int64_t row = 0; row < part.num_rows; ++row, result += a.value_dim + 2) {
      const Found found = tile.result(row);
      std::copy_n(found.out, a.value_dim, result);
      result[a.value_dim] = found.sum, result[a.value_dim + 1] = found.reference;
    }
  }

  void write(const TilePart& part, const float* result) const {
    const Tile tile = tile_of(a_, part, scratch_);
    for (int64_t row = 0; row < part.num_rows; ++row, result += a_.value_dim + 2)
      tile.write(row, {result, result[a_.value_dim], result[a_.value_dim + 1]});
  }

  const Attention& a_;
  const TilePart* parts_;
  const int64_t num_parts_;
  int64_t num_pages_ = 0, most_rows_ = 0;
  const Scratch& scratch_;
};

}  // namespace

// Process tiles until none is left. Several threads may share one Attention if no two items share a query. Returns 0,
// or 1 if memory runs out.
extern "C" int EXPORT(attend)(const Attention* a) {
  const Scratch scratch(a->key_dim, a->value_dim, a->scale);
  if (!scratch.memory) return 1;
  const std::vector<TilePart> parts = parts_of(*a, scratch.rows);
  const bool is_shared = SharedAttention::suits(*a);
  const int64_t together = is_shared ? kMostSharedTiles : 1;
  const auto next = [&] { return __atomic_fetch_add(a->next_tile, together, __ATOMIC_RELAXED); };
  for (int64_t first = next(); first < int64_t(parts.size()); first = next()) {
    const int64_t count = std::min<int64_t>(together, parts.size() - first);
    if (is_shared && SharedAttention(*a, &parts[first], count, scratch).share()) continue;
    for (int64_t part = first; part < first + count; ++part) tile_of(*a, parts[part], scratch).attend();
  }
  return 0;
}
