// Linear layers on prepared rows, with what follows them fused into the write of each tile.
#pragma once

#include "tile.h"

namespace diptych {
namespace DIPTYCH_TIER {

constexpr long kChunkBytes = 384 << 10;  // activations kept in L2 while weights stream past

constexpr long kFewRows = 4;

// Turn raw sums of one tile row into values: weight scale, input scale, bias.
template <class D>
DIPTYCH_INLINE VF finish_sum(const char* raw, const Linear& linear, const Rows& rows, long row,
                             long col) {
  VF y;
  if constexpr (D::kKind == Kind::I8) {
    // Weights were stored with 128 added: take 128 * (sum of inputs) off again.
    VI sum = (VI)load_raw(raw) - (VI)(VI{} + int32_t(rows.sum[row]) * 128);
    y = __builtin_convertvector(sum, VF) * (rows.scale[row] * load(linear.scale + col));
  } else {
    y = load(raw);
  }
  if (linear.bias) y += load(linear.bias + col);
  return y;
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

template <class D, class M>
DIPTYCH_INLINE void finish_tile(const char* raw, const Linear& linear, const Rows& rows, long row,
                                int height, long block, const Output& out) {
  for (int r = 0; r < height; ++r, raw += kStepBytes) {
    if (out.finish == Finish::Gate) {
      for (int v = 0; v < kBlockVecs / 2; ++v) {
        long lane = v * kLanes;
        VF gate = finish_sum<D>(raw + lane * 4, linear, rows, row + r, block * 32 + lane);
        VF up = finish_sum<D>(raw + 64 + lane * 4, linear, rows, row + r, block * 32 + 16 + lane);
        write_vector<M>(out, row + r, block * 16 + lane, silu(gate) * up);
      }
      continue;
    }
    for (int v = 0; v < kBlockVecs; ++v) {
      long col = block * 32 + v * kLanes;
      write_vector<M>(out, row + r, col,
                      finish_sum<D>(raw + v * DIPTYCH_BYTES, linear, rows, row + r, col));
    }
  }
}

// Work is handed out as (chunk of rows, block of columns); the blocks of one chunk follow one
// another so that the chunk's activations stay in cache.
template <class D>
inline void linear_as(const Crew& crew, const Linear& linear, const Rows& rows, long count,
                      const Output& out) {
  long lda = row_bytes(D::kKind, linear.inputs), steps = steps_of(D::kKind, linear.inputs);
  long blocks = blocks_of(linear.outputs);
  long tiles = (count + kTileRows - 1) / kTileRows;
  long chunk_tiles = max_of(1, min_of(tiles, kChunkBytes / (lda * kTileRows)));
  long chunks = (tiles + chunk_tiles - 1) / chunk_tiles;
  const char* packed = reinterpret_cast<const char*>(linear.packed);
  alignas(64) char raw[kTileRows * kStepBytes];
  for (long unit = crew.next(), after; unit < chunks * blocks; unit = after) {
    after = crew.next();  // known early, so that its weights can be asked for
    long chunk = unit / blocks, block = unit % blocks;
    const char* weights = packed + block * steps * kStepBytes;
    // Few rows run as fast as memory: the CPU's own prefetch does best undisturbed. With more
    // there is time to bring in the whole next block during the last tile.
    const char* wanted =
        count <= kFewRows ? weights + 2048 : packed + after % blocks * steps * kStepBytes;
    long last = min_of(tiles, (chunk + 1) * chunk_tiles);
    for (long t = chunk * chunk_tiles; t < last; ++t) {
      // Tiles of nearly equal height: 16 rows are 8 + 8, not 14 + 2.
      long row = t * count / tiles;
      int height = int((t + 1) * count / tiles - row);
      const char* a = reinterpret_cast<const char*>(rows.data) + row * lda;
      tile_of<D, true>(height, a, lda, weights, steps, raw, kBlockCols, nullptr,
                       t == last - 1 ? wanted : weights);
      if (out.store == Store::F32)
        finish_tile<D, MemF32>(raw, linear, rows, row, height, block, out);
      else if (out.store == Store::BF16)
        finish_tile<D, MemBF16>(raw, linear, rows, row, height, block, out);
      else
        finish_tile<D, MemF16>(raw, linear, rows, row, height, block, out);
    }
  }
  crew.sync();
}

inline void run_linear(const Crew& crew, const Linear& linear, const Rows& rows, long count,
                       const Output& out) {
  if (linear.kind == Kind::I8) return linear_as<DotI8>(crew, linear, rows, count, out);
  if (linear.kind == Kind::BF16) return linear_as<DotBF16>(crew, linear, rows, count, out);
  linear_as<DotF32>(crew, linear, rows, count, out);
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
