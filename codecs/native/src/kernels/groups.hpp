// Digits of grouped codes (docs/WIRE.md, "Groups").
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

inline constexpr unsigned kZeroCode = 128;

// The largest digit, that of a listed code; and the code whose digit is 0.
inline constexpr unsigned last_digit_of(int size) { return size == 2 ? 7 : 3; }
inline constexpr unsigned first_code_of(int size) {
  return kZeroCode + 1 - (last_digit_of(size) + 1) / 2;
}

inline constexpr bool has_digit(unsigned code, int size) {
  return code >= first_code_of(size) && code < first_code_of(size) + last_digit_of(size);
}

// A symbol of zeros, and the bits of the last of `count` codes' symbols that only fill it up.
inline constexpr unsigned zeros_of(int size) { return size == 2 ? 033 : 0x55; }
inline constexpr unsigned fill_of(std::size_t count, int size) {
  const std::size_t left =
      (static_cast<std::size_t>(size) - count % static_cast<std::size_t>(size)) %
      static_cast<std::size_t>(size);
  return (1U << (left * (size == 2 ? 3 : 2))) - 1;
}

}  // namespace fsl
