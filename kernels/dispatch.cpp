// Which tiers were compiled in and which of them this CPU can run.
#include <string.h>
#if defined(DIPTYCH_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
namespace amx {
extern const Kernels kernels;
}
#endif

namespace {

// Whether the CPU has tiles of bf16 and int8, and the kernel lets this process use them, which it
// must ask for (Linux, Documentation/arch/x86/xstate.rst).
bool may_use_amx() {
#if defined(DIPTYCH_X86) && defined(__linux__)
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // amx-bf16, amx-tile, amx-int8
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, its feature
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

struct Tier {
  const Kernels* kernels;
  bool runs;
};

struct Tiers {
  Tier best_first[5] = {};
  int count = 0;

  Tiers() {
#if defined(DIPTYCH_X86)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    best_first[count++] = {&amx::kernels, bf16 && may_use_amx()};
    best_first[count++] = {&avx512bf16::kernels, bf16};
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
