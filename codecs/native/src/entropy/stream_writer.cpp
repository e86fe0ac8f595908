#include "entropy/stream_writer.hpp"

#include <algorithm>
#include <cstring>

namespace fsl {

Stream write_stream(const Kernels& kernels, const CodeTable& table, const PlaneSource& source,
                    std::size_t count, Ahead& ahead, Arena& memory, std::uint64_t* uncoded,
                    std::size_t many_from) {
  const std::size_t lanes = lanes_of(count, many_from);
  const std::size_t coded = count - std::min(lanes, count);
  const unsigned mask = (1U << table.width) - 1;

  // The lanes' start, and which of these symbols have no code. Kept apart, because write_lanes()
  // overwrites the word in which they begin.
  Lanes state = {};
  std::uint64_t starts_uncoded[kMostLanes / 64 + 1] = {};
  std::size_t lane = coded % lanes;
  for (std::size_t i = coded; i < count; ++i) {
    const unsigned symbol = static_cast<unsigned>(source.bytes[i] >> source.shift) & mask;
    const bool has_code = table.lengths[symbol] != 0;
    state.low[lane] = has_code ? static_cast<std::uint8_t>(symbol) : table.code.mark;
    starts_uncoded[i / 64 - coded / 64] |= static_cast<std::uint64_t>(!has_code) << (i % 64);
    lane = lane + 1 < lanes ? lane + 1 : 0;
  }

  const std::size_t room = kSlackBytes + count + 2 * lanes;
  std::uint8_t* const end = memory.at_least(room) + room;
  std::uint8_t* front = kernels.write_lanes(table.code, source.bytes, source.shift, table.width,
                                            coded, lanes, state, end, uncoded, ahead);
  for (std::size_t from = lanes; from-- > 0;)
    *--front = static_cast<std::uint8_t>(state.high[from] | 1U << state.used[from]);
  front -= lanes;
  std::memcpy(front, state.low, lanes);

  const std::size_t first = coded / 64;
  if (coded % 64 != 0)
    starts_uncoded[0] |= uncoded[first] & ((std::uint64_t{1} << (coded % 64)) - 1);
  for (std::size_t word = first; word * 64 < count; ++word)
    uncoded[word] = starts_uncoded[word - first];
  return {front, static_cast<std::size_t>(end - front)};
}

}  // namespace fsl
