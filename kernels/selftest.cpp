// Runs every kernel of every tier on buffers of exactly the needed size, compiled with the
// address and undefined-behaviour sanitizers: a read or write one element too far ends the run.
// Results are compared with loops in double. No torch.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "attn_sizes.h"
#include "layer_sizes.h"
#include "plan.h"
#include "weights.h"

using namespace diptych;

namespace {

uint32_t g_state = 1;
float random_float() {
  g_state = g_state * 1664525u + 1013904223u;
  return float(int32_t(g_state) >> 8) * 0x1p-23f;
}

void require(bool ok, const char* what, const char* tier) {
  if (ok) return;
  fprintf(stderr, "selftest: %s is wrong on %s\n", what, tier);
  exit(1);
}

template <class T>
struct Exact {  // an allocation of its own, so that its end is guarded
  T* data;
  size_t count;
  explicit Exact(long n) : data(static_cast<T*>(malloc(size_t(n) * sizeof(T)))), count(size_t(n)) {}
  ~Exact() { free(data); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
};

Exact<float>& fill(Exact<float>& m) {
  for (size_t i = 0; i < m.count; ++i) m.data[i] = random_float();
  return m;
}

struct Aligned {
  char* data;
  explicit Aligned(long bytes) : data(static_cast<char*>(aligned_alloc(64, size_t(round_up(bytes, 64))))) {}
  ~Aligned() { free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
};

template <class F>
void crew(F&& body) {
  run_crew(2, [](const Crew& c, void* f) { (*static_cast<F*>(f))(c); }, &body);
}

void test_linear(const Kernels& k, Kind kind, long rows, long outputs, long inputs, bool gated) {
  Exact<float> w(outputs * inputs), up(outputs * inputs), x(rows * inputs);
  fill(w), fill(up), fill(x);
  long total = gated ? 2 * outputs : outputs, blocks = blocks_of(total);
  Exact<uint8_t> packed(packed_bytes(kind, total, inputs));
  Exact<float> bias(blocks * 32);
  fill(bias);
  pack_weights(kind, w.data, gated ? up.data : nullptr, outputs, inputs, packed.data);
  Exact<uint8_t> data(rows * row_bytes(kind, inputs));
  Exact<float> y(rows * outputs);
  Rows prepared{kind, data.data};
  Linear linear{kind, total, inputs, packed.data, gated ? nullptr : bias.data};
  Output out{gated ? Finish::Gate : Finish::Write, Store::F32, y.data, outputs, outputs};
  crew([&](const Crew& c) {
    k.prepare(c, Matrix{Store::F32, x.data, inputs}, rows, inputs, nullptr, prepared);
    k.linear(c, linear, prepared, rows, out);
  });
  for (long r = 0; r < rows; ++r) {
    for (long n = 0; n < outputs; ++n) {
      double a = 0, b = 0;
      for (long i = 0; i < inputs; ++i) {
        a += double(x.data[r * inputs + i]) * w.data[n * inputs + i];
        b += double(x.data[r * inputs + i]) * up.data[n * inputs + i];
      }
      double want = gated ? a / (1 + exp(-a)) * b : a + bias.data[n];
      double bound = (kind == Kind::F32 ? 1e-5 : is_int4(kind) ? 0.08 : 0.02) * (double(inputs) + 1);
      require(fabs(y.data[r * outputs + n] - want) <= bound, "linear", k.name);
    }
  }
}

struct Sequences {
  std::vector<int32_t> tables, start, context;
  long stride = 0, blocks = 0;

