// Huffman code lengths, limited, with the ties of docs/WIRE.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/lanes.hpp"

namespace fsl {

inline constexpr int kMaximumLeaves = 257;  // 256 symbols and an escape

// Code lengths of at most kLengthLimit bits for `size` symbols (up to 257) that occur `counts` times (each less than 2^22, their sum less than 2^22);
// 0 for those that do not occur. At least two must occur.
void code_lengths(const std::uint32_t* counts, int size, std::uint8_t* lengths);

}  // namespace fsl
