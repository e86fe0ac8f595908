// The kernel tables of this build, for cpu.cpp and the tests; other code calls kernels_of().
#pragma once

#include "kernels/kernels.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FSL_X86_KERNELS 1
#else
#define FSL_X86_KERNELS 0
#endif

namespace fsl {

extern const Kernels kScalarKernels;
#if FSL_X86_KERNELS
extern const Kernels kAvx2Kernels;
extern const Kernels
    kAvx2KernelsWithWideCrc;  // the same for processors that have VPCLMULQDQ, for wide_crc32()
std::uint32_t wide_crc32(std::uint32_t value, const std::uint8_t* data, std::size_t count);
extern const Kernels kAvx512Kernels;
#endif

}  // namespace fsl
