// Code words in lanes (docs/WIRE.md, "Streams"): the tables that kernels use, and the lanes' state
// between pieces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

inline constexpr int kLengthLimit = 8;
inline constexpr std::size_t kMostLanes = 128;
inline constexpr std::size_t kFewLanes = 16;
inline constexpr std::size_t kManyLanesFrom = 16384;       // symbols
inline constexpr std::size_t kManyLanesFromSparse = 4096;  // of a plane of a sparse split

inline constexpr std::size_t lanes_of(std::size_t symbols, std::size_t many_from) {
  return symbols >= many_from ? kMostLanes : kFewLanes;
}

// Set in the length of a symbol without a code, whose word is the escape's.
inline constexpr std::uint8_t kUncoded = 0x80;

// A complete code.
struct Code {
  alignas(64) std::uint8_t words[256];  // by symbol
  alignas(
      64) std::uint8_t lengths[256];  // by symbol; kUncoded is set for those that take the escape
  alignas(64) std::uint8_t symbol_of_window[256];  // by the next 8 bits; the mark for the escape
  alignas(64) std::uint8_t length_of_window[256];
  bool escapes;       // whether some symbols have no code
  std::uint8_t mark;  // the lowest of these; undefined if there are none

  // Made by arrange(). No word is longer than 8 bits, and those of 8 come in pairs, so seven bits
  // determine the length.
  alignas(64) std::uint8_t length_of_seven_bits[128];
  // Words are ordered by length. So a window has the shortest length, plus one for each length
  // whose last window it is past; and words of one length are as far apart as their ranks, the
  // leaves' numbers in that order.
  alignas(64) std::uint8_t symbol_of_rank[256];
  alignas(16) std::uint8_t first_rank[16];  // by length: rank of its first word, minus that word
  std::uint8_t
      last_window[kLengthLimit];  // by length: the last window of this length or a shorter one
  int shortest;
  std::size_t leaves;

  void arrange() {
    for (int bits = 0; bits < 128; ++bits) length_of_seven_bits[bits] = length_of_window[2 * bits];
    for (std::uint8_t& symbol : symbol_of_rank) symbol = 0;
    for (std::uint8_t& rank : first_rank) rank = 0;
    for (std::uint8_t& window : last_window) window = 255;
    shortest = length_of_window[0];
    leaves = 0;
    int length = shortest;
    for (int window = 0; window < 256; window += 256 >> length) {
      for (; length < length_of_window[window]; ++length)
        last_window[length] = static_cast<std::uint8_t>(window - 1);
      first_rank[length] =
          static_cast<std::uint8_t>(static_cast<int>(leaves) - (window >> (kLengthLimit - length)));
      symbol_of_rank[leaves++] = symbol_of_window[window];
    }
  }
};

// Two bit planes below symbols of six bits, which together are codes of 8 bits.
struct TwoPlanes {
  const std::uint8_t* high;
  const std::uint8_t* low;
  bool rotated;
};

// Codes of 8 bits that are read.
struct CodesRead {
  std::uint8_t* codes;
  std::uint8_t largest;  // of all read so far, without sign
};

// Lane l holds low[l] + 256 * (high[l] mod 2^used[l]). While lanes are read, higher bits of high[l]
// are arbitrary.
struct Lanes {
  alignas(64) std::uint8_t low[kMostLanes];
  alignas(64) std::uint8_t high[kMostLanes];
  alignas(64) std::uint8_t used[kMostLanes];  // 0 to 7
};

}  // namespace fsl
