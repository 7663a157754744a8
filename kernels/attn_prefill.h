// Attention of sequences with several query tokens: query tiles against key tiles with a
// streaming softmax. The rows of an item are all query heads of one KV head times a run of
// tokens (row = head * tokens + token), so that packed keys and values serve the whole group.
#pragma once

#include "amx.h"
#include "attn_decode.h"
#include "pack.h"

namespace diptych {
namespace DIPTYCH_TIER {

// out[row][0 … 31] = a[row] * block, or, with `fade`, added to fade[row] times its old value.
template <class D>
struct Product {
  static constexpr int kRows = kTileRows;
  static void run(int height, const char* a, long lda, const char* block, long steps, float* out,
                  long ldo, const float* fade) {
    tile_of<D>(height, a, lda, block, steps, reinterpret_cast<char*>(out), ldo, fade);
  }
};
#if defined(DIPTYCH_AMX)
template <>
struct Product<DotBF16> {
  static constexpr int kRows = kMatrixRows;
  MatrixUnit unit;
  DIPTYCH_INLINE void run(int height, const char* a, long lda, const char* block, long steps,
                          float* out, long ldo, const float* fade) {
    for (int r = 0; fade && r < height; ++r) {
      if (fade[r] == 1.0f) continue;  // most often: the largest score came early
      for (long c = 0; c < kBlockCols; c += kLanes)
        store(out + r * ldo + c, load(out + r * ldo + c) * fade[r]);
    }
    Sums to{reinterpret_cast<char*>(out), ldo * 4};
    MatrixTile tile{a, lda, block, steps, fade ? to : Sums{}, to};
    matrix_bf16<false>(unit, height, tile, [] {});
  }
};
#endif

template <class D>
struct PrefillMemory {
  Product<D> product;
  char *q, *keys, *values, *weights;
  long* offsets;
  float *scores, *sums, *max, *total;  // total: kLanes partial sums per row
  int32_t* last;                       // newest visible key of a row

