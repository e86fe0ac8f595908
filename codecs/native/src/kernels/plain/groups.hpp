// Groups of uniform codes in plain C++. For plain/kernels.hpp only.
#pragma once

#include "kernels/groups.hpp"

namespace fsl {
namespace {
namespace plain {

void group(const std::uint8_t* codes, std::size_t count, int size, std::uint8_t* symbols,
           std::uint64_t* listed) {
  const unsigned first = first_code_of(size);
  const unsigned last = last_digit_of(size);
  for (std::size_t i = 0; i < count; i += 64) listed[i / 64] = 0;
  for (std::size_t i = 0; i < count; i += static_cast<std::size_t>(size)) {
    unsigned symbol = 0;
    for (std::size_t at = i; at < i + static_cast<std::size_t>(size); ++at) {
      const unsigned digit = byte((at < count ? codes[at] : kZeroCode) - first);
      if (digit >= last) listed[at / 64] |= std::uint64_t{1} << at % 64;
      symbol = symbol * (last + 1) + (digit < last ? digit : last);
    }
    *symbols++ = byte(symbol);
  }
}

void ungroup(const std::uint8_t* symbols, std::size_t count, int size, const std::uint8_t*& listed,
             std::uint8_t* codes) {
  const unsigned first = first_code_of(size);
  const unsigned last = last_digit_of(size);
  const int bits = size == 2 ? 3 : 2;
  for (std::size_t i = 0; i < count; ++symbols) {
    for (int place = size - 1; place >= 0; --place, ++i) {
      const unsigned digit = *symbols >> (place * bits) & last;
      codes[i] = digit == last ? *listed++ : byte(first + digit);
    }
  }
}

}  // namespace plain
}  // namespace
}  // namespace fsl
