// Linear layers on prepared rows, with what follows them fused into the write of each tile.
#pragma once

#include "tile_matrix.h"

namespace diptych {
namespace DIPTYCH_TIER {

// Activations kept in L2, which CPUs with a matrix unit have more of, while weights stream past.
constexpr long kChunkBytes = kMatrixUnit ? 1 << 20 : 384 << 10;

constexpr long kFewRows = kMatrixUnit ? 8 : 4;

DIPTYCH_INLINE VF with_bias(const char* sums, const Linear& linear, long col) {
  VF y = load(sums);
  return linear.bias ? y + load(linear.bias + col) : y;
}

// The last columns, fewer than a vector; apart, so that what calls it needs no stack frame.
template <class M>
__attribute__((noinline)) void write_part(bool add, char* p, VF y, long left) {
  if (add) y += get_part<M>(p, left);
  put_part<M>(p, y, left);
}

template <class M>
DIPTYCH_INLINE void write_vector(const Output& out, long row, long col, VF y) {
  if (col >= out.cols) return;
  char* p = static_cast<char*>(out.data) + (row * out.stride + col) * M::kSize;
  bool add = out.finish == Finish::Add;
  if (col + kLanes > out.cols) return write_part<M>(add, p, y, out.cols - col);
  if (add) y += M::get(p);
  M::put(p, y);
}

template <class M>
DIPTYCH_INLINE void finish_row(const char* sums, const Linear& linear, long row, long block,
                               const Output& out) {
  if (out.finish == Finish::Gate) {
    for (int v = 0; v < kBlockVecs / 2; ++v) {
      long lane = v * kLanes;
      VF gate = with_bias(sums + lane * 4, linear, block * 32 + lane);
      VF up = with_bias(sums + 64 + lane * 4, linear, block * 32 + 16 + lane);
      write_vector<M>(out, row, block * 16 + lane, silu(gate) * up);
    }
    return;
  }
  for (int v = 0; v < kBlockVecs; ++v) {
    long col = block * 32 + v * kLanes;
    write_vector<M>(out, row, col, with_bias(sums + v * DIPTYCH_BYTES, linear, col));
  }
}

// A tile whose sums are complete and not yet written.
struct Finished {
  const Linear& linear;
  const Output& out;
  const char* sums = nullptr;
  long row = 0, block = 0;
  int left = 0;  // rows, from `row` on

  void next_row() {
    if (left == 0) return;
    with_store(out.store, [&](auto to) {
      finish_row<decltype(to)>(sums, linear, row, block, out);
    });
    sums += kStepBytes, ++row, --left;
  }
  void all() {
    with_store(out.store, [&](auto to) {
      for (; left > 0; sums += kStepBytes, ++row, --left)
        finish_row<decltype(to)>(sums, linear, row, block, out);
    });
  }
};

// Whether a tile's sums are the results, all of them.
DIPTYCH_INLINE bool is_plain(const Linear& linear, const Output& out, long block) {
  return !linear.bias && out.store == Store::F32 && out.finish != Finish::Gate &&
         (block + 1) * kBlockCols <= out.cols;
}

// Where tile `t` of `count` rows begins: all but the last are full, or, as smaller ones take less
// time, all of nearly equal height: 16 rows are 8 + 8, not 14 + 2.
template <class T>
DIPTYCH_INLINE long first_row(long t, long tiles, long count) {
  return T::kFull ? min_of(t * T::kRows, count) : t * count / tiles;
}

// Hands out units in short runs: to ask whose turn it is takes cores a tenth of a microsecond.
class Runs {
 public:
  Runs(const Crew& crew, long units)
      : crew_(crew), length_(max_of(1, min_of(4, units / (12 * crew.threads)))) {}
  long next() {
    if (left_ == 0) at_ = crew_.next() * length_, left_ = length_;
    --left_;
    return at_++;
  }

 private:
  const Crew& crew_;
  long length_, at_ = 0, left_ = 0;
};

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
  alignas(64) char sums[1 + T::kOverlaps][T::kRows * kStepBytes];
  int turn = 0;
  T tile;
  Finished before{linear, out};
  Runs runs(crew, chunks * blocks);
  for (long unit = runs.next(), after; unit < chunks * blocks; unit = after) {
    after = runs.next();  // known early, so that its weights can be asked for
    long chunk = unit / blocks, block = unit % blocks;
    const char* weights = packed + block * block_size;
    const char* wanted = packed + after % blocks * block_size;
    long first = chunk * chunk_tiles, last = min_of(tiles, first + chunk_tiles);
    tile.begin(weights, linear.inputs);
    for (long t = first; t < last; ++t) {
      long row = first_row<T>(t, tiles, count);
      int height = int(first_row<T>(t + 1, tiles, count) - row);
      const char* a = reinterpret_cast<const char*>(rows.data) + row * lda;
      TileJob job{height, a,     lda, weights, linear.inputs, sums[turn], kStepBytes, false,
                  {wanted, t - first, last - first, count <= kFewRows}};
      bool direct = T::kDirect && is_plain(linear, out, block);
      if (direct) {
        job.out = static_cast<char*>(out.data) + (row * out.stride + block * kBlockCols) * 4;
        job.stride = out.stride * 4, job.add = out.finish == Finish::Add;
      }
      tile.run(job, [&] { before.next_row(); });
      if (direct) continue;
      before.all();
      before.sums = sums[turn], before.row = row, before.block = block, before.left = height;
      if constexpr (T::kOverlaps)
        turn = 1 - turn;
      else
        before.all();
    }
  }
  before.all();
  crew.sync();
}

template <class W, int kPlanes>
inline void linear_grouped(const Crew& crew, const Linear& linear, const Rows& rows, long count,
                           const Output& out) {
#if defined(DIPTYCH_AMX)
  // A tile takes as long for fewer rows; int4 must be unpacked first.
  if (count >= (W::kInt4 ? 12 : 8))
    return linear_as<MatrixGrouped<W, kPlanes>>(crew, linear, rows, count, out);
#endif
  linear_as<TileGrouped<W, kPlanes>>(crew, linear, rows, count, out);
}

inline void run_linear(const Crew& crew, const Linear& linear, const Rows& rows, long count,
                       const Output& out) {
  switch (linear.kind) {
    case Kind::I8:
      return linear_grouped<Weights8, 1>(crew, linear, rows, count, out);
    case Kind::I8A16:
      return linear_grouped<Weights8, 2>(crew, linear, rows, count, out);
    case Kind::I4:
      return linear_grouped<Weights4, 1>(crew, linear, rows, count, out);
    case Kind::I4A16:
      return linear_grouped<Weights4, 2>(crew, linear, rows, count, out);
    case Kind::BF16:
#if defined(DIPTYCH_AMX)
      return linear_as<MatrixBF16>(crew, linear, rows, count, out);
#else
      return linear_as<TileFloat<DotBF16>>(crew, linear, rows, count, out);
#endif
    case Kind::F32:
      return linear_as<TileFloat<DotF32>>(crew, linear, rows, count, out);
  }
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
