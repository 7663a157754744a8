// Memory for packed weights.
#pragma once

#include <ATen/core/Tensor.h>

namespace diptych {

// A uint8 tensor [count] in memory shared with other weights; freed with the last of them.
at::Tensor weight_bytes(int64_t count);

}  // namespace diptych
