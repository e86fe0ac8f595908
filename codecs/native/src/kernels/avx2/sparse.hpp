// AVX2: masks of codes. For avx2/kernels.cpp only, which sets the target.
#pragma once

#include "kernels/avx2/base.hpp"

namespace fsl {
namespace {

std::size_t mark(const std::uint8_t* bytes, std::size_t count, std::uint8_t zero,
                 std::uint64_t* bitmap) {
  const __m256i zeros = all_bytes(zero);
  const std::size_t whole = count & ~(kWord - 1);
  std::size_t found = 0;
  for (std::size_t i = 0; i < whole; i += kWord) {
    const std::uint64_t bits = ~signs64(_mm256_cmpeq_epi8(load(bytes + i), zeros),
                                        _mm256_cmpeq_epi8(load(bytes + i + kStep), zeros));
    *bitmap++ = bits;
    found += static_cast<std::size_t>(_mm_popcnt_u64(bits));
  }
  return found + plain::mark(bytes + whole, count - whole, zero, bitmap);
}

}  // namespace
}  // namespace fsl
