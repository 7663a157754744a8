// The best 4-bit grid for one group of weights: weight = scale * q + least, q 0 … 15, both
// numbers fp16.
#pragma once

#include <stdint.h>

#include "api.h"

namespace diptych {

struct Int4Fit {
  uint16_t scale, least;  // fp16
  uint8_t q[kGroup];
};

// Weights that lie on such a grid (GGUF's Q4_0 and Q4_1 do) are found again; for others, grids
// with 8 to 18 steps between the ends are tried, each moved by least squares (as in
// llama.cpp's make_qkx2_quants), and the least squared error wins.
Int4Fit fit_int4(const float* w);

uint16_t to_half(float x);  // the next fp16 number, at most the largest finite one; 0 for NaN
float from_half(uint16_t h);

}  // namespace diptych
