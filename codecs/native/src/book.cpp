#include "book.hpp"

#include <algorithm>
#include <cstring>

namespace fsl {
namespace {

// Leaves ranked by (length, symbol); the escape is the symbol after all others.
struct Ranking {
  int leaves = 0;
  std::uint8_t lengths[kMaximumLeaves];
  std::uint16_t symbols[kMaximumLeaves];
};

void rank_leaves(const std::uint8_t* lengths, int symbols, int escape, Ranking& ranking) {
  int starts[kLengthLimit + 2] = {};
  for (int symbol = 0; symbol < symbols; ++symbol) ++starts[lengths[symbol] + 1];
  if (escape != 0) ++starts[escape + 1];
  starts[1] = 0;  // symbols without a code have no rank
  for (int length = 1; length <= kLengthLimit; ++length) starts[length + 1] += starts[length];
  ranking.leaves = starts[kLengthLimit + 1];
  for (int symbol = 0; symbol < symbols; ++symbol) {
    const int length = lengths[symbol];
    if (length == 0) continue;
    const int rank = starts[length]++;
    ranking.lengths[rank] = static_cast<std::uint8_t>(length);
    ranking.symbols[rank] = static_cast<std::uint16_t>(symbol);
  }
  if (escape != 0) {
    const int rank = starts[escape]++;
    ranking.lengths[rank] = static_cast<std::uint8_t>(escape);
    ranking.symbols[rank] = static_cast<std::uint16_t>(symbols);
  }
}

// Grows the canonical code's tree in preorder.
struct TreeBuilder {
  const Ranking& ranking;
  Node* nodes;
  int used = 0;
  int bitmaps = 0;

