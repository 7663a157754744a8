// What the torch operators share: checks, views of tensors as plain data, running a crew.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <memory>

#include "api.h"
#include "plan.h"
#include "weights.h"

namespace diptych {

const Kernels& active_kernels();

inline Store store_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return Store::F32;
    case at::kBFloat16:
      return Store::BF16;
    case at::kHalf:
      return Store::F16;
    default:
      TORCH_CHECK(false, "diptych: fp32, bf16 or fp16 expected, not ", t.scalar_type());
  }
}

inline Kind kind_of(int64_t kind) {
  TORCH_CHECK(kind >= 0 && kind <= 5, "diptych: unknown kind of linear layer ", kind);
  return Kind(kind);
}

inline const float* floats(const std::optional<at::Tensor>& t, int64_t count, const char* what) {
  if (!t.has_value()) return nullptr;
  TORCH_CHECK(t->scalar_type() == at::kFloat && t->is_contiguous() && t->numel() == count,
              "diptych: ", what, " must be ", count, " contiguous fp32 values");
  return t->const_data_ptr<float>();
}

inline Linear linear_of(Kind kind, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                        long outputs, long inputs) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous() &&
                  packed.numel() == packed_bytes(kind, outputs, inputs),
              "diptych: packed weights do not fit ", inputs, " inputs and ", outputs, " outputs");
  return Linear{kind, outputs, inputs, packed.const_data_ptr<uint8_t>(),
                floats(bias, blocks_of(outputs) * kBlockCols, "bias")};
}

// Rows of a matrix whose elements are adjacent inside a row.
inline Matrix matrix_of(const at::Tensor& t) {
  TORCH_CHECK(t.dim() == 2 && (t.size(1) <= 1 || t.stride(1) == 1),
              "diptych: rows with adjacent elements expected");
  return Matrix{store_of(t), t.data_ptr(), long(t.stride(0))};
}

// A pool's int8 [.., dim + kScaleBytes] are integers and their scale.
inline Store pool_store_of(const at::Tensor& pool) {
  return pool.scalar_type() == at::kChar ? Store::I8 : store_of(pool);
}
inline long dim_of(const at::Tensor& pool) {
  long dim = long(pool.size(3)) - (pool.scalar_type() == at::kChar ? kScaleBytes : 0);
  TORCH_CHECK(dim > 0, "diptych: rows of a KV pool are too short");
  return dim;
}

inline Pool pool_of(const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK(k.dim() == 4 && v.dim() == 4 && k.is_contiguous() && v.is_contiguous(),
              "diptych: KV pools must be contiguous [blocks, block_size, heads, dim]");
  TORCH_CHECK(k.scalar_type() == v.scalar_type() && k.size(0) == v.size(0) &&
                  k.size(1) == v.size(1) && k.size(2) == v.size(2),
              "diptych: K and V pool differ in more than their dim");
  Pool pool{pool_store_of(k),  static_cast<char*>(k.data_ptr()),
            static_cast<char*>(v.data_ptr()),
            long(k.size(0)),   long(k.size(1)),
            long(k.size(2)),   dim_of(k),
            dim_of(v)};
  TORCH_CHECK(pool.store != Store::I8 || pool.k_dim <= kMaxIntegerDim,
              "diptych: int8 keys of more than ", kMaxIntegerDim, " elements");
  return pool;
}

inline Batch batch_of(const at::Tensor& tables, const at::Tensor& query_start,
                      const at::Tensor& context, int64_t tokens) {
  TORCH_CHECK(tables.dim() == 2 && query_start.dim() == 1 && context.dim() == 1 &&
                  tables.size(0) == context.size(0) &&
                  query_start.size(0) == context.size(0) + 1,
              "diptych: tables [S, B], query_start [S + 1] and context [S] expected");
  TORCH_CHECK(tables.scalar_type() == at::kInt && query_start.scalar_type() == at::kInt &&
                  context.scalar_type() == at::kInt && tables.is_contiguous() &&
                  query_start.is_contiguous() && context.is_contiguous(),
              "diptych: tables, query_start and context must be contiguous int32");
  return Batch{long(context.size(0)),
               long(tokens),
               tables.const_data_ptr<int32_t>(),
               long(tables.size(1)),
               query_start.const_data_ptr<int32_t>(),
               context.const_data_ptr<int32_t>()};
}

inline void check_batch(const Batch& batch, const Pool& pool) {
  const char* problem = batch_problem(batch, pool.num_blocks, pool.block_size);
  TORCH_CHECK(!problem, "diptych: bad batch: ", problem);
}

inline void check_rotary(const at::Tensor& cos, const at::Tensor& sin, int64_t tokens,
                         int64_t half) {
  for (const at::Tensor* t : {&cos, &sin})
    TORCH_CHECK(t->scalar_type() == at::kFloat && t->is_contiguous() && t->dim() == 2 &&
                    t->size(0) == tokens && t->size(1) == half,
                "diptych: cos and sin must be contiguous fp32 [tokens, rotary / 2]");
}

template <class F>
void run(F&& body) {
  run_crew(at::get_num_threads(), [](const Crew& crew, void* f) { (*static_cast<F*>(f))(crew); },
           &body);
}

// Memory that one calling thread keeps between calls: fresh pages cost more than small kernels.
class Scratch {
 public:
  char* at_least(size_t bytes) {
    if (bytes > size_) {
      memory_.reset(new (std::align_val_t(64)) char[bytes]);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<char[], Free> memory_;
  size_t size_ = 0;
};

}  // namespace diptych
