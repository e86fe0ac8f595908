#include "entropy/code_table.hpp"

#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "bytes.hpp"

namespace fsl {
namespace {

// Symbols rarer than one in this many take the escape.
constexpr std::uint32_t kRarest = 768;

// Canonical words: the windows hold the leaves in the order of (length, symbol), the escape after
// all symbols of its length.

// The word and length that are written for each symbol.
void fill_words(const CodeTable& table, Code& code) {
  const int symbols = 1 << table.width;
  int windows[kLengthLimit + 1] = {};  // windows of a leaf, by its length
  for (int length = 1; length <= kLengthLimit; ++length) windows[length] = 256 >> length;
  int next[kLengthLimit + 2] = {};  // by length: the first window of the next leaf
  for (int symbol = 0; symbol < symbols; ++symbol)
    next[table.lengths[symbol] + 1] += windows[table.lengths[symbol]];
  next[table.escape + 1] += windows[table.escape];
  for (int length = 1; length <= kLengthLimit; ++length) next[length + 1] += next[length];

  std::memset(code.words, 0, sizeof(code.words));
  std::memcpy(code.lengths, table.lengths, sizeof(code.lengths));
  for (int symbol = 0; symbol < symbols; ++symbol) {
    const int length = table.lengths[symbol];
    code.words[symbol] = static_cast<std::uint8_t>(next[length] >> (kLengthLimit - length));
    next[length] += windows[length];
  }
  code.escapes = table.escape != 0;
  code.mark = table.lowest_uncoded;
  if (!code.escapes) return;
  const std::uint8_t word =
      static_cast<std::uint8_t>(next[table.escape] >> (kLengthLimit - table.escape));
  for (int number = 0; number < table.uncoded; ++number) {
    code.words[table.symbol_of[number]] = word;
    code.lengths[table.symbol_of[number]] = static_cast<std::uint8_t>(kUncoded | table.escape);
  }
}

// The symbol and length that are read for each window.
void fill_windows(const CodeTable& table, Code& code) {
  const int symbols = 1 << table.width;
  int next[kLengthLimit + 2] =
      {};  // by length: the rank of the next leaf; 0 counts symbols without a code
  for (int symbol = 0; symbol < symbols; ++symbol) ++next[table.lengths[symbol] + 1];
  next[1] = 0;
  if (table.escape != 0) ++next[table.escape + 1];
  for (int length = 1; length <= kLengthLimit; ++length) next[length + 1] += next[length];
  const int leaves = next[kLengthLimit + 1];
  std::uint8_t symbol_of[256];
  std::uint8_t length_of[256];
  const auto place = [&](int symbol, int length) {
    const int rank = next[length]++;
    symbol_of[rank] = static_cast<std::uint8_t>(symbol);
    length_of[rank] = static_cast<std::uint8_t>(length);
  };
  for (int symbol = 0; symbol < symbols; ++symbol) {
    if (table.lengths[symbol] != 0) place(symbol, table.lengths[symbol]);
  }
  if (table.escape != 0) place(table.lowest_uncoded, table.escape);

  // Eight windows at a time; the next leaf overwrites the surplus.
  std::uint8_t symbol_of_window[256 + 8];
  std::uint8_t length_of_window[256 + 8];
  constexpr std::uint64_t kEach = 0x0101010101010101;
  int window = 0;
  for (int rank = 0; rank < leaves; ++rank) {
    const int length = length_of[rank];
    const int behind = window + (256 >> length);
    for (int i = window; i < behind; i += 8) {
      store(symbol_of_window + i, kEach * symbol_of[rank]);
      store(length_of_window + i, kEach * static_cast<unsigned>(length));
    }
    window = behind;
  }
  std::memcpy(code.symbol_of_window, symbol_of_window, 256);
  std::memcpy(code.length_of_window, length_of_window, 256);
  code.arrange();
}

// Numbers the symbols without a code: those between symbols with codes first, then by distance, the
// lower first.
void number_uncoded(int first, int last, CodeTable& table) {
  const auto number = [&](int symbol) {
    table.number_of[symbol] = static_cast<std::uint8_t>(table.uncoded);
    table.symbol_of[table.uncoded++] = static_cast<std::uint8_t>(symbol);
  };
  const int highest = (1 << table.width) - 1;
  table.uncoded = 0;
  for (int symbol = first; symbol <= last; ++symbol) {
    if (table.lengths[symbol] == 0) number(symbol);
  }
  for (int distance = 1; distance <= std::max(first, highest - last); ++distance) {
    if (distance <= first) number(first - distance);
    if (distance <= highest - last) number(last + distance);
  }
  table.lowest_uncoded =
      table.uncoded == 0 ? 0 : *std::min_element(table.symbol_of, table.symbol_of + table.uncoded);
}

// Bits of a number in a list.
int number_bits(int number, int low_bits, int last_rank) {
  return low_bits + std::min((number >> low_bits) + 1, last_rank);
}

bool may_have_low_bits(int uncoded, int low_bits) {
  const unsigned highest = uncoded == 0 ? 0 : static_cast<unsigned>(uncoded - 1);
  return low_bits <= bits_needed(highest) &&
         highest >> low_bits <= static_cast<unsigned>(kLastRank);
}

// The low bits that cost least for symbols that occur `counts` times. Each counts a sixteenth more,
// because the sample may have missed some.
int cheapest_low_bits(const std::uint32_t* counts, const CodeTable& table) {
  std::uint64_t fewest = UINT64_MAX;
  int cheapest = 0;
  for (int low_bits = 0; low_bits <= 8; ++low_bits) {
    if (!may_have_low_bits(table.uncoded, low_bits)) continue;
    std::uint64_t bits = 0;
    for (int number = 0; number < table.uncoded; ++number) {
      const std::uint64_t weight = 16 * std::uint64_t{counts[table.symbol_of[number]]} + 1;
      bits += weight *
              static_cast<unsigned>(number_bits(number, low_bits, (table.uncoded - 1) >> low_bits));
    }
    if (bits >= fewest) continue;
    fewest = bits;
    cheapest = low_bits;
  }
  return cheapest;
}

// Fills all but low_bits, costs and the windows.
void fill_table(int width, int escape, const std::uint8_t* lengths, CodeTable& table) {
  const int symbols = 1 << width;
  table.width = width;
  table.escape = escape;
  std::memset(table.lengths, 0, sizeof(table.lengths));
  std::memcpy(table.lengths, lengths, static_cast<std::size_t>(symbols));
  int first = 0;
  while (lengths[first] == 0) ++first;
  int last = symbols - 1;
  while (lengths[last] == 0) --last;
  table.packed_bytes = 3 + static_cast<std::size_t>(last - first + 2) / 2;
  number_uncoded(first, last, table);
  fill_words(table, table.code);
}

void fill_costs(int low_bits, CodeTable& table) {
  table.low_bits = low_bits;
  std::memcpy(table.costs, table.lengths, sizeof(table.costs));
  for (int number = 0; table.escape != 0 && number < table.uncoded; ++number) {
    table.costs[table.symbol_of[number]] =
        static_cast<std::uint8_t>(table.escape + number_bits(number, low_bits, table.last_rank()));
  }
}

}  // namespace

std::uint64_t CodeTable::bits_of(const std::uint32_t* counts) const {
  const int symbols = 1 << width;
  std::uint32_t bits = 0;  // at most 2^20 symbols of at most 31 bits
  for (int symbol = 0; symbol < symbols; ++symbol) bits += counts[symbol] * costs[symbol];
  return bits;
}

std::size_t CodeTable::pack(std::uint8_t* out) const {
  int first = 0;
  while (lengths[first] == 0) ++first;
  int last = (1 << width) - 1;
  while (lengths[last] == 0) --last;
  out[0] = static_cast<std::uint8_t>(first);
  out[1] = static_cast<std::uint8_t>(last);
  out[2] = static_cast<std::uint8_t>(escape | low_bits << 4);
  std::uint8_t* nibbles = out + 3;
  for (int symbol = first; symbol <= last; symbol += 2) {
    const unsigned high = symbol < last ? lengths[symbol + 1] : 0U;
    *nibbles++ = static_cast<std::uint8_t>(lengths[symbol] | high << 4);
  }
  return packed_bytes;
}

Status make_table(int width, int escape, int low_bits, const std::uint8_t* lengths,
                  CodeTable& table) {
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
  if (leaves < 2 || leaves > 256 || longest > kLengthLimit)
    return {Fault::kTableLeaves, leaves, static_cast<std::uint64_t>(longest)};
  if (space != 1U << kLengthLimit || codes == 0) return {Fault::kTableSpace};
  if (escape != 0 && codes == symbols) return {Fault::kTableEscape};
  const int listed = escape != 0 ? symbols - codes : 0;
  if (!may_have_low_bits(listed, low_bits)) {
    return {Fault::kTableLowBits, static_cast<std::uint64_t>(std::max(0, listed - 1)),
            static_cast<std::uint64_t>(low_bits)};
  }
  fill_table(width, escape, lengths, table);
  fill_windows(table, table.code);
  fill_costs(low_bits, table);
  return {};
}

void make_own_table(const std::uint32_t* counts, std::uint32_t total, int width, bool is_sampled,
                    CodeTable& table) {
  const int symbols = 1 << width;
  std::uint32_t weights[kMaximumLeaves];
  // Lighter leaves would have words of more than 8 bits.
  const std::uint32_t floor = total >> kLengthLimit;
  std::uint32_t others = 0;
  bool is_everyone = true;
  for (int symbol = 0; symbol < symbols; ++symbol) {
    const bool is_coded = std::uint64_t{kRarest} * counts[symbol] >= total;
    weights[symbol] = is_coded ? std::max(counts[symbol], floor) : 0;
    others += is_coded ? 0 : counts[symbol];
    is_everyone &= is_coded;
  }
  const bool may_follow = is_sampled && !is_everyone;
  weights[symbols] = may_follow || others > 0 ? std::max({others, floor, 1U}) : 0;
  std::uint8_t lengths[kMaximumLeaves];
  code_lengths(weights, symbols + 1, lengths);
  fill_table(width, lengths[symbols], lengths, table);
  fill_costs(table.escape != 0 ? cheapest_low_bits(counts, table) : 0, table);
}

Status unpack_table(const std::uint8_t*& position, const std::uint8_t* end, int width,
                    CodeTable& table) {
  if (end - position < 3) return {Fault::kPayloadEnds};
  const unsigned first = position[0];
  const unsigned last = position[1];
  const int escape = position[2] & 15;
  const int low_bits = position[2] >> 4;
  position += 3;
  if (first > last || last >> width != 0)
    return {Fault::kTableRange, first, last, static_cast<std::uint64_t>(width)};
  const unsigned count = last - first + 1;
  const std::size_t bytes = (count + 1) / 2;
  if (static_cast<std::size_t>(end - position) < bytes) return {Fault::kPayloadEnds};
  std::uint8_t lengths[256] = {};
  for (unsigned i = 0; i < count; ++i)
    lengths[first + i] = static_cast<std::uint8_t>(position[i / 2] >> (i % 2 * 4) & 15);
  const bool has_spare = count % 2 != 0;
  if ((has_spare && position[bytes - 1] >> 4 != 0) || lengths[first] == 0 || lengths[last] == 0)
    return {Fault::kTableNibbles};
  position += bytes;
  return make_table(width, escape, low_bits, lengths, table);
}

}  // namespace fsl
