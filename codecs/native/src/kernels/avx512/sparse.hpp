// AVX-512: masks of codes, and steps of sparse chunks. For avx512/kernels.cpp only, which sets the
// target.
#pragma once

#include "kernels/avx512/quantise.hpp"
#include "kernels/sparse.hpp"

namespace fsl {
namespace {

void mark(const std::uint8_t* bytes, std::size_t count, std::uint8_t zero, std::uint64_t* bitmap) {
  const __m512i zeros = all_bytes(zero);
  for (std::size_t i = 0; i < count; i += kStep)
    *bitmap++ = _mm512_mask_cmpneq_epi8_mask(there(count - i), load(bytes + i), zeros);
}

void spread(const std::uint8_t* picked, const std::uint64_t* bitmap, std::size_t count,
            std::uint8_t zero, std::uint8_t* bytes) {
  const __m512i zeros = all_bytes(zero);
  for (std::size_t i = 0; i < count; i += kStep) {
    const std::uint64_t bits = *bitmap++;
    store(bytes + i, _mm512_mask_expand_epi8(zeros, bits, load_first(picked)));
    picked += ones(bits);
  }
}

std::size_t coarsen_uniform(const float* x, std::size_t count, std::size_t block_values,
                            std::uint8_t* codes, std::int16_t* steps) {
  const std::size_t whole = count - count % block_values;
  std::size_t escapes = 0;
  for (std::size_t start = 0; start < whole; start += block_values, ++steps) {
    std::size_t nonzero = 0;
    for (std::size_t i = start; i < start + block_values; i += kLane) {
      const __m512i magnitudes = _mm512_and_si512(load(x + i), all(0x7FFFFFFF));
      nonzero += ones(_mm512_test_epi32_mask(magnitudes, magnitudes));
    }
    if (nonzero == 0) continue;
    const int step = *steps + coarser_by(nonzero, block_values);
    *steps = static_cast<std::int16_t>(step < kHighestQuarters ? step : kHighestQuarters);
    const __m512 inverse = _mm512_castsi512_ps(quarter_powers(all(-*steps)));
    for (std::size_t i = start; i < start + block_values; i += kLane) {
      const __m512 product = _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse);
      const __mmask16 fits =
          _mm512_cmp_ps_mask(_mm512_abs_ps(product), _mm512_set1_ps(127.5F), _CMP_LT_OQ);
      escapes += kLane - ones(fits);
      const __m512i those = _mm512_maskz_add_epi32(fits, _mm512_cvtps_epi32(product), all(0x80));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(those));
    }
  }
  return escapes + kScalarKernels.coarsen_uniform(x + whole, count - whole, block_values,
                                                  codes + whole, steps);
}

}  // namespace
}  // namespace fsl
