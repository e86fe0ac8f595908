// Stands in for the avx512 kernels until they are there.
#include "kernels_paths.hpp"

#if FSL_X86_KERNELS
namespace fsl {
namespace {
Kernels stand_in() {
  Kernels kernels = kScalarKernels;
  kernels.path = Path::kAvx512;
  return kernels;
}
}  // namespace
const Kernels kAvx512Kernels = stand_in();
}  // namespace fsl
#endif
