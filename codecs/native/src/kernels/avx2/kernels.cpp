// The kernels for AVX2 with POPCNT, BMI1/2, F16C and PCLMULQDQ. Loops that compilers vectorize well
// are the plain ones.
#include "bits.hpp"
#include "kernels/paths.hpp"

#if FSL_X86_KERNELS

#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,popcnt,f16c,pclmul"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,popcnt,f16c,pclmul")
#endif
#pragma GCC diagnostic ignored "-Wunused-function"
#include <immintrin.h>

// The plain kernels, compiled for these instructions.
#include "kernels/plain/kernels.hpp"

// One file per concern, all within the target above.
#include "kernels/avx2/base.hpp"
#include "kernels/avx2/input.hpp"
#include "kernels/avx2/quantise.hpp"
#include "kernels/avx2/planes.hpp"
#include "kernels/avx2/values.hpp"
#include "kernels/avx2/lanes.hpp"
#include "kernels/avx2/groups.hpp"
#include "kernels/avx2/sparse.hpp"
#include "kernels/avx2/crc.hpp"

namespace fsl {

namespace {

constexpr Kernels kernels_with(decltype(Kernels::crc32) checksum,
                               decltype(Kernels::copy_crc32) copy) {
  return {
      plain::combine,
      plain::look,
      quantise_float8,
      quantise_uniform<false>,
      quantise_uniform<true>,
      cut_bfloat16,
      cut_float32,
      map,
      write_bit_planes,
      plain::write_ranks,
      plain::read_ranks,
      write_lanes,
      read_lanes,
      read_codes,
      nullptr,
      nullptr,
      join,
      group,
      ungroup,
      mark,
      plain::spread,
      plain::count_ones,
      dequantise_float8,
      dequantise_uniform,
      join_bfloat16,
      join_float32,
      copy_float32,
      plain::largest_byte,
      count_byte,
      plain::pick,
      plain::find_byte,
      checksum,
      copy,
      nullptr,
      nullptr,
      Path::kAvx2,
  };
}

}  // namespace

const Kernels kAvx2Kernels = kernels_with(crc32, plain::copied<crc32>);
const Kernels kAvx2KernelsWithWideCrc = kernels_with(wide_crc32, plain::copied<wide_crc32>);

}  // namespace fsl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // FSL_X86_KERNELS
