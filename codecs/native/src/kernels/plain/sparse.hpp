// Masks of codes in plain C++. For plain/kernels.hpp only.
#pragma once

#include "bits.hpp"

namespace fsl {
namespace {
namespace plain {

std::size_t mark(const std::uint8_t* bytes, std::size_t count, std::uint8_t zero,
                 std::uint64_t* bitmap) {
  std::size_t found = 0;
  for (std::size_t start = 0; start < count; start += 64) {
    const std::size_t here = count - start < 64 ? count - start : 64;
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < here; ++i) {
      const bool is_set = bytes[start + i] != zero;
      bits |= static_cast<std::uint64_t>(is_set) << i;
      found += is_set;
    }
    *bitmap++ = bits;
  }
  return found;
}

std::size_t spread(const std::uint8_t* picked, const std::uint64_t* bitmap, std::size_t count,
                   std::uint8_t zero, std::uint8_t* bytes) {
  const std::uint8_t* const first = picked;
  std::memset(bytes, zero, count);
  for (std::size_t start = 0; start < count; start += 64) {
    for (std::uint64_t bits = *bitmap++; bits != 0; bits &= bits - 1)
      bytes[start + static_cast<std::size_t>(trailing_zeros(bits))] = *picked++;
  }
  return static_cast<std::size_t>(picked - first);
}

std::size_t count_ones(const std::uint64_t* bitmap, std::size_t words) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < words; ++i) {
#if defined(__GNUC__)
    found += static_cast<std::size_t>(__builtin_popcountll(bitmap[i]));
#else
    for (std::uint64_t bits = bitmap[i]; bits != 0; bits &= bits - 1) ++found;
#endif
  }
  return found;
}

}  // namespace plain
}  // namespace
}  // namespace fsl
