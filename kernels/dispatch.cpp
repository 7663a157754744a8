// Which tiers were compiled in and which of them this CPU can run.
#include <string.h>

#include "api.h"

namespace diptych {

namespace generic {
extern const Kernels kernels;
}
#if defined(DIPTYCH_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
#endif

namespace {

struct Tier {
  const Kernels* kernels;
  bool runs;
};

struct Tiers {
  Tier best_first[4] = {};
  int count = 0;

  Tiers() {
#if defined(DIPTYCH_X86)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    best_first[count++] = {&avx512bf16::kernels, avx512 && __builtin_cpu_supports("avx512bf16")};
    best_first[count++] = {&avx512::kernels, avx512};
    best_first[count++] = {&avx2::kernels, avx2};
#endif
    best_first[count++] = {&generic::kernels, true};
  }
};

const Tiers& tiers() {
  static const Tiers all;
  return all;
}

}  // namespace

const Kernels* best_kernels() {
  for (int i = 0; i < tiers().count; ++i)
    if (tiers().best_first[i].runs) return tiers().best_first[i].kernels;
  return nullptr;
}

const Kernels* find_kernels(const char* name) {
  for (int i = 0; i < tiers().count; ++i) {
    const Tier& tier = tiers().best_first[i];
    if (tier.runs && strcmp(tier.kernels->name, name) == 0) return tier.kernels;
  }
  return nullptr;
}

}  // namespace diptych
