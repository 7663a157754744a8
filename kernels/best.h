// The best token of each row, noted while its logits are written: they fit no cache, and would have to
// be read again. Each thread keeps notes of the columns it computes, put together at the end.
#pragma once

#include "rows.h"

namespace diptych {
namespace DIPTYCH_TIER {

// Notes of a row: for each column of a block its largest result so far and in which block that was,
// and the bits of the largest magnitudes (a NaN's are above infinity's).
constexpr long kNotedBlocks = kBlockCols * 4, kNotedSizes = 2 * kBlockCols * 4;
static_assert(kNotedSizes + DIPTYCH_BYTES <= kNoteBytes);

inline void clear_notes(char* notes, long rows) {
  memset(notes, 0, size_t(rows * kNoteBytes));
  for (; rows > 0; --rows, notes += kNoteBytes)
    for (long at = 0; at < kNotedBlocks; at += DIPTYCH_BYTES)
      store(notes + at, splat(-__builtin_inff()));
}

// Of vector `v` of a block, of which `left` columns exist.
DIPTYCH_INLINE void note(char* notes, int v, VF y, long block, long left) {
  VF sized = y;
  for (long i = max_of(left, 0); i < kLanes; ++i) y[i] = -__builtin_inff(), sized[i] = 0.0f;
  VU bits = (VU)absolute(sized), size = load_raw(notes + kNotedSizes);
  store(notes + kNotedSizes, (VF)(bits > size ? bits : size));
  char *top = notes + v * DIPTYCH_BYTES, *place = top + kNotedBlocks;
  VI better = y > load(top);
  store(top, better ? y : load(top));
  store(place, (VF)(better ? VI{} + int32_t(block) : (VI)load_raw(place)));
}

// The first of the best tokens of a row; -1 where one of its logits is NaN or infinite. Threads' notes
// of a row are `stride` bytes apart.
inline int64_t best_noted(const char* notes, long threads, long stride) {
  float best = -__builtin_inff();
  int64_t token = -1;
  for (; threads > 0; --threads, notes += stride) {
    if (max_integers(load_raw(notes + kNotedSizes)) >= 0x7f800000u) return -1;
    for (long col = 0; col < kBlockCols; ++col) {
      float x = load_one(notes + col * 4);
      int64_t at = int64_t(load_integer(notes + kNotedBlocks + col * 4)) * kBlockCols + col;
      if (x > best || (x == best && at < token)) best = x, token = at;
    }
  }
  return token;
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
