// Vectors of one tier: `kLanes` floats wide, written with GCC/Clang vector types; intrinsics
// only where the compiler cannot find the instruction itself.
//
// Everything lives in a namespace named after the tier, and no std:: template is used in tier
// code: the linker merges equal inline functions of all translation units and could otherwise
// keep the AVX-512 version for a CPU without it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "api.h"

#if defined(__AVX512F__)
#define DIPTYCH_BYTES 64
#elif defined(__AVX2__)
#define DIPTYCH_BYTES 32
#else
#define DIPTYCH_BYTES 16
#endif
#define DIPTYCH_INLINE inline __attribute__((always_inline))

namespace diptych {
namespace DIPTYCH_TIER {

#if defined(DIPTYCH_AMX)
constexpr bool kMatrixUnit = true;  // amx.h
#else
constexpr bool kMatrixUnit = false;
#endif

constexpr int kLanes = DIPTYCH_BYTES / 4;
typedef float VF __attribute__((vector_size(DIPTYCH_BYTES)));
typedef int32_t VI __attribute__((vector_size(DIPTYCH_BYTES)));
typedef uint32_t VU __attribute__((vector_size(DIPTYCH_BYTES)));
typedef uint16_t VH __attribute__((vector_size(DIPTYCH_BYTES / 2)));  // 16-bit elements
typedef VF VF_any __attribute__((aligned(1), may_alias));
typedef VU VU_any __attribute__((aligned(1), may_alias));
typedef VH VH_any __attribute__((aligned(1), may_alias));

DIPTYCH_INLINE long min_of(long a, long b) { return a < b ? a : b; }
DIPTYCH_INLINE long max_of(long a, long b) { return a > b ? a : b; }

DIPTYCH_INLINE VF splat(float x) { return x - VF{}; }
DIPTYCH_INLINE VF load(const void* p) { return *static_cast<const VF_any*>(p); }
DIPTYCH_INLINE void store(void* p, VF x) { *static_cast<VF_any*>(p) = x; }
DIPTYCH_INLINE float load_one(const void* p) {
  float x;
  memcpy(&x, p, 4);
  return x;
}
DIPTYCH_INLINE int32_t load_integer(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return x;
}
DIPTYCH_INLINE VU load_raw(const void* p) { return *static_cast<const VU_any*>(p); }
DIPTYCH_INLINE VF larger(VF a, VF b) { return a > b ? a : b; }  // b where either is NaN
DIPTYCH_INLINE VF absolute(VF x) { return (VF)((VU)x & 0x7fffffffu); }

DIPTYCH_INLINE VI lane_numbers() {
  VI n;
  for (int i = 0; i < kLanes; ++i) n[i] = i;
  return n;
}

DIPTYCH_INLINE float sum_lanes(VF x) {  // element i with i + half, half after half
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float s[kLanes];
  store(s, x);
  for (int w = kLanes / 2; w >= 1; w /= 2)
    for (int i = 0; i < w; ++i) s[i] += s[i + w];
  return s[0];
#endif
}

DIPTYCH_INLINE float max_lanes(VF x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float s[kLanes];
  store(s, x);
  for (int w = kLanes / 2; w >= 1; w /= 2)
    for (int i = 0; i < w; ++i) s[i] = s[i] > s[i + w] ? s[i] : s[i + w];
  return s[0];
#endif
}

// ---------------------------------------------------------------- conversions

DIPTYCH_INLINE float bf16_to_float(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

DIPTYCH_INLINE uint16_t float_to_bf16(float f) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

DIPTYCH_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = uint32_t(h & 0x7fff) << 13;
  float f;
  if ((h & 0x7c00) == 0x7c00) {
    uint32_t bits = sign | magnitude | 0x7f800000u;
    memcpy(&f, &bits, 4);
    return f;
  }
  memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;  // the exponents' biases differ by 112; also makes subnormals right
  uint32_t bits;
  memcpy(&bits, &f, 4);
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}

DIPTYCH_INLINE uint16_t float_to_half(float f) {  // to nearest even
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000u) {  // subnormal: let the adder of fp32 round at 2^-24
    float a;
    memcpy(&a, &magnitude, 4);
    a += 0.5f;
    memcpy(&magnitude, &a, 4);
    return uint16_t(sign | (magnitude - 0x3f000000u));
  }
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((magnitude - 0x38000000u) >> 13));
}

DIPTYCH_INLINE VF widen_bf16(VH h) {
#if defined(__AVX512F__)
  return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
  return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (VF)(__builtin_convertvector(h, VU) << 16);
#endif
}

DIPTYCH_INLINE VF widen_half(VH h) {
#if defined(__AVX512F__)
  return (VF)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (VF)_mm256_cvtph_ps((__m128i)h);
#else
  VF out;
  for (int i = 0; i < kLanes; ++i) out[i] = half_to_float(h[i]);
  return out;
#endif
}

DIPTYCH_INLINE VH narrow_bf16(VF x) {
#if defined(__AVX512BF16__)
  return (VH)_mm512_cvtneps_pbh((__m512)x);
#else
  VU bits = (VU)x;
  VU rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  VU nan = bits >> 16 | 0x40u;
  VU picked = x == x ? rounded : nan;
  return __builtin_convertvector(picked, VH);
#endif
}

