// AVX-512: byte planes, maps, bit planes, masks. For avx512/kernels.cpp only, which sets the
// target.
#pragma once

#include "kernels/avx512/base.hpp"
#include "kernels/avx512/input.hpp"

namespace fsl {
namespace {

// --- rotated byte planes

void cut_bfloat16(const float* x, std::size_t count, std::uint32_t first_bits,
                  std::uint8_t* const planes[2], Seen& seen) {
  const __m512i first = all(static_cast<int>(first_bits));
  // Upper words of two vectors; then upper or lower bytes of two vectors.
  alignas(64) std::uint16_t upper_words[32];
  alignas(64) std::uint8_t lower_bytes[64];
  alignas(64) std::uint8_t upper_bytes[64];
  for (std::size_t i = 0; i < 32; ++i) upper_words[i] = static_cast<std::uint16_t>(2 * i + 1);
  for (std::size_t i = 0; i < 64; ++i) {
    lower_bytes[i] = static_cast<std::uint8_t>(2 * i);
    upper_bytes[i] = static_cast<std::uint8_t>(2 * i + 1);
  }
  const __m512i words = load(upper_words);
  const __m512i lower = load(lower_bytes);
  const __m512i upper = load(upper_bytes);
  Sight sight;
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    __m512i part[4];
    for (std::size_t j = 0; j < 4; ++j) {
      const __m512i bits = load(x + i + j * kLane);
      sight.see(bits, first);
      const __m512i ties = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all(1));
      part[j] = _mm512_add_epi32(_mm512_add_epi32(bits, all(0x7FFF)), ties);
    }
    __m512i low = _mm512_permutex2var_epi16(part[0], words, part[1]);
    __m512i high = _mm512_permutex2var_epi16(part[2], words, part[3]);
    low = _mm512_shldi_epi16(low, low, 1);
    high = _mm512_shldi_epi16(high, high, 1);
    store(planes[0] + i, _mm512_permutex2var_epi8(low, upper, high));
    store(planes[1] + i, _mm512_permutex2var_epi8(low, lower, high));
  }
  sight.fold_into(seen);
  std::uint8_t* const rest[2] = {planes[0] + whole, planes[1] + whole};
  kScalarKernels.cut_bfloat16(x + whole, count - whole, first_bits, rest, seen);
}

void cut_float32(const float* x, std::size_t count, std::uint32_t first_bits,
                 std::uint8_t* const planes[4], Seen& seen) {
  const __m512i first = all(static_cast<int>(first_bits));
  // Byte 3 of all lanes, then byte 2, ...
  alignas(64) std::uint8_t by_place[64];
  for (std::size_t i = 0; i < 64; ++i)
    by_place[i] = static_cast<std::uint8_t>(4 * (i % 16) + 3 - i / 16);
  const __m512i order = load(by_place);
  Sight sight;
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    __m512i part[4];
    for (std::size_t j = 0; j < 4; ++j) {
      const __m512i bits = load(x + i + j * kLane);
      sight.see(bits, first);
      part[j] = _mm512_permutexvar_epi8(order, _mm512_rol_epi32(bits, 1));
    }
    const __m512i upper01 = _mm512_shuffle_i64x2(part[0], part[1], 0x44);
    const __m512i upper23 = _mm512_shuffle_i64x2(part[2], part[3], 0x44);
    const __m512i lower01 = _mm512_shuffle_i64x2(part[0], part[1], 0xEE);
    const __m512i lower23 = _mm512_shuffle_i64x2(part[2], part[3], 0xEE);
    store(planes[0] + i, _mm512_shuffle_i64x2(upper01, upper23, 0x88));
    store(planes[1] + i, _mm512_shuffle_i64x2(upper01, upper23, 0xDD));
    store(planes[2] + i, _mm512_shuffle_i64x2(lower01, lower23, 0x88));
    store(planes[3] + i, _mm512_shuffle_i64x2(lower01, lower23, 0xDD));
  }
  sight.fold_into(seen);
  std::uint8_t* const rest[4] = {planes[0] + whole, planes[1] + whole, planes[2] + whole,
                                 planes[3] + whole};
  kScalarKernels.cut_float32(x + whole, count - whole, first_bits, rest, seen);
}

// --- maps, bit planes

// Looks up each byte of `index` in 256 entries.
struct Table256 {
  __m512i part[4];

  FSL_INLINE explicit Table256(const std::uint8_t* entries)
      : part{load(entries), load(entries + 64), load(entries + 128), load(entries + 192)} {}

  FSL_INLINE __m512i operator()(__m512i index) const {
    const __m512i low = _mm512_permutex2var_epi8(part[0], index, part[1]);
    const __m512i high = _mm512_permutex2var_epi8(part[2], index, part[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
  }
};

FSL_INLINE __m512i rotate_right(__m512i codes) {
  return _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 7), _mm512_srli_epi16(codes, 1),
                                   all_bytes(0x80), 0xE4);
}

void map(const std::uint8_t* bytes, std::size_t count, const std::uint8_t* entries,
         std::uint8_t* mapped) {
  const Table256 table(entries);
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) store(mapped + i, table(load(bytes + i)));
  kScalarKernels.map(bytes + whole, count - whole, entries, mapped + whole);
}

FSL_INLINE void store_mask(std::uint8_t* to, std::uint64_t mask) { std::memcpy(to, &mask, 8); }

std::size_t write_bit_planes(const std::uint8_t* codes, std::size_t count, bool rotated, int width,
                             std::uint8_t* out) {
  const std::size_t plane_bytes = (count + 7) / 8;
  const std::size_t whole = count & ~(kStep - 1);
  const auto place_of = [=](int bit) __attribute__((always_inline)) {
    return all_bytes(1 << (rotated ? (bit + 7) & 7 : bit));
  };
  const __m512i rest = whole < count ? _mm512_maskz_loadu_epi8(lowest(count - whole), codes + whole)
                                     : _mm512_setzero_si512();
  // A plane's last eight bytes may reach into the next plane, which is written later.
  if (width == 2 && whole == count) {
    // The usual case, in one pass.
    const __m512i high = place_of(1);
    const __m512i low = place_of(0);
    for (std::size_t i = 0; i < whole; i += kStep) {
      const __m512i some = load(codes + i);
      store_mask(out + i / 8, _mm512_test_epi8_mask(some, high));
      store_mask(out + plane_bytes + i / 8, _mm512_test_epi8_mask(some, low));
    }
    return 2 * plane_bytes;
  }
  for (int bit = width - 1; bit >= 0; --bit, out += plane_bytes) {
    const __m512i place = place_of(bit);
    for (std::size_t i = 0; i < whole; i += kStep)
      store_mask(out + i / 8, _mm512_test_epi8_mask(load(codes + i), place));
    if (whole < count) store_mask(out + whole / 8, _mm512_test_epi8_mask(rest, place));
  }
  return static_cast<std::size_t>(width) * plane_bytes;
}

// Moves between mask and general registers are slow on some machines (two cycles each way on Zen
// 4), and compilers tend to emit them. This goes through memory.
FSL_INLINE __mmask64 mask_at(const std::uint8_t* from) {
  __mmask64 mask;
  __asm__("kmovq %1, %0" : "=Yk"(mask) : "m"(*reinterpret_cast<const std::uint8_t (*)[8]>(from)));
  return mask;
}

}  // namespace
}  // namespace fsl
