// Tile registers of AMX.

#pragma once

#include <immintrin.h>

#include "common.h"

namespace {

constexpr int64_t kTileLanes = 16;  // Rows of a tile register, and its columns of fp32.
constexpr int64_t kTileDepth = 32;  // Its columns of bf16.

// Let instructions for tiles see what was written before. GCC's do not say what memory they read.
inline void finish_writing(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// This thread's tile registers, at first all with 16 rows of 64 bytes.
struct Tiles {
  Tiles() { shape(kTileLanes); }
  ~Tiles() { _tile_release(); }

  // Let tiles 2 and 3 have num_rows columns of fp32, and tiles 4 to 7 num_rows rows.
  static void shape(int64_t num_rows) {
    alignas(64) uint8_t config[64] = {1};  // Palette 1.
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = tile / 2 == 1 ? 4 * num_rows : 64;  // Bytes per row, as 16-bit numbers.
      config[48 + tile] = tile >= 4 ? num_rows : kTileLanes;
    }
    finish_writing(config);
    _tile_loadconfig(config);
  }
};

}  // namespace
