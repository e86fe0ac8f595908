// The kernels that this machine can run, from its feature bits and the registers that the operating
// system saves; and the size of its first cache level.
#include "kernels/paths.hpp"

#if FSL_X86_KERNELS
#include <cpuid.h>
#endif
#if defined(__unix__)
#include <unistd.h>
#endif

namespace fsl {
namespace {

#if FSL_X86_KERNELS

bool bit(unsigned word, int index) { return (word >> index & 1) != 0; }

struct Features {
  bool avx2 = false;
  bool wide_multiply = false;
  bool avx512 = false;

  Features() {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return;
    const bool saves_state = bit(ecx, 27);  // OSXSAVE
    const bool basics = bit(ecx, 1) && bit(ecx, 23) && bit(ecx, 28) &&
                        bit(ecx, 29);  // PCLMULQDQ, POPCNT, AVX, F16C
    if (!saves_state || !basics) return;
    unsigned state = 0;
    unsigned state_high = 0;
    __asm__("xgetbv" : "=a"(state), "=d"(state_high) : "c"(0));
    const bool saves_ymm = (state & 0x06) == 0x06;
    const bool saves_zmm = (state & 0xE6) == 0xE6;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return;
    const bool bmi = bit(ebx, 3) && bit(ebx, 8);  // BMI1, BMI2
    avx2 = saves_ymm && bmi && bit(ebx, 5);
    // F, DQ, BW, VL; VBMI, VBMI2: Intel from Ice Lake on, AMD from Zen 4 on.
    const bool foundation = bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 30) && bit(ebx, 31);
    const bool bytes = bit(ecx, 1) && bit(ecx, 6);
    wide_multiply = bit(ecx, 10);  // VPCLMULQDQ
    avx512 = avx2 && saves_zmm && foundation && bytes && wide_multiply;
  }
};

#endif

}  // namespace

bool has_roomy_first_level() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  static const bool is_roomy = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 * 1024;
  return is_roomy;
#else
  return false;
#endif
}

const Kernels* kernels_of(Path path) {
#if FSL_X86_KERNELS
  static const Features features;
  if (path == Path::kAvx2) {
    if (!features.avx2) return nullptr;
    return features.wide_multiply ? &kAvx2KernelsWithWideCrc : &kAvx2Kernels;
  }
  if (path == Path::kAvx512) return features.avx512 ? &kAvx512Kernels : nullptr;
#endif
  return path == Path::kScalar ? &kScalarKernels : nullptr;
}

}  // namespace fsl
