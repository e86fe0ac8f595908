// AVX2: groups of uniform codes. For avx2/kernels.cpp only, which sets the target.
#pragma once

#include "kernels/avx2/lanes.hpp"

namespace fsl {
namespace {

// The digits of 32 codes as pairs of 16 bits; sets those that are listed.
FSL_INLINE __m256i pairs_of(const std::uint8_t* codes, int size, std::uint32_t& listed) {
  const __m256i last = all_bytes(static_cast<int>(last_digit_of(size)));
  const __m256i digits =
      _mm256_sub_epi8(load(codes), all_bytes(static_cast<int>(first_code_of(size))));
  listed = signs(_mm256_cmpeq_epi8(_mm256_max_epu8(digits, last), digits));
  return _mm256_maddubs_epi16(_mm256_min_epu8(digits, last),
                              _mm256_set1_epi16(size == 2 ? 0x0108 : 0x0104));
}

void group(const std::uint8_t* codes, std::size_t count, int size, std::uint8_t* symbols,
           std::uint64_t* listed) {
  const std::size_t whole = count & ~(kWord - 1);
  for (std::size_t i = 0; i < whole; i += kWord) {
    std::uint32_t low_listed;
    std::uint32_t high_listed;
    __m256i low = pairs_of(codes + i, size, low_listed);
    __m256i high = pairs_of(codes + i + kStep, size, high_listed);
    listed[i / kWord] = low_listed | static_cast<std::uint64_t>(high_listed) << 32;
    if (size == 2) {
      store(symbols + i / 2, _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8));
      continue;
    }
    low = _mm256_madd_epi16(low, all(0x00010010));
    high = _mm256_madd_epi16(high, all(0x00010010));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + i / 4), _mm256_castsi256_si128(bytes));
  }
  if (whole < count)
    plain::group(codes + whole, count - whole, size,
                 symbols + whole / static_cast<std::size_t>(size), listed + whole / kWord);
}

// The digits of 32 codes.
FSL_INLINE __m256i digits_of(const std::uint8_t* symbols, int size) {
  if (size == 2) {
    const __m256i pairs = _mm256_cvtepu8_epi16(load_half(symbols));
    return _mm256_or_si256(_mm256_srli_epi16(pairs, 3),
                           _mm256_slli_epi16(_mm256_and_si256(pairs, _mm256_set1_epi16(7)), 8));
  }
  const __m256i fours =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols)));
  const __m256i upper = _mm256_or_si256(_mm256_srli_epi32(fours, 6),
                                        _mm256_and_si256(_mm256_slli_epi32(fours, 4), all(0x300)));
  const __m256i lower = _mm256_or_si256(
      _mm256_and_si256(_mm256_slli_epi32(fours, 14), all(0x30000)), _mm256_slli_epi32(fours, 24));
  return _mm256_and_si256(_mm256_or_si256(upper, lower), all_bytes(3));
}

void ungroup(const std::uint8_t* symbols, std::size_t count, int size, const std::uint8_t*& listed,
             std::uint8_t* codes) {
  const std::size_t step = static_cast<std::size_t>(size);
  const std::size_t whole = count & ~(kWord - 1);
  const __m256i first = all_bytes(static_cast<int>(first_code_of(size)));
  const __m256i last = all_bytes(static_cast<int>(last_digit_of(size)));
  std::uint64_t marked[kMarkedWords];
  for (std::size_t start = 0; start < whole; start += kMarkedWords * kWord) {
    const std::size_t end =
        whole - start < kMarkedWords * kWord ? whole : start + kMarkedWords * kWord;
    std::size_t word = 0;
    for (std::size_t i = start; i < end; i += kWord, ++word) {
      const __m256i low = digits_of(symbols + i / step, size);
      const __m256i high = digits_of(symbols + (i + kStep) / step, size);
      store(codes + i, _mm256_add_epi8(low, first));
      store(codes + i + kStep, _mm256_add_epi8(high, first));
      marked[word] = signs64(_mm256_cmpeq_epi8(low, last), _mm256_cmpeq_epi8(high, last));
    }
    place_listed(marked, word, listed, codes + start);
  }
  plain::ungroup(symbols + whole / step, count - whole, size, listed, codes + whole);
}

}  // namespace
}  // namespace fsl
