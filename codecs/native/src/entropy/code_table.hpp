// Code tables: the Huffman code of a plane's symbols, in the form that kernels use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "entropy/huffman.hpp"
#include "status.hpp"
#include "wire/format.hpp"

namespace fsl {

inline constexpr std::size_t kMaximumPackedBytes = 3 + 128;

struct CodeTable {
  int width;
  int escape;  // code length of the escape leaf, 0 without one
  std::size_t packed_bytes;
  std::uint8_t lengths[256];
  std::uint8_t costs[256];  // bits of a symbol, including its number in a list; 0: cannot be coded
  int uncoded;              // symbols without a code
  int low_bits;             // of their numbers: these are bit planes, the bits above are ranks
  std::uint8_t lowest_uncoded;
  std::uint8_t
      number_of[256];  // by symbol, of those without a code: nearest to those with codes first
  std::uint8_t symbol_of[256];  // by number
  Code code;

  // Bits of symbols that occur `counts` times, which all have a code or take the escape.
  std::uint64_t bits_of(const std::uint32_t* counts) const;

  // The rank of the highest number.
  int last_rank() const { return uncoded == 0 ? 0 : (uncoded - 1) >> low_bits; }

  // Writes first symbol, last symbol, escape and low bits, lengths as nibbles. Returns
  // packed_bytes.
  std::size_t pack(std::uint8_t* out) const;
};

// Fills the table of a plane of `width` bits. Refuses lengths that are not a complete code of 2 to
// 256 leaves, and low bits that leave too many ranks.
Status make_table(int width, int escape, int low_bits, const std::uint8_t* lengths,
                  CodeTable& table);

// Fills the Huffman table for symbols that occur `counts` times among `total`, at least two of them
// or `is_sampled`. Rare symbols take the escape, and in a sample those that do not occur. For
// writing only: the windows are not filled.
void make_own_table(const std::uint32_t* counts, std::uint32_t total, int width, bool is_sampled,
                    CodeTable& table);

// Reads what pack() wrote from `position`, which advances. Refuses bytes that it cannot have
// written.
Status unpack_table(const std::uint8_t*& position, const std::uint8_t* end, int width,
                    CodeTable& table);

}  // namespace fsl
