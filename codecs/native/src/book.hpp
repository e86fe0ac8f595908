// Books: the Huffman code of a plane's symbols, with the tree and the tables that kernels want.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format.hpp"
#include "huffman.hpp"
#include "status.hpp"

namespace fsl {

inline constexpr int kNoEscape = 256;  // no rank has this number
inline constexpr std::size_t kMaximumPackedBytes = 3 + 128;

struct Book {
  int width;
  int escape;       // code length of the escape leaf, 0 without one
  int escape_rank;  // kNoEscape without one
  int bitmaps;      // bitmaps and planes of an inner block
  bool is_total;    // every symbol of the plane has a code
  std::uint64_t digest;
  std::size_t packed_bytes;
  std::uint8_t lengths[256];
  std::uint8_t costs[256];  // bits of a symbol, its byte in the list included when it is escaped; 0: it cannot be coded
  alignas(64) std::uint8_t ranks[256];
  alignas(64) std::uint8_t symbol_of_rank[256];
  Node nodes[kMaximumNodes];

  // Bits of symbols that occur `counts` times; false when one of them cannot be coded.
  bool bits_of(const std::uint32_t* counts, std::uint64_t& bits) const;

  // First symbol, last symbol, length of the escape, nibbles. Returns packed_bytes.
  std::size_t pack(std::uint8_t* out) const;
};

// The book of a plane of `width` bits with these code lengths; fills everything but the digest. The status of lengths that are no
// complete code of 2 to 256 leaves.
Status make_book(int width, int escape, const std::uint8_t* lengths, Book& book);

// The Huffman book for symbols that occur `counts` times. A sampled one gets an escape for the symbols that do not occur. At least two
// symbols occur, or one, and it is sampled.
void make_own_book(const std::uint32_t* counts, int width, bool is_sampled, Book& book);

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
