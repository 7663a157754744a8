// Linear layers on prepared rows, with what follows them fused into the write of each tile.
#pragma once

#include "best.h"
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

// `notes`: this thread's of the row, or none.
template <class M>
DIPTYCH_INLINE void finish_row(const char* sums, const Linear& linear, long row, long block,
                               const Output& out, char* notes) {
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
    VF y = with_bias(sums + v * DIPTYCH_BYTES, linear, col);
    write_vector<M>(out, row, col, y);
    if (notes) note(notes, v, y, block, out.cols - col);
  }
}

// Rows of a plain gate whose results, 16 of bf16, are not yet written. Asked for between products: kept in
// registers, and with no choices left to make.
struct GatedRows {
  const char* sums;
  char* to;
  long stride;  // bytes
  int left;

  DIPTYCH_INLINE void next_row() {
    if (left == 0) return;
    MemBF16::put(to, silu(load(sums)) * load(sums + 64));
    sums += kStepBytes, to += stride, --left;
  }
};

// A tile whose sums are complete and not yet written.
struct Finished {
  const Linear& linear;
  const Output& out;
  char* notes;  // this thread's, or none
  const char* sums = nullptr;
  long row = 0, block = 0;
  int left = 0;  // rows, from `row` on

  void begin(const char* sums_, long row_, long block_, int count) {
    sums = sums_, row = row_, block = block_, left = count;
  }
  void next_row() {
    if (left == 0) return;
    with_store(out.store, [&](auto to) {
      finish_row<decltype(to)>(sums, linear, row, block, out,
                               notes ? notes + row * kNoteBytes : nullptr);
    });
    sums += kStepBytes, ++row, --left;
  }
  void all() {
    while (left > 0) next_row();
  }
  bool is_gated() const {
    return left > 0 && out.finish == Finish::Gate && out.store == Store::BF16 && !linear.bias &&
           kBlockVecs == 2 && (block + 1) * 16 <= out.cols;
  }
  GatedRows gated() {
    char* to = static_cast<char*>(out.data) + (row * out.stride + block * 16) * 2;
    GatedRows rows{sums, to, out.stride * 2, left};
    left = 0;
    return rows;
  }
};

