// Decode attention over int8 pools: what differs from that over floats. Integers are multiplied as
// integers, and each sum meets its scale once.
#pragma once

#include "attn_sizes.h"
#include "pack.h"
#include "rows.h"

namespace diptych {
namespace DIPTYCH_TIER {

// Blocks lie anywhere in memory and the CPU foresees nothing across them: while one row is
// worked on, the row that comes kLanes keys later is asked for.
DIPTYCH_INLINE void prefetch_row(const char* row, long bytes) {
  for (long i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

#if defined(__AVX512F__)

// A query is two planes of signed bytes, 256 * high + low, each round_up(dim, 64) long, and at its
// end: fp32 scale, then -128 * (sum of a plane's values) for both. Keys count as value + 128, as
// the CPU's product of bytes wants one unsigned factor.
struct IntegerKeys {
  typedef MemI8 Mem;
  static constexpr bool kBytes = true;
  static constexpr int kMost = 127 * 256;
  static DIPTYCH_INLINE void write(VI q, long d, long dim, char* out, VI sums[2]) {
    VI high = (q + 128) >> 8, low = q - (high << 8);
    store_bytes_of(high, out + d);
    store_bytes_of(low, out + round_up(dim, 64) + d);
    sums[0] += high;
    sums[1] += low;
  }
};

// scores[g * ld + t] = q[g] . key t for up to 16 keys, which are transposed for all heads at once;
// what is missing scores 0. The next `ahead` keys are asked for.
template <int G>
DIPTYCH_INLINE void dot_bytes(const char* k, const long* offsets, long count, long ahead, long dim,
                              const char* q, long q_stride, float* scores, long ld) {
  long bytes = row_bytes_of<MemI8>(dim), plane = round_up(dim, 64);
  float scales[kLanes] = {};
  for (long i = 0; i < count; ++i) {
    if (i < ahead) prefetch_row(k + offsets[i + kLanes] * bytes, bytes);
    scales[i] = row_scale<MemI8>(k + offsets[i] * bytes, dim);
  }
  __m512i high[G], low[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    const char* tail = q + (g + 1) * q_stride - kQueryTail;
    high[g] = _mm512_set1_epi32(load_integer(tail + 4));
    low[g] = _mm512_set1_epi32(load_integer(tail + 8));
  }
  for (long d = 0; d < dim; d += 64) {
    __mmask64 mask = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
    __m512i r[16];
#pragma GCC unroll 16
    for (long i = 0; i < 16; ++i)  // a key too many meets a scale of 0
      r[i] = _mm512_maskz_loadu_epi8(mask, k + offsets[min_of(i, count - 1)] * bytes + d);
    transpose16(r);
#pragma GCC unroll 16
    for (int s = 0; s < 16; ++s) {
      __m512i keys = _mm512_xor_si512(r[s], _mm512_set1_epi32(int(0x80808080u)));
      const char* at = q + d + 4 * s;
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g, at += q_stride) {
        high[g] = _mm512_dpbusd_epi32(high[g], keys, _mm512_set1_epi32(load_integer(at)));
        low[g] = _mm512_dpbusd_epi32(low[g], keys, _mm512_set1_epi32(load_integer(at + plane)));
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    VF dots = __builtin_convertvector((VI)high[g], VF) * 256.0f +
              __builtin_convertvector((VI)low[g], VF);
    float scale = load_one(q + (g + 1) * q_stride - kQueryTail);
    store(scores + g * ld, dots * (load(scales) * scale));
  }
}

// What the values of a unit's keys are multiplied with: weights times their rows' scales as 15-bit
// integers, and per head what the sums of those mean.
template <int G>
struct IntegerWeights {
  alignas(64) int16_t pairs[G][kPartition];
  float factors[G];

  // `weights` are zero from `count` on to a whole vector.
  IntegerWeights(const char* v, const long* offsets, long count, long dim, const float* weights,
                 long ld) {
    constexpr int kMost = 32767;
    long bytes = row_bytes_of<MemI8>(dim);
    float scales[kPartition];
    for (long t = 0; t < count; ++t) scales[t] = row_scale<MemI8>(v + offsets[t] * bytes, dim);
    for (long t = count; t % kLanes != 0; ++t) scales[t] = 0.0f;
    for (int g = 0; g < G; ++g, weights += ld) {
      VU largest = {};
      for (long t = 0; t < count; t += kLanes) {
        VU size = (VU)absolute(load(weights + t) * load(scales + t));
        largest = size > largest ? size : largest;
      }
      Range range(max_integers(largest), kMost);
      for (long t = 0; t < count; t += kLanes) {
        VI whole = range.rounded(load(weights + t) * load(scales + t), kMost);
        VH narrow = __builtin_convertvector(whole, VH);
        memcpy(pairs[g] + t, &narrow, sizeof narrow);
      }
      factors[g] = range.scale;
    }
  }
};

// out[g][0 … dim) = sum over `count` keys of weights[g][t] * V row t. Keys are added in pairs; 256 of
// them fit a sum. Of the row that comes kLanes keys later `ahead` bytes are asked for.
template <int G>
DIPTYCH_INLINE void add_bytes(const char* v, const long* offsets, long count, long ahead, long dim,
                              const float* weights, long ld, float* out, long out_stride) {
  static_assert(kPartition * 32767l * 128 < 1l << 31);
  long bytes = row_bytes_of<MemI8>(dim);
  IntegerWeights<G> integers(v, offsets, count, dim, weights, ld);
  // Of each 32 elements, 128 bits hold 8: 0 … 3 of each are in one sum, 4 … 7 in another.
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (long d = 0; d < dim; d += 64) {
    long left = dim - d;
    __mmask32 masks[2] = {left >= 32 ? ~0u : (1u << left) - 1,
                          left >= 64 ? ~0u : left > 32 ? (1u << (left - 32)) - 1 : 0u};
    __m512i acc[G][4] = {};
    for (long t = 0; t < count; t += 2) {
      const char* a = v + offsets[t] * bytes + d;
      const char* b = t + 1 < count ? v + offsets[t + 1] * bytes + d : a;  // its weight is 0
      for (long i = t; d == 0 && i < t + 2 && i + kLanes < count; ++i)
        prefetch_row(v + offsets[i + kLanes] * bytes, ahead);
      __m512i x[4];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        __m512i even = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(masks[i], a + 32 * i));
        __m512i odd = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(masks[i], b + 32 * i));
        x[2 * i] = _mm512_unpacklo_epi16(even, odd);
        x[2 * i + 1] = _mm512_unpackhi_epi16(even, odd);
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        __m512i w = _mm512_set1_epi32(load_integer(integers.pairs[g] + t));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[g][j] = _mm512_dpwssd_epi32(acc[g][j], x[j], w);
      }
    }
    int halves = left > 32 ? 2 : 1;  // `out` is padded to whole 32 elements
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        if (i >= halves) break;
        __m512i low = acc[g][2 * i], high = acc[g][2 * i + 1];
        float* to = out + g * out_stride + d + 32 * i;
        VI parts[2] = {(VI)_mm512_permutex2var_epi32(low, first, high),
                       (VI)_mm512_permutex2var_epi32(low, second, high)};
        for (int j = 0; j < 2; ++j)
          store(to + 16 * j, __builtin_convertvector(parts[j], VF) * integers.factors[g]);
      }
    }
  }
}

