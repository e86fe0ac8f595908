// AVX2: masks of codes, and steps of sparse chunks. For avx2/kernels.cpp only, which sets the
// target.
#pragma once

#include "kernels/avx2/quantise.hpp"

namespace fsl {
namespace {

void mark(const std::uint8_t* bytes, std::size_t count, std::uint8_t zero, std::uint64_t* bitmap) {
  const __m256i zeros = all_bytes(zero);
  const std::size_t whole = count & ~(kWord - 1);
  for (std::size_t i = 0; i < whole; i += kWord)
    *bitmap++ = ~signs64(_mm256_cmpeq_epi8(load(bytes + i), zeros),
                         _mm256_cmpeq_epi8(load(bytes + i + kStep), zeros));
  plain::mark(bytes + whole, count - whole, zero, bitmap);
}

std::size_t coarsen_uniform(const float* x, std::size_t count, std::size_t block_values,
                            std::uint8_t* codes, std::int16_t* steps) {
  const std::size_t whole = count - count % block_values;
  std::size_t escapes = 0;
  for (std::size_t start = 0; start < whole; start += block_values, ++steps) {
    __m256i zeros = _mm256_setzero_si256();
    for (std::size_t i = start; i < start + block_values; i += kLane)
      zeros = _mm256_sub_epi32(
          zeros, _mm256_cmpeq_epi32(magnitude_of(load(x + i)), _mm256_setzero_si256()));
    alignas(32) std::uint32_t of_lanes[kLane];
    store(of_lanes, zeros);
    std::size_t nonzero = block_values;
    for (const std::uint32_t some : of_lanes) nonzero -= some;
    if (nonzero == 0) continue;
    const int step = *steps + coarser_by(nonzero, block_values);
    *steps = static_cast<std::int16_t>(step < kHighestQuarters ? step : kHighestQuarters);
    escapes += code_uniform_run_with_escapes(
        x + start, block_values, _mm256_set1_ps(plain::quarter_power(-*steps)), codes + start);
  }
  return escapes +
         plain::coarsen_uniform(x + whole, count - whole, block_values, codes + whole, steps);
}

}  // namespace
}  // namespace fsl