// Whether a tile's sums are the results, all of them, and nobody wants to see them.
DIPTYCH_INLINE bool is_plain(const Linear& linear, const Output& out, long block) {
  return !linear.bias && out.store == Store::F32 && out.finish != Finish::Gate && !out.notes &&
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

// How a layer's rows and inputs are cut, for tiles T. Chunks of rows are of nearly equal size: a short
// one would read all weights for few rows. Long rows are multiplied a slice at a time, so that the slice of
// a block stays in the first-level cache while the chunk's rows pass; their sums wait in memory.
template <class T>
struct Cut {
  long lda, block_bytes, blocks, tiles, chunk_tiles, chunks, slice;
  Cut(const Linear& linear, long count)
      : lda(row_bytes(T::kKind, linear.inputs)),
        block_bytes(diptych::block_bytes(T::kKind, linear.inputs)),
        blocks(blocks_of(linear.outputs)),
        tiles((count + T::kRows - 1) / T::kRows),
        slice(linear.inputs) {
    long most = max_of(1, min_of(tiles, kChunkBytes / (lda * T::kRows)));
    long wanted = max_of(1, (tiles + most - 1) / most);  // no rows are no chunks
    chunk_tiles = max_of(1, (tiles + wanted - 1) / wanted);
    chunks = (tiles + chunk_tiles - 1) / chunk_tiles;
    if (chunk_tiles > 2 && T::kSlice > 0 && 2 * slice > 3 * T::kSlice) slice = T::kSlice;
  }
};

// What one thread does of a linear layer.
template <class T>
class LinearPart {
 public:
  LinearPart(const Linear& linear, const Rows& rows, long count, const Output& out, char* notes)
      : linear_(linear), rows_(rows), count_(count), out_(out), cut_(linear, count),
        before_{linear, out, notes} {
    static thread_local ThreadMemory memory;
    if (cut_.slice < linear.inputs)
      waiting_ = memory.at_least(cut_.chunk_tiles * T::kRows * kStepBytes);
  }

  // Work is handed out as (chunk of rows, block of columns); the blocks of one chunk follow one
  // another so that the chunk's activations stay in cache.
  void run(const Crew& crew) {
    long units = cut_.chunks * cut_.blocks;
    Runs runs(crew, units);
    for (long unit = runs.next(), after; unit < units; unit = after) {
      after = runs.next();  // known early, so that its weights can be asked for
      multiply(unit / cut_.blocks, unit % cut_.blocks, after % cut_.blocks);
    }
    before_.all();
  }

 private:
  const char* weights_of(long block) const {
    return reinterpret_cast<const char*>(linear_.packed) + block * cut_.block_bytes;
  }

  void multiply(long chunk, long block, long after) {
    const char *weights = weights_of(block), *wanted = weights_of(after);
    long first = chunk * cut_.chunk_tiles, tiles = min_of(cut_.tiles - first, cut_.chunk_tiles);
    long slices = (linear_.inputs + cut_.slice - 1) / cut_.slice, jobs = slices * tiles;
    tile_.begin(weights, linear_.inputs);
    bool direct = T::kSlice > 0 && is_plain(linear_, out_, block);
    for (long i = 0; i < jobs; ++i) {
      long tile = i % tiles, slice = i / tiles, input = slice * cut_.slice;
      long step = steps_of(T::kKind, input), row = first_row<T>(first + tile, cut_.tiles, count_);
      int height = int(first_row<T>(first + tile + 1, cut_.tiles, count_) - row);
      const char* a = reinterpret_cast<const char*>(rows_.data) + row * cut_.lda + step * 4;
      long inputs = min_of(cut_.slice, linear_.inputs - input);
      Ahead ahead{wanted, cut_.block_bytes, i, jobs, count_ <= kFewRows};
      TileJob job{height, a, cut_.lda, weights + step * kStepBytes, inputs, {}, {}, ahead};
      Sums wait{slices > 1 ? waiting_ + tile * T::kRows * kStepBytes : nullptr};
      Sums place{sums_[turn_]};
      if (direct) place = place_of_results(row, block);
      if (slice > 0)
        job.from = wait;
      else if (direct && out_.finish == Finish::Add)
        job.from = place;
      job.to = slice + 1 < slices ? wait : place;
      run_beside(job, direct);
      if (!direct && slice + 1 == slices) keep(row, block, height);
    }
  }

  // What is left to write of the tile before is written beside the products of this one.
  DIPTYCH_INLINE void run_beside(const TileJob& job, bool direct) {
    if constexpr (T::kOverlaps) {
      if (direct && before_.left == 0) return tile_.run(job, [] {});
      if (before_.is_gated()) {
        GatedRows rows = before_.gated();
        tile_.run(job, [&] { rows.next_row(); });
        while (rows.left > 0) rows.next_row();
        return;
      }
    }
    tile_.run(job, [&] { before_.next_row(); });
  }

  Sums place_of_results(long row, long block) const {
    char* data = static_cast<char*>(out_.data);
    return {data + (row * out_.stride + block * kBlockCols) * 4, out_.stride * 4};
  }

  // A tile's sums are complete: they are written now, or beside the next tile.
  void keep(long row, long block, int height) {
    before_.all();
    before_.begin(sums_[turn_], row, block, height);
    if constexpr (T::kOverlaps)
      turn_ = 1 - turn_;
    else
      before_.all();
  }

  const Linear& linear_;
  const Rows& rows_;
  long count_;
  const Output& out_;
  Cut<T> cut_;
  T tile_;
  alignas(64) char sums_[1 + T::kOverlaps][T::kRows * kStepBytes];
  char* waiting_ = nullptr;  // sums of a chunk's rows between slices
  int turn_ = 0;
  Finished before_;
};

template <class T>
inline void linear_as(const Crew& crew, const Linear& linear, const Rows& rows, long count,
                      const Output& out) {
  char* notes = out.notes ? out.notes + crew.tid * count * kNoteBytes : nullptr;
  LinearPart<T>(linear, rows, count, out, notes).run(crew);
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
