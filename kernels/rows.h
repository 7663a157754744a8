// Work on single rows: RMS norm, conversion and quantisation, SwiGLU, writing K and V.
#pragma once

#include "simd.h"

namespace diptych {
namespace DIPTYCH_TIER {

template <class M>
DIPTYCH_INLINE VF get_any(const char* p, long left) {
  return left >= kLanes ? M::get(p) : get_part<M>(p, left);
}
template <class M>
DIPTYCH_INLINE void put_any(char* p, VF x, long left) {
  if (left >= kLanes) return M::put(p, x);
  put_part<M>(p, x, left);
}

// The factor of an RMS norm over `width` elements.
template <class M>
DIPTYCH_INLINE float norm_factor(const char* in, long width, float eps) {
  VF squares = {};
  for (long i = 0; i < width; i += kLanes) {
    VF x = get_any<M>(in + i * M::kSize, width - i);
    squares += x * x;
  }
  return 1.0f / __builtin_sqrtf(sum_lanes(squares) / float(width) + eps);
}

struct Scaled {  // reads a row, normed where a weight is given
  const float* weight;
  float factor;
  template <class M>
  DIPTYCH_INLINE VF get(const char* in, long i, long width) const {
    VF x = get_any<M>(in + i * M::kSize, width - i);
    return weight ? x * factor * get_any<MemF32>(reinterpret_cast<const char*>(weight + i), width - i)
                  : x;
  }
};

// kLanes integers as int8.
DIPTYCH_INLINE void store_bytes_of(VI q, char* out) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)q));
#else
  for (int i = 0; i < kLanes; ++i) out[i] = char(int8_t(q[i]));
#endif
}

DIPTYCH_INLINE uint32_t max_integers(VU x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)x);
#else
  uint32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

DIPTYCH_INLINE int32_t sum_integers(VI x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

// Scale = largest magnitude / largest integer. A NaN or infinity makes the scale NaN, and so what
// is computed with it, without touching other rows.
struct Range {
  float scale, inverse;
  Range(uint32_t most_bits, int most) {
    memcpy(&scale, &most_bits, 4);
    scale /= float(most);
    inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    if (!(inverse < 3e38f)) inverse = 0.0f;  // only subnormal values: they round to zero
    if (most_bits >= 0x7f800000u) scale = __builtin_nanf("");
  }
  DIPTYCH_INLINE VI rounded(VF x, int most) const {
    VI q = (VI)(x * inverse + kRounder) - (VI)splat(kRounder);  // to nearest even
    q = q > most ? VI{} + most : q;
    return q < -most ? VI{} - most : q;
  }
};

// Quantise one row to int8 planes, group by group.
template <class M, int kPlanes>
DIPTYCH_INLINE void quantise_row(const char* in, long width, const Scaled& scaled, bool int4,
                                 char* out) {
  constexpr int kVecs = int(kGroup) / kLanes;
  constexpr int kMost = kPlanes == 2 ? 127 * 256 : 127;
  long groups = groups_of(width);
  char* scales = out + groups * kPlanes * kGroup;
  char* offsets = scales + groups * 4;
  for (long g = 0; g < groups; ++g) {
    VF x[kVecs];
    VU largest = {};  // as integers, magnitudes keep their order, and NaN is above infinity
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      long i = g * kGroup + v * kLanes;
      x[v] = i < width ? scaled.get<M>(in, i, width) : VF{};
      VU size = (VU)absolute(x[v]);
      largest = size > largest ? size : largest;
    }
    Range range(max_integers(largest), kMost);
    VI sum = {};
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      VI q = range.rounded(x[v], kMost);
      sum += q;
      char* to = out + g * kGroup + v * kLanes;
      if constexpr (kPlanes == 2) {
        VI high = (q + 128) >> 8;
        store_bytes_of(high, to);
        store_bytes_of(q - (high << 8), to + groups * kGroup);
      } else {
        store_bytes_of(q, to);
      }
    }
    int32_t total = sum_integers(sum), offset = -128 * total;
    float values = range.scale * float(total);
    memcpy(scales + g * 4, &range.scale, 4);
    if (int4)
      memcpy(offsets + g * 4, &values, 4);
    else
      memcpy(offsets + g * 4, &offset, 4);
  }
}

template <class M>
DIPTYCH_INLINE void prepare_row(const char* in, long width, const Norm* norm, const Rows& out,
                                long row) {
  Scaled scaled{nullptr, 1.0f};
  if (norm) scaled = Scaled{norm->weight, norm_factor<M>(in, width, norm->eps)};
  long bytes = row_bytes(out.kind, width);
  char* p = reinterpret_cast<char*>(out.data) + row * bytes;
  if (is_grouped(out.kind)) {
    bool int4 = is_int4(out.kind);
    if (planes_of(out.kind) == 1) return quantise_row<M, 1>(in, width, scaled, int4, p);
    return quantise_row<M, 2>(in, width, scaled, int4, p);
  }
  long size = out.kind == Kind::F32 ? 4 : 2;
  memset(p + used_row_bytes(out.kind, width) - 64, 0, 64);  // here lies the padding
  for (long i = 0; i < width; i += kLanes) {
    VF x = scaled.get<M>(in, i, width);
    if (out.kind == Kind::F32)
      put_any<MemF32>(p + i * size, x, width - i);
    else
      put_any<MemBF16>(p + i * size, x, width - i);
  }
}

constexpr long kRowsAtOnce = 4;  // rows handed out per unit of row work

