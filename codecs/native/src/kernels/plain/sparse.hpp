// Masks of codes, and steps of sparse chunks, in plain C++. For plain/kernels.hpp only.
#pragma once

#include "kernels/sparse.hpp"

namespace fsl {
namespace {
namespace plain {

void mark(const std::uint8_t* bytes, std::size_t count, std::uint8_t zero, std::uint64_t* bitmap) {
  for (std::size_t start = 0; start < count; start += 64) {
    const std::size_t here = count - start < 64 ? count - start : 64;
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < here; ++i)
      bits |= static_cast<std::uint64_t>(bytes[start + i] != zero) << i;
    *bitmap++ = bits;
  }
}

void spread(const std::uint8_t* picked, const std::uint64_t* bitmap, std::size_t count,
            std::uint8_t zero, std::uint8_t* bytes) {
  std::memset(bytes, zero, count);
  for (std::size_t start = 0; start < count; start += 64) {
    for (std::uint64_t bits = *bitmap++; bits != 0; bits &= bits - 1)
      bytes[start + static_cast<std::size_t>(trailing_zeros(bits))] = *picked++;
  }
}

std::size_t coarsen_uniform(const float* x, std::size_t count, std::size_t block_values,
                            std::uint8_t* codes, std::int16_t* steps) {
  std::size_t escapes = 0;
  for (std::size_t start = 0; start < count; start += block_values) {
    const std::size_t end = count - start < block_values ? count : start + block_values;
    std::size_t nonzero = 0;
    for (std::size_t i = start; i < end; ++i) nonzero += (bits_of(x[i]) & kMagnitude) != 0;
    const int step = *steps + coarser_by(nonzero, block_values);
    *steps = static_cast<std::int16_t>(step < kHighestQuarters ? step : kHighestQuarters);
    const float inverse = quarter_power(-*steps++);
    for (std::size_t i = start; nonzero != 0 && i < end; ++i) {
      codes[i] = uniform_code(x[i] * inverse);
      escapes += codes[i] == 0;
    }
  }
  return escapes;
}

}  // namespace plain
}  // namespace
}  // namespace fsl
