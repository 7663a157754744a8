// Keys and values of one KV head, packed like the weights of a linear layer (api.h) so that the
// same tile multiplies them: scores = queries * packed keys, sums = weights * packed values.
#pragma once

#include "rows.h"
#include "tile.h"

namespace diptych {
namespace DIPTYCH_TIER {

#if defined(__AVX512F__)
// Transpose 16 rows of 16 32-bit elements.
DIPTYCH_INLINE void transpose16(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4 * i + j]: rows 4i … 4i + 3 of columns j, j + 4, j + 8, j + 12, one per 128 bits.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x44);
    __m512i b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xee);
    __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x44);
    __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xee);
    t[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}
#endif

// 2 * kLanes int8 of a row with `left` of them, times `scale`, as bf16.
DIPTYCH_INLINE VU bf16_of_int8(const char* p, long left, float scale) {
  char rest[2 * kLanes] = {};
  if (left < 2 * kLanes) p = static_cast<const char*>(memcpy(rest, p, size_t(left)));
  VF low = MemI8::get(p) * scale, high = MemI8::get(p + kLanes) * scale;
#if defined(__AVX512BF16__)
  return (VU)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  char both[DIPTYCH_BYTES];
  MemBF16::put(both, low);
  MemBF16::put(both + 2 * kLanes, high);
  return load_raw(both);
#endif
}

// One 4-byte step of a key: one fp32 (converted from M) or two bf16 (as they are, or from int8).
template <class D, class M>
struct KeySteps {
  static constexpr long kPerVector = D::kKind == Kind::BF16 ? 2 * kLanes : kLanes;  // elements
  static DIPTYCH_INLINE VU get(const char* p, long left, float scale) {
    if constexpr (M::kTail > 0) {
      if constexpr (D::kKind == Kind::BF16) return bf16_of_int8(p, left, scale);
      return (VU)((left >= kLanes ? M::get(p) : get_part<M>(p, left)) * scale);
    } else if constexpr (D::kKind == Kind::BF16) {
      if (left >= kPerVector) return load_raw(p);
      char rest[DIPTYCH_BYTES] = {};
      memcpy(rest, p, size_t(left * 2));
      return load_raw(rest);
    } else {
      return (VU)(left >= kLanes ? M::get(p) : get_part<M>(p, left));
    }
  }
};

// `count` keys; those with an offset below zero and what is missing to a whole block of 32 become
// zero, so that no stale or foreign value (it may be NaN) takes part in any product.
template <class D, class M>
inline void pack_keys(const char* k, const long* offsets, long count, long dim, char* out) {
  typedef KeySteps<D, M> Steps;
  long steps = steps_of(D::kKind, dim), padded = (count + 31) / 32 * 32;
  for (long key = 0; key < padded; key += kLanes) {
    char* block = out + key / 32 * steps * kStepBytes + key % 32 * 4;
    for (long d = 0; d < dim; d += Steps::kPerVector) {
      VU r[kLanes];
      for (long i = 0; i < kLanes; ++i) {
        r[i] = VU{};
        if (key + i >= count || offsets[key + i] < 0) continue;
        const char* row = k + offsets[key + i] * row_bytes_of<M>(dim);
        r[i] = Steps::get(row + d * M::kSize, dim - d, row_scale<M>(row, dim));
      }
      long step = d / step_inputs(D::kKind), last = min_of(steps - step, kLanes);
#if defined(__AVX512F__)
      transpose16(reinterpret_cast<__m512i*>(r));
      for (long i = 0; i < last; ++i)
        store(block + (step + i) * kStepBytes, (VF)r[i]);
#else
      for (long i = 0; i < last; ++i) {
        uint32_t column[kLanes];
        for (long j = 0; j < kLanes; ++j) column[j] = r[j][i];
        memcpy(block + (step + i) * kStepBytes, column, sizeof column);
      }
#endif
    }
  }
}

// Two rows of bf16 values, element by element next to each other.
DIPTYCH_INLINE void interleave(const char* a, const char* b, char* out) {
#if defined(__AVX512BW__)
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
  _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi16(x, high, y));
#else
  for (long i = 0; i < 32; ++i) {
    memcpy(out + i * 4, a + i * 2, 2);
    memcpy(out + i * 4 + 2, b + i * 2, 2);
  }
#endif
}

template <class D, class M>
inline void pack_values(const char* v, const long* offsets, long count, long dim, char* out) {
  constexpr long kPer = D::kKind == Kind::BF16 ? 2 : 1;  // keys per step
  long padded = (count + 31) / 32 * 32, block_bytes = kKeyTile / kPer * kStepBytes;
  for (long d = 0; d < dim; d += 32, out += block_bytes) {
    long left = min_of(32, dim - d);
    for (long key = 0; key < padded; key += kPer) {
      char* to = out + key / kPer * kStepBytes;
      if constexpr (D::kKind == Kind::BF16) {
        char rows[2][64] = {};
        const char* from[2] = {rows[0], rows[1]};
        for (long i = 0; i < 2 && key + i < count; ++i) {
          if (offsets[key + i] < 0) continue;
          const char* first = v + offsets[key + i] * row_bytes_of<M>(dim);
          const char* row = first + d * M::kSize;
          if constexpr (M::kTail > 0) {
            VU wide = bf16_of_int8(row, left, row_scale<M>(first, dim));
            memcpy(rows[i], &wide, sizeof wide);
          } else if (left == 32)
            from[i] = row;
          else
            memcpy(rows[i], row, size_t(left * 2));
        }
        interleave(from[0], from[1], to);
      } else {
        for (long i = 0; i < 32; i += kLanes) {
          VF x = {};
          if (key < count && offsets[key] >= 0 && i < left) {
            const char* row = v + offsets[key] * row_bytes_of<M>(dim);
            x = get_any<M>(row + (d + i) * M::kSize, left - i);
            if constexpr (M::kTail > 0) x *= row_scale<M>(row, dim);
          }
          store(to + i * 4, x);
        }
      }
    }
  }
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
