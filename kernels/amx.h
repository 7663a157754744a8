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
    if (upper_ != 0) asm volatile("tilerelease" ::: "memory");
  }

  // `upper` and `lower` rows of inputs, `steps` 4-byte steps at a time.
  void shape(int upper, int lower, int steps) {
    if (upper == upper_ && lower == lower_ && steps == steps_) return;
    upper_ = upper, lower_ = lower, steps_ = steps;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } c;
    auto set = [&c](int tile, int rows, int bytes) {
      c.rows[tile] = uint8_t(rows);
      c.row_bytes[tile] = uint16_t(rows > 0 ? bytes : 0);
    };
    set(0, upper, 64), set(1, upper, 64), set(2, lower, 64), set(3, lower, 64);
    set(4, upper, steps * 4), set(5, lower, steps * 4);
    set(6, steps, 64), set(7, steps, 64);
    asm volatile("ldtilecfg %0" ::"m"(c) : "memory");
  }

 private:
  int upper_ = 0, lower_ = 0, steps_ = 0;
};

// Sums of 16 steps from `a` and `block` on; kLower: there are more than 16 rows. `meanwhile` is
// called twice, for work that the matrix unit need not wait for.
template <bool kLower, class F>
DIPTYCH_INLINE void add_tiles_bf16(const char* a, long lda, const char* block, F&& meanwhile) {
  DIPTYCH_TILE_LOAD(4, a, lda);
  DIPTYCH_TILE_LOAD(6, block, kStepBytes);
  DIPTYCH_TILE_DOT("tdpbf16ps", 0, 4, 6);
  meanwhile();
  DIPTYCH_TILE_LOAD(7, block + 64, kStepBytes);
  DIPTYCH_TILE_DOT("tdpbf16ps", 1, 4, 7);
  if constexpr (kLower) {
    DIPTYCH_TILE_LOAD(5, a + 16 * lda, lda);
    DIPTYCH_TILE_DOT("tdpbf16ps", 2, 5, 6);
    meanwhile();
    DIPTYCH_TILE_DOT("tdpbf16ps", 3, 5, 7);
  }
}

// One tile of results: out[row][0 … 31] (+)= a[row] * block, of bf16; strides in bytes. Rows of `a`
// are padded with zeros to 64 bytes.
struct MatrixTile {
  const char* a;
  long lda;
  const char* block;
  long steps;
  char* out;
  long out_stride;
  bool add;
};

template <bool kLower, class F>
DIPTYCH_INLINE void matrix_bf16_of(const MatrixTile& t, F&& meanwhile) {
  char* lower = t.out + 16 * t.out_stride;
  if (t.add) {
    DIPTYCH_TILE_LOAD(0, t.out, t.out_stride);
    DIPTYCH_TILE_LOAD(1, t.out + 64, t.out_stride);
    if constexpr (kLower) {
      DIPTYCH_TILE_LOAD(2, lower, t.out_stride);
      DIPTYCH_TILE_LOAD(3, lower + 64, t.out_stride);
    }
  } else {
    DIPTYCH_TILE_ZERO(0);
    DIPTYCH_TILE_ZERO(1);
    if constexpr (kLower) {
      DIPTYCH_TILE_ZERO(2);
      DIPTYCH_TILE_ZERO(3);
    }
  }
  long s = 0;
  for (; s + kTileSteps <= t.steps; s += kTileSteps)
    add_tiles_bf16<kLower>(t.a + s * 4, t.lda, t.block + s * kStepBytes, meanwhile);
  if (s < t.steps) {  // steps that are missing are zero: the next block's may be anything
    alignas(64) char rest[kTileSteps * kStepBytes] = {};
    memcpy(rest, t.block + s * kStepBytes, size_t((t.steps - s) * kStepBytes));
    add_tiles_bf16<kLower>(t.a + s * 4, t.lda, rest, meanwhile);
  }
  DIPTYCH_TILE_STORE(0, t.out, t.out_stride);
  DIPTYCH_TILE_STORE(1, t.out + 64, t.out_stride);
  if constexpr (kLower) {
    DIPTYCH_TILE_STORE(2, lower, t.out_stride);
    DIPTYCH_TILE_STORE(3, lower + 64, t.out_stride);
  }
}

template <class F>
DIPTYCH_INLINE void matrix_bf16(MatrixUnit& unit, int height, const MatrixTile& tile, F&& meanwhile) {
  int upper = height < 16 ? height : 16;
  unit.shape(upper, height - upper, kTileSteps);
  if (height > 16) return matrix_bf16_of<true>(tile, meanwhile);
  matrix_bf16_of<false>(tile, meanwhile);
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
#endif
