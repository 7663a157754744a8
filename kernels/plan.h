// How the attention of one step is cut into pieces, and how weights are packed.
#pragma once

#include <stdint.h>

#include <vector>

#include "api.h"

namespace diptych {

struct StepPlan {  // owns what a Plan points to
  std::vector<Item> decodes, prefills;
  std::vector<Merge> merges;
  long partials = 0;

  StepPlan(const Batch& batch, long group, long window);
  Plan view() const;
};

// The first thing wrong with a batch, or null. `num_blocks` and `block_size` of the pool.
const char* batch_problem(const Batch& batch, long num_blocks, long block_size);

// Bytes of packed weights, and packing one row-major fp32 matrix [outputs][inputs] into them.
long packed_bytes(Kind kind, long outputs, long inputs);
// `gate`/`up` interleaving: where `up` is given, `weight` is the gate and block b holds columns
// 16b … 16b + 15 of both.
void pack_weights(Kind kind, const float* weight, const float* up, long outputs, long inputs,
                  uint8_t* packed);

}  // namespace diptych
