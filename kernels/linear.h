// Linear layers on prepared rows, with what follows them fused into the write of each tile.
#pragma once

#include "tile_grouped.h"

namespace diptych {
namespace DIPTYCH_TIER {

constexpr long kChunkBytes = 384 << 10;  // activations kept in L2 while weights stream past

constexpr long kFewRows = 4;

DIPTYCH_INLINE VF with_bias(const char* sums, const Linear& linear, long col) {
  VF y = load(sums);
  return linear.bias ? y + load(linear.bias + col) : y;
}

template <class M>
DIPTYCH_INLINE void write_vector(const Output& out, long row, long col, VF y) {
  if (col >= out.cols) return;
  char* p = static_cast<char*>(out.data) + (row * out.stride + col) * M::kSize;
  if (col + kLanes <= out.cols) {
    if (out.finish == Finish::Add) y += M::get(p);
    M::put(p, y);
    return;
  }
  if (out.finish == Finish::Add) y += get_part<M>(p, out.cols - col);
  put_part<M>(p, y, out.cols - col);
}

template <class M>
DIPTYCH_INLINE void finish_tile(const char* sums, const Linear& linear, long row, int height,
                                long block, const Output& out) {
  for (int r = 0; r < height; ++r, sums += kStepBytes) {
    if (out.finish == Finish::Gate) {
      for (int v = 0; v < kBlockVecs / 2; ++v) {
        long lane = v * kLanes;
        VF gate = with_bias(sums + lane * 4, linear, block * 32 + lane);
        VF up = with_bias(sums + 64 + lane * 4, linear, block * 32 + 16 + lane);
        write_vector<M>(out, row + r, block * 16 + lane, silu(gate) * up);
      }
      continue;
    }
    for (int v = 0; v < kBlockVecs; ++v) {
      long col = block * 32 + v * kLanes;
      write_vector<M>(out, row + r, col, with_bias(sums + v * DIPTYCH_BYTES, linear, col));
    }
  }
}

// Work is handed out as (chunk of rows, block of columns); the blocks of one chunk follow one
// another so that the chunk's activations stay in cache.
template <class T>
inline void linear_as(const Crew& crew, const Linear& linear, const Rows& rows, long count,
                      const Output& out) {
  long lda = row_bytes(T::kKind, linear.inputs);
  long block_size = block_bytes(T::kKind, linear.inputs);
  long blocks = blocks_of(linear.outputs);
  long tiles = (count + T::kRows - 1) / T::kRows;
  long chunk_tiles = max_of(1, min_of(tiles, kChunkBytes / (lda * T::kRows)));
  long chunks = (tiles + chunk_tiles - 1) / chunk_tiles;
  const char* packed = reinterpret_cast<const char*>(linear.packed);
  alignas(64) char sums[T::kRows * kStepBytes];
  for (long unit = crew.next(), after; unit < chunks * blocks; unit = after) {
    after = crew.next();  // known early, so that its weights can be asked for
    long chunk = unit / blocks, block = unit % blocks;
    const char* weights = packed + block * block_size;
    const char* wanted = count <= kFewRows ? nullptr : packed + after % blocks * block_size;
    long first = chunk * chunk_tiles, last = min_of(tiles, first + chunk_tiles);
    for (long t = first; t < last; ++t) {
      // Tiles of nearly equal height: 16 rows are 8 + 8, not 14 + 2.
      long row = t * count / tiles;
      int height = int((t + 1) * count / tiles - row);
      const char* a = reinterpret_cast<const char*>(rows.data) + row * lda;
      T::run(height, a, lda, weights, linear.inputs, sums, Ahead{wanted, t - first, last - first});
      if (out.store == Store::F32)
        finish_tile<MemF32>(sums, linear, row, height, block, out);
      else if (out.store == Store::BF16)
        finish_tile<MemBF16>(sums, linear, row, height, block, out);
      else
        finish_tile<MemF16>(sums, linear, row, height, block, out);
    }
  }
  crew.sync();
}

inline void run_linear(const Crew& crew, const Linear& linear, const Rows& rows, long count,
                       const Output& out) {
  switch (linear.kind) {
    case Kind::I8:
      return linear_as<TileGrouped<Weights8, 1>>(crew, linear, rows, count, out);
    case Kind::I8A16:
      return linear_as<TileGrouped<Weights8, 2>>(crew, linear, rows, count, out);
    case Kind::I4:
      return linear_as<TileGrouped<Weights4, 1>>(crew, linear, rows, count, out);
    case Kind::I4A16:
      return linear_as<TileGrouped<Weights4, 2>>(crew, linear, rows, count, out);
    case Kind::BF16:
      return linear_as<TileFloat<DotBF16>>(crew, linear, rows, count, out);
    case Kind::F32:
      return linear_as<TileFloat<DotF32>>(crew, linear, rows, count, out);
  }
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
