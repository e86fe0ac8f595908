// Digits of grouped codes (docs/WIRE.md, "Groups").
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

inline constexpr unsigned kZeroCode = 128;

// The largest digit, that of a listed code; and the code whose digit is 0.
inline constexpr unsigned last_digit_of(int size) { return size == 2 ? 7 : 3; }
inline constexpr unsigned first_code_of(int size) { return kZeroCode + 1 - (last_digit_of(size) + 1) / 2; }

inline constexpr bool has_digit(unsigned code, int size) {
  return code >= first_code_of(size) && code < first_code_of(size) + last_digit_of(size);
}

}  // namespace fsl
