// Attention of one-token sequences: all query heads of a KV head share each K and V row. A long
// context is cut into partitions whose size depends on nothing but that context, so a result
// does not depend on batch or threads; partial results are merged afterwards.
#pragma once

#include "attn_int8.h"

namespace diptych {
namespace DIPTYCH_TIER {

constexpr int kHeadsAtOnce = 4;  // query heads per pass over K or V rows

// How a K row is multiplied: as fp32 after widening, as pairs of bf16 by the CPU's own dot, or
// as integers (attn_int8.h). `total` turns what `add` made into floats.
template <class M>
struct Widened {
  typedef M Mem;
  static constexpr Store kQuery = Store::F32;
  static constexpr bool kBytes = false;
  static constexpr long kQuerySize = 4, kStep = kLanes;
  static DIPTYCH_INLINE VF total(VF acc) { return acc; }
  static DIPTYCH_INLINE VF add(VF acc, const char* k, const char* q) {
    return acc + M::get(k) * load(q);
  }
};
#if defined(__AVX512BF16__)
struct PairedBF16 {
  typedef MemBF16 Mem;
  static constexpr Store kQuery = Store::BF16;
  static constexpr bool kBytes = false;
  static constexpr long kQuerySize = 2, kStep = 2 * kLanes;
  static DIPTYCH_INLINE VF total(VF acc) { return acc; }
  static DIPTYCH_INLINE VF add(VF acc, const char* k, const char* q) {
    return (VF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)load_raw(k), (__m512bh)load_raw(q));
  }
};
#endif
struct Plus {
  static DIPTYCH_INLINE VF of(VF a, VF b) { return a + b; }
  static DIPTYCH_INLINE float lanes(VF x) { return sum_lanes(x); }
};
struct Larger {
  static DIPTYCH_INLINE VF of(VF a, VF b) { return larger(a, b); }
  static DIPTYCH_INLINE float lanes(VF x) { return max_lanes(x); }
};

// Sums, or largest elements, of kLanes vectors, as one vector.
template <class Op>
DIPTYCH_INLINE VF fold_each(const VF* v) {
#if defined(__AVX512F__)
  auto fold = [](__m512 x, __m512 y) { return (__m512)Op::of((VF)x, (VF)y); };
  __m512 quad[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1];
    __m512 c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
    __m512d ab = (__m512d)fold(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512d cd = (__m512d)fold(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    quad[i] = fold((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
  }
  __m512 low = fold(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88),
                    _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
  __m512 high = fold(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88),
                     _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
  return (VF)fold(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
#else
  VF out;
  for (int i = 0; i < kLanes; ++i) out[i] = Op::lanes(v[i]);
  return out;
#endif
}

// scores[g * ld + t] = q[g] . key t for up to kLanes keys; what is missing scores 0.
// The next `ahead` keys are asked for.
template <class K, int G>
DIPTYCH_INLINE void dot_keys(const char* k, const long* offsets, long count, long ahead, long dim,
                             const char* q, long q_stride, float* scores, long ld) {
  typedef typename K::Mem M;
  VF parts[G][kLanes];
  float scales[kLanes] = {};
  long whole = dim / K::kStep * K::kStep, bytes = row_bytes_of<M>(dim);
  for (long i = 0; i < count; ++i) {
    const char* row = k + offsets[i] * bytes;
    if (i < ahead) prefetch_row(k + offsets[i + kLanes] * bytes, bytes);
    scales[i] = row_scale<M>(row, dim);
    VF acc[G] = {};
    for (long d = 0; d < whole; d += K::kStep)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
        acc[g] = K::add(acc[g], row + d * M::kSize, q + g * q_stride + d * K::kQuerySize);
    if (whole < dim) {
      char rest[K::kStep * M::kSize] = {};
      memcpy(rest, row + whole * M::kSize, size_t((dim - whole) * M::kSize));
      for (int g = 0; g < G; ++g)
        acc[g] = K::add(acc[g], rest, q + g * q_stride + whole * K::kQuerySize);
    }
    for (int g = 0; g < G; ++g) parts[g][i] = K::total(acc[g]);
  }
  for (int g = 0; g < G; ++g) {
    for (long i = count; i < kLanes; ++i) parts[g][i] = VF{};
    VF sums = fold_each<Plus>(parts[g]);
    if constexpr (M::kTail > 0)
      sums *= load(scales) * load_one(q + (g + 1) * q_stride - kQueryTail);
    store(scores + g * ld, sums);
  }
}

// out[g][0 … dim) += sum over keys of weights[g][t] * V row t.
template <class M, int G>
DIPTYCH_INLINE void add_values(const char* v, const long* offsets, long count, long ahead,
                               long dim, const float* weights, long ld, float* out, long out_stride) {
  constexpr int kVecs = 4;
  long d = 0, bytes = row_bytes_of<M>(dim);
  float scaled[G * kLanes];
  if constexpr (M::kTail > 0) {
    float scales[kLanes] = {};
    for (long t = 0; t < count; ++t) scales[t] = row_scale<M>(v + offsets[t] * bytes, dim);
    for (int g = 0; g < G; ++g)
      store(scaled + g * kLanes, load(weights + g * ld) * load(scales));
    weights = scaled;
    ld = kLanes;
  }
  for (; d + kVecs * kLanes <= dim; d += kVecs * kLanes) {
    VF acc[G][kVecs];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[g][j] = load(out + g * out_stride + d + j * kLanes);
    for (long t = 0; t < count; ++t) {
      const char* row = v + offsets[t] * bytes + d * M::kSize;
      if (t < ahead)
        prefetch_row(v + offsets[t + kLanes] * bytes + d * M::kSize, kVecs * kLanes * M::kSize);
      VF x[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) x[j] = M::get(row + j * kLanes * M::kSize);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        VF w = splat(weights[g * ld + t]);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) acc[g][j] += w * x[j];
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) store(out + g * out_stride + d + j * kLanes, acc[g][j]);
  }
  for (; d < dim; d += kLanes) {  // the rest of `out` up to its stride is padding
    for (int g = 0; g < G; ++g) {
      VF acc = load(out + g * out_stride + d);
      for (long t = 0; t < count; ++t)
        acc += splat(weights[g * ld + t]) * get_any<M>(v + offsets[t] * bytes + d * M::kSize, dim - d);
      store(out + g * out_stride + d, acc);
    }
  }
}

// The same for any kind of keys.
template <class K, int G>
DIPTYCH_INLINE void dots_of(const char* k, const long* offsets, long count, long ahead, long dim,
                            const char* q, long q_stride, float* scores, long ld) {
#if defined(__AVX512F__)
  if constexpr (K::kBytes)
    return dot_bytes<G>(k, offsets, count, ahead, dim, q, q_stride, scores, ld);
  else
#endif
    dot_keys<K, G>(k, offsets, count, ahead, dim, q, q_stride, scores, ld);
}
template <int G>
struct HeadCount {
  static constexpr int value = G;
};
template <class F>
DIPTYCH_INLINE void with_heads(long count, F&& f) {
  if (count >= 4) return f(HeadCount<4>{});
  if (count == 3) return f(HeadCount<3>{});
  if (count == 2) return f(HeadCount<2>{});
  f(HeadCount<1>{});
}

// Scores in units of log2: what exp2 takes.
struct ScoreScale {
  float factor, cap;
  explicit ScoreScale(const Attention& a)
      : factor(a.softcap > 0 ? a.scaling / a.softcap : a.scaling * kLog2e),
        cap(a.softcap > 0 ? a.softcap * kLog2e : 0.0f) {}
  DIPTYCH_INLINE VF of(VF dot) const {
    VF x = dot * factor;
    return cap > 0 ? tanh_of(x) * cap : x;
  }
};

constexpr float kNone = -__builtin_inff();

// In place: scores to weights exp2(score - max). `result` gets max and sum.
inline void soften(float* scores, long n, const ScoreScale& scale, float* result) {
  VF top = splat(kNone);
  for (long t = 0; t < n; t += kLanes) {
    VF x = scale.of(load(scores + t));
    if (n - t < kLanes) {
      for (long i = n - t; i < kLanes; ++i) x[i] = kNone;
    }
    top = larger(x, top);
    store(scores + t, x);
  }
  float m = max_lanes(top);
  float base = m == kNone ? 0.0f : m;
  VF total = {};
  for (long t = 0; t < n; t += kLanes) {
    VF w = exp2_of(load(scores + t) - base);
    total += w;
    store(scores + t, w);
  }
  result[0] = m;
  result[1] = sum_lanes(total);
}

DIPTYCH_INLINE float exp2_one(float x) { return exp2_of(splat(x))[0]; }

inline void write_row(const Attention& a, long token, long head, const float* x, float factor) {
  long dim = a.pool.v_dim;
  char* out = static_cast<char*>(a.out) +
              (token * a.heads + head) * dim * store_bytes(a.out_store);
  with_store(a.out_store, [&](auto mem) {
    typedef decltype(mem) M;
    for (long d = 0; d < dim; d += kLanes)
      put_any<M>(out + d * M::kSize, load(x + d) * factor, dim - d);
  });
}

// 1 / (sum of weights), a sink counted in.
inline float weight_factor(const Attention& a, long head, float max, float sum) {
  if (a.sinks) sum += exp2_one(a.sinks[head] * kLog2e - max);
  return 1.0f / sum;
}

// Query heads [head, head + count) of one token, in the element type keys are multiplied with.
inline void read_query(const Attention& a, long token, long head, long count, Store store,
                       char* out, long out_stride) {
  long size = store_bytes(a.q_store);
  const char* first = static_cast<const char*>(a.q) + (token * a.q_token + head * a.q_head) * size;
  for (long g = 0; g < count; ++g) {
    Matrix one{a.q_store, const_cast<char*>(first) + g * a.q_head * size, 0};
    memset(out + g * out_stride, 0, size_t(out_stride));
    write_heads(one, 0, 0, 1, a.pool.k_dim, store, out + g * out_stride);
  }
}

// Which KV heads of which item; a null item is none.
struct DecodeUnit {
  const Item* item;
  long kv_first, kv_last;
};

// Ask for the first rows of an item: nothing else has announced them.
template <class M>
DIPTYCH_INLINE void prefetch_first(const Pool& pool, const Batch& batch, const DecodeUnit& unit,
                                   const char* rows, long dim) {
  long offsets[kLanes];
  long first = unit.item->first, count = min_of(kLanes, unit.item->last - first);
  fill_offsets(pool, batch, unit.item->seq, first, first + count, unit.kv_first, offsets);
  long bytes = row_bytes_of<M>(dim);
  for (long t = 0; t < count; ++t)
    prefetch_row(rows + offsets[t] * bytes, (unit.kv_last - unit.kv_first) * bytes);
}

// The KV heads of one unit. Keys are taken kLanes at a time for all heads, so
// that memory is read in the order in which it lies.
template <class K>
inline void decode_item(const Attention& a, const Batch& batch, const DecodeUnit& unit,
                        const DecodeUnit& after, const AttentionSizes& sizes, char* own,
                        float* partials) {
  typedef typename K::Mem M;
  const Pool& pool = a.pool;
  const Item& item = *unit.item;
  long group = a.heads / pool.kv_heads, n = item.last - item.first;
  long kv_count = unit.kv_last - unit.kv_first, count = kv_count * group;
  long token = batch.query_start[item.seq], first = unit.kv_first * group;
  char* q = own + sizes.decode_q;
  long* offsets = reinterpret_cast<long*>(own + sizes.decode_offsets);
  float* scores = reinterpret_cast<float*>(own + sizes.decode_scores);
  float* sums = reinterpret_cast<float*>(own + sizes.decode_sums);
  fill_offsets(pool, batch, item.seq, item.first, item.last, unit.kv_first, offsets);
  if constexpr (M::kTail > 0)
    read_integers(a, token, first, count, q, sizes.q_stride);
  else
    read_query(a, token, first, count, K::kQuery, q, sizes.q_stride);
  // f(heads of this pass, index of the first, its KV head) for all heads.
  auto each_group = [&](auto&& f) {
    for (long h = 0; h < kv_count; ++h)
      for (long g = 0; g < group; g += kHeadsAtOnce)
        with_heads(group - g, [&](auto heads) { f(heads, h * group + g, h); });
  };
  for (long t = 0; t < n; t += kLanes) {
    long left = min_of(kLanes, n - t), ahead = min_of(kLanes, n - t - left);
    each_group([&](auto heads, long head, long h) {
      const char* keys = pool.k + h * row_bytes_of<M>(pool.k_dim);
      dots_of<K, decltype(heads)::value>(keys, offsets + t, left, ahead, pool.k_dim,
                                          q + head * sizes.q_stride, sizes.q_stride,
                                          scores + head * kScoreStride + t, kScoreStride);
    });
  }
  prefetch_first<M>(pool, batch, unit, pool.v, pool.v_dim);
  ScoreScale scale(a);
  for (long i = 0; i < count; ++i)
    soften(scores + i * kScoreStride, n, scale, sums + i * sizes.partial_stride + sizes.sum_stride);
  if (after.item) prefetch_first<M>(pool, batch, after, pool.k, pool.k_dim);
#if defined(__AVX512F__)
  if constexpr (K::kBytes) {
    long row = row_bytes_of<M>(pool.v_dim);
    each_group([&](auto heads, long head, long h) {
      long ahead = head == 0 ? kv_count * row : 0;  // what one head reads brings the others' rows
      add_bytes<decltype(heads)::value>(pool.v + h * row, offsets, n, ahead, pool.v_dim,
                                        scores + head * kScoreStride, kScoreStride,
                                        sums + head * sizes.partial_stride, sizes.partial_stride);
    });
  } else
#endif
  {
    for (long i = 0; i < count; ++i)
      memset(sums + i * sizes.partial_stride, 0, size_t(sizes.sum_stride) * 4);
    for (long t = 0; t < n; t += kLanes) {
      long left = min_of(kLanes, n - t), ahead = min_of(kLanes, n - t - left);
      each_group([&](auto heads, long head, long h) {
        add_values<M, decltype(heads)::value>(
            pool.v + h * row_bytes_of<M>(pool.v_dim), offsets + t, left, ahead, pool.v_dim,
            scores + head * kScoreStride + t, kScoreStride, sums + head * sizes.partial_stride,
            sizes.partial_stride);
      });
    }
  }
  if (item.partial >= 0) {
    memcpy(partials + (item.partial * a.heads + first) * sizes.partial_stride, sums,
           size_t(count * sizes.partial_stride) * 4);
    return;
  }
  for (long i = 0; i < count; ++i) {
    const float* sum = sums + i * sizes.partial_stride;
    const float* weight = sum + sizes.sum_stride;
    write_row(a, token, first + i, sum, weight_factor(a, first + i, weight[0], weight[1]));
  }
}

inline void merge_partials(const Attention& a, const Batch& batch, const Merge& merge, long head,
                           const AttentionSizes& sizes, char* own, const float* partials) {
  float* out = reinterpret_cast<float*>(own + sizes.decode_sums);
  long step = a.heads * sizes.partial_stride;
  const float* first = partials + merge.partial * step + head * sizes.partial_stride;
  float max = kNone, sum = 0.0f;
  for (long i = 0; i < merge.count; ++i) {
    float m = first[i * step + sizes.sum_stride];
    max = m > max ? m : max;
  }
  memset(out, 0, size_t(sizes.sum_stride) * 4);
  for (long i = 0; i < merge.count; ++i) {
    const float* p = first + i * step;
    float fade = exp2_one(p[sizes.sum_stride] - max);
    sum += fade * p[sizes.sum_stride + 1];
    for (long d = 0; d < sizes.sum_stride; d += kLanes)
      store(out + d, load(out + d) + load(p + d) * fade);
  }
  write_row(a, batch.query_start[merge.seq], head, out, weight_factor(a, head, max, sum));
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
