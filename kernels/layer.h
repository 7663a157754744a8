// A run of Llama-family decoder layers without leaving the crew: norm, qkv, (q/k norm), rotary,
// KV write, attention, output projection, residual, norm, SwiGLU, residual. The residual stream
// stays fp32. Row work goes through chunks (layer_sizes.h) so that scratch does not grow with the
// step beyond queries and attention results.
#pragma once

#include "attention.h"
#include "layer_sizes.h"
#include "linear.h"

namespace diptych {
namespace DIPTYCH_TIER {

// In place: RMS norm over one head where a weight is given.
DIPTYCH_INLINE void norm_head(float* x, long dim, const float* weight, float eps) {
  if (!weight) return;
  char* p = reinterpret_cast<char*>(x);
  float factor = norm_factor<MemF32>(p, dim, eps);
  for (long i = 0; i < dim; i += kLanes) {
    VF w = get_any<MemF32>(reinterpret_cast<const char*>(weight + i), dim - i);
    put_any<MemF32>(p + i * 4, get_any<MemF32>(p + i * 4, dim - i) * factor * w, dim - i);
  }
}

// In place: rotate the first `rotary` elements, element i with element i + rotary / 2.
DIPTYCH_INLINE void rotate_head(float* x, long rotary, const float* cos, const float* sin) {
  long half = rotary / 2, i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    VF a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

struct StackRun {
  const StackCall& call;
  StackSizes sizes;
  float *q, *attended;
  char* attention;

  explicit StackRun(const StackCall& c) : call(c), sizes(stack_sizes(c)) {
    q = reinterpret_cast<float*>(c.scratch + sizes.q);
    attended = reinterpret_cast<float*>(c.scratch + sizes.attended);
    attention = c.scratch + sizes.attention;
  }
};

// Memory for the rows that a crew, or one thread of it alone, works on between two attentions.
struct Workspace {
  float* qkv;
  char* inner;
  uint8_t* rows;

  Workspace(const StackRun& run, int number) {
    char* first = run.call.scratch + number * run.sizes.workspace;
    qkv = reinterpret_cast<float*>(first + run.sizes.qkv);
    inner = first + run.sizes.inner;
    rows = reinterpret_cast<uint8_t*>(first + run.sizes.rows);
  }
  // Prepare the input of `linear` and multiply.
  void project(const Crew& crew, const Linear& linear, const Matrix& in, long count,
               const Norm* norm, const Output& out) const {
    Rows prepared{linear.kind, rows};
    run_prepare(crew, in, count, linear.inputs, norm, prepared);
    run_linear(crew, linear, prepared, count, out);
  }
};

// f(crew, workspace, first row, count) for all rows of the step.
template <class F>
DIPTYCH_INLINE void each_chunk(const Crew& crew, const StackRun& run, F&& f) {
  long tokens = run.call.batch.tokens, chunk = run.sizes.chunk;
  if (!run.sizes.own) {
    for (long first = 0; first < tokens; first += chunk)
      f(crew, Workspace(run, 0), first, min_of(chunk, tokens - first));
    return;
  }
  Team team;
  Crew alone{&team, 0, 1};
  Workspace space(run, crew.tid);
  // As many units for each thread, of nearly equal size.
  long rounds = (tokens + chunk * crew.threads - 1) / (chunk * crew.threads);
  long units = rounds * crew.threads;
  for (long unit; (unit = crew.next()) < units;) {
    long first = unit * tokens / units, last = (unit + 1) * tokens / units;
    f(alone, space, first, last - first);
  }
  crew.sync();
}

// Sequence and position of a packed row.
struct Place {
  long seq, position;
};
inline Place place_of(const Batch& batch, long row) {
  long low = 0, high = batch.seqs - 1;
  while (low < high) {  // the last sequence that starts at or before `row`
    long middle = (low + high + 1) / 2;
    if (batch.query_start[middle] <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return {low, batch.context[low] - (batch.query_start[low + 1] - row)};
}

// From projected q, k, v of one row: queries to scratch, keys and values to the pool.
inline void place_row(const StackRun& run, const LayerWeights& w, const Pool& pool, long row,
                      float* qkv) {
  const StackShape& shape = run.call.shape;
  const Batch& batch = run.call.batch;
  long dim = shape.head_dim, heads = shape.heads, kv_heads = shape.kv_heads;
  const float* cos = run.call.cos + row * (shape.rotary / 2);
  const float* sin = run.call.sin + row * (shape.rotary / 2);
  for (long h = 0; h < heads + kv_heads; ++h) {
    norm_head(qkv + h * dim, dim, h < heads ? w.q_norm : w.k_norm, w.head_eps);
    rotate_head(qkv + h * dim, shape.rotary, cos, sin);
  }
  memcpy(run.q + row * heads * dim, qkv, size_t(heads * dim) * 4);
  Place at = place_of(batch, row);
  long block = batch.tables[at.seq * batch.table_stride + at.position / pool.block_size];
  long slot = block * pool.block_size + at.position % pool.block_size;
  long offset = slot * kv_heads * head_bytes(pool.store, dim);
  Matrix k{Store::F32, qkv + heads * dim, 0}, v{Store::F32, qkv + (heads + kv_heads) * dim, 0};
  write_heads(k, 0, dim, kv_heads, dim, pool.store, pool.k + offset);
  write_heads(v, 0, dim, kv_heads, dim, pool.store, pool.v + offset);
}

// How a result is kept that only a linear of this kind reads: bf16 where the linear rounds it to
// bf16 or to 8 bits. The widest rows of a layer leave the inner cache: half the bytes.
inline Store kept_for(Kind kind) {
  bool coarse = kind == Kind::BF16 || kind == Kind::I8 || kind == Kind::I4;
  return coarse ? Store::BF16 : Store::F32;
}

inline void run_layer(const Crew& crew, const StackRun& run, const LayerWeights& w,
                      const Pool& pool, const Plan& plan) {
  const StackCall& call = run.call;
  const StackShape& s = call.shape;
  long width = (s.heads + 2 * s.kv_heads) * s.head_dim, q_width = s.heads * s.head_dim;
  each_chunk(crew, run, [&](const Crew& team, const Workspace& space, long first, long count) {
    Matrix x{Store::F32, call.x + first * s.hidden, s.hidden};
    space.project(team, w.qkv, x, count, &w.attention_norm,
                  Output{Finish::Write, Store::F32, space.qkv, width, width});
    each_row(team, count, [&](long row) {
      place_row(run, w, pool, first + row, space.qkv + row * width);
    });
  });
  if (call.kv_only) return;
  Attention a{pool,         s.heads,      run.q, Store::F32, q_width,  s.head_dim,
              run.attended, Store::F32,   s.scaling, 0.0f,   w.window, nullptr};
  run_attention(crew, a, call.batch, plan, run.attention);
  Store inner = kept_for(w.down.kind);
  // In bf16 the gate's results already are the rows that `down` multiplies.
  bool ready = w.down.kind == Kind::BF16;
  long inner_width = ready ? row_bytes(Kind::BF16, s.inter) / 2 : s.inter;
  each_chunk(crew, run, [&](const Crew& team, const Workspace& space, long first, long count) {
    float* x = call.x + first * s.hidden;
    Output residual{Finish::Add, Store::F32, x, s.hidden, s.hidden};
    Matrix attended{Store::F32, run.attended + first * q_width, q_width};
    space.project(team, w.o, attended, count, nullptr, residual);
    if (long used = used_row_bytes(Kind::BF16, s.inter); ready && used > s.inter * 2)
      each_row(team, count, [&](long row) {
        memset(space.inner + row * inner_width * 2 + used - 64, 0, 64);  // holds the padding
      });
    space.project(team, w.gate_up, Matrix{Store::F32, x, s.hidden}, count, &w.mlp_norm,
                  Output{Finish::Gate, inner, space.inner, inner_width, s.inter});
    if (ready)
      run_linear(team, w.down, Rows{Kind::BF16, reinterpret_cast<uint8_t*>(space.inner)}, count,
                 residual);
    else
      space.project(team, w.down, Matrix{inner, space.inner, s.inter}, count, nullptr, residual);
  });
}

inline void run_stack(const Crew& crew, const StackCall& call) {
  StackRun run(call);
  for (long i = 0; i < call.count; ++i)
    run_layer(crew, run, call.layers[i], call.pools[i], *call.plans[i]);
}

inline void run_head(const Crew& crew, const HeadCall& call) {
  Rows rows{call.linear.kind, reinterpret_cast<uint8_t*>(call.scratch)};
  each_row(crew, call.count, [&](long row) {
    const char* x = reinterpret_cast<const char*>(call.x + call.rows[row] * call.hidden);
    prepare_row<MemF32>(x, call.hidden, &call.norm, rows, row);
  });
  char* notes = call.scratch + head_row_bytes(call);
  long stride = call.count * kNoteBytes;
  clear_notes(notes + crew.tid * stride, call.count);
  run_linear(crew, call.linear, rows, call.count,
             Output{Finish::Write, Store::F32, call.logits, call.linear.outputs,
                    call.linear.outputs, notes});
  each_row(crew, call.count, [&](long row) {
    call.best[row] = best_noted(notes + row * kNoteBytes, crew.threads, stride);
  });
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
