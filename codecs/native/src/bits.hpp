// Bits of words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fsl {

// The number of bits that `value` needs; 0 for 0.
inline int bits_needed(unsigned value) {
  int bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

// The index of the highest set bit; number is not 0.
inline int highest_bit(unsigned number) {
#if defined(__GNUC__)
  return 31 - __builtin_clz(number);
#else
  return bits_needed(number) - 1;
#endif
}

// The index of the lowest set bit; word is not 0.
inline int trailing_zeros(std::uint64_t word) {
#if defined(__GNUC__)
  return __builtin_ctzll(word);
#else
  int zeros = 0;
  for (; (word & 1) == 0; word >>= 1) ++zeros;
  return zeros;
#endif
}

// Which runs of `run_values` values (a power of two from 16) have some bit in a bitmap of `count`.
class RunsInUse {
 public:
  RunsInUse(const std::uint64_t* bitmap, std::size_t count, std::size_t run_values)
      : bytes_(reinterpret_cast<const std::uint8_t*>(bitmap)),
        end_((count + 7) / 8),
        step_(run_values / 8) {}

  bool operator()(std::size_t run) const {
    const std::size_t first = run * step_;
    const std::size_t size = first + step_ < end_ ? step_ : end_ - first;
    std::uint64_t bits = 0;
    std::size_t i = 0;
    for (std::uint64_t eight; i + 8 <= size; i += 8) {
      std::memcpy(&eight, bytes_ + first + i, 8);
      bits |= eight;
    }
    for (; i < size; ++i) bits |= bytes_[first + i];
    return bits != 0;
  }

 private:
  const std::uint8_t* bytes_;
  std::size_t end_;
  std::size_t step_;
};

// Calls put(index, place) for each bit set in a bitmap of `words` words, in order; returns their
// number. It may put one place too many at an index before it puts the right one there, or after
// the last. Fast for few bits: their places are unpredictable, so nonzero words are found before
// any branch depends on them, and two bits are taken from each unconditionally.
template <typename Put>
std::size_t list_bits(const std::uint64_t* bitmap, std::size_t words, Put put) {
  std::size_t found = 0;
  for (std::size_t start = 0; start < words; start += 64) {
    const std::size_t here = words - start < 64 ? words - start : 64;
    std::uint64_t where = 0;
    for (std::size_t word = 0; word < here; ++word)
      where |= static_cast<std::uint64_t>(bitmap[start + word] != 0) << word;
    for (; where != 0; where &= where - 1) {
      const std::size_t word = start + static_cast<std::size_t>(trailing_zeros(where));
      const auto place_of = [=](std::uint64_t bits) {
        return 64 * word + static_cast<std::size_t>(trailing_zeros(bits));
      };
      const std::uint64_t bits = bitmap[word];
      const std::uint64_t after_first = bits & (bits - 1);
      put(found, place_of(bits));
      put(found + 1, place_of(after_first | std::uint64_t{1} << 63));
      found += after_first != 0 ? 2 : 1;
      for (std::uint64_t more = after_first & (after_first - 1); more != 0; more &= more - 1)
        put(found++, place_of(more));
    }
  }
  return found;
}

}  // namespace fsl
