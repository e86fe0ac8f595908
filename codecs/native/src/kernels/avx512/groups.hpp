// AVX-512: groups of uniform codes. For avx512/kernels.cpp only, which sets the target.
#pragma once

#include "kernels/avx512/base.hpp"
#include "kernels/groups.hpp"

namespace fsl {
namespace {

void group(const std::uint8_t* codes, std::size_t count, int size, std::uint8_t* symbols,
           std::uint64_t* listed) {
  const __m512i first = all_bytes(static_cast<std::uint8_t>(first_code_of(size)));
  const __m512i last = all_bytes(static_cast<std::uint8_t>(last_digit_of(size)));
  const __m512i weights = _mm512_set1_epi16(size == 2 ? 0x0108 : 0x0104);
  for (std::size_t i = 0; i < count; i += kStep) {
    const __m512i those = _mm512_mask_loadu_epi8(all_bytes(kZeroCode), there(count - i), codes + i);
    const __m512i digits = _mm512_sub_epi8(those, first);
    listed[i / kStep] = _mm512_cmpge_epu8_mask(digits, last);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_min_epu8(digits, last), weights);
    if (size == 2) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols + i / 2), _mm512_cvtepi16_epi8(pairs));
    } else {
      const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00010010));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + i / 4), _mm512_cvtepi32_epi8(fours));
    }
  }
}

// Digits of 64 codes.
FSL_INLINE __m512i digits_of(const std::uint8_t* symbols, int size) {
  if (size == 2) {
    const __m512i pairs =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols)));
    const __m512i low = _mm512_slli_epi16(_mm512_and_si512(pairs, _mm512_set1_epi16(7)), 8);
    return _mm512_or_si512(_mm512_srli_epi16(pairs, 3), low);
  }
  const __m512i fours =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols)));
  const __m512i upper =
      _mm512_or_si512(_mm512_srli_epi32(fours, 6),
                      _mm512_and_si512(_mm512_slli_epi32(fours, 4), _mm512_set1_epi32(0x300)));
  const __m512i lower =
      _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi32(fours, 14), _mm512_set1_epi32(0x30000)),
                      _mm512_slli_epi32(fours, 24));
  return _mm512_and_si512(_mm512_or_si512(upper, lower), all_bytes(3));
}

void ungroup(const std::uint8_t* symbols, std::size_t count, int size, const std::uint8_t*& listed,
             std::uint8_t* codes) {
  const __m512i first = all_bytes(static_cast<std::uint8_t>(first_code_of(size)));
  const __m512i last = all_bytes(static_cast<std::uint8_t>(last_digit_of(size)));
  const std::size_t step = static_cast<std::size_t>(size);
  const std::size_t filled = (count + step - 1) / step * step;
  const std::uint8_t* next = listed;
  for (std::size_t i = 0; i < filled; i += kStep) {
    const __m512i digits = digits_of(symbols + i / step, size);
    const __mmask64 those = _mm512_mask_cmpeq_epi8_mask(there(filled - i), digits, last);
    store(codes + i,
          _mm512_mask_expand_epi8(_mm512_add_epi8(digits, first), those, load_first(next)));
    next += ones(those);
  }
  listed = next;
}

}  // namespace
}  // namespace fsl
