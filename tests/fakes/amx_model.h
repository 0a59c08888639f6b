// AMX in plain C++, as Intel's instruction set reference defines it, for tests on CPUs without it. Compilers include
// this file before the sources. Wrong use of the tile registers ends the process.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace amx_model {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[kRows][kRowBytes];
};

inline thread_local Tile tiles[kTiles];
inline thread_local bool is_configured = false;

inline void require(bool holds) {
  if (!holds) std::abort();
}

inline Tile& tile(int number) {
  require(is_configured && tiles[number].rows > 0);
  return tiles[number];
}

inline void load_config(const void* from) {
  uint8_t config[64];
  std::memcpy(config, from, sizeof config);
  require(config[0] == 1);  // Palette 1 is the only one.
  for (int i = 1; i < 16; ++i) require(config[i] == 0);
  for (int i = 0; i < kTiles; ++i) {
    const int row_bytes = config[16 + 2 * i] | config[17 + 2 * i] << 8, rows = config[48 + i];
    require(rows <= kRows && row_bytes <= kRowBytes && row_bytes % 4 == 0 && (rows == 0) == (row_bytes == 0));
    tiles[i].rows = rows, tiles[i].row_bytes = row_bytes;
    std::memset(tiles[i].data, 0, sizeof tiles[i].data);
  }
  for (int i = 32; i < 48; ++i) require(config[i] == 0);
  for (int i = 56; i < 64; ++i) require(config[i] == 0);
  is_configured = true;
}

inline void release() { is_configured = false; }

inline void zero(int number) { std::memset(tile(number).data, 0, sizeof(Tile::data)); }

inline void load(int number, const void* from, int64_t stride) {
  Tile& t = tile(number);
  zero(number);
  for (int i = 0; i < t.rows; ++i) std::memcpy(t.data[i], (const char*)from + i * stride, t.row_bytes);
}

inline void store(int number, void* to, int64_t stride) {
  const Tile& t = tile(number);
  for (int i = 0; i < t.rows; ++i) std::memcpy((char*)to + i * stride, t.data[i], t.row_bytes);
}

// Denormal numbers count as zero, before and after each operation.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float widened(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

// Add products of pairs. Even and odd elements have sums of their own, which are added up last.
inline void add_products(int to, int from, int by) {
  require(to != from && to != by && from != by);
  Tile &c = tile(to), &a = tile(from), &b = tile(by);
  require(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes / 4 == b.rows);
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float sums[2] = {0, 0}, held;
      for (int k = 0; k < a.row_bytes / 4; ++k)
        for (int i = 0; i < 2; ++i)
          sums[i] = flushed(std::fma(widened(a.data[m] + 4 * k + 2 * i), widened(b.data[k] + 4 * n + 2 * i), sums[i]));
      std::memcpy(&held, c.data[m] + 4 * n, sizeof held);
      held = flushed(flushed(held) + flushed(sums[0] + sums[1]));
      std::memcpy(c.data[m] + 4 * n, &held, sizeof held);
    }
  }
}

}  // namespace amx_model

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_model::load_config
#define _tile_release amx_model::release
#define _tile_loadd amx_model::load
#define _tile_stream_loadd amx_model::load
#define _tile_stored amx_model::store
#define _tile_zero amx_model::zero
#define _tile_dpbf16ps amx_model::add_products
#define __AMX_BF16__ 1