  // pairs of (queries, context); block ids run backwards
  Sequences(std::vector<std::pair<int, int>> list, long block_size) : start{0} {
    for (auto [n, c] : list) {
      start.push_back(start.back() + n);
      context.push_back(c);
      long need = (c + block_size - 1) / block_size;
      if (need > stride) stride = need;
      blocks += need;
    }
    long next = blocks;
    for (auto [n, c] : list)
      for (long i = 0; i < stride; ++i)
        tables.push_back(i < (c + block_size - 1) / block_size ? int32_t(--next) : 0);
  }
  Batch batch() const {
    return Batch{long(context.size()), start.back(), tables.data(), stride, start.data(),
                 context.data()};
  }
};

void test_attention(const Kernels& k, Store store, long k_dim, long v_dim, long heads,
                    long kv_heads, long block_size, long window) {
  Sequences seqs({{1, 1}, {1, 300}, {37, 37}, {5, 129}, {1, 1500}, {70, 90}}, block_size);
  Batch batch = seqs.batch();
  long slots = seqs.blocks * block_size, rows = slots * kv_heads;
  Exact<float> keys(slots * kv_heads * k_dim), values(slots * kv_heads * v_dim);
  fill(keys), fill(values);
  Exact<char> k_pool(rows * head_bytes(store, k_dim)), v_pool(rows * head_bytes(store, v_dim));
  Pool pool{store, k_pool.data, v_pool.data, seqs.blocks, block_size, kv_heads, k_dim, v_dim};
  std::vector<int64_t> all;
  for (long i = 0; i < slots; ++i) all.push_back(slots - 1 - i);  // slot s holds row slots - 1 - s
  Exact<float> q(batch.tokens * heads * k_dim), out(batch.tokens * heads * v_dim), sinks(heads);
  fill(q), fill(sinks);
  Attention a{pool,     heads,      q.data, Store::F32, heads * k_dim, k_dim,
              out.data, Store::F32, 0.3f,   5.0f,       window,        sinks.data};
  StepPlan plan(batch, heads / kv_heads, window);
  AttentionSizes sizes = attention_sizes(pool, heads);
  Aligned scratch(2 * sizes.thread_bytes + plan.partials * heads * sizes.partial_stride * 4);
  crew([&](const Crew& c) {
    k.write_kv(c, pool, all.data(), slots, Matrix{Store::F32, keys.data, kv_heads * k_dim}, k_dim,
               Matrix{Store::F32, values.data, kv_heads * v_dim}, v_dim);
    k.attention(c, a, batch, plan.view(), scratch.data);
  });
  for (long s = 0; s < batch.seqs; ++s) {
    for (long row = batch.query_start[s]; row < batch.query_start[s + 1]; row += 7) {
      long newest = batch.context[s] - (batch.query_start[s + 1] - row);
      long low = window > 0 && newest - window + 1 > 0 ? newest - window + 1 : 0;
      for (long h = 0; h < heads; ++h) {
        std::vector<double> want(size_t(v_dim), 0.0);
        double total = exp(double(sinks.data[h]));
        for (long t = low; t <= newest; ++t) {
          long slot = batch.tables[s * seqs.stride + t / block_size] * block_size + t % block_size;
          long at = (slots - 1 - slot) * kv_heads + h / (heads / kv_heads);
          double dot = 0;
          for (long d = 0; d < k_dim; ++d)
            dot += double(q.data[(row * heads + h) * k_dim + d]) * keys.data[at * k_dim + d];
          double weight = exp(5.0 * tanh(dot * 0.3 / 5.0));
          total += weight;
          for (long d = 0; d < v_dim; ++d) want[size_t(d)] += weight * values.data[at * v_dim + d];
        }
        for (long d = 0; d < v_dim; ++d)
          require(fabs(out.data[(row * heads + h) * v_dim + d] - want[size_t(d)] / total) < 0.02,
                  "attention", k.name);
      }
    }
  }
}

// Two layers with q/k norm and windows: only that nothing is touched beyond its end, and that
// one call over two layers equals two calls.
void test_stack(const Kernels& k, Kind kind, Store store, long inter = 50) {
  StackShape shape{40, 6, 2, 12, inter, 8, 0.3f};
  long width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  long outputs[4] = {width, shape.hidden, 2 * shape.inter, shape.hidden};
  long inputs[4] = {shape.hidden, shape.heads * shape.head_dim, shape.hidden, shape.inter};
  std::vector<std::vector<uint8_t>> packed;
  Linear linears[4];
  for (int i = 0; i < 4; ++i) {
    Exact<float> w(outputs[i] * inputs[i]);
    fill(w);
    packed.emplace_back(size_t(packed_bytes(kind, outputs[i], inputs[i])));
    pack_weights(kind, w.data, nullptr, outputs[i], inputs[i], packed.back().data());
  }
  for (int i = 0; i < 4; ++i)
    linears[i] = Linear{kind, outputs[i], inputs[i], packed[size_t(i)].data(), nullptr};
  Exact<float> norm(shape.hidden), head_norm(shape.head_dim);
  fill(norm), fill(head_norm);
  LayerWeights layer{Norm{norm.data, 1e-5f}, Norm{norm.data, 1e-5f}, linears[0], linears[1],
                     linears[2], linears[3], head_norm.data, head_norm.data, 1e-5f, 9};
  LayerWeights layers[2] = {layer, layer};
  layers[1].window = 0;
  Sequences seqs({{1, 20}, {600, 640}, {1, 1}}, 4);
  Batch batch = seqs.batch();
  long bytes = seqs.blocks * 4 * shape.kv_heads * head_bytes(store, shape.head_dim);
  long tokens = batch.tokens;
  std::vector<float> start(size_t(tokens * shape.hidden)), results[2];
  for (float& x : start) x = random_float();
  Exact<float> cos(tokens * 4), sin(tokens * 4);
  fill(cos), fill(sin);
  for (int split = 0; split < 2; ++split) {
    Exact<char> pools[4] = {Exact<char>(bytes), Exact<char>(bytes), Exact<char>(bytes),
                            Exact<char>(bytes)};
    Pool pool[2];
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) memset(pools[2 * i + j].data, 0, pools[2 * i + j].count);
      pool[i] = Pool{store, pools[2 * i].data, pools[2 * i + 1].data, seqs.blocks, 4,
                     shape.kv_heads, shape.head_dim, shape.head_dim};
    }
    StepPlan windowed(batch, 3, 9), full(batch, 3, 0);
    Plan views[2] = {windowed.view(), full.view()};
    const Plan* plans[2] = {&views[0], &views[1]};
    Exact<float> x(tokens * shape.hidden);
    memcpy(x.data, start.data(), x.count * 4);
    for (int first = 0; first < 2; first += split ? 1 : 2) {
      StackCall call{shape, batch, layers + first, pool + first, plans + first, split ? 1 : 2,
                     x.data, cos.data, sin.data, nullptr, 2};
      Aligned scratch(stack_sizes(call).total);
      call.scratch = scratch.data;
      crew([&](const Crew& c) { k.stack(c, call); });
    }
    results[split].assign(x.data, x.data + x.count);
  }
  require(memcmp(results[0].data(), results[1].data(), results[0].size() * 4) == 0, "stack",
          k.name);
  for (float x : results[0]) require(isfinite(x), "stack", k.name);
}

constexpr Store kStores[] = {Store::F32, Store::BF16, Store::F16};

double step_of(Store s) {  // how far rounding may move a number of up to 1, or of a row's up to 1
  return s == Store::F32 ? 1e-6 : s == Store::BF16 ? 0x1p-8 : s == Store::F16 ? 0x1p-10 : 0.5 / 127;
}

// `count` random numbers in a buffer of `store`, and what they are as doubles.
struct Stored {
  Exact<char> bytes;
  std::vector<double> values;

