// AVX-512: counting and finding bytes, CRC-32. For avx512/kernels.cpp only, which sets the target.
#pragma once

#include "kernels/avx512/base.hpp"
#include "kernels/fetch.hpp"

namespace fsl {
namespace {

// --- bytes

// A mask of the bytes that exist in a step.
FSL_INLINE __mmask64 there(std::size_t left) {
  return left < kStep ? lowest(left) : ~std::uint64_t{0};
}

std::uint8_t largest_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t mask) {
  const __m512i masks = all_bytes(mask);
  const std::size_t whole = count & ~(kStep - 1);
  __m512i largest =
      _mm512_and_si512(_mm512_maskz_loadu_epi8(there(count - whole), bytes + whole), masks);
  for (std::size_t i = 0; i < whole; i += kStep)
    largest = _mm512_max_epu8(largest, _mm512_and_si512(load(bytes + i), masks));
  return largest_of(largest);
}

std::size_t count_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t byte) {
  std::size_t found = 0;
  const __m512i wanted = all_bytes(byte);
  for (std::size_t i = 0; i < count; i += kStep) {
    const __mmask64 valid = there(count - i);
    found +=
        ones(_mm512_mask_cmpeq_epi8_mask(valid, _mm512_maskz_loadu_epi8(valid, bytes + i), wanted));
  }
  return found;
}

// Nonzero words are unpredictable, so they are found before any branch depends on them.
std::size_t pick(const std::uint8_t* bytes, const std::uint64_t* bitmap, std::size_t words,
                 std::uint8_t* picked) {
  constexpr std::size_t kWords = 8;  // of a vector
  std::size_t found = 0;
  for (std::size_t start = 0; start < words; start += 64) {
    std::uint64_t where = 0;
    for (std::size_t i = 0; i < 64 && start + i < words; i += kWords) {
      const std::size_t left = words - start - i;
      const __mmask8 valid = static_cast<__mmask8>(left < kWords ? lowest(left) : 0xFF);
      const __m512i those = _mm512_maskz_loadu_epi64(valid, bitmap + start + i);
      where |= static_cast<std::uint64_t>(_mm512_test_epi64_mask(those, those)) << i;
    }
    for (; where != 0; where = _blsr_u64(where)) {
      const std::size_t word = start + _tzcnt_u64(where);
      const std::uint64_t bits = bitmap[word];
      store(picked + found, _mm512_maskz_compress_epi8(bits, load(bytes + kStep * word)));
      found += ones(bits);
    }
  }
  return found;
}

std::size_t find_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t byte,
                      std::uint16_t* positions) {
  std::size_t found = 0;
  const __m512i wanted = all_bytes(byte);
  const auto note = [&](std::size_t i, std::uint64_t mask) __attribute__((always_inline)) {
    for (; mask != 0; mask &= mask - 1)
      positions[found++] =
          static_cast<std::uint16_t>(i + static_cast<std::size_t>(_tzcnt_u64(mask)));
  };
  std::size_t i = 0;
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    const __mmask64 first = _mm512_cmpeq_epi8_mask(load(bytes + i), wanted);
    const __mmask64 second = _mm512_cmpeq_epi8_mask(load(bytes + i + kStep), wanted);
    if (__builtin_expect(_kortestz_mask64_u8(first, second), 1)) continue;
    note(i, first);
    note(i + kStep, second);
  }
  for (; i < count; i += kStep) {
    const __mmask64 valid = there(count - i);
    note(i, _mm512_mask_cmpeq_epi8_mask(valid, _mm512_maskz_loadu_epi8(valid, bytes + i), wanted));
  }
  return found;
}

// --- CRC

// Folding by carry-less multiplication (Gopal et al. 2009): moving a part of the message by `bits`
// multiplies it by x^(bits +- 32) modulo the polynomial. The last 16 bytes, of equal remainder, go
// through the tables.
constexpr std::uint64_t folding_constant(int power) {
  std::uint32_t remainder = 0x80000000;  // x^0, lowest power in the highest bit
  for (int i = 0; i < power; ++i)
    remainder = remainder >> 1 ^ ((remainder & 1) != 0 ? 0xEDB88320U : 0U);
  return static_cast<std::uint64_t>(remainder) << 1;
}

template <int kBits>
FSL_INLINE __m512i fold(__m512i value, __m512i data) {
  constexpr long long kLow = static_cast<long long>(folding_constant(kBits + 32));
  constexpr long long kHigh = static_cast<long long>(folding_constant(kBits - 32));
  const __m512i constants = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, constants, 0x00),
                                   _mm512_clmulepi64_epi128(value, constants, 0x11), data, 0x96);
}

FSL_INLINE __m128i fold_once(__m128i value, __m128i data) {
  constexpr long long kLow = static_cast<long long>(folding_constant(128 + 32));
  constexpr long long kHigh = static_cast<long long>(folding_constant(128 - 32));
  const __m128i constants = _mm_set_epi64x(kHigh, kLow);
  const __m128i product = _mm_xor_si128(_mm_clmulepi64_si128(value, constants, 0x00),
                                        _mm_clmulepi64_si128(value, constants, 0x11));
  return _mm_xor_si128(product, data);
}

