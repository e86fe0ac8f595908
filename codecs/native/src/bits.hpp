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

// Calls each(place) for the bits set in a bitmap of `words` words, in order. Fast where they are few: words that are not zero are found before any
// branch depends on them, as nobody can foresee which they are.
template <typename Each>
void for_each_bit(const std::uint64_t* bitmap, std::size_t words, Each each) {
  for (std::size_t start = 0; start < words; start += 64) {
    const std::size_t here = words - start < 64 ? words - start : 64;
    std::uint64_t where = 0;
    for (std::size_t word = 0; word < here; ++word) where |= static_cast<std::uint64_t>(bitmap[start + word] != 0) << word;
    for (; where != 0; where &= where - 1) {
      const std::size_t word = start + static_cast<std::size_t>(trailing_zeros(where));
      std::uint64_t bits = bitmap[word];
      do {
        each(64 * word + static_cast<std::size_t>(trailing_zeros(bits)));
        bits &= bits - 1;
      } while (bits != 0);
    }
  }
}

}  // namespace fsl
