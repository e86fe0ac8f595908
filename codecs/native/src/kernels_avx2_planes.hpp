// AVX2: ranks, bit planes. For kernels_avx2.cpp only, which sets the target and includes
// kernels_plain.hpp for it.
#pragma once

#include <type_traits>

#include "kernels_avx2_base.hpp"

namespace fsl {
namespace {

// ------------------------------------------------------------------------------------------------------- ranks, bit planes

// Calls work with the number of planes (0 to 8) as a constant, so that loops over planes are unrolled.
template <typename Work>
FSL_INLINE void for_planes(int planes, Work work) {
  switch (planes) {
    case 0: return work(std::integral_constant<int, 0>());
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    case 4: return work(std::integral_constant<int, 4>());
    case 5: return work(std::integral_constant<int, 5>());
    case 6: return work(std::integral_constant<int, 6>());
    case 7: return work(std::integral_constant<int, 7>());
    default: return work(std::integral_constant<int, 8>());
  }
}

// Looks up the lowest six bits of each byte in 64 entries.
struct Table64 {
  __m256i part[4];

  FSL_INLINE explicit Table64(const std::uint8_t* entries) {
    for (int i = 0; i < 4; ++i) part[i] = _mm256_broadcastsi128_si256(load_half(entries + 16 * i));
  }

  FSL_INLINE __m256i operator()(__m256i index) const {
    const __m256i place = _mm256_and_si256(index, all_bytes(15));
    const __m256i bit4 = _mm256_slli_epi16(index, 3);
    const __m256i low = _mm256_blendv_epi8(_mm256_shuffle_epi8(part[0], place), _mm256_shuffle_epi8(part[1], place), bit4);
    const __m256i high = _mm256_blendv_epi8(_mm256_shuffle_epi8(part[2], place), _mm256_shuffle_epi8(part[3], place), bit4);
    return _mm256_blendv_epi8(low, high, _mm256_slli_epi16(index, 2));
  }
};

// Looks up whole bytes in 256 entries of which all but 64 neighbours are the last: exponents, and ranks of as many leaves.
struct Window {
  bool fits;
  std::uint8_t first;
  std::uint8_t others;

  explicit Window(const std::uint8_t* entries) : fits(true), first(0), others(entries[255]) {
    std::size_t low = 256;
    std::size_t high = 0;
    for (std::size_t i = 0; i < 256; i += kStep) {
      const std::uint32_t differ = ~signs(_mm256_cmpeq_epi8(load(entries + i), all_bytes(others)));
      if (differ == 0) continue;
      if (low == 256) low = i + static_cast<std::size_t>(__builtin_ctz(differ));
      high = i + 31 - static_cast<std::size_t>(__builtin_clz(differ));
    }
    if (low == 256) return;
    fits = high - low < 64;
    first = static_cast<std::uint8_t>(low < 192 ? low : 192);
  }

  void look_up(const std::uint8_t* entries, const std::uint8_t* bytes, std::size_t count, std::uint8_t* out) const {
    const Table64 table(entries + first);
    for (std::size_t i = 0; i < count; i += kStep) {
      const __m256i index = _mm256_sub_epi8(load(bytes + i), all_bytes(first));
      const __m256i is_inside = _mm256_cmpeq_epi8(_mm256_min_epu8(index, all_bytes(63)), index);
      store(out + i, _mm256_blendv_epi8(all_bytes(others), table(index), is_inside));
    }
  }
};

void rank(const std::uint8_t* codes, std::size_t count, bool rotated, int shift, const std::uint8_t* ranks, std::uint8_t* symbols) {
  if (!rotated && shift == 0) {
    const Window window(ranks);
    if (window.fits) return window.look_up(ranks, codes, count, symbols);
  }
  // The sign of rotated codes falls off at the right, so these bits of a code, found six bits wide, decide.
  const int lowest_bit = rotated ? shift - 1 : shift;
  if (lowest_bit < (rotated ? 1 : 2)) return plain::rank(codes, count, rotated, shift, ranks, symbols);
  std::uint8_t entries[64];
  for (int index = 0; index < 64; ++index) {
    const int code = index << lowest_bit & 0xFF;
    entries[index] = ranks[(rotated ? code << 1 & 0xFF : code) >> shift];
  }
  const Table64 table(entries);
  const __m128i places = _mm_cvtsi32_si128(lowest_bit);
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) store(symbols + i, table(_mm256_srl_epi16(load(codes + i), places)));
  plain::rank(codes + whole, count - whole, rotated, shift, ranks, symbols + whole);
}

// `kWidth` planes of the lowest bits of codes, or of codes turned left by one bit.
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
  // The last first: its words reach into the planes behind, which are written after it.
  if (whole < count) step(whole, lowest64(count - whole));
  for (std::size_t i = 0; i < whole; i += kWord) step(i, ~std::uint64_t{0});
}

std::size_t write_bit_planes(const std::uint8_t* codes, std::size_t count, bool rotated, int width, std::uint8_t* out) {
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
