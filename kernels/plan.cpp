#include "plan.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "attn_sizes.h"

namespace diptych {

StepPlan::StepPlan(const Batch& batch, long group, long window) {
  for (long s = 0; s < batch.seqs; ++s) {
    long first = batch.query_start[s], last = batch.query_start[s + 1];
    long context = batch.context[s];
    if (last - first != 1) {
      long step = prefill_tokens(group);
      for (long t = first; t < last; t += step)
        prefills.push_back({int32_t(s), int32_t(t), int32_t(std::min(t + step, last)), -1});
      continue;
    }
    long low = window > 0 ? std::max(0L, context - window) : 0;
    long step = context - low <= kShortContext ? kShortPartition : kPartition;
    long parts = (context - low + step - 1) / step;
    if (parts > 1) merges.push_back({int32_t(s), int32_t(partials), int32_t(parts)});
    for (long i = 0; i < parts; ++i) {
      long key = low + i * step;
      decodes.push_back({int32_t(s), int32_t(key), int32_t(std::min(key + step, context)),
                         parts > 1 ? int32_t(partials++) : -1});
    }
  }
  auto keys = [&](const Item& item) {  // visible to the last row: what an item costs
    long seen = batch.context[item.seq] - (batch.query_start[item.seq + 1] - item.last);
    return window > 0 ? std::min(seen, window + (item.last - item.first)) : seen;
  };
  std::stable_sort(prefills.begin(), prefills.end(),
                   [&](const Item& a, const Item& b) { return keys(a) > keys(b); });
}

Plan StepPlan::view() const {
  return Plan{decodes.data(), long(decodes.size()), prefills.data(), long(prefills.size()),
              merges.data(),  long(merges.size()),  partials};
}

const char* batch_problem(const Batch& batch, long num_blocks, long block_size) {
  if (batch.seqs < 1) return "no sequence";
  if (batch.query_start[0] != 0) return "query_start does not begin with 0";
  if (batch.query_start[batch.seqs] != batch.tokens)
    return "query_start does not end with the number of rows";
  for (long s = 0; s < batch.seqs; ++s) {
    long queries = long(batch.query_start[s + 1]) - batch.query_start[s];
    long context = batch.context[s];
    if (queries < 1) return "a sequence without rows";
    if (context < queries) return "a context shorter than its rows";
    long blocks = (context + block_size - 1) / block_size;
    if (blocks > batch.table_stride) return "a block table shorter than its context";
    const int32_t* table = batch.tables + s * batch.table_stride;
    for (long i = 0; i < blocks; ++i)
      if (table[i] < 0 || table[i] >= num_blocks) return "a block outside the pool";
  }
  return nullptr;
}

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

float from_half(uint16_t h) {  // h finite and not negative
  int exponent = h >> 10, mantissa = h & 0x3ff;
  return exponent ? ldexpf(float(mantissa + 0x400), exponent - 25) : ldexpf(float(mantissa), -24);
}

// The fp16 number next to x >= 0, at most the largest finite one.
uint16_t to_half(float x) {
  int exponent;
  frexpf(x, &exponent);  // x < 2^exponent
  if (!(x < 65504.0f)) return 0x7bff;
  int shift = std::max(exponent, -13) - 11;  // fp16 keeps 11 bits; below 2^-14, multiples of 2^-24
  long units = lrintf(ldexpf(x, -shift));
  // Exponent field and mantissa are one number: a carry out of the mantissa is right as it is.
  return uint16_t(((shift + 24) << 10) + units);
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

// One output's weights into its column, which is number `col` of `block`.
void pack_column(Kind kind, const float* w, long inputs, uint8_t* block, long col) {
  uint8_t* to = block + col * 4;
  if (is_int8(kind)) {
    for (long i = 0; i < inputs; i += kGroup, block += kGroupBytes, to += kGroupBytes)
      pack_group(w + i, std::min(kGroup, inputs - i), to,
                 block + kGroupSteps * kStepBytes + col * 2);
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

// Weights of zero with scales of zero.
void clear_blocks(Kind kind, long bytes, uint8_t* packed) {
  memset(packed, 0, size_t(bytes));
  if (!is_int8(kind)) return;
  for (long at = 0; at < bytes; at += kGroupBytes)
    memset(packed + at, 128, size_t(kGroupSteps * kStepBytes));
}

}  // namespace

void pack_weights(Kind kind, const float* weight, const float* up, long outputs, long inputs,
                  uint8_t* packed) {
  long total = up ? 2 * outputs : outputs, block = block_bytes(kind, inputs);
  clear_blocks(kind, packed_bytes(kind, total, inputs), packed);
  for (long n = 0; n < outputs; ++n) {
    long col = up ? n / 16 * 32 + n % 16 : n;
    uint8_t* to = packed + col / 32 * block;
    pack_column(kind, weight + n * inputs, inputs, to, col % 32);
    if (up) pack_column(kind, up + n * inputs, inputs, to, col % 32 + 16);
  }
}

}  // namespace diptych
