// torch.classes.diptych.LlamaStack: prepacked decoder layers and head behind one object.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <map>
#include <vector>

#include "layer_sizes.h"
#include "torch_common.h"

namespace diptych {
namespace {

struct LlamaStack : torch::CustomClassHolder {
  // sizes: hidden, heads, kv_heads, head_dim, inter, rotary
  LlamaStack(std::vector<int64_t> sizes, double scaling) {
    TORCH_CHECK(sizes.size() == 6, "diptych: six sizes expected");
    for (int64_t size : sizes) TORCH_CHECK(size > 0, "diptych: sizes must be positive");
    shape_ = StackShape{long(sizes[0]), long(sizes[1]), long(sizes[2]), long(sizes[3]),
                        long(sizes[4]), long(sizes[5]), float(scaling)};
    TORCH_CHECK(shape_.heads % shape_.kv_heads == 0 && shape_.rotary % 2 == 0 &&
                    shape_.rotary <= shape_.head_dim,
                "diptych: heads must be a multiple of KV heads, rotary even and <= head_dim");
  }

  // weights, biases and kinds of qkv, o, gate_up, down; norms: attention, mlp, q or none, k or none
  void add_layer(std::vector<at::Tensor> packed, std::vector<std::optional<at::Tensor>> biases,
                 std::vector<int64_t> kinds, std::vector<std::optional<at::Tensor>> norms,
                 double eps, int64_t window) {
    TORCH_CHECK(packed.size() == 4 && biases.size() == 4 && kinds.size() == 4 && norms.size() == 4,
                "diptych: four weights, biases, kinds and norms expected");
    TORCH_CHECK(norms[0] && norms[1], "diptych: a layer needs both of its norms");
    TORCH_CHECK(window >= 0, "diptych: window must be >= 0");
    const StackShape& s = shape_;
    long q_width = s.heads * s.head_dim;
    long outputs[4] = {q_width + 2 * s.kv_heads * s.head_dim, s.hidden, 2 * s.inter, s.hidden};
    long inputs[4] = {s.hidden, q_width, s.hidden, s.inter};
    Linear linears[4];
    for (int i = 0; i < 4; ++i)
      linears[i] = keep(packed[i], biases[i], kind_of(kinds[i]), outputs[i], inputs[i]);
    float e = float(eps);
    layers_.push_back(LayerWeights{Norm{floats(norms[0], s.hidden, "norm"), e},
                                   Norm{floats(norms[1], s.hidden, "norm"), e}, linears[0],
                                   linears[1], linears[2], linears[3],
                                   floats(norms[2], s.head_dim, "q norm"),
                                   floats(norms[3], s.head_dim, "k norm"), e, long(window)});
    for (const auto& norm : norms)
      if (norm) kept_.push_back(*norm);
  }

  void set_head(at::Tensor norm, double eps, at::Tensor packed, std::optional<at::Tensor> bias,
                int64_t kind, int64_t outputs) {
    head_norm_ = Norm{floats(norm, shape_.hidden, "norm"), float(eps)};
    head_ = keep(packed, bias, kind_of(kind), outputs, shape_.hidden);
    kept_.push_back(norm);
  }

  void attach(std::vector<at::Tensor> k, std::vector<at::Tensor> v) {
    TORCH_CHECK(k.size() == layers_.size() && v.size() == layers_.size(),
                "diptych: one K and one V pool per layer expected");
    std::vector<Pool> pools;
    for (size_t i = 0; i < k.size(); ++i) {
      pools.push_back(pool_of(k[i], v[i]));
      const Pool& p = pools.back();
      TORCH_CHECK(p.kv_heads == shape_.kv_heads && p.k_dim == shape_.head_dim &&
                      p.v_dim == shape_.head_dim && p.num_blocks == pools[0].num_blocks &&
                      p.block_size == pools[0].block_size && p.store == pools[0].store,
                  "diptych: the KV pool of layer ", i, " has another shape than the model");
    }
    pools_ = std::move(pools);
    pool_tensors_ = std::move(k);
    pool_tensors_.insert(pool_tensors_.end(), v.begin(), v.end());
  }

