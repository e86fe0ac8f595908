// Writes small numbers as ranks: the loop around each path's step of 64 numbers, inlined with its
// target.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/bit_stream.hpp"
#include "kernels/kernels.hpp"

namespace fsl {
namespace {

// Rank by rank, 64 numbers a step. pick(ranks, count, rank, higher, found) returns a bit per
// number, 1 if it is higher than the rank, writes the higher ones to higher + found, where up to 64
// bytes may be overwritten, and adds their number to found.
template <typename Pick>
inline __attribute__((always_inline)) std::size_t write_ranks_by(const std::uint8_t* ranks,
                                                                 std::size_t count, int last,
                                                                 std::uint8_t* out, Pick pick) {
  BitWriter writer(out);
  alignas(64) std::uint8_t higher[kBlockValues + 64];
  for (int rank = 0; rank < last && count > 0; ++rank) {
    std::size_t found = 0;
    for (std::size_t start = 0; start < count; start += 64) {
      const std::size_t here = count - start < 64 ? count - start : 64;
      writer.put(pick(ranks + start, here, rank, higher, found),
                 here);  // writing never overtakes reading
    }
    ranks = higher;
    count = found;
  }
  return writer.finish();
}

}  // namespace
}  // namespace fsl
