// Bits of words.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

// How many bits a number needs; 0 for 0.
inline int bits_needed(unsigned value) {
  int bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

// The place of the highest bit of a number that is not 0.
inline int highest_bit(unsigned number) {
#if defined(__GNUC__)
  return 31 - __builtin_clz(number);
#else
  return bits_needed(number) - 1;
#endif
}

}  // namespace fsl
