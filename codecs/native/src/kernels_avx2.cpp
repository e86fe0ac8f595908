// Stands in for the avx2 kernels until they are there.
#include "kernels_paths.hpp"

#if FSL_X86_KERNELS
namespace fsl {
namespace {
Kernels stand_in() {
  Kernels kernels = kScalarKernels;
  kernels.path = Path::kAvx2;
  return kernels;
}
}  // namespace
const Kernels kAvx2Kernels = stand_in();
}  // namespace fsl
#endif
