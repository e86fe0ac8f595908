// Books: the Huffman code of a plane's symbols, with the tables that kernels want.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format.hpp"
#include "huffman.hpp"
#include "status.hpp"

namespace fsl {

inline constexpr std::size_t kMaximumPackedBytes = 3 + 128;

struct Book {
  int width;
  int escape;   // code length of the escape leaf, 0 without one
  std::uint64_t digest;
  std::size_t packed_bytes;
  std::uint8_t lengths[256];
  std::uint8_t costs[256];  // bits of a symbol, with its number in the list where it has no code; 0: it cannot be coded
  int uncoded;              // symbols without a code
  int number_bits;          // of their numbers
  std::uint8_t lowest_uncoded;
  std::uint8_t number_of[256];  // by symbol, of those without a code
  std::uint8_t symbol_of[256];  // by number
  Code code;

  // Bits of symbols that occur `counts` times; false when one of them cannot be coded.
  bool bits_of(const std::uint32_t* counts, std::uint64_t& bits) const;

  // First symbol, last symbol, length of the escape, nibbles. Returns packed_bytes.
  std::size_t pack(std::uint8_t* out) const;
};

// The book of a plane of `width` bits with these code lengths; fills everything but the digest. The status of lengths that are no
// complete code of 2 to 256 leaves.
Status make_book(int width, int escape, const std::uint8_t* lengths, Book& book);

// The Huffman book for symbols that occur `counts` times in a sample of `total`. Rare ones get an escape, and in a sample
// those that do not occur. At least two symbols occur, or one, and it is sampled.
void make_own_book(const std::uint32_t* counts, std::uint32_t total, int width, bool is_sampled, Book& book);

// What pack() wrote, from the front of `position`, which advances. Refuses whatever it cannot have written.
Status unpack_book(const std::uint8_t*& position, const std::uint8_t* end, int width, Book& book);

// The books that every peer has: null, or those of a format from `first` number on.
struct StaticBooks {
  const Book* books;
  int first;
  int count;
};

StaticBooks static_books_of(Kind kind);

// Books that the caller shares with its peer.
struct SharedBooks {
  const Book* books = nullptr;
  std::size_t count = 0;
};

}  // namespace fsl
