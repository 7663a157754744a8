// Scratch memory of the fused layers and of the head. `static` on purpose: see simd.h.
#pragma once

#include "attn_sizes.h"

namespace diptych {

constexpr long kChunkRows = 512;

struct StackSizes {  // offsets in bytes
  long qkv, inner, q, attended, rows, attention, total;
};

static inline long largest_partials(const StackCall& call) {
  long most = 0;
  for (long i = 0; i < call.count; ++i)
    if (call.plans[i]->num_partials > most) most = call.plans[i]->num_partials;
  return most;
}

static inline StackSizes stack_sizes(const StackCall& call, int threads) {
  const StackShape& s = call.shape;
  StackSizes z = {};
  long tokens = call.batch.tokens, chunk = tokens < kChunkRows ? tokens : kChunkRows;
  long end = 0;
  auto take = [&end](long bytes) {
    long at = end;
    end = round_up(end + bytes, 64);
    return at;
  };
  long q_width = s.heads * s.head_dim;
  long widest = s.hidden > s.inter ? s.hidden : s.inter;
  if (q_width > widest) widest = q_width;
  z.qkv = take(chunk * (q_width + 2 * s.kv_heads * s.head_dim) * 4);
  z.inner = take(chunk * s.inter * 4);
  z.q = take(tokens * q_width * 4);
  z.attended = take(tokens * q_width * 4);
  long row = row_bytes(Kind::F32, widest), small = row_bytes(Kind::I8A16, widest);
  z.rows = take(chunk * (row > small ? row : small));  // for any kind
  AttentionSizes a = attention_sizes(call.pools[0], s.heads);
  z.attention = take(threads * a.thread_bytes +
                     largest_partials(call) * s.heads * a.partial_stride * 4);
  z.total = end;
  return z;
}

static inline long head_bytes(const HeadCall& call) {
  return call.count * row_bytes(call.linear.kind, call.hidden);
}

}  // namespace diptych
