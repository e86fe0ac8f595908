// A plane's code words in lanes (docs/WIRE.md, "Streams"): what kernels know of a code, and the lanes' state between inner blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

inline constexpr int kLengthLimit = 8;
inline constexpr std::size_t kMostLanes = 128;
inline constexpr std::size_t kFewLanes = 16;
inline constexpr std::size_t kManyLanesFrom = 16384;  // values of a chunk

inline constexpr std::size_t lanes_of(std::size_t values) { return values >= kManyLanesFrom ? kMostLanes : kFewLanes; }

// Set in a symbol's length where it has no code of its own, and its word is the escape's.
inline constexpr std::uint8_t kUncoded = 0x80;

// Tables of a complete code.
struct Code {
  alignas(64) std::uint8_t words[256];    // by symbol
  alignas(64) std::uint8_t lengths[256];  // by symbol; kUncoded is set for those that take the escape
  alignas(64) std::uint8_t symbol_of_window[256];  // by the next 8 bits; the lowest uncoded symbol for the escape
  alignas(64) std::uint8_t length_of_window[256];
};

// Lane l holds low[l] + 256 * (high[l] mod 2^used[l]); bits of high above these are anything.
struct Lanes {
  alignas(64) std::uint8_t low[kMostLanes];
  alignas(64) std::uint8_t high[kMostLanes];
  alignas(64) std::uint8_t used[kMostLanes];  // 0 to 7
};

}  // namespace fsl
