// The tiles of linear layers on the matrix unit (amx.h), in the form that linear.h asks for.
#pragma once

#include "amx.h"
#include "tile_grouped.h"

#if defined(DIPTYCH_AMX)
namespace diptych {
namespace DIPTYCH_TIER {

// Asks for the next block, evenly over the tiles that use this one, `passes` times in each.
struct LinesAhead {
  const char *next, *end;
  long each;  // lines of 64 bytes at a time

  LinesAhead(const Ahead& ahead, long passes) {
    long lines = (ahead.bytes / 64 + ahead.tiles - 1) / ahead.tiles;
    each = (lines + passes - 1) / passes;
    next = ahead.block + ahead.tile * lines * 64, end = next + lines * 64;
  }
  DIPTYCH_INLINE void ask() {
    if (next >= end) return;
    for (long i = 0; i < each; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// Asks for what comes kNearBytes behind what few rows use, `passes` times in a block.
struct LinesNear {
  const char *next, *then;
  long each, until;  // times, until it goes on at `then`

  LinesNear(const TileJob& job, long passes)
      : next(job.block + kNearBytes),
        then(job.ahead.block),
        each((job.ahead.bytes / 64 + passes - 1) / passes),
        until(max_of(1, (job.ahead.bytes - kNearBytes) / (each * 64) + 1)) {}
  DIPTYCH_INLINE void ask() {
    if (--until == 0) next = then;
    for (long i = 0; i < each; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

struct MatrixBF16 {
  static constexpr int kRows = kMatrixRows;
  static constexpr bool kFull = true, kOverlaps = true;
  static constexpr long kSlice = 12 * kTileSteps * 2;
  static constexpr Kind kKind = Kind::BF16;
  MatrixUnit unit;

  static void begin(const char*, long) {}

  // `meanwhile` is called now and then: what it does takes no time from the products. Inlined, as a job
  // kept in memory would be read behind the tile before's stores, which wait for its products.
  template <class F>
  DIPTYCH_INLINE void run(const TileJob& job, F&& meanwhile) {
    long steps = steps_of(kKind, job.inputs), passes = (steps + kTileSteps - 1) / kTileSteps * 2;
    MatrixTile tile{job.a, job.lda, job.block, steps, job.from, job.to};
    if (job.ahead.near) {
      LinesNear lines(job, passes);
      return multiply<false>(job.height, tile, lines, meanwhile);
    }
    LinesAhead lines(job.ahead, passes);
    multiply<true>(job.height, tile, lines, meanwhile);
  }

 private:
  template <bool kStream, class L, class F>
  DIPTYCH_INLINE void multiply(int height, const MatrixTile& tile, L& lines, F&& meanwhile) {
    matrix_bf16<kStream>(unit, height, tile, [&] {
      lines.ask();
      meanwhile();
    });
  }
};

// Of one group of an unpacked int4 block: 8 steps of weights, the scales of the columns in fp32 and
// their least values.
constexpr long kUnpacked = kGroupSteps * kStepBytes + 2 * kBlockCols * 4;

inline void unpack_block(const char* block, long groups, char* out) {
  for (long g = 0; g < groups; ++g, block += kInt4Bytes, out += kUnpacked) {
    for (long at = 0; at < Weights4::kSteps * kStepBytes; at += DIPTYCH_BYTES) {
      VU x = load_raw(block + at);  // the halves of each byte are two steps
      char* to = out + at / kStepBytes * 2 * kStepBytes + at % kStepBytes;
      store(to, (VF)(x & 0x0f0f0f0fu));
      store(to + kStepBytes, (VF)(x >> 4 & 0x0f0f0f0fu));
    }
    const char* numbers = block + Weights4::kSteps * kStepBytes;
    char* to = out + kGroupSteps * kStepBytes;
    for (long i = 0; i < 2 * kBlockCols; i += kLanes) store(to + i * 4, MemF16::get(numbers + i * 2));
  }
}

// What sums of one plane begin with: added to the bits of kRounder, an integer below 2^22 makes a
// float that much larger, so that no conversion is needed.
struct RounderTile {
  alignas(64) float values[256];
  constexpr RounderTile() : values() {
    for (float& value : values) value = kRounder;
  }
};
constexpr RounderTile kRounders;

// Weights that are -128 everywhere.
struct OffsetTile {
  alignas(64) uint32_t values[kGroupSteps * 16];
  constexpr OffsetTile() : values() {
    for (uint32_t& value : values) value = 0x80808080u;
  }
};
constexpr OffsetTile kOffsets;

// Integer sums of 16 rows and 16 columns of one group, for each plane of the inputs, in one of two
// sets of registers: 0 and 1, or 2 and 5. `plane`: bytes between planes. Weights of int8 count as value
// + 128: register 3 holds -128 everywhere, which takes that away again.
#define DIPTYCH_SUM_GROUP(sum, in)                          \
  do {                                                      \
    if constexpr (kPlanes == 1)                             \
      DIPTYCH_TILE_LOAD(sum, kRounders.values, kTileBytes); \
    else                                                    \
      DIPTYCH_TILE_ZERO(sum);                               \
    if constexpr (kInt4) {                                  \
      DIPTYCH_TILE_DOT("tdpbssd", sum, in, 6);              \
    } else {                                                \
      DIPTYCH_TILE_DOT("tdpbssd", sum, in, 3);              \
      DIPTYCH_TILE_DOT("tdpbsud", sum, in, 6);              \
    }                                                       \
  } while (0)
template <bool kInt4, int kSet, int kPlanes>
DIPTYCH_INLINE void multiply_group(const char* a, long lda, long plane, const char* weights) {
  DIPTYCH_TILE_LOAD(4, a, lda);
  DIPTYCH_TILE_LOAD(6, weights, kStepBytes);
  if constexpr (kSet == 0)
    DIPTYCH_SUM_GROUP(0, 4);
  else
    DIPTYCH_SUM_GROUP(2, 4);
  if constexpr (kPlanes == 1) return;
  DIPTYCH_TILE_LOAD(7, a + plane, lda);
  if constexpr (kSet == 0)
    DIPTYCH_SUM_GROUP(1, 7);
  else
    DIPTYCH_SUM_GROUP(5, 7);
}
#undef DIPTYCH_SUM_GROUP

constexpr long kSumBytes = 16 * kTileBytes;  // of one plane: [16 rows][16 columns]

template <int kSet, int kPlanes>
DIPTYCH_INLINE void keep_sums(char* sums) {
  if constexpr (kSet == 0) {
    DIPTYCH_TILE_STORE(0, sums, kTileBytes);
    if constexpr (kPlanes == 2) DIPTYCH_TILE_STORE(1, sums + kSumBytes, kTileBytes);
  } else {
    DIPTYCH_TILE_STORE(2, sums, kTileBytes);
    if constexpr (kPlanes == 2) DIPTYCH_TILE_STORE(5, sums + kSumBytes, kTileBytes);
  }
}

// Rows whose inputs and weights are rounded in groups: results are those of TileGrouped, bit by bit.
template <class W, int kPlanes>
struct MatrixGrouped {
  static constexpr int kRows = 16;
  static constexpr bool kFull = true, kOverlaps = false;
  static constexpr long kSlice = 0;
  static constexpr Kind kKind = TileGrouped<W, kPlanes>::kKind;
  // Bytes of a group of weights as they are multiplied, and of a number of a column behind them.
  static constexpr long kForm = W::kInt4 ? kUnpacked : kGroupBytes, kNumber = W::kInt4 ? 4 : 2;
  MatrixUnit unit;
  const char* weights = nullptr;

  void begin(const char* block, long inputs) {
    weights = block;
    if constexpr (W::kInt4) {
      static thread_local ThreadMemory memory;
      char* to = memory.at_least(groups_of(inputs) * kUnpacked);
      unpack_block(block, groups_of(inputs), to);
      weights = to;
    }
  }

  // A row's integer sums times `scale`, rounded once.
  static DIPTYCH_INLINE VF scaled_row(const char* sums, VF scale) {
    VI acc = (VI)load_raw(sums);
    if constexpr (kPlanes == 2) acc = (acc << 8) + (VI)load_raw(sums + kSumBytes);
    return scaled<kPlanes == 1>(acc, scale);
  }

  // total[row] += scaled sums of one group. `scales` and `offsets` are those of the first row;
  // where fewer rows than 16 exist, the last one is read again.
  template <bool kWhole>
  static DIPTYCH_INLINE void scale(VF* total, const char* sums, const char* scales,
                                   const char* offsets, long lda, int height, const char* numbers) {
    VF weight_scale, least = {};
    if constexpr (W::kInt4)
      weight_scale = load(numbers), least = load(numbers + kBlockCols * 4);
    else
      weight_scale = MemF16::get(numbers);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      long row = kWhole || r < height ? r : height - 1, at = row * lda;
      VF y = scaled_row(sums + row * kTileBytes, weight_scale);
      if constexpr (W::kInt4) total[r] += least * number_at<float>(offsets + at);
      total[r] += y * number_at<float>(scales + at);
    }
  }

  // 16 of the block's columns. Three things at a time, so that none waits: the products of a group,
  // the sums of the one before on their way to memory, and those before that being scaled.
  template <bool kWhole>
  static inline void half(int height, const char* a, long lda, long groups, const char* columns,
                          const char* numbers, char* out, LinesAhead& lines) {
    const char* scales = a + groups * kPlanes * kGroup;
    alignas(4096) char sums[2][kPlanes * kSumBytes];  // of one page: loads pass other stores
    VF total[kRows] = {};
    auto step = [&](long g, auto set) __attribute__((always_inline)) {
      constexpr int kSet = decltype(set)::value;
      if (g < groups) {
        lines.ask();
        multiply_group<W::kInt4, kSet, kPlanes>(a + g * kGroup, lda, groups * kGroup,
                                                columns + g * kForm);
      }
      if (g > 0 && g <= groups) keep_sums<1 - kSet, kPlanes>(sums[1 - kSet]);
      if (g > 1)
        scale<kWhole>(total, sums[kSet], scales + (g - 2) * 4, scales + (groups + g - 2) * 4, lda,
                      height, numbers + (g - 2) * kForm);
    };
    for (long g = 0; g < groups + 2; g += 2) {
      step(g, Height<0>{});
      if (g + 1 < groups + 2) step(g + 1, Height<1>{});
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      if (kWhole || r < height) store(out + r * kStepBytes, total[r]);
  }

  template <class F>
  void run(const TileJob& job, F&&) {
    int height = job.height;
    unit.shape_grouped(height);
    if constexpr (!W::kInt4) DIPTYCH_TILE_LOAD(3, kOffsets.values, kTileBytes);
    long groups = groups_of(job.inputs);
    LinesAhead lines(job.ahead, 2 * groups);
    const char* numbers = weights + kGroupSteps * kStepBytes;
    for (long at = 0; at < kStepBytes; at += kTileBytes) {
      const char *columns = weights + at, *scales = numbers + at / 4 * kNumber;
      if (height == kRows)
        half<true>(height, job.a, job.lda, groups, columns, scales, job.to.data + at, lines);
      else
        half<false>(height, job.a, job.lda, groups, columns, scales, job.to.data + at, lines);
    }
  }
};

}  // namespace DIPTYCH_TIER
}  // namespace diptych
#endif
