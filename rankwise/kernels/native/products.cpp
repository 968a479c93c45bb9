// Matrix products in bfloat16 run on the matrix tiles of processors (Intel AMX), whose speed libraries reach in part.
// On other processors this library has one function, which says so.

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)

#include "newton_schulz.h"
#include "precondition.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <numeric>
#include <vector>

extern "C" {

// Asks the system for the tiles, once per process and before its threads need them.
int has_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Each matrix is worked on by one thread, the largest first, or by all threads where there are few matrices.
void newton_schulz(int64_t count, const Orthogonal* matrices, int64_t steps, const Rates* rates, int threads) {
  std::vector<int64_t> order(count), needs(count);
  std::iota(order.begin(), order.end(), 0);
  std::transform(matrices, matrices + count, needs.begin(), NewtonSchulz::needs);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return needs[a] > needs[b]; });
  const int outer = count < 2 * threads ? 1 : threads;
#pragma omp parallel num_threads(outer)
  {
    const Halves memory = halves(needs[order[0]]);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < count; ++index)
      NewtonSchulz(matrices[order[index]], memory.get(), threads / outer).run(steps, rates);
  }
}

void precondition(const Gradient* gradient, const Half* left, const Half* right, int rescale, float* weight, float* bias,
                  Half* memory, int threads) {
  Preconditioning(*gradient, memory, threads).run(left, right, rescale, weight, bias);
}

}  // extern "C"

#else

extern "C" int has_tiles() { return 0; }

#endif
