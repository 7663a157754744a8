#include "plan.h"


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

}  // namespace diptych