#else

// A query is 16-bit integers, and at its end their fp32 scale. A lane of `acc` holds up to
// kMaxIntegerDim / (2 * kLanes) pairs of products without overflow.
struct IntegerKeys {
  typedef MemI8 Mem;
  static constexpr bool kBytes = false;
  static constexpr int kMost = 127 * 256;
  static constexpr long kQuerySize = 2, kStep = 2 * kLanes;
  static DIPTYCH_INLINE void write(VI q, long d, long, char* out, VI*) {
    VH whole = __builtin_convertvector(q, VH);
    memcpy(out + d * 2, &whole, sizeof whole);
  }
  static DIPTYCH_INLINE VF total(VF acc) { return __builtin_convertvector((VI)acc, VF); }
  static DIPTYCH_INLINE VF add(VF acc, const char* k, const char* q) {
#if defined(__AVX2__)
    __m256i keys = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(k)));
    return (VF)((VI)acc + (VI)_mm256_madd_epi16(keys, (__m256i)load_raw(q)));
#else
    VI sum = (VI)acc;
    int16_t query[kStep];
    memcpy(query, q, sizeof query);
    for (int i = 0; i < kLanes; ++i)
      sum[i] += int8_t(k[2 * i]) * query[2 * i] + int8_t(k[2 * i + 1]) * query[2 * i + 1];
    return (VF)sum;
#endif
  }
};

#endif

// Query heads [head, head + count) of one token as integers: their rounding is 2^-8 of the keys'.
inline void read_integers(const Attention& a, long token, long head, long count, char* out,
                          long out_stride) {
  long dim = a.pool.k_dim;
  with_store(a.q_store, [&](auto mem) {
    typedef decltype(mem) M;
    const char* q = static_cast<const char*>(a.q) + (token * a.q_token + head * a.q_head) * M::kSize;
    for (long g = 0; g < count; ++g, q += a.q_head * M::kSize, out += out_stride) {
      memset(out, 0, size_t(out_stride));
      Range range = range_of<M>(q, dim, IntegerKeys::kMost);
      VI sums[2] = {};
      for (long d = 0; d < dim; d += kLanes) {
        VF x = get_any<M>(q + d * M::kSize, dim - d);
        IntegerKeys::write(range.rounded(x, IntegerKeys::kMost), d, dim, out, sums);
      }
      char* tail = out + out_stride - kQueryTail;
      int32_t offsets[2] = {-128 * sum_integers(sums[0]), -128 * sum_integers(sums[1])};
      memcpy(tail, &range.scale, 4);
      memcpy(tail + 4, offsets, sizeof offsets);
    }
  });
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
