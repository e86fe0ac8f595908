// Common helpers of the AVX2 kernels. For avx2/kernels.cpp only, which sets the target and includes
// plain/kernels.hpp for it.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/paths.hpp"

#define FSL_INLINE inline __attribute__((always_inline))

namespace fsl {
namespace {

constexpr std::size_t kLane = 8;   // fp32 values of a vector
constexpr std::size_t kStep = 32;  // bytes of a vector
constexpr std::size_t kWord = 64;  // bits of a word of a bitmap

FSL_INLINE __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
FSL_INLINE void store(void* to, __m256i value) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), value);
}
FSL_INLINE __m128i load_half(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
FSL_INLINE __m256i all(int value) { return _mm256_set1_epi32(value); }
FSL_INLINE __m256i all_bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
FSL_INLINE std::size_t ones(std::uint32_t mask) {
  return static_cast<std::size_t>(_mm_popcnt_u32(mask));
}
FSL_INLINE std::uint32_t signs(__m256i bytes) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
}
// The lowest `count` bits, count < 32.
FSL_INLINE std::uint32_t lowest(std::size_t count) { return (std::uint32_t{1} << count) - 1; }
FSL_INLINE int log2_of(std::size_t power) { return __builtin_ctzll(power); }

// The lowest `count` bits, count < 64.
FSL_INLINE std::uint64_t lowest64(std::size_t count) { return (std::uint64_t{1} << count) - 1; }

FSL_INLINE void store_word(std::uint8_t* to, std::uint64_t word) { std::memcpy(to, &word, 8); }

FSL_INLINE __m256i rotate_right(__m256i codes) {
  const __m256i above = _mm256_and_si256(_mm256_slli_epi16(codes, 7), all_bytes(0x80));
  return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(codes, 1), all_bytes(0x7F)), above);
}

// The signs of 64 bytes.
FSL_INLINE std::uint64_t signs64(__m256i low, __m256i high) {
  return signs(low) | static_cast<std::uint64_t>(signs(high)) << 32;
}

FSL_INLINE std::uint32_t load_mask(const std::uint8_t* from) {
  std::uint32_t mask;
  std::memcpy(&mask, from, 4);
  return mask;
}

// The last bits of a bitmap, count < 32; touches no byte after it.
FSL_INLINE std::uint32_t load_rest(const std::uint8_t* from, std::size_t count) {
  std::uint32_t mask = 0;
  std::memcpy(&mask, from, (count + 7) / 8);
  return mask & lowest(count);
}

// 32 bits as bytes of ones or zeros.
FSL_INLINE __m256i spread_bits(std::uint32_t mask) {
  const __m256i bytes = _mm256_shuffle_epi8(
      all(static_cast<int>(mask)),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

}  // namespace
}  // namespace fsl
