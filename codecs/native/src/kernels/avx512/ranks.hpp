// Small numbers as ranks. For avx512/kernels.cpp only.
#pragma once

#include "kernels/avx512/base.hpp"
#include "kernels/bit_stream.hpp"
#include "kernels/write_ranks.hpp"

namespace fsl {
namespace {

// The lowest `count` bits, count from 1 to 64.
FSL_INLINE std::uint64_t first_of(std::size_t count) { return ~std::uint64_t{0} >> (64 - count); }

std::size_t write_ranks(const std::uint8_t* ranks, std::size_t count, int last, std::uint8_t* out) {
  const auto pick = [](const std::uint8_t* from, std::size_t here, int rank, std::uint8_t* higher,
                       std::size_t& found) __attribute__((always_inline)) {
    const __m512i those = load(from);
    const std::uint64_t bits = _mm512_mask_cmpgt_epu8_mask(first_of(here), those, all_bytes(rank));
    store(higher + found, _mm512_maskz_compress_epi8(bits, those));
    found += ones(bits);
    return bits;
  };
  return write_ranks_by(ranks, count, last, out, pick);
}

const std::uint8_t* read_ranks(const std::uint8_t* in, const std::uint8_t* end, std::size_t count,
                               int last, std::uint8_t* ranks) {
  std::uint8_t room[kRankBytes + kBitSlackBytes];
  BitReader reader(with_slack(in, end, (count * static_cast<std::size_t>(last) + 7) / 8, room));
  std::uint64_t reached[kBlockValues / kStep];  // by vector: the numbers of at least the rank
  const std::size_t vectors = (count + kStep - 1) / kStep;
  for (std::size_t i = 0; i < vectors; ++i) {
    store(ranks + kStep * i, _mm512_setzero_si512());
    reached[i] = first_of(i + 1 < vectors ? kStep : count - kStep * i);
  }
  std::uint64_t any = count;
  for (int rank = 0; rank < last && any != 0; ++rank) {
    any = 0;
    for (std::size_t i = 0; i < vectors; ++i) {
      reached[i] = _pdep_u64(reader.take(ones(reached[i])), reached[i]);
      any |= reached[i];
      store(ranks + kStep * i, _mm512_mask_add_epi8(load(ranks + kStep * i), reached[i],
                                                    load(ranks + kStep * i), all_bytes(1)));
    }
  }
  return reader.bytes() <= static_cast<std::size_t>(end - in) ? in + reader.bytes() : nullptr;
}

}  // namespace
}  // namespace fsl
