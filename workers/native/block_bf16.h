// Processing one block of keys and values on a CPU with AVX512-BF16 or AMX. Many rows share packed keys and values; few
// rows read them in place.

#pragma once

#ifdef __AMX_BF16__
#include "few_amx.h"
#include "panel_amx.h"
#else
#include "few_avx512.h"
#include "panel_avx512.h"
#endif

namespace {

// Process a block for a tile of at most kFewRows rows, padded.
void attend_few(const Scratch& s, int64_t num_rows, const Block& block, const Block& next, const int* seen) {
  switch (num_rows) {
    case 1: return attend_rows<1>(s, block, next, seen);
    case 2: return attend_rows<2>(s, block, next, seen);
    case 4: return attend_rows<4>(s, block, next, seen);
    case 8: return attend_rows<8>(s, block, next, seen);
    default: return attend_rows<kFewRows>(s, block, next, seen);
  }
}

// Process a block for all rows of a tile. Row r sees the first seen[r] keys.
void attend_block(const Scratch& s, int64_t num_rows, const Block& block, const Block& next, const int* seen) {
  if (num_rows <= kFewRows) return attend_few(s, num_rows, block, next, seen);
  pack_keys(block, s.key_dim, s.keys);
  pack_values(block, round_up(*std::max_element(seen, seen + num_rows), 32), s.value_dim, s.value_width, s.values);
  prefetch_keys(next, 0, kBlock, s.key_dim, s.value_dim);
  for (int64_t row = 0; row < num_rows; row += kRows) attend_panel(s, row, seen + row);
}

}  // namespace
