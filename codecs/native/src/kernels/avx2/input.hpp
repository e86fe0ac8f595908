// AVX2: fp32 is inspected and cut into rotated byte planes. For avx2/kernels.cpp only, which sets
// the target and includes plain/kernels.hpp for it.
#pragma once

#include "kernels/avx2/base.hpp"

namespace fsl {
namespace {

// --- input

FSL_INLINE __m256i magnitude_of(__m256i bits) { return _mm256_and_si256(bits, all(0x7FFFFFFF)); }

FSL_INLINE std::uint32_t largest_lane(__m256i lanes) {
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}

// Puts four bytes of each of four vectors of 8 lanes in order: a 0 to 3, b 0 to 3, ... d 4 to 7.
FSL_INLINE __m256i in_order(__m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Seen, a vector at a time.
struct Sight {
  __m256i largest;
  __m256i differing;

  FSL_INLINE Sight() : largest(_mm256_setzero_si256()), differing(_mm256_setzero_si256()) {}

  FSL_INLINE void see(__m256i bits, __m256i first) {
    largest = _mm256_max_epu32(largest, magnitude_of(bits));
    differing = _mm256_or_si256(differing, _mm256_xor_si256(bits, first));
  }

  FSL_INLINE void fold_into(Seen& seen) const {
    const std::uint32_t magnitude = largest_lane(largest);
    if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
    // Some of each vector's differing bits are enough.
    seen.differing_bits |= largest_lane(differing);
  }
};

// --- rotated byte planes

void cut_bfloat16(const float* x, std::size_t count, std::uint32_t first_bits,
                  std::uint8_t* const planes[2], Seen& seen) {
  const __m256i first = all(static_cast<int>(first_bits));
  Sight sight;
  const auto code_at = [&](const float* from) __attribute__((always_inline)) {
    const __m256i bits = load(from);
    sight.see(bits, first);
    const __m256i ties = _mm256_and_si256(_mm256_srli_epi32(bits, 16), all(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, all(0x7FFF)), ties), 16);
  };
  // Two vectors of words, rotated left by one bit, in the order that in_order() restores.
  const auto words_at = [&](const float* from) __attribute__((always_inline)) {
    const __m256i words = _mm256_packus_epi32(code_at(from), code_at(from + kLane));
    return _mm256_or_si256(_mm256_add_epi16(words, words), _mm256_srli_epi16(words, 15));
  };
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    const __m256i low = words_at(x + i);
    const __m256i high = words_at(x + i + 2 * kLane);
    store(planes[0] + i,
          in_order(_mm256_packus_epi16(_mm256_srli_epi16(low, 8), _mm256_srli_epi16(high, 8))));
    const __m256i lower_byte = _mm256_set1_epi16(0xFF);
    store(planes[1] + i, in_order(_mm256_packus_epi16(_mm256_and_si256(low, lower_byte),
                                                      _mm256_and_si256(high, lower_byte))));
  }
  sight.fold_into(seen);
  std::uint8_t* const rest[2] = {planes[0] + whole, planes[1] + whole};
  plain::cut_bfloat16(x + whole, count - whole, first_bits, rest, seen);
}

void cut_float32(const float* x, std::size_t count, std::uint32_t first_bits,
                 std::uint8_t* const planes[4], Seen& seen) {
  const __m256i first = all(static_cast<int>(first_bits));
  // Of four values byte 3, then byte 2, ...
  const __m256i by_place = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(3, 7, 11, 15, 2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12));
  Sight sight;
  const auto bytes_at = [&](const float* from) __attribute__((always_inline)) {
    const __m256i bits = load(from);
    sight.see(bits, first);
    return _mm256_shuffle_epi8(
        _mm256_or_si256(_mm256_add_epi32(bits, bits), _mm256_srli_epi32(bits, 31)), by_place);
  };
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    const __m256i a = bytes_at(x + i);
    const __m256i b = bytes_at(x + i + kLane);
    const __m256i c = bytes_at(x + i + 2 * kLane);
    const __m256i d = bytes_at(x + i + 3 * kLane);
    const __m256i upper_ab = _mm256_unpacklo_epi32(a, b);
    const __m256i upper_cd = _mm256_unpacklo_epi32(c, d);
    const __m256i lower_ab = _mm256_unpackhi_epi32(a, b);
    const __m256i lower_cd = _mm256_unpackhi_epi32(c, d);
    store(planes[0] + i, in_order(_mm256_unpacklo_epi64(upper_ab, upper_cd)));
    store(planes[1] + i, in_order(_mm256_unpackhi_epi64(upper_ab, upper_cd)));
    store(planes[2] + i, in_order(_mm256_unpacklo_epi64(lower_ab, lower_cd)));
    store(planes[3] + i, in_order(_mm256_unpackhi_epi64(lower_ab, lower_cd)));
  }
  sight.fold_into(seen);
  std::uint8_t* const rest[4] = {planes[0] + whole, planes[1] + whole, planes[2] + whole,
                                 planes[3] + whole};
  plain::cut_float32(x + whole, count - whole, first_bits, rest, seen);
}

}  // namespace
}  // namespace fsl
