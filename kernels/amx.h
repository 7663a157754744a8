// The matrix unit of newer Intel CPUs (AMX): registers that are tiles of up to 16 rows of 64 bytes.
// A packed block (api.h) already is what it wants: 16 of its 4-byte steps, of 16 columns, are a tile.
//
// The instructions are written out, so that any compiler will do whose assembler knows them.
#pragma once

#include "tile.h"

#if defined(DIPTYCH_AMX)
namespace diptych {
namespace DIPTYCH_TIER {

// Registers 0 … 3 are sums of (upper, lower rows) x (left, right columns), 4 and 5 inputs of the
// upper and lower rows, 6 and 7 weights of the left and right columns.
#define DIPTYCH_TILE_LOAD(N, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #N ::"r"(p), "r"(long(stride)) : "memory")
// What is not to stay in the first-level cache: it would drive out what is read again.
#define DIPTYCH_TILE_STREAM(N, p, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #N ::"r"(p), "r"(long(stride)) : "memory")
#define DIPTYCH_TILE_STORE(N, p, stride) \
  asm volatile("tilestored %%tmm" #N ", (%0,%1,1)" ::"r"(p), "r"(long(stride)) : "memory")
#define DIPTYCH_TILE_ZERO(N) asm volatile("tilezero %%tmm" #N ::: "memory")
#define DIPTYCH_TILE_DOT(op, sum, in, weights) \
  asm volatile(op " %%tmm" #weights ", %%tmm" #in ", %%tmm" #sum ::: "memory")

constexpr int kMatrixRows = 32;   // of inputs at a time: two tiles
constexpr long kTileSteps = 16;   // of 4 bytes in a tile's row
constexpr long kTileBytes = 64;   // of one row of a tile

// The shapes of this thread's registers, kept while an object lives. Torch's own kernels set theirs
// whenever they run, so every call sets ours anew.
class MatrixUnit {
 public:
  MatrixUnit() = default;
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
  ~MatrixUnit() {
    if (rows_[0] != 0) asm volatile("tilerelease" ::: "memory");
  }

  // Registers as above: `upper` and `lower` rows of inputs, 16 4-byte steps at a time.
  void shape(int upper, int lower) {
    if (upper == rows_[0] && lower == rows_[1]) return;
    rows_[0] = upper, rows_[1] = lower;
    Shape shape;
    shape.set(0, upper, 64), shape.set(1, upper, 64), shape.set(4, upper, 64);
    shape.set(2, lower, 64), shape.set(3, lower, 64), shape.set(5, lower, 64);
    shape.set(6, 16, 64), shape.set(7, 16, 64);
    shape.load();
  }
  // For groups of 32 bytes: 0, 1, 2 and 5 are sums of `rows`, 4 and 7 inputs, 3 and 6 weights.
  void shape_grouped(int rows) {
    if (rows == rows_[0] && rows_[1] < 0) return;
    rows_[0] = rows, rows_[1] = -1;
    Shape shape;
    shape.set(0, rows, 64), shape.set(1, rows, 64), shape.set(2, rows, 64), shape.set(5, rows, 64);
    shape.set(4, rows, 32), shape.set(7, rows, 32);
    shape.set(3, 8, 64), shape.set(6, 8, 64);
    shape.load();
  }

 private:
  struct alignas(64) Shape {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int count, int bytes) {
      rows[tile] = uint8_t(count);
      row_bytes[tile] = uint16_t(count > 0 ? bytes : 0);
    }
    void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
  };
  int rows_[2] = {0, 0};
};

// Sums of 16 steps from `a` and `block` on; kLower: there are more than 16 rows; kStream: each row
// meets so many blocks that it is not to stay in the first-level cache, but the block is. `meanwhile`
// is called twice, for work that the matrix unit need not wait for.
template <bool kLower, bool kStream, class F>
DIPTYCH_INLINE void add_tiles_bf16(const char* a, long lda, const char* block, F&& meanwhile) {
  if constexpr (kStream)
    DIPTYCH_TILE_STREAM(4, a, lda);
  else
    DIPTYCH_TILE_LOAD(4, a, lda);
  DIPTYCH_TILE_LOAD(6, block, kStepBytes);
  DIPTYCH_TILE_DOT("tdpbf16ps", 0, 4, 6);
  meanwhile();
  DIPTYCH_TILE_LOAD(7, block + 64, kStepBytes);
  DIPTYCH_TILE_DOT("tdpbf16ps", 1, 4, 7);
  if constexpr (kLower) {
    if constexpr (kStream)
      DIPTYCH_TILE_STREAM(5, a + 16 * lda, lda);
    else
      DIPTYCH_TILE_LOAD(5, a + 16 * lda, lda);
    DIPTYCH_TILE_DOT("tdpbf16ps", 2, 5, 6);
    meanwhile();
    DIPTYCH_TILE_DOT("tdpbf16ps", 3, 5, 7);
  }
}

// One tile of results: to[row][0 … 31] = from[row] + a[row] * block, of bf16; without `from.data`
// sums begin at 0. Rows of `a` are padded with zeros to 64 bytes.
struct MatrixTile {
  const char* a;
  long lda;
  const char* block;
  long steps;
  Sums from, to;
};

template <bool kLower>
DIPTYCH_INLINE void load_sums(const Sums& from) {
  if (!from.data) {
    DIPTYCH_TILE_ZERO(0);
    DIPTYCH_TILE_ZERO(1);
    if constexpr (kLower) {
      DIPTYCH_TILE_ZERO(2);
      DIPTYCH_TILE_ZERO(3);
    }
    return;
  }
  DIPTYCH_TILE_LOAD(0, from.data, from.stride);
  DIPTYCH_TILE_LOAD(1, from.data + 64, from.stride);
  if constexpr (kLower) {
    const char* lower = from.data + 16 * from.stride;
    DIPTYCH_TILE_LOAD(2, lower, from.stride);
    DIPTYCH_TILE_LOAD(3, lower + 64, from.stride);
  }
}

template <bool kLower>
DIPTYCH_INLINE void store_sums(const Sums& to) {
  DIPTYCH_TILE_STORE(0, to.data, to.stride);
  DIPTYCH_TILE_STORE(1, to.data + 64, to.stride);
  if constexpr (kLower) {
    char* lower = to.data + 16 * to.stride;
    DIPTYCH_TILE_STORE(2, lower, to.stride);
    DIPTYCH_TILE_STORE(3, lower + 64, to.stride);
  }
}

template <bool kLower, bool kStream, class F>
DIPTYCH_INLINE void matrix_bf16_of(const MatrixTile& t, F&& meanwhile) {
  load_sums<kLower>(t.from);
  long s = 0;
  for (; s + kTileSteps <= t.steps; s += kTileSteps)
    add_tiles_bf16<kLower, kStream>(t.a + s * 4, t.lda, t.block + s * kStepBytes, meanwhile);
  if (s < t.steps) {  // steps that are missing are zero: the next block's may be anything
    alignas(64) char rest[kTileSteps * kStepBytes] = {};
    memcpy(rest, t.block + s * kStepBytes, size_t((t.steps - s) * kStepBytes));
    add_tiles_bf16<kLower, kStream>(t.a + s * 4, t.lda, rest, meanwhile);
  }
  store_sums<kLower>(t.to);
}

template <bool kStream, class F>
DIPTYCH_INLINE void matrix_bf16(MatrixUnit& unit, int height, const MatrixTile& tile, F&& meanwhile) {
  int upper = height < 16 ? height : 16;
  unit.shape(upper, height - upper);
  if (height > 16) return matrix_bf16_of<true, kStream>(tile, meanwhile);
  matrix_bf16_of<false, kStream>(tile, meanwhile);
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
#endif
