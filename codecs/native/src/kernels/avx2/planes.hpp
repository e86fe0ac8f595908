// AVX2: maps, bit planes. For avx2/kernels.cpp only, which sets the target and includes
// plain/kernels.hpp for it.
#pragma once

#include <type_traits>

#include "kernels/avx2/base.hpp"

namespace fsl {
namespace {

// --- maps, bit planes

// Calls `work` with the number of planes (0 to 8) as a constant, so that loops over planes are
// unrolled.
template <typename Work>
FSL_INLINE void for_planes(int planes, Work work) {
  switch (planes) {
    case 0:
      return work(std::integral_constant<int, 0>());
    case 1:
      return work(std::integral_constant<int, 1>());
    case 2:
      return work(std::integral_constant<int, 2>());
    case 3:
      return work(std::integral_constant<int, 3>());
    case 4:
      return work(std::integral_constant<int, 4>());
    case 5:
      return work(std::integral_constant<int, 5>());
    case 6:
      return work(std::integral_constant<int, 6>());
    case 7:
      return work(std::integral_constant<int, 7>());
    default:
      return work(std::integral_constant<int, 8>());
  }
}

// Looks up the lowest bits of each byte in 16 entries for each of `parts`.
template <int kParts>
FSL_INLINE __m256i look_up(const __m256i* parts, __m256i index) {
  if constexpr (kParts == 1) {
    return _mm256_shuffle_epi8(parts[0], _mm256_and_si256(index, all_bytes(15)));
  } else {
    constexpr int kHalf = kParts / 2;
    constexpr int kUp = 3 - __builtin_ctz(kHalf);  // moves the deciding bit to the top
    return _mm256_blendv_epi8(look_up<kHalf>(parts, index), look_up<kHalf>(parts + kHalf, index),
                              _mm256_slli_epi16(index, kUp));
  }
}

// The same in 64 or 256 entries.
template <int kEntries>
struct Table {
  __m256i part[kEntries / 16];

  FSL_INLINE explicit Table(const std::uint8_t* entries) {
    for (int i = 0; i < kEntries / 16; ++i)
      part[i] = _mm256_broadcastsi128_si256(load_half(entries + 16 * i));
  }

  FSL_INLINE __m256i operator()(__m256i index) const { return look_up<kEntries / 16>(part, index); }
};

void map(const std::uint8_t* bytes, std::size_t count, const std::uint8_t* entries,
         std::uint8_t* mapped) {
  const Table<256> table(entries);
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) store(mapped + i, table(load(bytes + i)));
  plain::map(bytes + whole, count - whole, entries, mapped + whole);
}

// `kWidth` planes of the lowest bits of codes, or of codes rotated left by one bit.
template <int kWidth, bool kRotated>
void write_planes_of(const std::uint8_t* codes, std::size_t count, std::uint8_t* out) {
  const std::size_t plane_bytes = (count + 7) / 8;
  const auto step = [=](std::size_t i, std::uint64_t valid) __attribute__((always_inline)) {
    const __m256i low = load(codes + i);
    const __m256i high = load(codes + i + kStep);
#pragma GCC unroll 8
    for (int plane = 0; plane < kWidth; ++plane) {
      const int bit = kWidth - 1 - plane;
      const int up = 7 - (kRotated ? (bit + 7) & 7 : bit);
      store_word(out + static_cast<std::size_t>(plane) * plane_bytes + i / 8,
                 signs64(_mm256_slli_epi16(low, up), _mm256_slli_epi16(high, up)) & valid);
    }
  };
  const std::size_t whole = count & ~(kWord - 1);
  // The last word first: it reaches into the next plane, which is written later.
  if (whole < count) step(whole, lowest64(count - whole));
  for (std::size_t i = 0; i < whole; i += kWord) step(i, ~std::uint64_t{0});
}

std::size_t write_bit_planes(const std::uint8_t* codes, std::size_t count, bool rotated, int width,
                             std::uint8_t* out) {
  for_planes(width, [=](auto plane_count) {
    if (rotated) {
      write_planes_of<plane_count(), true>(codes, count, out);
    } else {
      write_planes_of<plane_count(), false>(codes, count, out);
    }
  });
  return static_cast<std::size_t>(width) * ((count + 7) / 8);
}

}  // namespace
}  // namespace fsl
