// Stand-alone operators in the namespace `diptych`, usable by any model.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "attn_sizes.h"
#include "torch_common.h"
#include "weight_memory.h"

namespace diptych {
namespace {

const Kernels* g_active = nullptr;

Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

at::Tensor attention_like(const at::Tensor& q, const at::Tensor& v_pool) {
  return at::empty({q.size(0), q.size(1), dim_of(v_pool)}, q.options());
}

at::Tensor paged_attention_meta(const at::Tensor& q, const at::Tensor&, const at::Tensor& v_pool,
                                const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                                int64_t, double, const std::optional<at::Tensor>&) {
  return attention_like(q, v_pool);
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool,
                           const at::Tensor& tables, const at::Tensor& query_start,
                           const at::Tensor& context, double scaling, int64_t window,
                           double softcap, const std::optional<at::Tensor>& sinks) {
  Pool pool = pool_of(k_pool, v_pool);
  TORCH_CHECK(q.dim() == 3 && q.size(2) == pool.k_dim && q.stride(2) == 1 &&
                  q.size(1) % pool.kv_heads == 0,
              "diptych: q must be [tokens, heads, k_dim], heads a multiple of the KV heads");
  TORCH_CHECK(window >= 0 && softcap >= 0, "diptych: window and softcap must be >= 0");
  Batch batch = batch_of(tables, query_start, context, q.size(0));
  check_batch(batch, pool);
  at::Tensor out = attention_like(q, v_pool);
  Attention a{pool,
              long(q.size(1)),
              q.const_data_ptr(),
              store_of(q),
              long(q.stride(0)),
              long(q.stride(1)),
              out.data_ptr(),
              store_of(out),
              float(scaling),
              float(softcap),
              long(window),
              floats(sinks, q.size(1), "sinks")};
  StepPlan plan(batch, a.heads / pool.kv_heads, a.window);
  Plan view = plan.view();
  AttentionSizes sizes = attention_sizes(pool, a.heads);
  char* memory = scratch().at_least(size_t(at::get_num_threads() * sizes.thread_bytes +
                                           plan.partials * a.heads * sizes.partial_stride * 4));
  run([&](const Crew& crew) { active_kernels().attention(crew, a, batch, view, memory); });
  return out;
}

void kv_write(const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_pool,
              const at::Tensor& v_pool, const at::Tensor& slots) {
  Pool pool = pool_of(k_pool, v_pool);
  int64_t tokens = slots.size(0);
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.dim() == 1,
              "diptych: slots must be contiguous int64 [tokens]");
  TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && k.size(0) == tokens && v.size(0) == tokens &&
                  k.size(1) == pool.kv_heads && v.size(1) == pool.kv_heads &&
                  k.size(2) == pool.k_dim && v.size(2) == pool.v_dim && k.stride(2) == 1 &&
                  v.stride(2) == 1,
              "diptych: k and v must be [tokens, kv_heads, dim] as in the pool");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK(slot[i] >= 0 && slot[i] < pool.num_blocks * pool.block_size,
                "diptych: a slot outside the pool");
  Matrix k_rows{store_of(k), k.data_ptr(), long(k.stride(0))};
  Matrix v_rows{store_of(v), v.data_ptr(), long(v.stride(0))};
  run([&](const Crew& crew) {
    active_kernels().write_kv(crew, pool, slot, tokens, k_rows, k.stride(1), v_rows, v.stride(1));
  });
}

// Blocks of one pool into another that differs in its element type, by the calling thread alone.
void kv_convert(const at::Tensor& source, const at::Tensor& target, const at::Tensor& from,
                const at::Tensor& to) {
  for (const at::Tensor* pool : {&source, &target})
    TORCH_CHECK(pool->dim() == 4 && pool->is_contiguous(),
                "diptych: KV pools must be contiguous [blocks, block_size, heads, dim]");
  TORCH_CHECK(source.size(1) == target.size(1) && source.size(2) == target.size(2) &&
                  dim_of(source) == dim_of(target),
              "diptych: the pools differ in more than their blocks and element type");
  for (const at::Tensor* blocks : {&from, &to})
    TORCH_CHECK(blocks->scalar_type() == at::kLong && blocks->is_contiguous() &&
                    blocks->dim() == 1 && blocks->size(0) == from.size(0),
                "diptych: blocks must be contiguous int64, as many of one pool as of the other");
  const int64_t *first = from.const_data_ptr<int64_t>(), *second = to.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < from.size(0); ++i)
    TORCH_CHECK(first[i] >= 0 && first[i] < source.size(0) && second[i] >= 0 &&
                    second[i] < target.size(0),
                "diptych: a block outside the pool");
  Store in = pool_store_of(source), out = pool_store_of(target);
  long dim = dim_of(source), rows = long(source.size(1) * source.size(2));
  const char* theirs = static_cast<const char*>(source.const_data_ptr());
  char* ours = static_cast<char*>(target.data_ptr());
  for (int64_t i = 0; i < from.size(0); ++i)
    active_kernels().convert(in, theirs + first[i] * rows * head_bytes(in, dim), out,
                             ours + second[i] * rows * head_bytes(out, dim), rows, dim);
}

void kv_write_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                   const at::Tensor&) {}