// Ends a message: 16 bytes of equal remainder go through the tables, then its last `count` bytes.
FSL_INLINE std::uint32_t finish_crc32(__m512i sum, const std::uint8_t* data, std::size_t count) {
  for (; count >= 64; data += 64, count -= 64) sum = fold<512>(sum, load(data));
  __m128i last = fold_once(_mm512_castsi512_si128(sum), _mm512_extracti64x2_epi64(sum, 1));
  last = fold_once(fold_once(last, _mm512_extracti64x2_epi64(sum, 2)),
                   _mm512_extracti64x2_epi64(sum, 3));
  std::uint8_t bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), last);
  // The tables start from the complement of their first argument, here 0.
  return kScalarKernels.crc32(kScalarKernels.crc32(0xFFFFFFFF, bytes, 16), data, count);
}

// The number of bytes before the first cache line: vectors that span two take twice as long to load
// or store.
FSL_INLINE std::size_t to_line(const std::uint8_t* data) {
  return (64 - (reinterpret_cast<std::uintptr_t>(data) & 63)) & 63;
}

FSL_INLINE std::uint32_t crc32_to_line(std::uint32_t value, const std::uint8_t*& data,
                                       std::size_t& count) {
  const std::size_t lead = to_line(data);
  value = kScalarKernels.crc32(value, data, lead);
  data += lead;
  count -= lead;
  return value;
}

// XORed with a message's first bytes, to continue from `value`.
FSL_INLINE __m512i start_of_crc32(std::uint32_t value) {
  return _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~value)));
}

// For at least 256 bytes; take(i, bytes) gets all whole groups of 256.
template <typename Take>
FSL_INLINE std::uint32_t whole_crc32(std::uint32_t value, const std::uint8_t* data,
                                     std::size_t count, Take take) {
  __m512i sums[4];
  for (std::size_t v = 0; v < 4; ++v) {
    sums[v] = load(data + 64 * v);
    take(64 * v, sums[v]);
  }
  sums[0] = _mm512_xor_si512(sums[0], start_of_crc32(value));
  std::size_t i = 256;
  for (; i + 256 <= count; i += 256) {
    for (std::size_t v = 0; v < 4; ++v) {
      const __m512i bytes = load(data + i + 64 * v);
      take(i + 64 * v, bytes);
      sums[v] = fold<2048>(sums[v], bytes);
    }
  }
  return finish_crc32(fold<512>(fold<512>(fold<512>(sums[0], sums[1]), sums[2]), sums[3]), data + i,
                      count - i);
}

std::uint32_t crc32(std::uint32_t value, const std::uint8_t* data, std::size_t count) {
  if (count < 512) return kScalarKernels.crc32(value, data, count);
  if (count >= 4096) value = crc32_to_line(value, data, count);
  return whole_crc32(value, data, count, [](std::size_t, __m512i) {});
}

std::uint32_t copy_crc32(std::uint32_t value, const std::uint8_t* from, std::size_t count,
                         std::uint8_t* to) {
  const std::size_t lead = to_line(to);
  if (count < 512 + lead) return kScalarKernels.copy_crc32(value, from, count, to);
  value = kScalarKernels.copy_crc32(value, from, lead, to);
  from += lead;
  to += lead;
  count -= lead;
  const std::size_t whole = count & ~std::size_t{255};
  std::memcpy(to + whole, from + whole, count - whole);
  return whole_crc32(value, from, count,
                     [=](std::size_t i, __m512i bytes)
                         __attribute__((always_inline)) { store(to + i, bytes); });
}

void begin_checksum(std::uint32_t value, const std::uint8_t* data, std::size_t count,
                    Checksum& checksum) {
  static_assert(kLeastBeside >= 64 + sizeof checksum.sums, "a line's rest and two vectors");
  value = crc32_to_line(value, data, count);
  store(checksum.sums, _mm512_xor_si512(load(data), start_of_crc32(value)));
  store(checksum.sums + 64, load(data + 64));
  checksum.next = data + 128;
  checksum.end = data + count;
}

// Takes in two cache lines, if that many are left. The sums stay in memory, so that the loop keeps
// its registers.
FSL_INLINE void take_in(Checksum& checksum) {
  const std::uint8_t* const data = checksum.next;
  if (checksum.end - data < 128) return;
  fetch_checked(data);
  for (int i = 0; i < 128; i += 64)
    store(checksum.sums + i, fold<1024>(load(checksum.sums + i), load(data + i)));
  checksum.next = data + 128;
}

std::uint32_t end_checksum(Checksum& checksum) {
  while (checksum.end - checksum.next >= 128) take_in(checksum);
  const std::size_t left = static_cast<std::size_t>(checksum.end - checksum.next);
  return finish_crc32(fold<512>(load(checksum.sums), load(checksum.sums + 64)), checksum.next,
                      left);
}

}  // namespace
}  // namespace fsl
