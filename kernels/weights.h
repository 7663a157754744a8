// How weights of linear layers are packed (layouts in api.h).
#pragma once

#include <stdint.h>

#include "api.h"

namespace diptych {

// Bytes of packed weights, and packing one row-major fp32 matrix [outputs][inputs] into them.
long packed_bytes(Kind kind, long outputs, long inputs);
// Outputs [first, last) of `outputs`; the whole of `packed` was cleared before by clear_weights.
// `gate`/`up` interleaving: where `up` is given, `weight` is the gate and block b holds columns
// 16b … 16b + 15 of both.
void clear_weights(Kind kind, long bytes, uint8_t* packed);
void pack_outputs(Kind kind, const float* weight, const float* up, long first, long last,
                  long inputs, uint8_t* packed);
// All outputs at once.
void pack_weights(Kind kind, const float* weight, const float* up, long outputs, long inputs,
                  uint8_t* packed);

}  // namespace diptych
