// AVX2: CRC-32. For avx2/kernels.cpp and avx2/wide_crc.cpp only, which set the target and include
// plain/kernels.hpp for it.
#pragma once

#include "kernels/avx2/base.hpp"

namespace fsl {
namespace {

// --- CRC

// See avx512/bytes.hpp.
constexpr std::uint64_t folding_constant(int power) {
  std::uint32_t remainder = 0x80000000;  // x^0, lowest power in the highest bit
  for (int i = 0; i < power; ++i)
    remainder = remainder >> 1 ^ ((remainder & 1) != 0 ? 0xEDB88320U : 0U);
  return static_cast<std::uint64_t>(remainder) << 1;
}

template <int kBits>
FSL_INLINE __m128i folding_constants() {
  constexpr long long kLow = static_cast<long long>(folding_constant(kBits + 32));
  constexpr long long kHigh = static_cast<long long>(folding_constant(kBits - 32));
  return _mm_set_epi64x(kHigh, kLow);
}

template <int kBits>
FSL_INLINE __m128i fold(__m128i value, __m128i data) {
  const __m128i constants = folding_constants<kBits>();
  const __m128i product = _mm_xor_si128(_mm_clmulepi64_si128(value, constants, 0x00),
                                        _mm_clmulepi64_si128(value, constants, 0x11));
  return _mm_xor_si128(product, data);
}

// The checksum of the folded bytes and of those after them.
std::uint32_t finish_crc32(__m128i sum, const std::uint8_t* data, std::size_t count) {
  for (; count >= 16; data += 16, count -= 16) sum = fold<128>(sum, load_half(data));
  std::uint8_t bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), sum);
  // The tables start from the complement of their first argument, here 0.
  return plain::crc32(plain::crc32(0xFFFFFFFF, bytes, 16), data, count);
}

std::uint32_t crc32(std::uint32_t value, const std::uint8_t* data, std::size_t count) {
  if (count < 128) return plain::crc32(value, data, count);
  __m128i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = load_half(data + 16 * i);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(~value)));
  data += 64;
  count -= 64;
  for (; count >= 64; data += 64, count -= 64) {
    for (int i = 0; i < 4; ++i) sums[i] = fold<512>(sums[i], load_half(data + 16 * i));
  }
  return finish_crc32(fold<128>(fold<128>(fold<128>(sums[0], sums[1]), sums[2]), sums[3]), data,
                      count);
}

}  // namespace
}  // namespace fsl
