// Huffman code lengths, limited, with ties as in docs/WIRE.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/lanes.hpp"

namespace fsl {

inline constexpr int kMaximumLeaves = 257;  // 256 symbols and an escape

// Writes code lengths of at most kLengthLimit bits for `size` symbols (at most 257) that occur
// `counts` times (sum below 2^22); 0 for those that do not occur. At least two must occur.
void code_lengths(const std::uint32_t* counts, int size, std::uint8_t* lengths);

}  // namespace fsl
