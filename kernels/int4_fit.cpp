#include "int4_fit.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace diptych {
namespace {

typedef float V4 __attribute__((vector_size(16)));
constexpr int kVecs = int(kGroup) / 4;

float sum(V4 x) { return (x[0] + x[1]) + (x[2] + x[3]); }

struct Grid {
  uint16_t scale = 0, least = 0;
  float error = INFINITY;
  V4 q[kVecs] = {};
};

// The weights rounded to the fp16 numbers next to these two.
Grid grid_of(const V4* w, float scale, float least) {
  Grid g;
  g.scale = to_half(scale), g.least = to_half(least);
  float step = from_half(g.scale), low = from_half(g.least);
  float inverse = step > 0 ? 1.0f / step : 0.0f;
  V4 error = {};
  for (int i = 0; i < kVecs; ++i) {
    V4 x = (w[i] - low) * inverse;
    x = x > 0.0f ? x : V4{};  // NaN becomes 0
    x = x < 15.0f ? x : V4{} + 15.0f;
    g.q[i] = (x + 12582912.0f) - 12582912.0f;  // to a whole number
    V4 missed = g.q[i] * step + low - w[i];
    error += missed * missed;
  }
  g.error = sum(error);
  return g;
}

// The same whole numbers with the scale and least value that fit them best.
Grid refined(const V4* w, const Grid& g) {
  V4 q = {}, x = {}, qq = {}, qx = {};
  for (int i = 0; i < kVecs; ++i)
    q += g.q[i], x += w[i], qq += g.q[i] * g.q[i], qx += g.q[i] * w[i];
  float mean_q = sum(q) / kGroup, mean = sum(x) / kGroup;
  float spread = sum(qq) - mean_q * mean_q * kGroup;
  if (!(spread > 0.5f)) return grid_of(w, 0.0f, mean);  // all in one place
  float scale = (sum(qx) - mean_q * mean * kGroup) / spread;
  return scale > 0 ? grid_of(w, scale, mean - scale * mean_q) : g;
}

}  // namespace

float from_half(uint16_t h) {
  uint32_t bits = uint32_t(h & 0x7fff) << 13;
  float size;
  memcpy(&size, &bits, 4);
  size *= 0x1p112f;  // the exponents' biases differ by 112; also makes subnormals right
  return h & 0x8000 ? -size : size;
}

uint16_t to_half(float x) {
  uint16_t sign = x < 0 ? 0x8000 : 0;
  float size = fabsf(x);
  if (!(size == size)) return 0;
  if (size >= 65504.0f) return uint16_t(sign | 0x7bff);
  bool subnormal = size < 0x1p-14f;
  if (subnormal) size += 0.5f;  // let the adder of fp32 round at 2^-24
  uint32_t bits;
  memcpy(&bits, &size, 4);
  if (subnormal) return uint16_t(sign | (bits - 0x3f000000u));
  bits += 0xfff + (bits >> 13 & 1);  // to nearest even
  // A carry out of the mantissa goes into the exponent and is right there.
  return uint16_t(sign | ((bits - 0x38000000u) >> 13));
}

Int4Fit fit_int4(const float* weights) {
  V4 w[kVecs];
  memcpy(w, weights, sizeof w);
  V4 low = w[0], high = w[0];
  for (int i = 1; i < kVecs; ++i) {
    low = w[i] < low ? w[i] : low;
    high = w[i] > high ? w[i] : high;
  }
  float least = std::min({low[0], low[1], low[2], low[3]});
  float most = std::max({high[0], high[1], high[2], high[3]});
  Grid best;
  for (int steps : {15, 14, 13, 12, 11, 10, 9, 8, 16, 17, 18}) {
    float scale = (most - least) / float(steps);
    float from = steps > 15 ? least + 0.5f * float(steps - 15) * scale : least;
    Grid found = grid_of(w, scale, from), better = refined(w, found);
    if (better.error < found.error) found = better;
    if (found.error < best.error) best = found;
    float near = 0.03f * from_half(best.scale);  // what bf16 does to weights on a grid
    if (best.error <= near * near * kGroup) break;
  }
  Int4Fit fit = {best.scale, best.least, {}};
  for (int i = 0; i < int(kGroup); ++i) fit.q[i] = uint8_t(best.q[i / 4][i % 4]);
  return fit;
}

}  // namespace diptych