  PrefillMemory(char* own, const AttentionSizes& s)
      : q(own + s.q),
        keys(own + s.keys),
        values(own + s.values),
        weights(own + s.weights),
        offsets(reinterpret_cast<long*>(own + s.offsets)),
        scores(reinterpret_cast<float*>(own + s.scores)),
        sums(reinterpret_cast<float*>(own + s.sums)),
        max(reinterpret_cast<float*>(own + s.max)),
        total(reinterpret_cast<float*>(own + s.total)),
        last(reinterpret_cast<int32_t*>(own + s.last)) {}
};

// Visible columns [low, high) of the key tile starting at `base` for a row.
struct Span {
  long low, high;
};
DIPTYCH_INLINE Span span_of(long last, long window, long base, long count) {
  return {window > 0 ? max_of(0, last - window + 1 - base) : 0, min_of(count, last + 1 - base)};
}

// `x` where the columns from `col` on are visible, else `other`.
DIPTYCH_INLINE VF visible(VF x, long col, const Span& span, float other) {
  if (col >= span.low && col + kLanes <= span.high) return x;
  VI at = lane_numbers() + int32_t(col);
  x = at < int32_t(span.low) ? splat(other) : x;
  return at < int32_t(span.high) ? x : splat(other);
}

// The columns of a key tile that any row sees, [first, end), and what their scores are multiplied
// by; where that is not all there is to it, `top_of_row` scales them before.
struct Columns {
  long first, end;
  bool scale_first;
  float factor;
  Columns(long low, long high, const ScoreScale& scale)
      : first(low / 32 * 32),
        end((high + 31) / 32 * 32),
        scale_first(scale.cap != 0.0f || scale.factor <= 0.0f),
        factor(scale_first ? 1.0f : scale.factor) {}
};

// Largest visible score of a row, as a vector.
DIPTYCH_INLINE VF top_of_row(float* scores, const Columns& columns, const Span& span,
                             const ScoreScale& scale) {
  VF top = splat(kNone);
  for (long c = columns.first; c < columns.end; c += kLanes) {
    VF x = load(scores + c);
    if (columns.scale_first) {
      x = scale.of(x);
      store(scores + c, x);
    }
    top = larger(visible(x, c, span, kNone), top);
  }
  return top;
}

// A row of scores to weights 2^(score * factor - base), 0 where nothing is visible; returns their
// sum as a vector. A weight depends on its own score only, not on what else is in the tile.
template <class D>
DIPTYCH_INLINE VF weigh_row(const float* scores, char* weights, const Columns& columns,
                            const Span& span, float base) {
  VF sum = {};
  for (long c = columns.first; c < columns.end; c += kLanes) {
    VF x = load(scores + c) * columns.factor - base;
    if constexpr (D::kKind == Kind::BF16) {
      VF w = visible(exp2_rough(x), c, span, 0.0f);
      sum += w;
      MemBF16::put(weights + c * 2, w);
    } else {
      VF w = visible(exp2_of(x), c, span, 0.0f);
      sum += w;
      store(weights + c * 4, w);
    }
  }
  return sum;
}

// Up to kLanes rows of a tile; arrays begin at the first of them.
struct SoftRows {
  long count;
  const Span* spans;
  float* scores;
  char* weights;
  float *max, *total;
  float* fade;  // gets what the older sums are to be multiplied by
};

// Scores to weights 2^(score - max), where `max` is rounded to an integer: one near it will do.
template <class D>
inline void soften_rows(const SoftRows& rows, const Columns& columns, const ScoreScale& scale) {
  constexpr long kSize = D::kKind == Kind::BF16 ? 2 : 4;
  VF tops[kLanes];
  for (long i = 0; i < kLanes; ++i) tops[i] = splat(kNone);
  for (long i = 0; i < rows.count; ++i)
    tops[i] = top_of_row(rows.scores + i * kKeyTile, columns, rows.spans[i], scale);
  VF top = fold_each<Larger>(tops) * columns.factor, old = load(rows.max);
  VF now = larger((top + kRounder) - kRounder, old);
  VF bases = now == kNone ? VF{} : now, fades = exp2_of(old - bases);
  store(rows.max, now);
  store(rows.fade, fades);
  for (long i = 0; i < rows.count; ++i) {
    VF sum = weigh_row<D>(rows.scores + i * kKeyTile, rows.weights + i * kKeyTile * kSize, columns,
                          rows.spans[i], bases[i]);
    float* total = rows.total + i * 16;
    store(total, load(total) * fades[i] + sum);
  }
}

// Rows [row, row + height) against the packed tile of keys base … base + count.
template <class D>
inline void tile_rows(const Attention& a, PrefillMemory<D>& m, const AttentionSizes& sizes,
                      const ScoreScale& scale, long row, int height, long base, long count) {
  constexpr long kPer = D::kKind == Kind::BF16 ? 2 : 1;
  constexpr long kSize = D::kKind == Kind::BF16 ? 2 : 4;
  constexpr int kRows = (Product<D>::kRows + kLanes - 1) / kLanes * kLanes;
  Span spans[kRows];
  long low = kKeyTile, high = 0;
  for (int r = 0; r < height; ++r) {
    spans[r] = span_of(m.last[row + r], a.window, base, count);
    if (spans[r].high <= spans[r].low) continue;
    low = min_of(low, spans[r].low);
    high = max_of(high, spans[r].high);
  }
  if (high <= low) return;
  Columns columns(low, high, scale);
  long first = columns.first, end = columns.end, steps = steps_of(D::kKind, a.pool.k_dim);
  for (long c = first; c < end; c += 32)
    m.product.run(height, m.q + row * sizes.q_stride, sizes.q_stride,
                  m.keys + c / 32 * steps * kStepBytes, steps, m.scores + c, kKeyTile, nullptr);
  float fade[kRows];
  for (int r = 0; r < height; r += kLanes)
    soften_rows<D>(SoftRows{min_of(kLanes, height - r), spans + r, m.scores + r * kKeyTile,
                            m.weights + r * kKeyTile * kSize, m.max + row + r,
                            m.total + (row + r) * 16, fade + r},
                   columns, scale);
  for (long d = 0; d < a.pool.v_dim; d += 32)
    m.product.run(height, m.weights + first * kSize, kKeyTile * kSize,
                  m.values + (d / 32 * kKeyTile + first) / kPer * kStepBytes, (end - first) / kPer,
                  m.sums + row * sizes.sum_stride + d, sizes.sum_stride, fade);
}

template <class D, class M>
inline void prefill_item(const Attention& a, const Batch& batch, const Item& item, long kv_head,
                         const AttentionSizes& sizes, char* own) {
  PrefillMemory<D> m(own, sizes);
  const Pool& pool = a.pool;
  long group = a.heads / pool.kv_heads, tokens = item.last - item.first, rows = group * tokens;
  long end_row = batch.query_start[item.seq + 1];
  long first_key = batch.context[item.seq] - (end_row - item.first);  // of the first token
  Store query = D::kKind == Kind::BF16 ? Store::BF16 : Store::F32;
  for (long t = 0; t < tokens; ++t) {
    for (long g = 0; g < group; ++g) {
      long row = g * tokens + t;
      read_query(a, item.first + t, kv_head * group + g, 1, query, m.q + row * sizes.q_stride,
                 sizes.q_stride);
      m.last[row] = int32_t(first_key + t);
      m.max[row] = kNone;
    }
  }
  memset(m.sums, 0, size_t(rows * sizes.sum_stride) * 4);
  memset(m.total, 0, size_t(rows) * 64);
  ScoreScale scale(a);
  long end = first_key + tokens;
  long start = a.window > 0 ? max_of(0, first_key - a.window + 1) : 0;
  long tiles = (rows + Product<D>::kRows - 1) / Product<D>::kRows;
  // Tiles begin where they would for any other rows of the sequence: sums do not depend on chunks.
  for (long base = start / kKeyTile * kKeyTile; base < end; base += kKeyTile) {
    long count = min_of(kKeyTile, end - base), unseen = max_of(0, start - base);
    for (long i = 0; i < unseen; ++i) m.offsets[i] = -1;
    fill_offsets(pool, batch, item.seq, base + unseen, base + count, kv_head, m.offsets + unseen);
    pack_keys<D, M>(pool.k, m.offsets, count, pool.k_dim, m.keys);
    pack_values<D, M>(pool.v, m.offsets, count, pool.v_dim, m.values);
    for (long t = 0; t < tiles; ++t) {
      long row = t * rows / tiles;
      tile_rows<D>(a, m, sizes, scale, row, int((t + 1) * rows / tiles - row), base, count);
    }
  }
  for (long row = 0; row < rows; ++row) {
    long head = kv_head * group + row / tokens;
    float sum = sum_lanes(load(m.total + row * 16));
    write_row(a, item.first + row % tokens, head, m.sums + row * sizes.sum_stride,
              weight_factor(a, head, m.max[row], sum));
  }
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
