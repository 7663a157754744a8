// The tile of int8 linear layers (layouts in api.h): an integer sum per group of inputs, which
// both scales turn into fp32. Like every tile, a row's sum takes the groups in order.
#pragma once

#include "tile.h"

namespace diptych {
namespace DIPTYCH_TIER {

#if defined(__AVX512F__)
constexpr int kInt8Rows = 6;  // 6 * 2 integer sums, 6 * 2 of fp32, weights and scales
#else
constexpr int kInt8Rows = kTileRows;
#endif

// One group of R rows: acc += inputs * (weights + 128) of one plane.
template <int R>
DIPTYCH_INLINE void add_group(VI (*acc)[kBlockVecs], const char* a, long lda, const char* group) {
#pragma GCC unroll 2
  for (long s = 0; s < kGroupSteps; ++s) {
    VU b[kBlockVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v) b[v] = load_raw(group + s * kStepBytes + v * DIPTYCH_BYTES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      DotI8::In in = DotI8::spread(a + r * lda + s * 4);
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v) acc[r][v] = DotI8::add(acc[r][v], in, b[v]);
    }
  }
}

// out[row][0 … 31] = a[row] * block. With every group, `lines` more lines at `ahead` are asked for.
template <int kPlanes, int R>
DIPTYCH_INLINE void tile_int8(const char* a, long lda, const char* block, long groups, char* out,
                              const char* ahead, long lines) {
  const char* scales = a + groups * kPlanes * kGroup;
  const char* offsets = scales + groups * 4;
  constexpr bool kKeep = DIPTYCH_BYTES == 64;  // sums wait in registers, else in memory
  VF sums[kKeep ? R : 1][kBlockVecs] = {};
  if constexpr (!kKeep) memset(out, 0, R * kStepBytes);
  for (long g = 0; g < groups; ++g, block += kGroupBytes) {
    for (long i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    VI acc[R][kBlockVecs];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t offset = 0;
      if constexpr (kPlanes == 1) memcpy(&offset, offsets + r * lda + g * 4, 4);
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v) acc[r][v] = VI{} + offset;
    }
    add_group<R>(acc, a + g * kGroup, lda, block);
    if constexpr (kPlanes == 2) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t offset;
        memcpy(&offset, offsets + r * lda + g * 4, 4);
#pragma GCC unroll 16
        for (int v = 0; v < kBlockVecs; ++v) acc[r][v] = (acc[r][v] << 8) + offset;
      }
      add_group<R>(acc, a + (groups + g) * kGroup, lda, block);
    }
    VF weight_scale[kBlockVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v)
      weight_scale[v] = MemF16::get(block + kGroupSteps * kStepBytes + v * kLanes * 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float scale;
      memcpy(&scale, scales + r * lda + g * 4, 4);
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v) {
        VF y = __builtin_convertvector(acc[r][v], VF) * weight_scale[v];
        if constexpr (kKeep) {
          sums[r][v] += y * scale;
        } else {
          char* to = out + r * kStepBytes + v * DIPTYCH_BYTES;
          store(to, load(to) + y * scale);
        }
      }
    }
  }
  if constexpr (kKeep) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v) store(out + r * kStepBytes + v * DIPTYCH_BYTES, sums[r][v]);
  }
}

// The next block, to be asked for while `tiles` tiles use this one; `tile` is the current one.
// Null where the CPU's own prefetch does best undisturbed: few rows run as fast as memory.
struct Ahead {
  const char* block;
  long tile, tiles;
};

// Results of linear layers in all kinds come as fp32 [height][32].
template <int kPlanes>
struct TileInt8 {
  static constexpr int kRows = kInt8Rows;
  static constexpr Kind kKind = kPlanes == 2 ? Kind::I8A16 : Kind::I8;
  static void run(int height, const char* a, long lda, const char* block, long inputs, char* out,
                  const Ahead& ahead) {
    long groups = groups_of(inputs);
    // Spread evenly over the tiles: at 16 rows both memory and arithmetic are busy all the time.
    long lines = ahead.block ? (kGroupBytes / 64 + ahead.tiles - 1) / ahead.tiles : 0;
    const char* first = ahead.block ? ahead.block + ahead.tile * groups * lines * 64 : block;
    with_height(height, [&](auto rows) {
      tile_int8<kPlanes, decltype(rows)::value>(a, lda, block, groups, out, first, lines);
    });
  }
};

template <class D>
struct TileFloat {
  static constexpr int kRows = kTileRows;
  static constexpr Kind kKind = D::kKind;
  static void run(int height, const char* a, long lda, const char* block, long inputs, char* out,
                  const Ahead& ahead) {
    tile_of<D, true>(height, a, lda, block, steps_of(kKind, inputs), out, kBlockCols, nullptr,
                     ahead.block && ahead.tile == ahead.tiles - 1 ? ahead.block : block + 2048);
  }
};

}  // namespace DIPTYCH_TIER
}  // namespace diptych
