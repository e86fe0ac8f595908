// Common helpers of the AVX-512 kernels. For avx512/kernels.cpp only, which sets the target.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/paths.hpp"

#define FSL_INLINE inline __attribute__((always_inline))

namespace fsl {
namespace {

constexpr std::size_t kLane = 16;  // fp32 values of a vector
constexpr std::size_t kStep = 64;  // bytes of a vector

FSL_INLINE __m512i load(const void* from) { return _mm512_loadu_si512(from); }
// The same, in a register: some instructions are slower with a memory operand (expanding, on Zen
// 4).
FSL_INLINE __m512i load_first(const void* from) {
  __m512i loaded = load(from);
  asm("" : "+v"(loaded));
  return loaded;
}
FSL_INLINE void store(void* to, __m512i value) { _mm512_storeu_si512(to, value); }
FSL_INLINE __m512i all(int value) { return _mm512_set1_epi32(value); }
FSL_INLINE __m512i all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
FSL_INLINE std::size_t ones(std::uint64_t mask) {
  return static_cast<std::size_t>(_mm_popcnt_u64(mask));
}
// The lowest `count` bits, count < 64.
FSL_INLINE std::uint64_t lowest(std::size_t count) { return (std::uint64_t{1} << count) - 1; }

// The largest of a vector's bytes.
FSL_INLINE std::uint8_t largest_of(__m512i largest) {
  const __m256i half =
      _mm256_max_epu8(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
  __m128i few = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  few = _mm_max_epu8(few, _mm_srli_epi16(few, 8));
  // The largest of eight words is the smallest of their complements.
  const __m128i words = _mm_andnot_si128(few, _mm_set1_epi16(0xFF));
  return static_cast<std::uint8_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(words)));
}

FSL_INLINE int log2_of(std::size_t power) { return __builtin_ctzll(power); }

}  // namespace
}  // namespace fsl
