// CRC-32 with VPCLMULQDQ, 32 bytes at a time, for processors that have it without AVX-512 (Zen 3,
// Alder Lake).
#include "kernels/paths.hpp"

#if FSL_X86_KERNELS

#include <cstring>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,bmi,bmi2,popcnt,f16c,pclmul,vpclmulqdq"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,popcnt,f16c,pclmul,vpclmulqdq")
#endif
#pragma GCC diagnostic ignored "-Wunused-function"
#include <immintrin.h>

#include "kernels/plain/kernels.hpp"

#include "kernels/avx2/base.hpp"
#include "kernels/avx2/crc.hpp"

namespace fsl {
namespace {

// As fold(), for each half.
template <int kBits>
FSL_INLINE __m256i fold_halves(__m256i value, __m256i data) {
  const __m256i constants = _mm256_broadcastsi128_si256(folding_constants<kBits>());
  const __m256i product = _mm256_xor_si256(_mm256_clmulepi64_epi128(value, constants, 0x00),
                                           _mm256_clmulepi64_epi128(value, constants, 0x11));
  return _mm256_xor_si256(product, data);
}

}  // namespace

std::uint32_t wide_crc32(std::uint32_t value, const std::uint8_t* data, std::size_t count) {
  if (count < 256) return crc32(value, data, count);
  __m256i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = load(data + 32 * i);
  sums[0] =
      _mm256_xor_si256(sums[0], _mm256_setr_epi32(static_cast<int>(~value), 0, 0, 0, 0, 0, 0, 0));
  data += 128;
  count -= 128;
  for (; count >= 128; data += 128, count -= 128) {
    for (int i = 0; i < 4; ++i) sums[i] = fold_halves<1024>(sums[i], load(data + 32 * i));
  }
  const __m256i halves =
      fold_halves<256>(fold_halves<256>(fold_halves<256>(sums[0], sums[1]), sums[2]), sums[3]);
  return finish_crc32(
      fold<128>(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)), data, count);
}

}  // namespace fsl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // FSL_X86_KERNELS
