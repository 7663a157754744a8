// How the attention of one step is cut into pieces.
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

}  // namespace diptych
