// Matrix products in bfloat16 run on the matrix tiles of processors (Intel AMX), whose speed libraries reach in part.
// On other processors this library has one function, which says so.

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)

#include "precondition.h"

#include <sys/syscall.h>
#include <unistd.h>

extern "C" {

// Asks the system for the tiles, once per process and before its threads need them.
int has_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

void precondition(const Gradient* gradient, const Half* left, const Half* right, int rescale, float* weight, float* bias,
                  Half* memory, int threads) {
  Preconditioning(*gradient, memory, threads).run(left, right, rescale, weight, bias);
}

}  // extern "C"

#else

extern "C" int has_tiles() { return 0; }

#endif
