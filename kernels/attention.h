// Attention over a packed batch of decodes and prefill chunks.
#pragma once

#include "attn_prefill.h"

namespace diptych {
namespace DIPTYCH_TIER {

template <class K, class D>
inline void attention_as(const Crew& crew, const Attention& a, const Batch& batch, const Plan& plan,
                         char* scratch) {
  typedef typename K::Mem M;
  AttentionSizes sizes = attention_sizes(a.pool, a.heads);
  char* own = scratch + crew.tid * sizes.thread_bytes;
  float* partials = reinterpret_cast<float*>(scratch + crew.threads * sizes.thread_bytes);
  long kv_heads = a.pool.kv_heads;
  // Prefill items come first and are sorted by size: the small ones fill the gaps at the end.
  // A decode item is cut into its KV heads only where there are too few items to go round.
  long parts = plan.num_decodes >= 2 * crew.threads ? 1 : kv_heads, width = kv_heads / parts;
  long prefills = plan.num_prefills * kv_heads, all = prefills + plan.num_decodes * parts;
  auto decode_unit = [&](long unit) {
    if (unit < prefills || unit >= all) return DecodeUnit{nullptr, 0, 0};
    long first = (unit - prefills) % parts * width;
    return DecodeUnit{plan.decodes + (unit - prefills) / parts, first, first + width};
  };
  for (long unit = crew.next(), after; unit < all; unit = after) {
    after = crew.next();  // known early, so that its first keys can be asked for
    if (unit < prefills)
      prefill_item<D, M>(a, batch, plan.prefills[unit / kv_heads], unit % kv_heads, sizes, own);
    else
      decode_item<K>(a, batch, decode_unit(unit), decode_unit(after), sizes, own, partials);
  }
  crew.sync();
  if (plan.num_merges == 0) return;
  for (long unit; (unit = crew.next()) < plan.num_merges * a.heads;)
    merge_partials(a, batch, plan.merges[unit / a.heads], unit % a.heads, sizes, own, partials);
  crew.sync();
}

inline void run_attention(const Crew& crew, const Attention& a, const Batch& batch,
                          const Plan& plan, char* scratch) {
  switch (a.pool.store) {
    case Store::F32:
      return attention_as<Widened<MemF32>, DotF32>(crew, a, batch, plan, scratch);
    case Store::F16:
      return attention_as<Widened<MemF16>, DotF32>(crew, a, batch, plan, scratch);
    case Store::I8:
#if defined(__AVX512BF16__)
      return attention_as<IntegerKeys, DotBF16>(crew, a, batch, plan, scratch);
#else
      return attention_as<IntegerKeys, DotF32>(crew, a, batch, plan, scratch);
#endif
    case Store::BF16:
#if defined(__AVX512BF16__)
      return attention_as<PairedBF16, DotBF16>(crew, a, batch, plan, scratch);
#else
      return attention_as<Widened<MemBF16>, DotF32>(crew, a, batch, plan, scratch);
#endif
  }
}

}  // namespace DIPTYCH_TIER
}  // namespace diptych
