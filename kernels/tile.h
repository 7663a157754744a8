// The one inner loop of all matrix products: a tile of up to kTileRows rows times one packed
// block of 32 columns. A row's sum runs over its steps in order whatever the tile's height, so
// a result never depends on which other rows are in the batch.
#pragma once

#include <stdlib.h>

#include "simd.h"

namespace diptych {
namespace DIPTYCH_TIER {

// Memory of one thread, kept between calls.
class ThreadMemory {
 public:
  ThreadMemory() = default;
  ThreadMemory(const ThreadMemory&) = delete;
  ThreadMemory& operator=(const ThreadMemory&) = delete;
  ~ThreadMemory() { free(data_); }
  char* at_least(long bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = (bytes + 63) / 64 * 64;
      data_ = static_cast<char*>(aligned_alloc(64, size_t(size_)));
      if (!data_) abort();  // some tens of kilobytes
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  long size_ = 0;
};

// Where the sums of a tile's rows lie, 32 of fp32 each; `stride` in bytes.
struct Sums {
  char* data = nullptr;
  long stride = kStepBytes;
};

constexpr int kBlockVecs = int(kStepBytes) / DIPTYCH_BYTES;  // vectors in one step of a block

// Each Dot adds, per column, the product of one step (4 bytes) of inputs and weights.
struct DotF32 {
  static constexpr Kind kKind = Kind::F32;
  typedef VF Acc;
  typedef VF In;
  static DIPTYCH_INLINE In spread(const char* a) {
    float x;
    memcpy(&x, a, 4);
    return splat(x);
  }
  static DIPTYCH_INLINE Acc add(Acc c, In a, VU b) { return c + a * (VF)b; }
};

struct DotBF16 {
  static constexpr Kind kKind = Kind::BF16;
  typedef VF Acc;
#if defined(__AVX512BF16__)
  typedef VU In;
  static DIPTYCH_INLINE In spread(const char* a) {
    int32_t x;
    memcpy(&x, a, 4);
    return (VU)_mm512_set1_epi32(x);
  }
  static DIPTYCH_INLINE Acc add(Acc c, In a, VU b) {
    return (VF)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
#else
  struct In {
    float even, odd;
  };
  static DIPTYCH_INLINE In spread(const char* a) {
    uint16_t x[2];
    memcpy(x, a, 4);
    return {bf16_to_float(x[0]), bf16_to_float(x[1])};
  }
  static DIPTYCH_INLINE Acc add(Acc c, In a, VU b) {
    c = c + splat(a.even) * (VF)(b << 16);
    return c + splat(a.odd) * (VF)(b & 0xffff0000u);
  }
#endif
};

struct DotI8 {  // inputs int8, weights uint8
  typedef VI Acc;
#if defined(__AVX512VNNI__)
  typedef VU In;
  static DIPTYCH_INLINE In spread(const char* a) {
    int32_t x;
    memcpy(&x, a, 4);
    return (VU)_mm512_set1_epi32(x);
  }
  static DIPTYCH_INLINE Acc add(Acc c, In a, VU b) {
    return (VI)_mm512_dpbusd_epi32((__m512i)c, (__m512i)b, (__m512i)a);
  }
#elif defined(__SSE2__)
  struct In {  // pairs of 16-bit inputs: (0, 2) and (1, 3)
    uint32_t even, odd;
  };
  static DIPTYCH_INLINE In spread(const char* a) {
    int8_t x[4];
    memcpy(x, a, 4);
    return {uint16_t(int16_t(x[0])) | uint32_t(uint16_t(int16_t(x[2]))) << 16,
            uint16_t(int16_t(x[1])) | uint32_t(uint16_t(int16_t(x[3]))) << 16};
  }
  static DIPTYCH_INLINE VI pairs(VU b, uint32_t a) {
    VU in = VU{} + a;
#if defined(__AVX2__)
    return (VI)_mm256_madd_epi16((__m256i)b, (__m256i)in);
#else
    return (VI)_mm_madd_epi16((__m128i)b, (__m128i)in);
#endif
  }
  static DIPTYCH_INLINE Acc add(Acc c, In a, VU b) {
    return c + pairs(b & 0x00ff00ffu, a.even) + pairs(b >> 8 & 0x00ff00ffu, a.odd);
  }
#else
  struct In {
    int32_t x[4];
  };
  static DIPTYCH_INLINE In spread(const char* a) {
    int8_t x[4];
    memcpy(x, a, 4);
    return {{x[0], x[1], x[2], x[3]}};
  }
  static DIPTYCH_INLINE Acc add(Acc c, In a, VU b) {
    for (int i = 0; i < 4; ++i) c += a.x[i] * (VI)(b >> 8 * i & 0xffu);
    return c;
  }
#endif
};

#if defined(__AVX512F__)
constexpr int kTileRows = 14;  // 14 * 2 accumulators + 2 weights of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 1;
#endif

// out[row][0 … 31] (+)= a[row] * block. `lda` in bytes; `out` rows are `ldo` 4-byte elements
// apart. With `fade` the old value counts, multiplied by fade[row].
// With kAhead, memory of the block's size at `ahead` is asked for meanwhile.
template <class D, int R, bool kAhead>
DIPTYCH_INLINE void tile(const char* a, long lda, const char* block, long steps, char* out,
                         long ldo, const float* fade, const char* ahead) {
  typedef typename D::Acc Acc;
  typedef Acc Acc_any __attribute__((aligned(1), may_alias));
  Acc acc[R][kBlockVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v) {
      acc[r][v] = Acc{};
      if (fade) acc[r][v] = load(out + (r * ldo + v * kLanes) * 4) * fade[r];
    }
  for (long s = 0; s < steps; ++s) {
    if constexpr (kAhead) {
      __builtin_prefetch(ahead + s * kStepBytes, 0, 2);
      __builtin_prefetch(ahead + s * kStepBytes + 64, 0, 2);
    }
    VU b[kBlockVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v) b[v] = load_raw(block + s * kStepBytes + v * DIPTYCH_BYTES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      typename D::In in = D::spread(a + r * lda + s * 4);
#pragma GCC unroll 16
      for (int v = 0; v < kBlockVecs; ++v) acc[r][v] = D::add(acc[r][v], in, b[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v)
      *reinterpret_cast<Acc_any*>(out + (r * ldo + v * kLanes) * 4) = acc[r][v];
}

template <int R>
struct Height {
  static constexpr int value = R;
};

// f with a height known only at run time, 1 … kMost; f is compiled for no other.
template <int kMost = kTileRows, class F>
DIPTYCH_INLINE void with_height(int height, F&& f) {
#define DIPTYCH_HEIGHT(R)                            \
  case R:                                            \
    if constexpr (R <= kMost) return f(Height<R>{}); \
    return;
  switch (height) {
    DIPTYCH_HEIGHT(1)
#if defined(__AVX2__)
    DIPTYCH_HEIGHT(2)
    DIPTYCH_HEIGHT(3)
#endif
#if defined(__AVX512F__)
    DIPTYCH_HEIGHT(4)
    DIPTYCH_HEIGHT(5)
    DIPTYCH_HEIGHT(6)
    DIPTYCH_HEIGHT(7)
    DIPTYCH_HEIGHT(8)
    DIPTYCH_HEIGHT(9)
    DIPTYCH_HEIGHT(10)
    DIPTYCH_HEIGHT(11)
    DIPTYCH_HEIGHT(12)
    DIPTYCH_HEIGHT(13)
    DIPTYCH_HEIGHT(14)
#endif
  }
#undef DIPTYCH_HEIGHT
}

template <class D, bool kAhead = false>
inline void tile_of(int height, const char* a, long lda, const char* block, long steps, char* out,
                    long ldo, const float* fade, const char* ahead = nullptr) {
  with_height(height, [&](auto rows) {
    tile<D, decltype(rows)::value, kAhead>(a, lda, block, steps, out, ldo, fade, ahead);
  });
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
