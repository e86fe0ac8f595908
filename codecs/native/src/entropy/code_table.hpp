// Code tables: the Huffman code of a plane's symbols, with the tables that kernels want.
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
  int escape;   // code length of the escape leaf, 0 without one
  std::size_t packed_bytes;
  std::uint8_t lengths[256];
  std::uint8_t costs[256];  // bits of a symbol, with its number in the list where it has no code; 0: it cannot be coded
  int uncoded;              // symbols without a code
  int low_bits;             // of their numbers, which go as bit planes; those above are ranks
  std::uint8_t lowest_uncoded;
  std::uint8_t number_of[256];  // by symbol, of those without a code: from the nearest to those with codes on, the lower first
  std::uint8_t symbol_of[256];  // by number
  Code code;

  // Bits of symbols that occur `counts` times; false when one of them cannot be coded.
  bool bits_of(const std::uint32_t* counts, std::uint64_t& bits) const;

  // The highest number without its low bits.
  int last_rank() const { return uncoded == 0 ? 0 : (uncoded - 1) >> low_bits; }

  // First symbol, last symbol, length of the escape and low bits, nibbles. Returns packed_bytes.
  std::size_t pack(std::uint8_t* out) const;
};

// The table of a plane of `width` bits with these code lengths and low bits of numbers; the status of lengths that are
// no complete code of 2 to 256 leaves, or of numbers that could take too many ranks.
Status make_table(int width, int escape, int low_bits, const std::uint8_t* lengths, CodeTable& table);

// The Huffman table for symbols that occur `counts` times in a sample of `total`. Rare ones get an escape, and in a sample
// those that do not occur. At least two symbols occur, or one, and it is sampled. It is for writing: nothing can be read with it.
void make_own_table(const std::uint32_t* counts, std::uint32_t total, int width, bool is_sampled, CodeTable& table);

// What pack() wrote, from the front of `position`, which advances. Refuses whatever it cannot have written.
Status unpack_table(const std::uint8_t*& position, const std::uint8_t* end, int width, CodeTable& table);

// The tables that every peer has: null, or those of a format from `first` number on.
struct StaticTables {
  const CodeTable* tables;
  int first;
  int count;
};

StaticTables static_tables_of(Kind kind);

}  // namespace fsl