// Weight [outputs, inputs] fp32 -> packed uint8 [bytes].
at::Tensor pack_linear(const at::Tensor& weight, int64_t kind, const std::optional<at::Tensor>& up) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat && weight.is_contiguous(),
              "diptych: weight must be contiguous fp32 [outputs, inputs]");
  int64_t outputs = weight.size(0), inputs = weight.size(1);
  const float* second = floats(up, weight.numel(), "up");
  int64_t total = second ? 2 * outputs : outputs;
  at::Tensor packed = weight_bytes(packed_bytes(kind_of(kind), total, inputs));
  clear_weights(kind_of(kind), packed.numel(), packed.data_ptr<uint8_t>());
  at::parallel_for(0, outputs, 64, [&](int64_t first, int64_t last) {
    pack_outputs(kind_of(kind), weight.const_data_ptr<float>(), second, first, last, inputs,
                 packed.data_ptr<uint8_t>());
  });
  return packed;
}

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor&, const std::optional<at::Tensor>&,
                       int64_t, int64_t outputs, bool gated) {
  return at::empty({x.size(0), gated ? outputs / 2 : outputs}, x.options());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed,
                  const std::optional<at::Tensor>& bias, int64_t kind_number, int64_t outputs,
                  bool gated) {
  Matrix in = matrix_of(x);
  Kind kind = kind_of(kind_number);
  long inputs = x.size(1), count = x.size(0);
  Linear layer = linear_of(kind, packed, bias, outputs, inputs);
  at::Tensor out = linear_meta(x, packed, bias, kind_number, outputs, gated);
  char* memory = scratch().at_least(size_t(count * row_bytes(kind, inputs)));
  Rows rows{kind, reinterpret_cast<uint8_t*>(memory)};
  Output output{gated ? Finish::Gate : Finish::Write, store_of(out), out.data_ptr(),
                long(out.size(1)), long(out.size(1))};
  run([&](const Crew& crew) {
    active_kernels().prepare(crew, in, count, inputs, nullptr, rows);
    active_kernels().linear(crew, layer, rows, count, output);
  });
  return out;
}

at::Tensor like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  Matrix in = matrix_of(x);
  at::Tensor out = like(x);
  Norm norm{floats(weight, x.size(1), "weight"), float(eps)};
  run([&](const Crew& crew) {
    active_kernels().rms_norm(crew, in, matrix_of(out), x.size(0), x.size(1), norm);
  });
  return out;
}

at::Tensor rms_norm_meta(const at::Tensor& x, const at::Tensor&, double) { return like(x); }

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  Matrix g = matrix_of(gate), u = matrix_of(up);
  TORCH_CHECK(gate.sizes() == up.sizes() && g.store == u.store, "diptych: gate and up differ");
  at::Tensor out = like(gate);
  run([&](const Crew& crew) {
    active_kernels().silu_mul(crew, g, u, matrix_of(out), gate.size(0), gate.size(1));
  });
  return out;
}

at::Tensor silu_mul_meta(const at::Tensor& gate, const at::Tensor&) { return like(gate); }

// cos and sin [tokens, frequencies] fp32 of positions int64 [tokens].
std::tuple<at::Tensor, at::Tensor> rotary_table(const at::Tensor& positions,
                                                const at::Tensor& frequencies, double factor) {
  int64_t tokens = positions.numel(), width = frequencies.numel();
  TORCH_CHECK(positions.scalar_type() == at::kLong && positions.is_contiguous(),
              "diptych: positions must be contiguous int64");
  const float* frequency = floats(frequencies, width, "frequencies");
  const int64_t* position = positions.const_data_ptr<int64_t>();
  at::Tensor cos = at::empty({tokens, width}, frequencies.options()), sin = like(cos);
  float *c = cos.data_ptr<float>(), *s = sin.data_ptr<float>();
  at::parallel_for(0, tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * width; i < end * width; ++i) {
      float angle = float(position[i / width]) * frequency[i % width];
      c[i] = std::cos(angle) * float(factor);
      s[i] = std::sin(angle) * float(factor);
    }
  });
  return {cos, sin};
}

bool use_tier(c10::string_view name) {
  const Kernels* found = find_kernels(std::string(name).c_str());
  if (found) g_active = found;
  return found != nullptr;
}

bool place_threads(int64_t own, std::vector<int64_t> cpus) {
  TORCH_CHECK(own > 0, "diptych: a crew has a thread of its own");
  for (int64_t cpu : cpus) TORCH_CHECK(cpu >= 0, "diptych: no CPU ", cpu);
  return place_crew(int(own), cpus.data(), int(cpus.size()));
}

std::string tier() { return active_kernels().name; }

}  // namespace

const Kernels& active_kernels() {
  if (!g_active) g_active = best_kernels();
  return *g_active;
}

TORCH_LIBRARY(diptych, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor tables, Tensor query_start, "
      "Tensor context, float scaling, int window=0, float softcap=0.0, Tensor? sinks=None) -> "
      "Tensor");
  m.def(
      "kv_write(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots) -> ()");
  m.def("kv_convert(Tensor source, Tensor(a!) target, Tensor from_blocks, Tensor to_blocks) -> ()");
  m.def("pack_linear(Tensor weight, int kind, Tensor? up=None) -> Tensor");
  m.def(
      "linear(Tensor x, Tensor packed, Tensor? bias, int kind, int outputs, bool gated=False) -> "
      "Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("rotary_table(Tensor positions, Tensor frequencies, float factor) -> (Tensor, Tensor)");
  m.def("use_tier(str name) -> bool", use_tier);
  m.def("tier() -> str", tier);
  m.def("place_threads(int own, int[] cpus) -> bool", place_threads);
}

TORCH_LIBRARY_IMPL(diptych, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("kv_write", kv_write);
  m.impl("kv_convert", kv_convert);
  m.impl("pack_linear", pack_linear);
  m.impl("linear", linear);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("rotary_table", rotary_table);
}

TORCH_LIBRARY_IMPL(diptych, Meta, m) {
  m.impl("paged_attention", paged_attention_meta);
  m.impl("kv_write", kv_write_meta);
  m.impl("linear", linear_meta);
  m.impl("rms_norm", rms_norm_meta);
  m.impl("silu_mul", silu_mul_meta);
}

}  // namespace diptych
