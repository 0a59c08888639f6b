// Tiles of attention of queries over keys and values in pages, on a CPU. The source file defines Element, the type of
// all numbers, and includes operations on a block of keys and values.
//
// A tile has some query rows (query by query, the G heads that share a kv head) of one kv head. It processes its keys
// block by block. A large tile rearranges each block for all its rows; a small tile reads it in place.
//
// Strides and offsets are in elements.

#pragma once

namespace {

struct Strides {
  int64_t page, head, slot;
};

struct Item {
  int64_t first_query, num_queries, table, first_key, num_keys;
  int64_t ahead, step;  // Query i sees the keys up to ahead + i * step.
};

struct Attention {
  const Element *query, *key, *value;
  Element* out;
  float* lse;
  const int64_t* tables;
  const Item* items;
  int64_t* next_tile;  // Shared by all threads of one call.
  int64_t overwrites;  // Whether all results are written over, instead of merged into a partial.
  int64_t num_items, page_size, kv_heads, groups, key_dim, value_dim, query_stride, query_head_stride;
  Strides key_strides, value_strides;
  float scale;
};

// Iterates over the pages of one item for one kv head.
class Cursor {
 public:
  Cursor(const Attention& a, const Item& item, int64_t head)
      : a_(a), table_(a.tables + item.table + item.first_key / a.page_size), slot_(item.first_key % a.page_size),
        left_(item.num_keys), key_(a.key + head * a.key_strides.head), value_(a.value + head * a.value_strides.head) {}

  void next(Block& block) {
    int i = 0;
    while (i < kBlock && left_ > 0) {
      const int64_t count = std::min({int64_t(kBlock - i), left_, a_.page_size - slot_});
      const Element* key = key_ + *table_ * a_.key_strides.page + slot_ * a_.key_strides.slot;
      const Element* value = value_ + *table_ * a_.value_strides.page + slot_ * a_.value_strides.slot;
      for (const int end = i + int(count); i < end; ++i) {
        block.key[i] = key, block.value[i] = value;
        key += a_.key_strides.slot, value += a_.value_strides.slot;
      }
      left_ -= count, slot_ += count;
      if (slot_ == a_.page_size) slot_ = 0, ++table_;
    }
    for (; i < kBlock; ++i) block.key[i] = block.value[i] = kZeros;
  }

 private:
  const Attention& a_;
  const int64_t* table_;
  int64_t slot_, left_;
  const Element *key_, *value_;
};

// Merge a finished row into the output, which is (0, -inf) if no key has been seen yet, or write it over.
void write_row(const Found& row, int64_t value_dim, bool overwrites, Element* out, float* lse) {
  const float before = overwrites ? -std::numeric_limits<float>::infinity() : *lse;
  const float found = (row.reference + std::log2(row.sum)) * float(M_LN2);
  const float top = std::max(found, before);
  const float merged = top + std::log(std::exp(found - top) + std::exp(before - top));
  const float mine = std::exp(found - merged) / row.sum, theirs = std::exp(before - merged);
  for (int64_t d = 0; d < value_dim; ++d) {
    const float held = theirs > 0 ? as_float(out[d]) * theirs : 0.0f;
    set(out[d], row.out[d] * mine + held);
  }
  *lse = merged;
}

// One tile, processed from its first block of keys to its result rows.
class Tile {
 public:
  Tile(const Attention& a, const Item& item, int64_t head, int64_t first_row, int64_t num_rows, const Scratch& s)
      : a_(a), item_(item), s_(s), head_(head), first_row_(first_row), num_rows_(num_rows),
        padded_(padded(num_rows)) {}

  void attend() {
    compute();
    for (int64_t row = 0; row < num_rows_; ++row) write(row, result(row));
  }

  void write(int64_t row, const Found& found) const {
    const int64_t to = token(row) * a_.kv_heads * a_.groups + query_head(row);
    write_row(found, a_.value_dim, a_.overwrites, a_.out + to * a_.value_dim, a_.lse + to);
  }

  void compute() {
    read_queries();
    Cursor cursor(a_, item_, head_);
    Block blocks[2];
    cursor.next(blocks[0]);
    const int64_t most = seen_[padded_ - 1];
    for (int64_t begin = 0, number = 0; begin < most; begin += kBlock, ++number) {
      cursor.next(blocks[(number + 1) % 2]);
      int seen[kTileRows];
      for (int64_t row = 0; row < padded_; ++row) seen[row] = int(std::clamp<int64_t>(seen_[row] - begin, 0, kBlock));
      attend_block(s_, padded_, blocks[number % 2], blocks[(number + 1) % 2], seen);
    }
  }

  Found result(int64_t row) const { return found(s_, row, padded_); }

 private:
  int64_t token(int64_t row) const { return item_.first_query + (first_row_ + row) / a_.groups; }
  int64_t query_head(int64_t row) const { return head_ * a_.groups + (first_row_ + row) % a_.groups; }

  void read_queries() {
    clear(s_, padded_);
    for (int64_t row = 0; row < padded_; ++row) {
      const Element* from = kZeros;
      if (row < num_rows_) from = a_.query + token(row) * a_.query_stride + query_head(row) * a_.query_head_stride;
      read_query(s_, row, padded_, from);
      const int64_t query = token(std::min(row, num_rows_ - 1)) - item_.first_query;
      seen_[row] = std::min(item_.num_keys, item_.ahead + query * item_.step + 1);
    }
  }

  const Attention& a_;
  const Item& item_;
  const Scratch& s_;
  const int64_t head_, first_row_, num_rows_;
  const int64_t padded_;     // Rows including zero padding, as the block functions expect.
  int64_t seen_[kTileRows];  // Number of keys that each row sees.
};

}  // namespace
