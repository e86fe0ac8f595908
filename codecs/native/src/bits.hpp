// Bits of words.
#pragma once

#include <cstdint>

namespace fsl {

// How many bits a number needs; 0 for 0.
inline int bits_needed(unsigned value) {
  int bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

// Of a number that is not 0.
inline int trailing_zeros(std::uint64_t word) {
#if defined(__GNUC__)
  return __builtin_ctzll(word);
#else
  int zeros = 0;
  for (; (word & 1) == 0; word >>= 1) ++zeros;
  return zeros;
#endif
}

}  // namespace fsl
