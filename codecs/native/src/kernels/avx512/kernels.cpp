// The kernels for AVX-512 with byte permutes and compressions (F, BW, VL, DQ, VBMI, VBMI2,
// VPCLMULQDQ), 64 symbols or 16 values a step. Loops do whole steps; a block's last values go
// through masks or the plain kernels.
#include "kernels/paths.hpp"

#if FSL_X86_KERNELS

#include <cstring>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(                                                                     \
    __attribute__((                                                                               \
        target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,vpclmulqdq,pclmul,bmi," \
               "bmi2,popcnt"))),                                                                  \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,vpclmulqdq,pclmul,bmi,bmi2,popcnt")
#pragma GCC diagnostic ignored \
    "-Wuninitialized"  // gcc 12 warns of its own header's undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

// One file per concern, all within the target above.
#include "kernels/avx512/base.hpp"
#include "kernels/avx512/bytes.hpp"
#include "kernels/avx512/input.hpp"
#include "kernels/avx512/quantise.hpp"
#include "kernels/avx512/planes.hpp"
#include "kernels/avx512/ranks.hpp"
#include "kernels/avx512/lanes.hpp"
#include "kernels/avx512/groups.hpp"
#include "kernels/avx512/sparse.hpp"
#include "kernels/avx512/values.hpp"
#include "kernels/avx512/read_values.hpp"

namespace fsl {

const Kernels kAvx512Kernels = {
    combine,
    look,
    quantise_float8,
    quantise_uniform<false>,
    quantise_uniform<true>,
    cut_bfloat16,
    cut_float32,
    map,
    write_bit_planes,
    write_ranks,
    read_ranks,
    write_lanes,
    read_lanes,
    read_codes,
    read_float8,
    read_uniform,
    join,
    group,
    ungroup,
    mark,
    spread,
    count_ones,
    dequantise_float8,
    dequantise_uniform,
    join_bfloat16,
    join_float32,
    copy_float32,
    largest_byte,
    count_byte,
    pick,
    find_byte,
    crc32,
    copy_crc32,
    begin_checksum,
    end_checksum,
    Path::kAvx512,
};

}  // namespace fsl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // FSL_X86_KERNELS