  std::uint16_t grow(int first, int end, int depth) {
    const int index = used++;
    Node node = {static_cast<std::uint8_t>(first), 0, 0, 0, 0};
    if (ranking.lengths[first] == ranking.lengths[end - 1]) {
      node.planes = static_cast<std::uint8_t>(ranking.lengths[first] - depth);
      bitmaps += node.planes;
    } else {
      ++bitmaps;
      // The left child's leaves fill half of the node's code space, shortest codes first.
      const int half = 1 << (kLengthLimit - depth - 1);
      int pivot = first;
      for (int filled = 0; filled < half; ++pivot) filled += 1 << (kLengthLimit - ranking.lengths[pivot]);
      node.pivot = static_cast<std::uint16_t>(pivot);
      node.left = grow(first, pivot, depth + 1);
      node.right = grow(pivot, end, depth + 1);
    }
    nodes[index] = node;
    return static_cast<std::uint16_t>(index);
  }
};

void fill_book(int width, int escape, const std::uint8_t* lengths, Book& book) {
  const int symbols = 1 << width;
  book.width = width;
  book.escape = escape;
  book.digest = 0;
  std::memset(book.lengths, 0, sizeof(book.lengths));
  std::memcpy(book.lengths, lengths, static_cast<std::size_t>(symbols));

  Ranking ranking;
  rank_leaves(lengths, symbols, escape, ranking);
  TreeBuilder builder{ranking, book.nodes};
  builder.grow(0, ranking.leaves, 0);
  book.bitmaps = builder.bitmaps;

  std::memset(book.symbol_of_rank, 0, sizeof(book.symbol_of_rank));
  book.escape_rank = kNoEscape;
  for (int rank = 0; rank < ranking.leaves; ++rank) {
    if (ranking.symbols[rank] == symbols) book.escape_rank = rank;
  }
  std::memset(book.ranks, book.escape_rank & 0xFF, sizeof(book.ranks));
  for (int rank = 0; rank < ranking.leaves; ++rank) {
    if (rank == book.escape_rank) continue;
    book.ranks[ranking.symbols[rank]] = static_cast<std::uint8_t>(rank);
    book.symbol_of_rank[rank] = static_cast<std::uint8_t>(ranking.symbols[rank]);
  }

  const std::uint8_t of_escaped = static_cast<std::uint8_t>(escape != 0 ? escape + 8 : 0);
  int first = symbols;
  int last = 0;
  book.is_total = true;
  for (int symbol = 0; symbol < symbols; ++symbol) {
    const bool has_code = lengths[symbol] != 0;
    book.costs[symbol] = has_code ? lengths[symbol] : of_escaped;
    book.is_total &= has_code;
    if (!has_code) continue;
    first = std::min(first, symbol);
    last = symbol;
  }
  book.packed_bytes = 3 + static_cast<std::size_t>(last - first + 2) / 2;
}

}  // namespace

bool Book::bits_of(const std::uint32_t* counts, std::uint64_t& bits) const {
  const int symbols = 1 << width;
  std::uint32_t uncoded = 0;
  std::uint32_t total = 0;  // at most 2^21 symbols of at most 20 bits
  for (int symbol = 0; symbol < symbols; ++symbol) {
    const std::uint32_t cost = costs[symbol];
    total += counts[symbol] * cost;
    uncoded |= cost == 0 ? counts[symbol] : 0;
  }
  bits = total;
  return uncoded == 0;
}

std::size_t Book::pack(std::uint8_t* out) const {
  int first = 0;
  while (lengths[first] == 0) ++first;
  int last = (1 << width) - 1;
  while (lengths[last] == 0) --last;
  out[0] = static_cast<std::uint8_t>(first);
  out[1] = static_cast<std::uint8_t>(last);
  out[2] = static_cast<std::uint8_t>(escape);
  std::uint8_t* nibbles = out + 3;
  for (int symbol = first; symbol <= last; symbol += 2) {
    const unsigned high = symbol < last ? lengths[symbol + 1] : 0U;
    *nibbles++ = static_cast<std::uint8_t>(lengths[symbol] | high << 4);
  }
  return packed_bytes;
}

Status make_book(int width, int escape, const std::uint8_t* lengths, Book& book) {
  const int symbols = 1 << width;
  std::uint64_t leaves = 0;
  int longest = 0;
  std::uint32_t space = 0;
  int codes = 0;
  for (int i = 0; i <= symbols; ++i) {
    const int length = i < symbols ? lengths[i] : escape;
    longest = std::max(longest, length);
    if (length == 0) continue;
    ++leaves;
    codes += i < symbols;
    if (length <= kLengthLimit) space += 1U << (kLengthLimit - length);
  }
  if (leaves < 2 || leaves > 256 || longest > kLengthLimit) return {Fault::kBookLeaves, leaves, static_cast<std::uint64_t>(longest)};
  if (space != 1U << kLengthLimit || codes == 0) return {Fault::kBookSpace};
  fill_book(width, escape, lengths, book);
  return {};
}

void make_own_book(const std::uint32_t* counts, int width, bool is_sampled, Book& book) {
  const int symbols = 1 << width;
  std::uint32_t weights[kMaximumLeaves];
  std::uint32_t once = 0;
  bool all_occur = true;
  for (int symbol = 0; symbol < symbols; ++symbol) {
    weights[symbol] = counts[symbol];
    once += counts[symbol] == 1;
    all_occur &= counts[symbol] != 0;
  }
  weights[symbols] = is_sampled && !all_occur ? std::max(once, 1U) : 0;
  std::uint8_t lengths[kMaximumLeaves];
  code_lengths(weights, symbols + 1, lengths);
  fill_book(width, lengths[symbols], lengths, book);
}

Status unpack_book(const std::uint8_t*& position, const std::uint8_t* end, int width, Book& book) {
  if (end - position < 3) return {Fault::kPayloadEnds};
  const unsigned first = position[0];
  const unsigned last = position[1];
  const int escape = position[2];
  position += 3;
  if (first > last || last >> width != 0) return {Fault::kBookRange, first, last, static_cast<std::uint64_t>(width)};
  const unsigned count = last - first + 1;
  const std::size_t bytes = (count + 1) / 2;
  if (static_cast<std::size_t>(end - position) < bytes) return {Fault::kPayloadEnds};
  std::uint8_t lengths[256] = {};
  for (unsigned i = 0; i < count; ++i) lengths[first + i] = static_cast<std::uint8_t>(position[i / 2] >> (i % 2 * 4) & 15);
  const bool has_spare = count % 2 != 0;
  if ((has_spare && position[bytes - 1] >> 4 != 0) || lengths[first] == 0 || lengths[last] == 0) return {Fault::kBookNibbles};
  position += bytes;
  return make_book(width, escape, lengths, book);
}

}  // namespace fsl