DIPTYCH_INLINE VH narrow_half(VF x) {
#if defined(__AVX512F__)
  return (VH)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (VH)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  VH out;
  for (int i = 0; i < kLanes; ++i) out[i] = float_to_half(x[i]);
  return out;
#endif
}

// One element type in memory: vectors of kLanes floats in and out.
struct MemF32 {
  static constexpr Store kStore = Store::F32;
  static constexpr long kSize = 4, kTail = 0;
  static DIPTYCH_INLINE VF get(const char* p) { return load(p); }
  static DIPTYCH_INLINE void put(char* p, VF x) { store(p, x); }
};
struct MemBF16 {
  static constexpr Store kStore = Store::BF16;
  static constexpr long kSize = 2, kTail = 0;
  static DIPTYCH_INLINE VF get(const char* p) {
    return widen_bf16(*reinterpret_cast<const VH_any*>(p));
  }
  static DIPTYCH_INLINE void put(char* p, VF x) {
    *reinterpret_cast<VH_any*>(p) = narrow_bf16(x);
  }
};
struct MemF16 {
  static constexpr Store kStore = Store::F16;
  static constexpr long kSize = 2, kTail = 0;
  static DIPTYCH_INLINE VF get(const char* p) {
    return widen_half(*reinterpret_cast<const VH_any*>(p));
  }
  static DIPTYCH_INLINE void put(char* p, VF x) {
    *reinterpret_cast<VH_any*>(p) = narrow_half(x);
  }
};

// Integers of a pool's row, which ends with their scale; `rows.h` writes whole rows.
struct MemI8 {
  static constexpr Store kStore = Store::I8;
  static constexpr long kSize = 1, kTail = kScaleBytes;
  static DIPTYCH_INLINE VF get(const char* p) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (VF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    VF out;
    for (int i = 0; i < kLanes; ++i) out[i] = float(int8_t(p[i]));
    return out;
#endif
  }
};

// A pool's row of one head: its bytes, and what its elements are multiplied by.
template <class M>
DIPTYCH_INLINE long row_bytes_of(long dim) {
  return dim * M::kSize + M::kTail;
}
template <class M>
DIPTYCH_INLINE float row_scale(const char* row, long dim) {
  return M::kTail > 0 ? load_one(row + dim * M::kSize) : 1.0f;
}

// The first n < kLanes elements; the others read as zero and are not written.
template <class M>
DIPTYCH_INLINE VF get_part(const char* p, long n) {
  char buffer[kLanes * 4] = {};
  memcpy(buffer, p, size_t(n * M::kSize));
  return M::get(buffer);
}
template <class M>
DIPTYCH_INLINE void put_part(char* p, VF x, long n) {
  char buffer[kLanes * 4];
  M::put(buffer, x);
  memcpy(p, buffer, size_t(n * M::kSize));
}

// Call f with the memory type of `s`, which is none of a pool's only.
template <class F>
DIPTYCH_INLINE void with_store(Store s, F&& f) {
  if (s == Store::F32) f(MemF32{});
  if (s == Store::BF16) f(MemBF16{});
  if (s == Store::F16) f(MemF16{});
}

// ---------------------------------------------------------------- exponential

constexpr float kLog2e = 1.44269504f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// 2^f for f in [-0.5, 0.5]: to 2^-22 relative (Cephes exp2f), or to 2^-13, enough for bf16.
template <bool kRough>
DIPTYCH_INLINE VF exp2_fraction(VF f) {
  if constexpr (kRough) {
    VF p = f * 5.5171669e-2f + 2.4261112e-1f;
    p = p * f + 6.9326099e-1f;
    return p * f + 9.9992807e-1f;
  }
  VF p = f * 1.5353362e-4f + 1.3398874e-3f;
  p = p * f + 9.6184374e-3f;
  p = p * f + 5.5503325e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314720e-1f;
  return p * f + 1.0f;
}

// 2^x; 0 for -infinity and below about 2^-126, infinite above 2^128, NaN stays NaN.
DIPTYCH_INLINE VF exp2_of(VF x) {
#if defined(__AVX512F__)
  __m512 y = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // NaN: the second operand
  __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (VF)_mm512_scalef_ps((__m512)exp2_fraction<false>((VF)(y - n)), n);
#else
  VF low = x < -126.5f ? splat(-126.5f) : x;
  VF y = low > 127.9f ? splat(127.9f) : low;
  VF shifted = y + kRounder;
  VI n = (VI)shifted - (VI)splat(kRounder);
  VF scale = (VF)((n + 127) << 23);
  VF result = exp2_fraction<false>(y - (shifted - kRounder)) * scale;
  return x < -126.0f ? VF{} : result;
#endif
}

// 2^x to 2^-13 for x below 127, with few instructions; 2^-126 for what is smaller, NaN stays.
DIPTYCH_INLINE VF exp2_rough(VF x) {
  VF y = splat(-126.0f) > x ? splat(-126.0f) : x;
  VF whole = y + kRounder;
  VF fraction = y - (whole - kRounder);
  return (VF)((VI)exp2_fraction<true>(fraction) + ((VI)whole << 23));
}

DIPTYCH_INLINE VF silu(VF x) { return x / (1.0f + exp2_of(x * -kLog2e)); }

DIPTYCH_INLINE VF tanh_of(VF x) {
  VF t = exp2_of(absolute(x) * (-2.0f * kLog2e));
  VF y = (1.0f - t) / (1.0f + t);
  return (VF)((VU)y | ((VU)x & 0x80000000u));
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