template <class F>
DIPTYCH_INLINE void each_row(const Crew& crew, long rows, F&& f) {
  if (rows < 16 * crew.threads) {  // so short that asking whose turn it is takes as long
    for (long row = crew.tid; row < rows; row += crew.threads) f(row);
    return crew.sync();
  }
  for (long unit; (unit = crew.next()) * kRowsAtOnce < rows;) {
    long last = min_of(rows, (unit + 1) * kRowsAtOnce);
    for (long row = unit * kRowsAtOnce; row < last; ++row) f(row);
  }
  crew.sync();
}

inline const char* row_of(const Matrix& m, long row) {
  return static_cast<const char*>(m.data) + row * m.stride * store_bytes(m.store);
}
inline char* row_to(const Matrix& m, long row) {
  return static_cast<char*>(m.data) + row * m.stride * store_bytes(m.store);
}

inline void run_prepare(const Crew& crew, const Matrix& in, long rows, long inputs,
                        const Norm* norm, const Rows& out) {
  with_store(in.store, [&](auto mem) {
    typedef decltype(mem) M;
    each_row(crew, rows, [&](long row) { prepare_row<M>(row_of(in, row), inputs, norm, out, row); });
  });
}

inline void run_rms_norm(const Crew& crew, const Matrix& in, const Matrix& out, long rows,
                         long width, const Norm& norm) {
  with_store(in.store, [&](auto from) {
    typedef decltype(from) M;
    each_row(crew, rows, [&](long row) {
      const char* x = row_of(in, row);
      Scaled scaled{norm.weight, norm_factor<M>(x, width, norm.eps)};
      with_store(out.store, [&](auto to) {
        typedef decltype(to) W;
        for (long i = 0; i < width; i += kLanes)
          put_any<W>(row_to(out, row) + i * W::kSize, scaled.get<M>(x, i, width), width - i);
      });
    });
  });
}

inline void run_silu_mul(const Crew& crew, const Matrix& gate, const Matrix& up, const Matrix& out,
                         long rows, long width) {
  with_store(gate.store, [&](auto mem) {
    typedef decltype(mem) M;
    each_row(crew, rows, [&](long row) {
      for (long i = 0; i < width; i += kLanes) {
        VF g = get_any<M>(row_of(gate, row) + i * M::kSize, width - i);
        VF u = get_any<M>(row_of(up, row) + i * M::kSize, width - i);
        put_any<M>(row_to(out, row) + i * M::kSize, silu(g) * u, width - i);
      }
    });
  });
}

// Range of `dim` elements to integers of up to `most`.
template <class M>
DIPTYCH_INLINE Range range_of(const char* in, long dim, int most) {
  VU largest = {};
  for (long i = 0; i < dim; i += kLanes) {
    VU size = (VU)absolute(get_any<M>(in + i * M::kSize, dim - i));
    largest = size > largest ? size : largest;
  }
  return Range(max_integers(largest), most);
}

// One head's row of an int8 pool: integers, then their scale.
template <class M>
DIPTYCH_INLINE void write_int8(const char* in, long dim, char* out) {
  Range range = range_of<M>(in, dim, 127);
  for (long i = 0; i < dim; i += kLanes) {
    VI q = range.rounded(get_any<M>(in + i * M::kSize, dim - i), 127);
    char whole[kLanes];
    bool fits = dim - i >= kLanes;
    store_bytes_of(q, fits ? out + i : whole);
    if (!fits) memcpy(out + i, whole, size_t(dim - i));
  }
  memcpy(out + dim, &range.scale, 4);
}

// Copy one token's heads into its slot, converting the element type where it differs.
inline void write_heads(const Matrix& in, long row, long head_stride, long heads, long dim,
                        Store store, char* out) {
  long size = store_bytes(in.store), out_size = store_bytes(store);
  for (long h = 0; h < heads; ++h, out += head_bytes(store, dim)) {
    const char* from = row_of(in, row) + h * head_stride * size;
    if (in.store == store) {
      memcpy(out, from, size_t(dim * size));
      continue;
    }
    with_store(in.store, [&](auto source) {
      typedef decltype(source) M;
      if (store == Store::I8) return write_int8<M>(from, dim, out);
      with_store(store, [&](auto target) {
        typedef decltype(target) W;
        for (long i = 0; i < dim; i += kLanes)
          put_any<W>(out + i * out_size, get_any<M>(from + i * size, dim - i), dim - i);
      });
    });
  }
}

// `rows` rows of a pool, adjacent, as a pool of another element type holds them.
inline void convert_rows(Store from, const char* in, Store to, char* out, long rows, long dim) {
  if (from == to) {
    memcpy(out, in, size_t(rows * head_bytes(to, dim)));
    return;
  }
  if (from != Store::I8) {
    Matrix all{from, const_cast<char*>(in), 0};
    return write_heads(all, 0, dim, rows, dim, to, out);
  }
  with_store(to, [&](auto target) {
    typedef decltype(target) W;
    for (long row = 0; row < rows; ++row) {
      float scale = row_scale<MemI8>(in, dim);
      for (long i = 0; i < dim; i += kLanes)
        put_any<W>(out + i * W::kSize, get_any<MemI8>(in + i, dim - i) * scale, dim - i);
      in += row_bytes_of<MemI8>(dim);
      out += row_bytes_of<W>(dim);
    }
  });
}

inline void run_write_kv(const Crew& crew, const Pool& pool, const int64_t* slots, long tokens,
                         const Matrix& k, long k_head, const Matrix& v, long v_head) {
  each_row(crew, tokens, [&](long row) {
    long first = slots[row] * pool.kv_heads;
    write_heads(k, row, k_head, pool.kv_heads, pool.k_dim, pool.store,
                pool.k + first * head_bytes(pool.store, pool.k_dim));
    write_heads(v, row, v_head, pool.kv_heads, pool.v_dim, pool.store,
                pool.v + first * head_bytes(pool.store, pool.v_dim));
  });
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
