// Small numbers as ranks, in plain C++. For plain/kernels.hpp only.
#pragma once

#include <cstring>

#include "bits.hpp"
#include "kernels/bit_stream.hpp"
#include "kernels/paths.hpp"
#include "kernels/write_ranks.hpp"

namespace fsl {
namespace {
namespace plain {

std::size_t write_ranks(const std::uint8_t* ranks, std::size_t count, int last, std::uint8_t* out) {
  const auto pick = [](const std::uint8_t* from, std::size_t here, int rank, std::uint8_t* higher,
                       std::size_t& found) __attribute__((always_inline)) {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < here; ++i) {
      const bool is_higher = from[i] > rank;
      bits |= std::uint64_t{is_higher} << i;
      higher[found] = from[i];
      found += is_higher;
    }
    return bits;
  };
  return write_ranks_by(ranks, count, last, out, pick);
}

const std::uint8_t* read_ranks(const std::uint8_t* in, const std::uint8_t* end, std::size_t count,
                               int last, std::uint8_t* ranks) {
  std::uint8_t room[kRankBytes + kBitSlackBytes];
  BitReader reader(with_slack(in, end, (count * static_cast<std::size_t>(last) + 7) / 8, room));
  std::uint16_t places[kBlockValues];  // of those of at least the rank
  std::memset(ranks, 0, count);
  for (int rank = 0; rank < last; ++rank) {
    std::size_t found = 0;
    for (std::size_t start = 0; start < count; start += 64) {
      const std::size_t here = count - start < 64 ? count - start : 64;
      for (std::uint64_t bits = reader.take(here); bits != 0; bits &= bits - 1) {
        const std::size_t at = start + static_cast<std::size_t>(trailing_zeros(bits));
        const std::uint16_t place = rank == 0 ? static_cast<std::uint16_t>(at) : places[at];
        places[found++] = place;
        ranks[place] = static_cast<std::uint8_t>(rank + 1);
      }
    }
    count = found;
  }
  return reader.bytes() <= static_cast<std::size_t>(end - in) ? in + reader.bytes() : nullptr;
}

}  // namespace plain
}  // namespace
}  // namespace fsl
