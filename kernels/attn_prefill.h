// Attention of sequences with several query tokens: query tiles against key tiles with a
// streaming softmax. The rows of an item are all query heads of one KV head times a run of
// tokens (row = head * tokens + token), so that packed keys and values serve the whole group.
#pragma once

#include "attn_decode.h"
#include "pack.h"

namespace diptych {
namespace DIPTYCH_TIER {

template <class D>
struct PrefillMemory {
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
  Span(long last, long window, long base, long count)
      : low(window > 0 ? max_of(0, last - window + 1 - base) : 0),
        high(min_of(count, last + 1 - base)) {}
};

DIPTYCH_INLINE VF hide(VF x, long col, const Span& span) {
  VI at = lane_numbers() + int32_t(col);
  x = at < int32_t(span.low) ? splat(kNone) : x;
  return at < int32_t(span.high) ? x : splat(kNone);
}

// One row of scores [first, end) to weights; returns the factor by which older sums fade.
template <class D>
inline float soften_row(float* scores, char* weights, long first, long end, const Span& span,
                        const ScoreScale& scale, float* max, float* total) {
  bool masked = span.low > first || span.high < end;
  bool simple = !masked && scale.cap == 0.0f && scale.factor > 0.0f;
  VF top = splat(kNone);
  for (long c = first; c < end; c += kLanes) {
    VF x = load(scores + c);
    if (!simple) {
      x = scale.of(x);
      if (masked) x = hide(x, c, span);
      store(scores + c, x);
    }
    top = larger(x, top);
  }
  float factor = simple ? scale.factor : 1.0f;
  float old = *max, now = max_lanes(top) * factor;
  if (!(now > old)) now = old;
  float base = now == kNone ? 0.0f : now;
  VF sum = {};
  for (long c = first; c < end; c += kLanes) {
    VF w = exp2_of<D::kKind == Kind::BF16>(load(scores + c) * factor - base);
    sum += w;
    if (D::kKind == Kind::BF16)
      MemBF16::put(weights + c * 2, w);
    else
      store(weights + c * 4, w);
  }
  float fade = now == old ? 1.0f : exp2_one(old - base);
  *max = now;
  store(total, load(total) * fade + sum);
  return fade;
}

// Rows [row, row + height) against the packed tile of keys base … base + count.
template <class D>
inline void tile_rows(const Attention& a, const PrefillMemory<D>& m, const AttentionSizes& sizes,
                      const ScoreScale& scale, long row, int height, long base, long count) {
  constexpr long kPer = D::kKind == Kind::BF16 ? 2 : 1;
  constexpr long kSize = D::kKind == Kind::BF16 ? 2 : 4;
  long low = kKeyTile, high = 0;
  for (int r = 0; r < height; ++r) {
    Span span(m.last[row + r], a.window, base, count);
    if (span.high <= span.low) continue;
    low = min_of(low, span.low);
    high = max_of(high, span.high);
  }
  if (high <= low) return;
  long first = low / 32 * 32, end = (high + 31) / 32 * 32;
  long steps = steps_of(D::kKind, a.pool.k_dim);
  for (long c = first; c < end; c += 32)
    tile_of<D>(height, m.q + row * sizes.q_stride, sizes.q_stride,
               m.keys + c / 32 * steps * kStepBytes, steps, reinterpret_cast<char*>(m.scores + c),
               kKeyTile, nullptr);
  float fade[kTileRows];
  for (int r = 0; r < height; ++r) {
    Span span(m.last[row + r], a.window, base, count);
    fade[r] = soften_row<D>(m.scores + r * kKeyTile, m.weights + r * kKeyTile * kSize, first, end,
                            span, scale, m.max + row + r, m.total + (row + r) * 16);
  }
  for (long d = 0; d < a.pool.v_dim; d += 32)
    tile_of<D>(height, m.weights + first * kSize, kKeyTile * kSize,
               m.values + (d / 32 * kKeyTile + first) / kPer * kStepBytes, (end - first) / kPer,
               reinterpret_cast<char*>(m.sums + row * sizes.sum_stride + d), sizes.sum_stride,
               fade);
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
  long tiles = (rows + kTileRows - 1) / kTileRows;
  for (long base = start; base < end; base += kKeyTile) {
    long count = min_of(kKeyTile, end - base);
    fill_offsets(pool, batch, item.seq, base, base + count, kv_head, m.offsets);
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
