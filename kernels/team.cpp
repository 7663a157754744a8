// One OpenMP region per call instead of one per operation: the threads of a crew walk through
// all phases of a layer together and meet at a spin barrier, which costs far less than a
// fork and join. OpenMP is torch's own pool, so torch.set_num_threads is respected.
#include "api.h"

#include <omp.h>
#include <sched.h>

#include <atomic>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace diptych {
namespace {

constexpr int kSpins = 4000;  // then give the core away: another process may need it to arrive

void pause_briefly(int spins) {
  if (spins > kSpins) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

long Crew::next() const { return __atomic_fetch_add(&team->counter, 1, __ATOMIC_RELAXED); }

void Crew::sync() const {
  if (threads == 1) {
    team->counter = 0;
    return;
  }
  int round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
    team->arrived = 0;
    team->counter = 0;
    __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 0; __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round; ++spins) {
    pause_briefly(spins);
  }
}

void run_crew(int threads, CrewBody body, void* context) {
  Team team;
  if (threads <= 1 || omp_in_parallel()) {
    body(Crew{&team, 0, 1}, context);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    // OpenMP may grant fewer threads than asked for: the barrier counts those that came.
#pragma omp single
    team.threads = omp_get_num_threads();
    body(Crew{&team, omp_get_thread_num(), team.threads}, context);
  }
}

bool place_crew(int own, const int64_t* cpus, int count) {
  omp_set_num_threads(own + count);  // of what this thread runs, torch's own operations included
  std::atomic<int> placed{0};
#pragma omp parallel num_threads(own + count)
  {
    int number = omp_get_thread_num();
    bool right = number < own;
#if defined(__linux__)
    if (!right && cpus[number - own] < CPU_SETSIZE) {
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(size_t(cpus[number - own]), &only);
      right = sched_setaffinity(0, sizeof only, &only) == 0;
    }
#endif
    placed += right;
  }
  if (placed == own + count) return true;
  omp_set_num_threads(own);
  return false;
}

}  // namespace diptych
