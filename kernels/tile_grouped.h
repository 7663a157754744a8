// The tile of linear layers whose inputs and weights are rounded in groups, int8 and int4 (layouts
// in api.h): an integer sum per group of inputs, which the scales turn into fp32. Like every tile, a
// row's sum takes the groups in order.
#pragma once

#include "tile.h"

namespace diptych {
namespace DIPTYCH_TIER {

#if defined(__AVX512F__)
constexpr int kGroupedRows = 6;  // 6 * 2 integer sums, 6 * 2 of fp32, weights and scales
#else
constexpr int kGroupedRows = kTileRows;
#endif

// acc += inputs of one step * weights.
template <int R>
DIPTYCH_INLINE void add_step(VI (*acc)[kBlockVecs], const char* a, long lda, const VU* b) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    DotI8::In in = DotI8::spread(a + r * lda);
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v) acc[r][v] = DotI8::add(acc[r][v], in, b[v]);
  }
}

// Weights + 128 in bytes; what the 128 adds is known per row and group.
struct Weights8 {
  static constexpr long kBytes = kGroupBytes;
  static constexpr long kSteps = kGroupSteps;  // of kStepBytes
  static constexpr bool kInt4 = false;

  template <int R>
  static DIPTYCH_INLINE void add(VI (*acc)[kBlockVecs], const char* a, long lda,
                                 const char* group) {
#pragma GCC unroll 2
    for (long s = 0; s < kSteps; ++s) {
      VU b[kBlockVecs];
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v)
        b[v] = load_raw(group + s * kStepBytes + v * DIPTYCH_BYTES);
      add_step<R>(acc, a + s * 4, lda, b);
    }
  }
};

// Two steps in the halves of each byte; the least values come on top per row and group.
struct Weights4 {
  static constexpr long kBytes = kInt4Bytes;
  static constexpr long kSteps = kGroupSteps / 2;
  static constexpr bool kInt4 = true;

  template <int R>
  static DIPTYCH_INLINE void add(VI (*acc)[kBlockVecs], const char* a, long lda,
                                 const char* group) {
#pragma GCC unroll 2
    for (long s = 0; s < kSteps; ++s) {
      VU even[kBlockVecs], odd[kBlockVecs];
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v) {
        VU both = load_raw(group + s * kStepBytes + v * DIPTYCH_BYTES);
        even[v] = both & 0x0f0f0f0fu;
        odd[v] = both >> 4 & 0x0f0f0f0fu;
      }
      add_step<R>(acc, a + s * 8, lda, even);
      add_step<R>(acc, a + s * 8 + 4, lda, odd);
    }
  }
};

template <class T>
DIPTYCH_INLINE T number_at(const char* p) {
  T x;
  memcpy(&x, p, 4);
  return x;
}

// Where there are multiply-adds of 512 bits, sums of one plane begin with the bits of kRounder: added to
// them, an integer below 2^22 makes a float that much larger, which no conversion has to make.
#if defined(__AVX512F__)
constexpr bool kBiasedSums = true;
#else
constexpr bool kBiasedSums = false;
#endif

// Integer sums times `scale`, rounded once. Of biased ones the bias is taken away in the same step:
// scales of weights have 11 bits, so its product is exact.
template <bool kBiased>
DIPTYCH_INLINE VF scaled(VI sums, VF scale) {
#if defined(__AVX512F__)
  if constexpr (kBiased)
    return (VF)_mm512_fmsub_ps((__m512)sums, (__m512)scale, (__m512)(scale * kRounder));
#endif
  return __builtin_convertvector(sums, VF) * scale;
}

// What is asked for meanwhile: with every group, `lines` more lines at `next`; group `turn` goes on at
// `then`.
struct Asked {
  const char* next;
  long lines, turn;
  const char* then;
};

