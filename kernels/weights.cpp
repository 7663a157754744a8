#include "weights.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "int4_fit.h"

namespace diptych {

long packed_bytes(Kind kind, long outputs, long inputs) {
  return blocks_of(outputs) * block_bytes(kind, inputs);
}

namespace {

uint16_t to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One group of one output: `to` is the column's 4 bytes of the group's first step, `scale` its
// place behind the steps.
void pack_group(const float* w, long count, uint8_t* to, uint8_t* scale) {
  float most = 0;
  for (long i = 0; i < count; ++i) most = std::max(most, fabsf(w[i]));
  uint16_t half = to_half(most / 127.0f);
  float rounded = from_half(half);
  if (rounded * 127.5f < most && half < 0x7bff) rounded = from_half(++half);  // a coarse subnormal: cut nothing off
  memcpy(scale, &half, 2);
  float inverse = rounded > 0 ? 1.0f / rounded : 0.0f;
  for (long i = 0; i < count; ++i)
    to[i / 4 * kStepBytes + i % 4] =
        uint8_t(128 + std::clamp(lrintf(w[i] * inverse), -127L, 127L));
}

// The same for int4; `scale` is followed by the least value, a row of scales later.
void pack_group4(const float* w, long count, uint8_t* to, uint8_t* scale) {
  float all[kGroup];
  for (long i = 0; i < kGroup; ++i) all[i] = w[std::min(i, count - 1)];
  Int4Fit fit = fit_int4(all);
  memcpy(scale, &fit.scale, 2);
  memcpy(scale + kBlockCols * 2, &fit.least, 2);
  for (long i = 0; i < count; ++i) {
    long step = i / 4;
    to[step / 2 * kStepBytes + i % 4] |= uint8_t(fit.q[i] << step % 2 * 4);
  }
}

// One output's weights into its column, which is number `col` of `block`.
void pack_column(Kind kind, const float* w, long inputs, uint8_t* block, long col) {
  uint8_t* to = block + col * 4;
  if (is_grouped(kind)) {
    long size = is_int4(kind) ? kInt4Bytes : kGroupBytes;
    auto pack = is_int4(kind) ? pack_group4 : pack_group;
    long steps = is_int4(kind) ? kGroupSteps / 2 : kGroupSteps;
    for (long i = 0; i < inputs; i += kGroup, block += size, to += size)
      pack(w + i, std::min(kGroup, inputs - i), to, block + steps * kStepBytes + col * 2);
    return;
  }
  for (long i = 0; i < inputs; ++i) {
    if (kind == Kind::F32) {
      memcpy(to + i * kStepBytes, w + i, 4);
      continue;
    }
    uint16_t half = to_bf16(w[i]);
    memcpy(to + i / 2 * kStepBytes + i % 2 * 2, &half, 2);
  }
}

}  // namespace

// Weights of zero with scales of zero.
void clear_weights(Kind kind, long bytes, uint8_t* packed) {
  memset(packed, 0, size_t(bytes));
  if (!is_int8(kind)) return;
  for (long at = 0; at < bytes; at += kGroupBytes)
    memset(packed + at, 128, size_t(kGroupSteps * kStepBytes));
}

void pack_outputs(Kind kind, const float* weight, const float* up, long first, long last,
                  long inputs, uint8_t* packed) {
  long block = block_bytes(kind, inputs);
  for (long n = first; n < last; ++n) {
    long col = up ? n / 16 * 32 + n % 16 : n;
    uint8_t* to = packed + col / 32 * block;
    pack_column(kind, weight + n * inputs, inputs, to, col % 32);
    if (up) pack_column(kind, up + n * inputs, inputs, to, col % 32 + 16);
  }
}

void pack_weights(Kind kind, const float* weight, const float* up, long outputs, long inputs,
                  uint8_t* packed) {
  clear_weights(kind, packed_bytes(kind, up ? 2 * outputs : outputs, inputs), packed);
  pack_outputs(kind, weight, up, 0, outputs, inputs, packed);
}

}  // namespace diptych
