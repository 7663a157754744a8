// Scratch memory of attention: one region per thread, then the partial results of decode.
// `static` on purpose: see the note on merged inline functions in simd.h.
#pragma once

#include "api.h"

namespace diptych {

constexpr long kPartition = 256;       // longest piece of context per decode item
constexpr long kShortPartition = 128;  // for contexts up to kShortContext, so that few
constexpr long kShortContext = 1024;   // sequences still keep all threads busy
constexpr long kScoreStride = kPartition + 16;
constexpr long kQueryTail = 64;   // behind a query of integers: its scale
constexpr long kKeyTile = 128;    // keys packed at a time in prefill
constexpr long kQueryRows = 192;  // rows (tokens * query heads of a group) of a prefill item
constexpr long kRowPad = 32;      // at least the tallest tile

struct AttentionSizes {  // offsets in bytes from the start of a thread's region
  long q_stride;         // bytes between query heads or rows
  long sum_stride;       // floats of one value sum, padded
  long partial_stride;   // floats of a value sum with max and sum of its weights behind it
  long decode_q, decode_offsets, decode_scores, decode_sums;
  long rows;  // rows of a prefill item, padded
  long q, keys, values, offsets, scores, weights, sums, max, total, last;
  long thread_bytes;
};

static inline long round_up(long x, long to) { return (x + to - 1) / to * to; }

static inline long prefill_tokens(long group) { return group > kQueryRows ? 1 : kQueryRows / group; }

static inline AttentionSizes attention_sizes(const Pool& pool, long heads) {
  AttentionSizes s = {};
  long group = heads / pool.kv_heads;
  s.q_stride = pool.store == Store::I8 ? round_up(pool.k_dim, 64) * 4 + kQueryTail
                                       : round_up(pool.k_dim * 4, 64);
  s.sum_stride = round_up(pool.v_dim, kBlockCols);
  s.partial_stride = s.sum_stride + 16;
  long end = 0;
  auto take = [&end](long bytes) {
    long at = end;
    end = round_up(end + bytes, 64);
    return at;
  };
  s.decode_q = take(heads * s.q_stride);
  s.decode_offsets = take(kPartition * long(sizeof(long)));
  s.decode_scores = take(heads * kScoreStride * 4);
  s.decode_sums = take(heads * s.partial_stride * 4);
  long decode_end = end;
  end = 0;
  s.rows = round_up(prefill_tokens(group) * group, kRowPad) + kRowPad;
  s.q = take(s.rows * s.q_stride);
  s.keys = take(kKeyTile * s.q_stride);
  s.values = take(kKeyTile * s.sum_stride * 4);
  s.offsets = take(kKeyTile * long(sizeof(long)));
  s.scores = take(kRowPad * kKeyTile * 4);
  s.weights = take(kRowPad * kKeyTile * 4);
  s.sums = take(s.rows * s.sum_stride * 4);
  s.max = take(s.rows * 4);
  s.total = take(s.rows * 64);
  s.last = take(s.rows * 4);
  s.thread_bytes = end > decode_end ? end : decode_end;
  return s;
}

// offsets[i] = index of (key first + i, kv_head) in rows of one head.
static inline void fill_offsets(const Pool& pool, const Batch& batch, long seq, long first,
                                long last, long kv_head, long* offsets) {
  const int32_t* table = batch.tables + seq * batch.table_stride;
  long at = first;
  while (at < last) {
    long block = at / pool.block_size, end = (block + 1) * pool.block_size;
    if (end > last) end = last;
    long slot = table[block] * pool.block_size + at % pool.block_size;
    for (; at < end; ++at, ++slot) *offsets++ = slot * pool.kv_heads + kv_head;
  }
}

}  // namespace diptych
