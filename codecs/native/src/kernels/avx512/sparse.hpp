// AVX-512: masks of codes. For avx512/kernels.cpp only, which sets the target.
#pragma once

#include "kernels/avx512/bytes.hpp"

namespace fsl {
namespace {

std::size_t mark(const std::uint8_t* bytes, std::size_t count, std::uint8_t zero,
                 std::uint64_t* bitmap) {
  const __m512i zeros = all_bytes(zero);
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; i += kStep) {
    const std::uint64_t bits =
        _mm512_mask_cmpneq_epi8_mask(there(count - i), load(bytes + i), zeros);
    *bitmap++ = bits;
    found += ones(bits);
  }
  return found;
}

std::size_t spread(const std::uint8_t* picked, const std::uint64_t* bitmap, std::size_t count,
                   std::uint8_t zero, std::uint8_t* bytes) {
  const __m512i zeros = all_bytes(zero);
  const std::uint8_t* const first = picked;
  for (std::size_t i = 0; i < count; i += kStep) {
    const std::uint64_t bits = *bitmap++;
    store(bytes + i, _mm512_mask_expand_epi8(zeros, bits, load_first(picked)));
    picked += ones(bits);
  }
  return static_cast<std::size_t>(picked - first);
}

std::size_t count_ones(const std::uint64_t* bitmap, std::size_t words) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < words; ++i) found += ones(bitmap[i]);
  return found;
}

}  // namespace
}  // namespace fsl
