// Scratch memory of the fused layers and of the head. `static` on purpose: see simd.h.
#pragma once

#include "attn_sizes.h"

namespace diptych {

// Rows of a step that are between two attentions at a time: shared by all threads, each of which
// multiplies them by some of the weights, or, of long steps, `kOwnRows` of each thread's own, which
// stay in its cache from the norm to the end and wait for nobody.
constexpr long kChunkRows = 512;
constexpr long kOwnRows = 512;
constexpr long kFewestOwnRows = 128;  // fewer would reread weights too often
constexpr long kOwnBytes = 64 << 20;  // more would be too much memory: many threads, wide rows

struct StackSizes {  // offsets in bytes
  long qkv, inner, rows;  // in a workspace of `chunk` rows
  long chunk, workspace;  // bytes of one; there is one, or one per thread
  bool own;               // each thread has rows of its own
  long q, attended, attention, total;
};

static inline long largest_partials(const StackCall& call) {
  long most = 0;
  for (long i = 0; i < call.count; ++i)
    if (call.plans[i]->num_partials > most) most = call.plans[i]->num_partials;
  return most;
}

// Offsets of a workspace of `chunk` rows; the size of one.
static inline long workspace_sizes(const StackShape& s, long chunk, StackSizes& z) {
  long q_width = s.heads * s.head_dim;
  long widest = s.hidden > s.inter ? s.hidden : s.inter;
  if (q_width > widest) widest = q_width;
  long row = row_bytes(Kind::F32, widest), small = row_bytes(Kind::I8A16, widest);
  z.chunk = chunk;
  z.qkv = 0;
  z.inner = round_up(chunk * (q_width + 2 * s.kv_heads * s.head_dim) * 4, 64);
  long ready = row_bytes(Kind::BF16, s.inter);  // padded, so of narrow layers more than fp32 takes
  z.rows = z.inner + round_up(chunk * (ready > s.inter * 4 ? ready : s.inter * 4), 64);
  z.workspace = z.rows + round_up(chunk * (row > small ? row : small), 64);  // for any kind
  return z.workspace;
}

static inline StackSizes stack_sizes(const StackCall& call) {
  const StackShape& s = call.shape;
  StackSizes z = {};
  long tokens = call.batch.tokens, threads = call.threads;
  z.own = threads > 1 && tokens >= threads * kFewestOwnRows &&
          threads * workspace_sizes(s, kOwnRows, z) <= kOwnBytes;
  if (!z.own) workspace_sizes(s, tokens < kChunkRows ? tokens : kChunkRows, z);
  long end = z.workspace * (z.own ? threads : 1);
  auto take = [&end](long bytes) {
    long at = end;
    end = round_up(end + bytes, 64);
    return at;
  };
  z.q = take(tokens * s.heads * s.head_dim * 4);
  z.attended = take(tokens * s.heads * s.head_dim * 4);
  AttentionSizes a = attention_sizes(call.pools[0], s.heads);
  z.attention = take(threads * a.thread_bytes +
                     largest_partials(call) * s.heads * a.partial_stride * 4);
  z.total = end;
  return z;
}

// Rows of inputs, then the threads' notes.
static inline long head_row_bytes(const HeadCall& call) {
  return round_up(call.count * row_bytes(call.linear.kind, call.hidden), 64);
}
static inline long head_bytes(const HeadCall& call) {
  return head_row_bytes(call) + call.threads * call.count * kNoteBytes;
}

}  // namespace diptych