// out[row][0 … 31] = a[row] * block.
template <class W, int kPlanes, int R>
DIPTYCH_INLINE void tile_grouped(const char* a, long lda, const char* block, long groups,
                                 char* out, Asked asked) {
  const char* scales = a + groups * kPlanes * kGroup;
  const char* offsets = scales + groups * 4;
  constexpr bool kKeep = DIPTYCH_BYTES == 64;  // sums wait in registers, else in memory
  constexpr bool kBiased = kBiasedSums && kPlanes == 1;
  VF sums[kKeep ? R : 1][kBlockVecs] = {};
  if constexpr (!kKeep) memset(out, 0, R * kStepBytes);
  for (long g = 0; g < groups; ++g, block += W::kBytes) {
    if (g == asked.turn) asked.next = asked.then;
    for (long i = 0; i < asked.lines; ++i, asked.next += 64) __builtin_prefetch(asked.next, 0, 2);
    VI acc[R][kBlockVecs];
    // What int8 begins with: with two planes, only the sum of both knows the offset.
    auto offset_of = [&](int r) {
      return W::kInt4 ? 0 : number_at<int32_t>(offsets + r * lda + g * 4);
    };
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v)
        acc[r][v] = (kBiased ? (VI)splat(kRounder) : VI{}) + (kPlanes == 1 ? offset_of(r) : 0);
    W::template add<R>(acc, a + g * kGroup, lda, block);
    if constexpr (kPlanes == 2) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kBlockVecs; ++v) acc[r][v] = (acc[r][v] << 8) + offset_of(r);
      W::template add<R>(acc, a + (groups + g) * kGroup, lda, block);
    }
    const char* numbers = block + W::kSteps * kStepBytes;
    VF weight_scale[kBlockVecs], least[kBlockVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v) {
      weight_scale[v] = MemF16::get(numbers + v * kLanes * 2);
      if constexpr (W::kInt4) least[v] = MemF16::get(numbers + kBlockCols * 2 + v * kLanes * 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float scale = number_at<float>(scales + r * lda + g * 4);
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v) {
        VF y = scaled<kBiased>(acc[r][v], weight_scale[v]);
        char* to = out + r * kStepBytes + v * DIPTYCH_BYTES;
        VF sum = kKeep ? sums[kKeep ? r : 0][v] : load(to);
        if constexpr (W::kInt4) sum += least[v] * number_at<float>(offsets + r * lda + g * 4);
        sum += y * scale;
        if constexpr (kKeep)
          sums[r][v] = sum;
        else
          store(to, sum);
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

// The next block, to be asked for while `tiles` tiles use this one; `tile` is the current one. Few
// rows run as fast as memory: they ask for what comes just behind what they use (`near`).
struct Ahead {
  const char* block;
  long bytes;  // of it
  long tile, tiles;
  bool near;
};

// How far ahead few rows ask. Where it is 0, the CPU's own prefetch does best undisturbed; Intel's
// reads 30 GB/s on two cores, and 42 where somebody asks.
constexpr long kNearBytes = kMatrixUnit ? 8 << 10 : 0;

// One tile of results, as fp32: `height` rows of inputs times a block. Tiles with a kSlice write where
// results belong, add to what is in `from`, and can do their inputs in slices of so many.
struct TileJob {
  int height;
  const char* a;
  long lda;
  const char* block;
  long inputs;
  Sums from, to;
  Ahead ahead;
};

template <class W, int kPlanes>
struct TileGrouped {
  static constexpr int kRows = kGroupedRows;
  static constexpr bool kFull = false, kOverlaps = false;
  static constexpr long kSlice = 0;
  static constexpr Kind kKind = W::kInt4 ? kPlanes == 2 ? Kind::I4A16 : Kind::I4
                                         : kPlanes == 2 ? Kind::I8A16 : Kind::I8;
  static void begin(const char*, long) {}
  template <class F>
  static void run(const TileJob& job, F&&) {
    long groups = groups_of(job.inputs);
    Asked asked = job.ahead.near ? near(job, groups) : spread(job, groups);
    with_height<kRows>(job.height, [&](auto rows) {
      tile_grouped<W, kPlanes, decltype(rows)::value>(job.a, job.lda, job.block, groups, job.to.data,
                                                      asked);
    });
  }

 private:
  // Evenly over the tiles: at 16 rows both memory and arithmetic are busy all the time.
  static Asked spread(const TileJob& job, long groups) {
    long lines = (W::kBytes / 64 + job.ahead.tiles - 1) / job.ahead.tiles;
    return {job.ahead.block + job.ahead.tile * groups * lines * 64, lines, -1, nullptr};
  }
  static Asked near(const TileJob& job, long groups) {
    if (kNearBytes == 0 || job.ahead.tile > 0) return {job.block, 0, -1, nullptr};
    long distance = min_of(groups, kNearBytes / W::kBytes);
    return {job.block + distance * W::kBytes, (W::kBytes + 63) / 64, groups - distance,
            job.ahead.block};
  }
};

template <class D>
struct TileFloat {
  static constexpr int kRows = kTileRows;
  static constexpr bool kFull = false, kOverlaps = false;
  static constexpr long kSlice = 0;
  static constexpr Kind kKind = D::kKind;
  static void begin(const char*, long) {}
  template <class F>
  static void run(const TileJob& job, F&&) {
    const Ahead& ahead = job.ahead;
    bool last = !ahead.near && ahead.tile == ahead.tiles - 1;
    tile_of<D, true>(job.height, job.a, job.lda, job.block, steps_of(kKind, job.inputs), job.to.data,
                     kBlockCols, nullptr, last ? ahead.block : job.block + 2048);
  }
};

}  // namespace DIPTYCH_TIER
}  // namespace diptych