  Stored(const Kernels& k, Store store, long count) : bytes(count * store_bytes(store)) {
    Exact<float> plain(count);
    fill(plain);
    k.convert(Store::F32, reinterpret_cast<char*>(plain.data), store, bytes.data, 1, count);
    values = read(k, store, bytes.data, count);
  }
  static std::vector<double> read(const Kernels& k, Store store, const char* data, long count) {
    Exact<float> plain(count);
    k.convert(store, data, Store::F32, reinterpret_cast<char*>(plain.data), 1, count);
    return std::vector<double>(plain.data, plain.data + count);
  }
};

void test_convert(const Kernels& k, Store from, Store to, long rows, long dim) {
  Exact<float> plain(rows * dim), back(rows * dim);
  fill(plain);
  Exact<char> first(rows * head_bytes(from, dim)), second(rows * head_bytes(to, dim));
  k.convert(Store::F32, reinterpret_cast<char*>(plain.data), from, first.data, rows, dim);
  k.convert(from, first.data, to, second.data, rows, dim);
  k.convert(to, second.data, Store::F32, reinterpret_cast<char*>(back.data), rows, dim);
  double bound = step_of(from) + step_of(to) + 1e-6;
  for (long i = 0; i < rows * dim; ++i)
    require(fabs(double(back.data[i]) - plain.data[i]) <= bound, "convert", k.name);
}

void test_rms_norm(const Kernels& k, Store from, Store to, long rows, long width) {
  Stored in(k, from, rows * width);
  Exact<float> weight(width);
  fill(weight);
  Exact<char> out(rows * width * store_bytes(to));
  crew([&](const Crew& c) {
    k.rms_norm(c, Matrix{from, in.bytes.data, width}, Matrix{to, out.data, width}, rows, width,
               Norm{weight.data, 1e-5f});
  });
  std::vector<double> got = Stored::read(k, to, out.data, rows * width);
  for (long r = 0; r < rows; ++r) {
    double squares = 0;
    for (long i = 0; i < width; ++i) squares += pow(in.values[size_t(r * width + i)], 2);
    double factor = 1 / sqrt(squares / double(width) + 1e-5);
    for (long i = 0; i < width; ++i) {
      double want = in.values[size_t(r * width + i)] * factor * weight.data[i];
      require(fabs(got[size_t(r * width + i)] - want) <= (1e-5 + step_of(to)) * (1 + fabs(want)),
              "rms_norm", k.name);
    }
  }
}

void test_silu_mul(const Kernels& k, Store store, long rows, long width) {
  Stored gate(k, store, rows * width), up(k, store, rows * width);
  Exact<char> out(rows * width * store_bytes(store));
  crew([&](const Crew& c) {
    k.silu_mul(c, Matrix{store, gate.bytes.data, width}, Matrix{store, up.bytes.data, width},
               Matrix{store, out.data, width}, rows, width);
  });
  std::vector<double> got = Stored::read(k, store, out.data, rows * width);
  for (size_t i = 0; i < got.size(); ++i) {
    double want = gate.values[i] / (1 + exp(-gate.values[i])) * up.values[i];
    require(fabs(got[i] - want) <= 1e-4 + step_of(store), "silu_mul", k.name);
  }
}

void test_head(const Kernels& k, Kind kind, std::vector<int64_t> chosen) {
  constexpr long kHidden = 37, kOutputs = 70, kTokens = 7;
  long count = long(chosen.size());
  Exact<float> w(kOutputs * kHidden), x(kTokens * kHidden), norm(kHidden);
  fill(w), fill(x), fill(norm);
  Exact<uint8_t> packed(packed_bytes(kind, kOutputs, kHidden));
  pack_weights(kind, w.data, nullptr, kOutputs, kHidden, packed.data);
  Exact<int64_t> rows(count);
  memcpy(rows.data, chosen.data(), size_t(count) * 8);
  Exact<float> logits(count * kOutputs);
  Exact<int64_t> best(count);
  HeadCall call{x.data, kHidden, rows.data, count, Norm{norm.data, 1e-5f},
                Linear{kind, kOutputs, kHidden, packed.data, nullptr}, logits.data, best.data, 2,
                nullptr};
  Aligned scratch(head_bytes(call));
  call.scratch = scratch.data;
  crew([&](const Crew& c) { k.head(c, call); });
  for (long r = 0; r < count; ++r) {
    const float* row = x.data + chosen[size_t(r)] * kHidden;
    double squares = 0;
    for (long i = 0; i < kHidden; ++i) squares += double(row[i]) * row[i];
    double factor = 1 / sqrt(squares / kHidden + 1e-5);
    for (long n = 0; n < kOutputs; ++n) {
      double want = 0;
      for (long i = 0; i < kHidden; ++i)
        want += row[i] * factor * norm.data[i] * w.data[n * kHidden + i];
      double bound = (kind == Kind::F32 ? 1e-5 : is_int4(kind) ? 0.08 : 0.02) * 2 * (kHidden + 1);
      require(fabs(logits.data[r * kOutputs + n] - want) <= bound, "head", k.name);
    }
    const float* found = logits.data + r * kOutputs;
    require(best.data[r] == std::max_element(found, found + kOutputs) - found, "best", k.name);
  }
  for (float wrong : {float(NAN), float(INFINITY)}) {
    x.data[chosen[0] * kHidden + kHidden - 1] = wrong;
    crew([&](const Crew& c) { k.head(c, call); });
    for (long r = 0; r < count; ++r)
      require((best.data[r] < 0) == (chosen[size_t(r)] == chosen[0]), "not finite", k.name);
  }
}

void test_rows(const Kernels& k) {
  for (long dim : {1L, 5L, 16L, 33L, 64L})
    for (Store from : {Store::F32, Store::BF16, Store::F16, Store::I8})
      for (Store to : {Store::F32, Store::BF16, Store::F16, Store::I8})
        test_convert(k, from, to, 3, dim);
  for (long rows : {1L, 3L, 37L}) {  // the last are handed out, the others dealt out
    for (long width : {1L, 7L, 16L, 37L, 64L}) {
      for (Store from : kStores) {
        for (Store to : kStores) test_rms_norm(k, from, to, rows, width);
        test_silu_mul(k, from, rows, width);
      }
    }
  }
}

void test_tier(const Kernels& k) {
  test_rows(k);
  for (Kind kind : {Kind::F32, Kind::BF16, Kind::I8, Kind::I8A16, Kind::I4, Kind::I4A16}) {
    for (long rows : {1L, 3L, 14L, 15L, 29L})
      test_linear(k, kind, rows, 70, 37, false);
    test_linear(k, kind, 2, 1, 1, false);
    test_linear(k, kind, 0, 33, 40, false);
    test_linear(k, kind, 17, 41, 64, true);
    test_linear(k, kind, 70, 33, 1024, false);
    test_head(k, kind, {6, 0, 3, 3, 5});
    test_head(k, kind, {6});
  }
  for (Store store : {Store::F32, Store::BF16, Store::F16, Store::I8}) {
    test_attention(k, store, 64, 64, 9, 3, 16, 0);
    test_attention(k, store, 20, 7, 5, 1, 5, 50);
    test_attention(k, store, 3, 33, 2, 2, 1, 1);
  }
  test_stack(k, Kind::F32, Store::F32);
  test_stack(k, Kind::BF16, Store::BF16);
  test_stack(k, Kind::BF16, Store::BF16, 7);  // narrower than a padded row
  test_stack(k, Kind::I8, Store::F16);
  test_stack(k, Kind::I8A16, Store::BF16);
  test_stack(k, Kind::I4A16, Store::F32);
  test_stack(k, Kind::I8, Store::I8);
}

}  // namespace

int main() {
  for (const char* name : {"generic", "avx2", "avx512", "avx512bf16", "amx"}) {
    const Kernels* kernels = find_kernels(name);
    if (!kernels) {
      printf("%s: not on this machine\n", name);
      continue;
    }
    test_tier(*kernels);
    printf("%s: ok\n", name);
  }
  return 0;
}