  // Layers [first, last) on x fp32 [tokens, hidden], in place; of one layer with `kv_only`, its
  // keys and values only.
  void run(at::Tensor x, at::Tensor tables, at::Tensor query_start, at::Tensor context,
           at::Tensor cos, at::Tensor sin, int64_t first, int64_t last, bool kv_only) {
    TORCH_CHECK(!kv_only || last == first + 1, "diptych: KV of one layer at a time");
    TORCH_CHECK(!pools_.empty(), "diptych: attach a KV pool first");
    TORCH_CHECK(first >= 0 && first < last && last <= int64_t(layers_.size()),
                "diptych: no layers ", first, " to ", last);
    check_x(x);
    check_rotary(cos, sin, x.size(0), shape_.rotary / 2);
    Batch batch = batch_of(tables, query_start, context, x.size(0));
    check_batch(batch, pools_[0]);
    std::map<long, StepPlan> plans;
    std::map<long, Plan> views;
    std::vector<const Plan*> chosen;
    for (int64_t i = first; i < last; ++i) {
      long window = layers_[i].window;
      auto [at, fresh] = plans.try_emplace(window, batch, shape_.heads / shape_.kv_heads, window);
      if (fresh) views[window] = at->second.view();
      chosen.push_back(&views[window]);
    }
    StackCall call{shape_,       batch,           layers_.data() + first,
                   pools_.data() + first, chosen.data(), last - first,
                   x.data_ptr<float>(),   cos.const_data_ptr<float>(),
                   sin.const_data_ptr<float>(), nullptr, at::get_num_threads(),
                   kv_only};
    call.scratch = scratch_.at_least(size_t(stack_sizes(call).total));
    diptych::run([&](const Crew& crew) { active_kernels().stack(crew, call); });
  }

  // Logits fp32 [rows, outputs] of the given rows of x, and the best token of each, int64 [rows]: -1
  // where one is not finite.
  std::tuple<at::Tensor, at::Tensor> logits(at::Tensor x, at::Tensor rows) {
    TORCH_CHECK(head_.packed, "diptych: the model has no head");
    check_x(x);
    TORCH_CHECK(rows.scalar_type() == at::kLong && rows.is_contiguous() && rows.dim() == 1,
                "diptych: rows must be contiguous int64");
    const int64_t* row = rows.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows.numel(); ++i)
      TORCH_CHECK(row[i] >= 0 && row[i] < x.size(0), "diptych: no row ", row[i]);
    at::Tensor out = at::empty({rows.numel(), head_.outputs}, x.options());
    at::Tensor best = at::empty({rows.numel()}, rows.options());
    HeadCall call{x.const_data_ptr<float>(), shape_.hidden, row, long(rows.numel()), head_norm_,
                  head_, out.data_ptr<float>(), best.data_ptr<int64_t>(), at::get_num_threads(),
                  nullptr};
    call.scratch = scratch_.at_least(size_t(head_bytes(call)));
    diptych::run([&](const Crew& crew) { active_kernels().head(crew, call); });
    return {out, best};
  }

 private:
  Linear keep(const at::Tensor& packed, const std::optional<at::Tensor>& bias, Kind kind,
              long outputs, long inputs) {
    Linear linear = linear_of(kind, packed, bias, outputs, inputs);
    kept_.push_back(packed);
    if (bias) kept_.push_back(*bias);
    return linear;
  }

  void check_x(const at::Tensor& x) const {
    TORCH_CHECK(x.dim() == 2 && x.size(1) == shape_.hidden && x.scalar_type() == at::kFloat &&
                    x.is_contiguous(),
                "diptych: x must be contiguous fp32 [tokens, ", shape_.hidden, "]");
  }

  StackShape shape_;
  std::vector<LayerWeights> layers_;
  std::vector<Pool> pools_;
  std::vector<at::Tensor> pool_tensors_;
  std::vector<at::Tensor> kept_;  // owns what the weights point to
  Norm head_norm_ = {};
  Linear head_ = {};
  Scratch scratch_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(diptych, m) {
  m.class_<LlamaStack>("LlamaStack")
      .def(torch::init<std::vector<int64_t>, double>())
      .def("add_layer", &LlamaStack::add_layer)
      .def("set_head", &LlamaStack::set_head)
      .def("attach", &LlamaStack::attach)
      .def("run", &LlamaStack::run)
      .def("logits", &LlamaStack::logits);
}

}  // namespace diptych
